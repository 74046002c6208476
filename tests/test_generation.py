"""Generated tokens: with the cache and without, against a plain loop, at and past the end of the context."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from minilm.attention import (
    Alibi,
    Causal,
    Full,
    Learned,
    MultiHeadAttention,
    NoPosition,
    Prefix,
    Rotary,
    Sinusoidal,
    SlidingWindow,
)
from minilm.errors import ConfigError
from minilm.generation import Generator, Speed, encode_prompt
from minilm.model import GPT, GPTConfig
from minilm.sampling import Sampler
from minilm.tokenizer import BPE, Byte, Char

V, T, C, H = 29, 16, 16, 2
GREEDY = Sampler(temperature=0)
POSITIONS = {
    "rope": lambda: Rotary(head_dim=C // H),
    "alibi": lambda: Alibi(n_head=H),
    "none": NoPosition,
    "learned": lambda: Learned(n_embd=C, block_size=T),
    "sinusoidal": lambda: Sinusoidal(n_embd=C),
}
MASKS = {
    "causal": Causal(),
    "window": SlidingWindow(5),
    "long window": SlidingWindow(T + 4),
    "prefix": Prefix(4),
}
LENGTHS = [1, T - 1, T, T + 1, 5 * T // 2]


def make(position="rope", mask=Causal(), vocab_size=V, dtype=torch.float64, dropout=0.0):  # noqa: B008
    """A model whose weights are so large that each token matters to what follows."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=vocab_size, block_size=T, n_layer=2, n_head=H, n_embd=C, dropout=dropout)
    attention = lambda: MultiHeadAttention(C, n_head=H, mask=mask)  # noqa: E731
    model = GPT(config, position=POSITIONS[position](), attention=attention).to(dtype)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model.eval()


def prompt(length, seed=0, vocab_size=V):
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(model, prompts, n, *, sampler=GREEDY, seed=0, **options):
    """New tokens of each row."""
    rows = list(Generator(model, sampler, **options).tokens(prompts, n, seed=seed))
    assert len(rows) == n
    return torch.stack(rows, dim=1).tolist() if rows else [[] for _ in prompts]


def by_hand(model, prompt, n):
    """The rule of the module's docstring, one forward pass of the whole context for each token."""
    forgets = model.position.relative and isinstance(model.mask, SlidingWindow) and model.mask.window <= T
    context = prompt if forgets else prompt[-T:]
    new = []
    for _ in range(n):
        if len(context) > T and not forgets:
            context = context[-T // 2 :]
        with torch.no_grad():
            new.append(int(model(torch.tensor([context]))[0, -1].argmax()))
        context = [*context, new[-1]]
    return new


# ---- the cache ----


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_with_and_without_the_cache_the_same_tokens_also_past_the_context(position, mask):
    model, met = make(position, MASKS[mask]), set()
    for length in LENGTHS:
        if mask == "prefix" and length < 4:
            continue  # refused, see below
        start = prompt(length)
        new = by_hand(model, start, 24)
        assert generate(model, [start], 24, cache=False) == [new]
        assert generate(model, [start], 24, cache=True) == [new]
        met |= set(new)
    assert len(met) > 4  # a model that repeats itself would show nothing


@pytest.mark.parametrize("position", POSITIONS)
def test_in_float32_too_and_far_past_the_context(position):
    model = make(position, dtype=torch.float32)
    new = by_hand(model, prompt(10), 100)
    assert (
        generate(model, [prompt(10)], 100, cache=True)
        == generate(model, [prompt(10)], 100, cache=False)
        == [new]
    )


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_row_of_a_batch_is_the_row_alone(position, mask, cache):
    model = make(position, MASKS[mask])
    prompts = [
        prompt(length, seed=length) for length in ([4, 9, T + 3] if mask == "prefix" else [1, 9, T + 3])
    ]
    together = generate(model, prompts, 20, cache=cache)
    assert together == [by_hand(model, start, 20) for start in prompts]


def test_a_cache_that_rolls_stops_growing():
    speed = Speed()
    for _ in Generator(make(mask=SlidingWindow(5))).tokens([prompt(40)], 30, seed=0, speed=speed):
        pass
    assert speed.cache_bytes == 2 * 2 * C * 5 * 8  # keys and values, layers, width, window, float64


def test_speed_counts_what_was_read_and_written():
    speed = Speed()
    list(Generator(make()).tokens([prompt(3), prompt(5)], 4, seed=0, speed=speed))
    assert (speed.prefill_tokens, speed.decode_tokens) == (8, 6)
    assert speed.prefill_seconds > 0
    assert speed.decode_seconds > 0


# ---- randomness ----


@pytest.mark.parametrize("cache", [True, False])
def test_the_same_seed_draws_the_same_and_another_does_not(cache):
    model, sampler = make(), Sampler(temperature=1.5, top_k=20)
    first, again, other = (
        generate(model, [prompt(5)] * 2, 30, sampler=sampler, seed=seed, cache=cache) for seed in (7, 7, 8)
    )
    assert first == again != other
    assert first[0] != first[1]  # the rows of a batch do not draw alike
    assert first == generate(model, [prompt(5)] * 2, 30, sampler=sampler, seed=7, cache=not cache)


def test_without_a_seed_each_call_draws_afresh():
    model, sampler = make(), Sampler(temperature=1.5)
    drawn = [generate(model, [prompt(5)], 30, sampler=sampler, seed=None) for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_generating_leaves_no_trace():
    model = make().train()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    start = prompt(5)
    generate(model, [start], 30, sampler=Sampler(temperature=1.0), seed=None)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert start == prompt(5)


def test_the_repetition_penalty_knows_the_whole_text_not_only_the_context():
    class Spy(Sampler):
        def __call__(self, logits, seen=None, generator=None):
            spied.append(seen.tolist())
            return super().__call__(logits, seen, generator)

    spied, prompts = [], [prompt(T + 5), prompt(3)]
    new = generate(make(), prompts, 12, sampler=Spy(temperature=0, repetition_penalty=1.3))
    whole = [start + more for start, more in zip(prompts, new, strict=True)]
    for i, rows in enumerate(spied):
        assert [[t for t in row if t >= 0] for row in rows] == [
            text[: len(start) + i] for text, start in zip(whole, prompts, strict=True)
        ]


# ---- how much ----


@pytest.mark.parametrize("n", [0, 1, T, 3 * T])
def test_exactly_as_many_tokens_as_asked_for(n):
    assert [len(row) for row in generate(make(), [prompt(3), prompt(T)], n)] == [n, n]


def test_overflow_error_gives_the_numbers():
    generate(make(), [prompt(10)], T - 10, overflow="error")
    with pytest.raises(
        ConfigError, match="a prompt of 10 and max_new_tokens=7 exceed the context, block_size=16"
    ):
        generate(make(), [prompt(10), prompt(3)], 7, overflow="error")


def test_where_layers_forget_nothing_overflows():
    generate(make(mask=SlidingWindow(5)), [prompt(10)], 30, overflow="error")


@pytest.mark.parametrize(
    ("prompts", "n", "options", "says"),
    [
        ([[1]], -1, {}, "max_new_tokens=-1"),
        ([], 5, {}, "every prompt needs at least one token"),
        ([[1], []], 5, {}, "every prompt needs at least one token"),
        ([[1]], 5, {"overflow": "wrap"}, "overflow=wrap: expected slide or error"),
        ([[1]], 5, {"keep": 0}, "keep=0"),
        ([[1]], 5, {"keep": 1.0}, "keep=1.0"),
        ([[1]], 5, {"keep": float("nan")}, "keep=nan"),
    ],
)
def test_impossible_wishes_are_refused_by_name(prompts, n, options, says):
    with pytest.raises(ConfigError) as refused:
        generate(make(), prompts, n, **options)
    assert says in str(refused.value)


def test_keep_is_the_share_of_a_full_context_that_goes_on():
    lengths = []

    class Watched(Generator):
        def _read(self, contexts, cache, device):
            lengths.append(len(contexts[0]))
            return super()._read(contexts, cache, device)

    list(Watched(make(), GREEDY, keep=0.25).tokens([prompt(T)], 3 * T, seed=0))
    assert lengths == [T, 4, 4, 4, 4]


# ---- masks that read ahead ----


def test_without_a_mask_the_cache_is_refused_and_the_plain_way_runs():
    model = make(mask=Full())
    with pytest.raises(ConfigError, match="cache=false"):
        generate(model, [prompt(5)], 3)
    assert generate(model, [prompt(5)], 3, cache=False) == [by_hand(model, prompt(5), 3)]


def test_a_prefix_wants_its_first_tokens_in_one_piece():
    model = make(mask=Prefix(4))
    generate(model, [prompt(4)], 3)
    for prompts in ([prompt(3)], [prompt(9), prompt(2)]):
        with pytest.raises(ConfigError, match="at least 4 tokens, or cache=false"):
            generate(model, prompts, 3)
        generate(model, prompts, 3, cache=False)


def test_a_prefix_longer_than_what_is_kept_is_refused_before_the_first_token():
    model = make(mask=Prefix(10))
    generate(model, [prompt(12)], 5)  # the last token is not read
    with pytest.raises(
        ConfigError, match=r"keep=0.5 of block_size=16 leaves 8 tokens.*larger keep, or cache=false"
    ):
        next(Generator(model).tokens([prompt(12)], 6))
    for options in ({"keep": 0.7}, {"cache": False}):
        generate(model, [prompt(12)], 20, **options)


# ---- text ----

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz."


def text(model, tokenizer, prompts, n, **options):
    """The new text of each row."""
    texts = ["" for _ in prompts]
    for row, piece in Generator(model, GREEDY, **options.pop("how", {})).text(
        tokenizer, prompts, n, **options
    ):
        texts[row] += piece
    return texts


@pytest.fixture(scope="module")
def writer():
    tokenizer = Char(ALPHABET)
    return make(vocab_size=tokenizer.vocab_size), tokenizer


def test_text_is_the_tokens_decoded(writer):
    model, tokenizer = writer
    prompts = ["a", "much longer than that one"]
    new = generate(model, [tokenizer.encode(start) for start in prompts], 30)
    assert text(model, tokenizer, prompts, 30) == [tokenizer.decode(row) for row in new]


def test_each_row_ends_at_its_own_stop(writer):
    model, tokenizer = writer
    prompts = ["a", "bc", "def"]
    whole = text(model, tokenizer, prompts, 40)
    stops = [whole[0][5:7], whole[1][2:3]]
    expected = [row[: min([row.find(s) for s in stops if s in row], default=len(row))] for row in whole]
    assert len(set(map(len, expected))) > 1
    assert text(model, tokenizer, prompts, 40, stop=stops) == expected


def test_generation_ends_when_every_row_has_stopped(writer):
    model, tokenizer = writer
    speed = Speed()
    whole = text(model, tokenizer, ["a"], 40)[0]
    assert text(model, tokenizer, ["a"], 40, stop=[whole[3]], speed=speed) == [whole[: whole.index(whole[3])]]
    assert speed.decode_tokens <= 3


def test_an_end_token_ends_a_row():
    tokenizer = BPE.fit("a banana and a bandana " * 20, vocab_size=260)
    model, a = make(vocab_size=tokenizer.vocab_size), tokenizer.encode("a")[0]

    class Ending(Sampler):
        def __call__(self, logits, seen=None, generator=None):
            drawn.append(len(logits))
            return torch.tensor([tokenizer.end_token if len(drawn) > 3 else a] * len(logits))

    drawn = []
    pieces = Generator(model, Ending()).text(tokenizer, ["a"], 50)
    assert "".join(piece for _, piece in pieces) == "aaa"
    assert len(drawn) == 4


def test_a_stop_in_the_prompt_stops_nothing(writer):
    model, tokenizer = writer
    whole = text(model, tokenizer, ["abc"], 10)[0]
    unseen = next(c for c in "abc" if c not in whole)
    assert text(model, tokenizer, ["abc"], 10, stop=[unseen]) == [whole]


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (Char(ALPHABET), [0]),
        (Byte(), [10]),
        (BPE.fit("a banana and a bandana " * 20, vocab_size=260), [259]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_empty_prompt_begins_at_an_end_of_text_or_a_line(tokenizer, ids):
    assert encode_prompt(tokenizer, "") == ids


def test_an_empty_prompt_with_nothing_to_begin_at_is_refused():
    with pytest.raises(ConfigError, match=r"prompt is empty, .* say prompt="):
        encode_prompt(Char("abc"), "")


def test_a_character_that_was_never_seen_is_named():
    with pytest.raises(ConfigError, match=r"'É' \(U\+00C9\)"):
        encode_prompt(Char("abc"), "abÉ")


# ---- several threads ----


@pytest.mark.parametrize("training", [False, True], ids=["to use", "in training"])
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(5)], ids=["causal", "rolling"])
def test_threads_that_share_a_model_write_what_one_does(mask, training):
    """In training it has dropout, which no thread may switch on again while another generates."""
    model = make(mask=mask, dropout=0.5).train(training)
    prompts = [[[1 + i, 2, 3], [4]] for i in range(6)]

    def work(i):
        return torch.stack(list(Generator(model, Sampler(top_k=5)).tokens(prompts[i], 40, seed=i)))

    alone = [work(i) for i in range(6)]
    with ThreadPoolExecutor(max_workers=6) as pool:
        together = list(pool.map(work, range(6)))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
    assert model.training is training
