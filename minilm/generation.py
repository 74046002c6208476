"""New tokens from a model, one at a time for a batch of prompts.

Prefill reads the prompts, decode adds a token a step behind the cache: n · d work each, never n². Without the
cache every step reads the whole context anew: slower, and the same tokens.

Past the context: where the model's layers forget (a window, relative positions), generation goes on for ever.
Otherwise a row whose context outgrows block_size goes on from the newest half of it, positions starting at 0
again. The cache and the plain way follow the same rule, and so does every row of a batch on its own.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minilm.attention.cache import KVCache
from minilm.errors import ConfigError
from minilm.model import GPT
from minilm.runtime import inference
from minilm.sampling import Sampler
from minilm.streaming import TextStream
from minilm.tokenizer import Tokenizer


@dataclass
class Speed:
    """What generating took."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    cache_bytes: int = 0


@dataclass
class Generator:
    """Generates from a model.

    cache: keep keys and values, else read the context anew at each step. overflow: 'slide' past block_size, or
    'error' to refuse what would not fit. keep: the share of a full context that is kept when it slides.
    step: reads one more token of each row behind the cache, (B, 1) -> (B, 1, V); a `CompiledStep`, or the model.
    """

    model: GPT
    sampler: Sampler = field(default_factory=Sampler)
    cache: bool = True
    overflow: str = "slide"
    keep: float = 0.5
    step: Callable[[Tensor, KVCache], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.overflow not in ("slide", "error"):
            raise ConfigError(f"overflow={self.overflow}: expected slide or error")
        if not 0 < self.keep < 1:
            raise ConfigError(f"keep={self.keep}: a share of the context, above 0 and below 1")

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int | None = None,
        speed: Speed | None = None,
    ) -> Iterator[Tensor]:
        """Yields the next token of every row, (B,) int64 on the CPU, max_new_tokens times.

        prompts: B rows of token ids, of any lengths from 1 up. seed: of the draws; None is a fresh one.
        """
        self._check(prompts, max_new_tokens)
        speed = speed if speed is not None else Speed()
        rng = torch.Generator()
        rng.seed() if seed is None else rng.manual_seed(seed)
        size = self.model.config.block_size
        rows = [list(prompt) for prompt in prompts]
        limit = math.inf if self.model.rolls else size
        # what the model reads: the newest of each row that fits
        contexts = [row if limit > size else row[-size:] for row in rows]
        device = next(self.model.parameters()).device
        step, cache, latest = self.step or self.model, None, None
        for i in range(max_new_tokens):
            started = time.perf_counter()
            with inference(self.model):
                full = [context for context in contexts if len(context) > limit]
                for context in full:  # down to its newest part
                    del context[: -self._kept]
                if cache is not None and latest is not None and not full:
                    logits = step(latest.unsqueeze(1).to(device), cache)[:, -1]
                else:
                    if self.cache:
                        room = None if full else max(map(len, contexts)) + max_new_tokens - i - 1
                        cache = self.model.new_cache(len(rows), room)
                        speed.cache_bytes = max(speed.cache_bytes, cache.nbytes)
                    logits = self._read(contexts, cache, device)
            logits = logits.float().cpu()
            seen = _pad(rows, -1) if self.sampler.repetition_penalty != 1 else None
            latest = chosen = self.sampler(logits, seen, rng)
            for row, context, token in zip(rows, contexts, chosen.tolist(), strict=True):
                row.append(token)
                if context is not row:
                    context.append(token)
            taken = time.perf_counter() - started
            if i == 0:
                speed.prefill_tokens, speed.prefill_seconds = sum(map(len, contexts)) - len(rows), taken
            else:
                speed.decode_tokens += len(rows)
                speed.decode_seconds += taken
            yield chosen

    def text(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        max_new_tokens: int,
        *,
        stop: Sequence[str] = (),
        seed: int | None = None,
        speed: Speed | None = None,
    ) -> Iterator[tuple[int, str]]:
        """Yields (row, text) pieces of new text as they become certain; ends when every row has stopped.

        stop: strings that end a row, not shown. An empty prompt starts at the end-of-text token, or a newline.
        """
        streams = [TextStream(tokenizer, stop) for _ in prompts]
        ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        for chosen in self.tokens(ids, max_new_tokens, seed=seed, speed=speed):
            for row, (stream, token) in enumerate(zip(streams, chosen.tolist(), strict=True)):
                if not stream.finished and (piece := stream.push(token)):
                    yield row, piece
            if all(stream.finished for stream in streams):
                break
        for row, stream in enumerate(streams):
            if rest := stream.close():
                yield row, rest

    def _read(self, contexts: list[list[int]], cache, device: torch.device) -> Tensor:
        """Logits after each context (B, V), read in one piece."""
        lengths = torch.tensor([len(context) for context in contexts])
        tokens = _pad(contexts, 0).to(device)
        if len(set(lengths.tolist())) == 1:
            return self.model(tokens, cache, keep=1)[:, -1]
        width = tokens.shape[1]
        pos = (torch.arange(width) - (width - lengths.unsqueeze(1))).clamp(min=-1).to(device)
        return self.model(tokens, cache, pos=pos, keep=1)[:, -1]

    @property
    def _kept(self) -> int:
        """How many tokens of a full context are left when it slides."""
        return max(1, int(self.model.config.block_size * self.keep))

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        size = self.model.config.block_size
        if max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={max_new_tokens}: 0 or more")
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ConfigError("every prompt needs at least one token")
        longest, lookahead = max(map(len, prompts)), self.model.mask.lookahead
        slides = not self.model.rolls and min(longest, size) + max_new_tokens - 1 > size
        if slides and self.cache and self._kept < lookahead < float("inf"):
            raise ConfigError(
                f"keep={self.keep} of block_size={size} leaves {self._kept} tokens where the context is full, and "
                f"the mask lets the first {lookahead} read one another: take a larger keep, or cache=false"
            )
        if self.overflow == "error" and not self.model.rolls and longest + max_new_tokens > size:
            raise ConfigError(
                f"overflow=error: a prompt of {longest} and max_new_tokens={max_new_tokens} exceed "
                f"the context, block_size={size}"
            )


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt, at least one: an empty prompt is the end-of-text token, or else a newline."""
    start = list(tokenizer.prompt_start)
    if prompt or start:
        return start + list(tokenizer.encode(prompt))
    if tokenizer.end_token is not None:
        return [tokenizer.end_token]
    try:
        return list(tokenizer.encode("\n"))
    except ConfigError:
        raise ConfigError(
            "prompt is empty, and this model knows no line end to begin with: say prompt=…"
        ) from None


def _pad(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Rows of different lengths, right-aligned, (B, T) int64."""
    width = max(map(len, rows))
    return torch.tensor([[filler] * (width - len(row)) + list(row) for row in rows])
