"""The embedded corpus `tales`: tiny stories written by a grammar, so that their true entropy is known.

The grammar is data/tales/*.yaml, and the README beside it says how to write one. Each choice is drawn
where its text begins, with the weights that stand in the grammar, and no story can be derived in two
ways (tests/test_tales.py reads the stories back to hold that). So the information of a text is the sum
of -log p over its choices: the entropy floor, which no model can be expected to beat.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml

from minilm.errors import ConfigError, one_line

FOLDER = Path(__file__).resolve().parent.parent / "data" / "tales"


@dataclass(frozen=True)
class Tales:
    """A corpus and what it costs to tell."""

    text: str  # plain ASCII; every story is followed by a blank line
    nats: np.ndarray  # (len(text),) float64: the information of the choices whose text begins there


def generate(seed: int = 1337, n_bytes: int = 1_000_000, folder: Path = FOLDER) -> Tales:
    """Whole stories up to the first that reaches `n_bytes`: the same bytes for a seed everywhere."""
    if n_bytes < 1:
        raise ConfigError(f"{n_bytes=} must be at least 1")
    writer = _Writer(load(folder), random.Random(seed))
    while writer.size < n_bytes:
        writer.story()
    text = "".join(writer.pieces)
    nats = np.zeros(len(text))
    nats[np.cumsum([0] + [len(piece) for piece in writer.pieces[:-1]])] = writer.nats
    return Tales(text, nats)


# ------------------------------------------------------------------------------------------------
# A grammar, and a writer that follows it


@dataclass(frozen=True)
class Slot:
    """`{name}` or `{name.form}`: a member of the cast, a word of a list, or a rule."""

    name: str
    form: str  # which form of a word; "" is the word itself
    article: bool  # "a" or "an" goes before it
    capital: bool  # its first letter becomes a capital
    where: str = field(compare=False)  # for messages

    def __str__(self) -> str:
        return f"{{{self.name}{'.' * bool(self.form)}{self.form}}}"

    def dress(self, text: str) -> str:
        """The beginning of this slot's text with its article and capital."""
        if self.article:
            text = ("an " if text[0] in "aeiouAEIOU" else "a ") + text
        return text[0].upper() + text[1:] if self.capital else text


@dataclass(frozen=True)
class Choice:
    """Alternatives and their whole-number weights."""

    options: tuple[Template, ...]
    weights: tuple[int, ...]


Template: TypeAlias = tuple[str | Slot | Choice, ...]


@dataclass(frozen=True)
class Words:
    """A list of words: each a dict from form to text, in which "" is the word itself."""

    options: tuple[dict[str, str], ...]
    weights: tuple[int, ...]


@dataclass(frozen=True)
class Grammar:
    """What the YAML files say."""

    words: dict[str, Words]  # drawn anew at each mention
    cast: dict[str, str]  # member -> its list of words; drawn at the first mention, kept for the story
    rules: dict[str, Choice]  # drawn anew at each mention; a story is the rule `story`


class _Writer:
    """Writes stories as pieces of text, with the nats of the choices that each piece reveals."""

    def __init__(self, grammar: Grammar, rng: random.Random):
        self.grammar, self.rng = grammar, rng
        self.pieces: list[str] = []  # never empty texts
        self.nats: list[float] = []  # one a piece
        self.size = 0  # characters written
        self.unbooked = 0.0  # nats of choices that have written nothing yet
        self.bound: dict[str, int] = {}  # member of the cast -> index into its list, for this story

    def story(self) -> None:
        self.bound = {}
        start = len(self.pieces)
        self.write(self.draw(self.grammar.rules["story"]))
        self.write(("\n\n",))
        self.size += sum(map(len, self.pieces[start:]))

    def write(self, template: Template) -> None:
        for part in template:
            if isinstance(part, str):
                self.pieces.append(part)
                self.nats.append(self.unbooked)
                self.unbooked = 0.0
            elif isinstance(part, Choice):
                self.write(self.draw(part))
            else:
                start = len(self.pieces)
                self.write(self.fill(part))
                if len(self.pieces) > start:
                    self.pieces[start] = part.dress(self.pieces[start])

    def fill(self, slot: Slot) -> Template:
        if slot.name in self.grammar.cast:
            return (self.member(slot.name)[slot.form],)
        if slot.name in self.grammar.words:
            words = self.grammar.words[slot.name]
            return (words.options[self.index(words.weights)][slot.form],)
        return self.draw(self.grammar.rules[slot.name])

    def draw(self, choice: Choice) -> Template:
        return choice.options[self.index(choice.weights)]

    def member(self, name: str) -> dict[str, str]:
        """Who plays `name`: drawn at the first mention from those of its list who play nobody yet."""
        cast, words = self.grammar.cast, self.grammar.words[self.grammar.cast[name]]
        if name not in self.bound:
            taken = {index for other, index in self.bound.items() if cast[other] == cast[name]}
            self.bound[name] = self.index([0 if i in taken else w for i, w in enumerate(words.weights)])
        return words.options[self.bound[name]]

    def index(self, weights: Sequence[int]) -> int:
        """An index with a probability in proportion to its weight; the nats wait for the next text."""
        ends = list(itertools.accumulate(weights))
        # of all methods, Python promises for random() alone that it stays the same for a seed
        index = bisect.bisect(ends, int(self.rng.random() * ends[-1]))
        self.unbooked += math.log(ends[-1] / weights[index])
        return index


# ------------------------------------------------------------------------------------------------
# Reading a grammar; whatever is broken is refused with its file and name


def load(folder: Path = FOLDER) -> Grammar:
    """The grammar of all *.yaml in `folder`."""
    grammar = Grammar({}, {}, {})
    readers = {"words": _words, "cast": _member, "rules": _rule}
    for file in sorted(folder.glob("*.yaml")):
        try:  # BaseLoader makes texts of all that is no list or mapping, so that `true` and `no` are words
            sections = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"{file.name}: not YAML: {one_line(error)}") from error
        for section, items in sections.items() if isinstance(sections, dict) else [(sections, {})]:
            if section not in readers or not isinstance(items, dict):
                raise ConfigError(f"{file.name}: {section!r} is not a mapping named {', '.join(readers)}")
            for name, value in items.items():
                where = f"{file.name}: {section}: {name}"
                if any(name in known for known in (grammar.words, grammar.cast, grammar.rules)):
                    raise ConfigError(f"{where}: the name is taken already; choose another")
                getattr(grammar, section)[name] = readers[section](value, where)
    if "story" not in grammar.rules:
        raise ConfigError(f"{folder}: no rule 'story' in its *.yaml files")
    _check(grammar, folder)
    return grammar


def _words(value: Any, where: str) -> Words:
    """A list of words, or a mapping from word to its further forms; (a|b) in a word makes two words."""
    options: list[dict[str, str]] = []
    weights: list[int] = []
    for key, more in value.items() if isinstance(value, dict) else [(word, {}) for word in value]:
        forms = more or {}
        if not isinstance(forms, dict) or not all(isinstance(text, str) for text in (key, *forms.values())):
            raise ConfigError(f"{where}: expected a word and its forms, found {key!r}: {more!r}")
        for word, weight in _spell((_choice([_parse(key, where)], where),), where):
            options.append({"": word} | forms)
            weights.append(weight)
    texts = [option[""] for option in options]
    if len(set(texts)) < len(texts) or not all(text for option in options for text in option.values()):
        raise ConfigError(f"{where}: {max(texts, key=texts.count)!r} stands twice, or a word is empty")
    return Words(tuple(options), tuple(weights))


def _spell(template: Template, where: str) -> list[tuple[str, int]]:
    """All that a template can say, with weights."""
    said = [("", 1)]
    for part in template:
        if isinstance(part, Slot):
            raise ConfigError(f"{where}: a word holds no slots, found {part}")
        ends = [(part, 1)] if isinstance(part, str) else []
        if isinstance(part, Choice):
            for option, weight in zip(part.options, part.weights, strict=True):
                ends += [(end, weight * w) for end, w in _spell(option, where)]
        said = [(text + end, weight * w) for text, weight in said for end, w in ends]
    return said


def _member(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: expected the name of a list of words, found {value!r}")
    return value


def _rule(value: Any, where: str) -> Choice:
    """One alternative a line; an indented line goes on with the one above, as a new line of the story."""
    if not isinstance(value, str):
        raise ConfigError(f"{where}: expected lines of text after '|', found {value!r}")
    lines = re.split(r"\n(?=\S)", value.strip())
    return _choice([_parse(re.sub(r"\s*\n\s*", "\n", line), where) for line in lines], where)


def _parse(text: str, where: str) -> Template:
    """A template: text, {slots} and (inline|choices), which may nest."""
    levels: list[list[list[Any]]] = [[[]]]  # for the line and each open choice: its options so far
    for slot, mark, literal, stray in re.findall(r"\{([^{}]*)\}|([(|)])|([^{}(|)]+)|(.)", text):
        if stray or (mark and mark != "(" and len(levels) == 1):
            raise ConfigError(f"{where}: stray {stray or mark!r} in {text!r}")
        if mark == "(":
            levels.append([[]])
        elif mark == "|":
            levels[-1].append([])
        elif mark == ")":
            choice = _choice([tuple(option) for option in levels.pop()], where)
            levels[-1][-1].append(choice)
        else:
            levels[-1][-1].append(literal or _slot(slot, where))
    if len(levels) > 1:
        raise ConfigError(f"{where}: a '(' is not closed in {text!r}")
    if not text.isascii():
        raise ConfigError(f"{where}: only plain ASCII, found {text!r}")
    return tuple(levels[0][0])


def _slot(text: str, where: str) -> Slot:
    match = re.fullmatch(r"([A-Za-z]\w*)(?:\.([A-Za-z]\w*))?", text)
    if not match:
        raise ConfigError(f"{where}: slot {{{text}}} is not {{name}} or {{name.form}}")
    name, form = match[1], match[2] or ""
    capital = (form or name)[0].isupper()
    name, form = name[0].lower() + name[1:], form[:1].lower() + form[1:]
    return Slot(name, "" if form == "a" else form, form == "a", capital, where)


def _choice(options: Sequence[Template], where: str) -> Choice:
    """Take the weights `3* ` off the options; a doubled one is refused, as two derivations spoil the floor."""
    bare: list[Template] = []
    weights: list[int] = []
    for option in options:
        text = option[0] if option and isinstance(option[0], str) else ""
        match = re.match(r"([1-9]\d*)\* ?", text)
        rest = text[match.end() :] if match else text
        bare.append(((rest,) if rest else ()) + option[bool(text) :])
        weights.append(int(match[1]) if match else 1)
    if twice := [option for option in bare if bare.count(option) > 1]:
        raise ConfigError(f"{where}: {''.join(map(str, twice[0]))!r} stands twice; give it a weight instead")
    return Choice(tuple(bare), tuple(weights))


def _slots(item: Template | Choice) -> Iterator[Slot]:
    for part in item.options if isinstance(item, Choice) else item:
        if isinstance(part, Slot):
            yield part
        elif not isinstance(part, str):
            yield from _slots(part)


def _check(grammar: Grammar, folder: Path) -> None:
    """Refuse casts too large for their list, slots that nothing can fill, and rules that never end."""
    lists = {name: words.options for name, words in grammar.words.items()}
    for name in grammar.cast.values():
        members = [member for member, other in grammar.cast.items() if other == name]
        if len(members) > len(lists.get(name, ())):
            raise ConfigError(
                f"{folder}: {members} need more than the {len(lists.get(name, ()))} words of {name}"
            )
    fillers = lists | {member: lists[name] for member, name in grammar.cast.items()}
    fillers |= {name: ({"": name},) for name in grammar.rules}
    needs = {name: list(_slots(rule)) for name, rule in grammar.rules.items()}
    for slot in itertools.chain.from_iterable(needs.values()):
        near = difflib.get_close_matches(slot.name, fillers, 1)
        if slot.name not in fillers:
            raise ConfigError(f"{slot.where}: nothing fills {slot}; did you mean {near or sorted(fillers)}?")
        for entry in fillers[slot.name]:
            if slot.form not in entry:
                raise ConfigError(f"{slot.where}: nothing fills {slot}; {entry['']!r} has no {slot.form!r}")
    ending = {*fillers} - {*needs}
    while more := {name for name in {*needs} - ending if all(slot.name in ending for slot in needs[name])}:
        ending |= more
    if endless := sorted({*needs} - ending):
        raise ConfigError(f"{folder}: these rules lead back to themselves: {', '.join(endless)}")
