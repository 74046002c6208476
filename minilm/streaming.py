"""Generated tokens to text that can be shown at once."""

import codecs
from collections.abc import Sequence
from typing import TextIO

from minilm.errors import ConfigError
from minilm.tokenizer import Tokenizer


class TextStream:
    """Token ids in, displayable text out: complete characters only, nothing past a stop string.

    The pieces joined are the text of all tokens decoded at once, up to the stop. Only new text, that which is
    pushed, can stop. Of several stop strings the first to be complete wins, however the text is cut into
    tokens; of those complete at the same character, the longest.

        stream = TextStream(tokenizer, stop=["\\n\\n"])
        for token in tokens:
            show(stream.push(token))
            if stream.finished:
                break
        show(stream.close())

    finished    no more tokens are read
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(s, str) and s for s in stops):
            raise ConfigError(f"stop={stops!r} must be texts of one character or more")
        self.finished = False
        self._tokenizer = tokenizer
        self._stops = sorted(stops, key=len, reverse=True)
        # the decoder holds back an incomplete character, _held what may be the beginning of a stop string
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token: int) -> str:
        """The text now certain, '' if none. An end token writes nothing; after the finish all is ''."""
        if self.finished:
            return ""
        if token == self._tokenizer.end_token:
            self.finished = True
            return ""
        return self._release(self._decoder.decode(self._tokenizer.decode_bytes([token])))

    def close(self) -> str:
        """The text still held back, U+FFFD for a character that was never completed; '' ever after."""
        rest = self._release(self._decoder.decode(b"", final=True)) + self._held
        self.finished, self._held = True, ""
        return rest

    def _release(self, text: str) -> str:
        """Takes in new text and returns what no stop string can claim any more."""
        certain = ""
        for char in text:
            self._held += char
            for stop in self._stops:
                if self._held.endswith(stop):
                    certain += self._held.removesuffix(stop)
                    self.finished = True
                    self._held = ""
                    self._decoder.reset()
                    return certain
            while self._held and not any(stop.startswith(self._held) for stop in self._stops):
                certain, self._held = certain + self._held[0], self._held[1:]
        return certain


def write(out: TextIO, text: str) -> None:
    """Shows text at once, with escapes for what a console's encoding lacks: é becomes \\xe9 in ASCII."""
    try:
        out.write(text)
    except UnicodeEncodeError:
        out.write(text.encode(out.encoding, errors="backslashreplace").decode(out.encoding))
    out.flush()
