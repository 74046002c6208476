"""The embedded corpus: the same bytes for a seed, one derivation a story, and a floor that is exact."""

import hashlib
import math
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from ngram import NGram, best_order, encode

from minilm.errors import ConfigError
from minilm.tales import FOLDER, Choice, Grammar, Tales, generate, load

VOWELS = "aeiouAEIOU"
# a promise: change it knowingly
DEFAULT_SHA256 = "31b7a80cb9284b9779e7c4cca5a7989b13503d14e0ba1b6c095d6a8aab5bcef5"


@cache
def corpus(seed: int = 1337, n_bytes: int = 200_000) -> Tales:
    return generate(seed, n_bytes)


def stories(tales: Tales) -> list[str]:
    assert tales.text.endswith("\n\n")
    return tales.text[:-2].split("\n\n")


# ------------------------------------------------------------------------------------------------
# A reader: finds every way in which the grammar could have written a text


def derivations(grammar: Grammar, text: str) -> list[float]:
    """The nats of every derivation of `text`, by trying each alternative of each choice.

    It shares no code with the generator. A state is: what is still to be written (as a linked list), how much
    of the text is read, who plays whom, the slots that dress the next piece of text, and the nats so far.
    """
    found = []
    start = (grammar.rules["story"], None)
    states = [(start, 0, {}, (), 0.0)]
    while states:
        todo, at, bound, dressing, nats = states.pop()
        if todo is None:
            found += [nats] if at == len(text) else []
            continue
        part, rest = todo
        if isinstance(part, str):
            for slot in dressing:
                part = f"a{'n' * (part[0] in VOWELS)} {part}" if slot.article else part
                part = part[0].upper() + part[1:] if slot.capital else part
            if text.startswith(part, at):
                states.append((rest, at + len(part), bound, (), nats))
        elif isinstance(part, Choice):
            for option, weight in zip(part.options, part.weights, strict=True):
                if (
                    option
                    and not dressing
                    and isinstance(option[0], str)
                    and not text.startswith(option[0], at)
                ):
                    continue  # only to be quicker
                after = rest
                for piece in reversed(option):
                    after = (piece, after)
                states.append((after, at, bound, dressing, nats - math.log(weight / sum(part.weights))))
        elif part.name in grammar.rules:
            states.append(((grammar.rules[part.name], rest), at, bound, (part, *dressing), nats))
        else:
            list_name = grammar.cast.get(part.name, part.name)
            words = grammar.words[list_name]
            free = dict(enumerate(words.weights))
            if part.name in bound:
                free = {bound[part.name]: 1}
            elif part.name in grammar.cast:
                for name, i in bound.items():
                    free = (
                        free if grammar.cast[name] != list_name else {j: w for j, w in free.items() if j != i}
                    )
            total = sum(free.values())
            begin = at + bool(part.article) * (3 if text.startswith("n ", at + 1) else 2)
            for i, weight in free.items():
                word = words.options[i][part.form]
                if not dressing and not text.startswith(word[1:], begin + 1):
                    continue  # only to be quicker
                now = {**bound, part.name: i} if part.name in grammar.cast else bound
                states.append(((word, rest), at, now, (part, *dressing), nats - math.log(weight / total)))
    return found


@pytest.mark.parametrize("n_bytes", [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_every_story_has_one_derivation_and_the_floor_is_its_information(n_bytes):
    tales, grammar = corpus(n_bytes=n_bytes), load()
    start = 0
    for story in stories(tales):
        (nats,) = derivations(grammar, story)
        stop = start + len(story) + 2
        assert nats == pytest.approx(tales.nats[start:stop].sum())
        start = stop
    assert start == len(tales.text)


def test_a_story_that_forgets_has_no_derivation():
    grammar = load()
    for story in stories(corpus())[:100]:
        name, times = Counter(re.findall(r"\b[A-Z][a-z]+\b", story)).most_common(1)[0]
        other = "Peter" if name != "Peter" else "Tom"
        last = story.rindex(name)
        assert times > 1
        assert not derivations(grammar, story[:last] + other + story[last + len(name) :])


# ------------------------------------------------------------------------------------------------
# The corpus


def test_same_bytes_for_a_seed():
    text = generate().text
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == DEFAULT_SHA256
    assert 1_000_000 <= len(text) < 1_001_000
    assert text.startswith(corpus().text)
    assert corpus(seed=2, n_bytes=5_000).text != corpus(seed=3, n_bytes=5_000).text


def test_stories_are_many_and_short():
    lengths = [len(story) for story in stories(corpus())]
    assert len(set(stories(corpus()))) == len(lengths) > 300
    assert min(lengths) > 300
    assert max(lengths) < 750
    assert 400 < np.mean(lengths) < 600


def test_rich_in_words_and_sentences():
    words = Counter(re.findall("[a-z]+", corpus().text.lower()))
    assert sum(count >= 5 for count in words.values()) >= 600
    sentences = {
        option for rule in load().rules.values() for option in rule.options if str(option[-1])[-1] in '.!?"'
    }
    assert len(sentences) >= 60


def test_reads_well():
    text = corpus().text
    assert not re.findall(rf"\b[Aa] [{VOWELS}]\w*", text)
    assert not re.findall(rf"\b[Aa]n [^{VOWELS}]\w*", text)
    assert not re.findall(r"\b(\w+) \1\b|  | \n|\n |[{}()|*]| [.,!?]|[.,!?][a-zA-Z]", text)
    assert not re.findall(r"(?:^|[.!?\n] )[a-z]", text)
    for line in text.split("\n"):
        assert line.count('"') % 2 == 0
        assert not line or line[-1] in '.!?"'


def test_everything_named_is_used():
    grammar = load()
    used = set(re.findall(r"\{(\w+)", "".join(path.read_text() for path in FOLDER.glob("*.yaml"))))
    used = {name[0].lower() + name[1:] for name in used} | {"story", *grammar.cast.values()}
    assert not {*grammar.words, *grammar.cast, *grammar.rules} - used


def test_a_character_costs_a_fraction_of_a_nat():
    assert 0.1 < corpus().nats.mean() < 0.6


def test_no_text_is_refused():
    with pytest.raises(ConfigError, match="n_bytes=0"):
        generate(n_bytes=0)


# ------------------------------------------------------------------------------------------------
# The grammar format


def write(folder: Path, text: str) -> Path:
    (folder / "small.yaml").write_text(text)
    return folder


SMALL = """
words:
  people:
    2* Al: {they: he}
    (Bo|Ida): {they: she}
cast: {hero: people, friend: people}
rules:
  story: |
    3* {hero} met {friend}.
    {friend.A} (ate|3* slept).
      {friend.They} {end}
  end: |
    smiled.
"""


def test_probabilities_by_hand(tmp_path):
    tales = generate(5, 40_000, write(tmp_path, SMALL))
    assert set(map(len, derivations_of_all(load(tmp_path), tales))) == {1}
    known, start = {}, 0
    for story in stories(tales):
        stop = start + len(story) + 2
        known[story] = math.exp(-tales.nats[start:stop].sum())
        start = stop
    assert known["Al met Bo."] == pytest.approx(3 / 4 * 2 / 4 * 1 / 2)
    assert known["Ida met Al."] == pytest.approx(3 / 4 * 1 / 4 * 2 / 3)
    assert known["An Al slept.\nHe smiled."] == pytest.approx(1 / 4 * 2 / 4 * 3 / 4)
    assert len(known) == 6 + 6
    assert sum(known.values()) == pytest.approx(1)


def derivations_of_all(grammar: Grammar, tales: Tales) -> list[list[float]]:
    return [derivations(grammar, story) for story in sorted(set(stories(tales)))]


def test_nats_stand_where_the_text_begins(tmp_path):
    tales = generate(0, 1, write(tmp_path, "rules:\n  story: |\n    so (a|b)(c|)(|d)\n    no\n"))
    assert set(np.flatnonzero(tales.nats)) <= {0, 3, 4, 5}
    assert tales.nats[0] == pytest.approx(math.log(2))
    assert len(tales.nats) == len(tales.text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{end}", "{edn}", r"small.yaml: rules: story: nothing fills \{edn\}; did you mean \['end'"),
        (
            "{hero} met",
            "{hero.their} met",
            r"small.yaml: rules: story: nothing fills \{hero.their\}; 'Al' has no 'their'",
        ),
        ("{end}", "{end.they}", r"\{end.they\}"),
        ("{end}", "{end it}", r"small.yaml: rules: story: slot \{end it\} is not"),
        ("{end}", "{end", r"stray '\{'"),
        ("3* slept)", "3* slept", "story: a '\\(' is not closed"),
        ("(ate|", "ate|", r"stray '\|'"),
        ("(ate|3* slept)", "(ate|3* ate)", "stands twice"),
        ("(Bo|Ida)", "(Bo|Al)", "words: people: 'Al' stands twice"),
        ("(Bo|Ida)", "Bo {hero}", r"a word holds no slots, found \{hero\}"),
        ("(Bo|Ida)", "{hero}", "small.yaml: not YAML"),
        ("{they: she}", "she", "small.yaml: words: people: "),
        ("friend: people", "friend: peoples", "need more than the 0 words of peoples"),
        (
            "friend: people",
            "friend: people, third: people, fourth: people",
            "need more than the 3 words of people",
        ),
        ("friend: people", "end: people", "small.yaml: rules: end: the name is taken"),
        ("friend: people", "friend: [people]", "small.yaml: cast: friend"),
        ("smiled.", "smiled {end}", "back to themselves: end, story"),
        ("  story: |", "  tale: |", "no rule 'story'"),
        ("rules:", "rulers:", "small.yaml: 'rulers' is not a mapping named words, cast, rules"),
        ("smiled.", "smiled \u00e9.", "small.yaml: rules: end: only plain ASCII"),
        ("  end: |\n    smiled.", "  end: [smiled]", "small.yaml: rules: end: expected lines"),
    ],
)
def test_a_broken_grammar_is_refused_by_name(tmp_path, old, new, message):
    assert old in SMALL
    write(tmp_path, SMALL.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_grammar_needs_files(tmp_path):
    with pytest.raises(ConfigError, match="no rule 'story'"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------
# The baseline without attention


def test_ngram_sums_to_one():
    tokens, vocab_size = encode(corpus().text[:20_000])
    model = NGram(tokens, vocab_size, 5)
    for at in (100, 101, 250, 999):
        past = np.append(tokens[at - 4 : at], 0)
        odd = (past + 7 * (at % 2)) % vocab_size  # for some also contexts that never occurred
        for order in range(1, 6):
            total = 0.0
            for last in range(vocab_size):
                odd[-1] = last
                total += model.probabilities(odd, order)[-1]
            assert total == pytest.approx(1)


def test_ngram_by_hand():
    # counts 4, 3, 2, 1: one token each, so y = 1/3 and the discounts are 1/3, 1 and 5/3
    tokens, vocab_size = encode("aaaabbbccd")
    p = NGram(tokens, vocab_size, 1).probabilities(np.arange(4), 1)
    assert p * 60 == pytest.approx([21, 15, 13, 11])


def test_ngram_of_order_two_by_its_definition():
    text = corpus().text[:3_000]
    tokens, vocab_size = encode(text)
    pairs = Counter(pairwise(text))
    before = Counter(b for _, b in pairs)  # different tokens before b

    def discounts(counts):
        n = Counter(counts.values())
        y = n[1] / (n[1] + 2 * n[2])
        return [0] + [min(max(i - (i + 1) * y * n[i + 1] / n[i], 0.05), i) if n[i] else i for i in (1, 2, 3)]

    def p_one(b):
        d = discounts(before)
        freed = sum(d[min(c, 3)] for c in before.values())
        return (before[b] - d[min(before[b], 3)] + freed / vocab_size) / sum(before.values())

    def p_two(a, b):
        d = discounts(pairs)
        after = {y: c for (x, y), c in pairs.items() if x == a}
        freed = sum(d[min(c, 3)] for c in after.values())
        count = after.get(b, 0)
        return (count - d[min(count, 3)] + freed * p_one(b)) / sum(after.values())

    p = NGram(tokens, vocab_size, 2).probabilities(tokens[:300], 2)
    expected = [p_two(a, b) for a, b in pairwise(text[:300])]
    assert p[1:] == pytest.approx(expected)


def test_the_corpus_needs_more_than_an_ngram():
    tales = corpus()
    tokens, vocab_size = encode(tales.text)
    n_train = len(tokens) * 9 // 10
    train = tokens[:n_train]
    order = best_order(train, vocab_size, 8)
    nats = NGram(train, vocab_size, order).nats(tokens[n_train:], order, train)
    assert nats - tales.nats[n_train:].mean() > 0.08
