"""A compiled step is a step: same logits, same tokens, and where it cannot be compiled the plain way, unasked."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minilm import decoding, runtime
from minilm.attention import (
    Alibi,
    Learned,
    LinearAttention,
    MultiHeadAttention,
    Prefix,
    Rotary,
    SlidingWindow,
    cache,
)
from minilm.attention.cache import Growing, Slot
from minilm.decoding import CompiledStep, attention_by_sums, linear_by_sums
from minilm.generation import Generator
from minilm.model import GPT, GPTConfig
from minilm.packed import can_pack
from minilm.sampling import Sampler

V, T, C, H = 29, 24, 16, 4
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5}


def make(dtype=torch.float64, *, position=None, attention=None, **shape):
    """A model whose weights are so large that each token matters to what follows."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=V, n_layer=2, n_head=H, n_embd=C, **{"block_size": T} | shape)
    model = GPT(config, position=position, attention=attention).to(dtype)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model.eval()


def traced(model, monkeypatch):
    """A compiled step with all but the compiler itself: the graph runs as it was rewritten, and is counted."""
    graphs = []

    def plainly(graph, inputs, options=None):
        graphs.append(graph)
        return lambda *arguments: tuple(graph(*arguments))

    monkeypatch.setattr(torch._inductor, "compile", plainly)
    monkeypatch.setattr(runtime, "_probe_compiler", lambda: None)
    torch._dynamo.reset()
    return CompiledStep(model, "strict"), graphs


def tokens(model, n=T - 3, prompts=((1, 2, 3),), **options):
    rows = Generator(model, Sampler(temperature=0), **options).tokens([list(p) for p in prompts], n)
    return torch.stack(list(rows), dim=1).tolist()


# ---- the sums ----


@pytest.mark.parametrize(
    "shape", [(7, 5), (1030, 260), (1024, 512)]
)  # a small one, and streams with and without a rest
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_of_a_row_is_a_sum(shape, rows, bias):
    torch.manual_seed(0)
    x, weight = torch.randn(1, rows, shape[1]).double(), torch.randn(shape).double()
    b = torch.randn(shape[0]).double() if bias else None
    torch.testing.assert_close(linear_by_sums(x, weight, b), F.linear(x, weight, b), rtol=0, atol=1e-10)


def test_sums_of_bfloat16_are_in_float32():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 1, 512).bfloat16(), torch.randn(8, 512).bfloat16()
    told = F.linear(x.double(), weight.double())
    assert linear_by_sums(x, weight).dtype == torch.bfloat16
    torch.testing.assert_close(linear_by_sums(x, weight), told.bfloat16(), rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("groups", [H, 2, 1])
def test_attention_of_one_query_is_two_sums(groups):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 8).double() for heads, n in ((H, 1), (groups, 9), (groups, 9)))
    told = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    found = attention_by_sums(q, k, v, scale=0.3, enable_gqa=groups != H)
    torch.testing.assert_close(found, told, rtol=0, atol=1e-10)


@pytest.mark.parametrize("by_channels", [False, True])
def test_a_slot_writes_where_its_tensor_says(by_channels):
    like = torch.empty(1, 2, 0, 3)
    plain, data = Growing(like, 5), torch.zeros(1, 2, 3, 5) if by_channels else torch.zeros(1, 2, 5, 3)
    for i in range(4):
        x = torch.full((1, 2, 1, 3), float(i))
        found = Slot(data, torch.tensor([i]), i + 1, by_channels=by_channels).append(x)
        assert torch.equal(found, plain.append(x))
    assert torch.equal(data.mT if by_channels else data, plain.data)


# ---- whole steps ----

MODELS = {
    "rope": lambda d: make(d),
    "classic": lambda d: make(
        d, position=Learned(n_embd=C, block_size=T), norm="layernorm", mlp="gelu", bias=True
    ),
    "grouped, qk-norm": lambda d: make(
        d, attention=lambda: MultiHeadAttention(C, n_head=H, n_kv_head=2, qk_norm=True), mlp="swiglu"
    ),
    "alibi": lambda d: make(d, position=Alibi(n_head=H)),
    "ngram": lambda d: make(d, ngrams=(2, 4), ngram_rows=500),
    "prefix": lambda d: make(d, attention=lambda: MultiHeadAttention(C, n_head=H, mask=Prefix(2))),
    "reference": lambda d: make(d, attention=lambda: MultiHeadAttention(C, n_head=H, backend="reference")),
}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_at_every_step_are_the_uncached_ones(name, dtype, monkeypatch):
    model = MODELS[name](dtype)
    step, graphs = traced(model, monkeypatch)
    text = torch.randint(V, (1, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        told = model(text)
        for first in (4, 9):  # another cache, of another length
            kept = model.new_cache(1, T if first == 4 else T - 2)
            model(text[:, :first], kept)
            for i in range(first, kept.capacity):
                torch.testing.assert_close(
                    step(text[:, i : i + 1], kept)[0, 0], told[0, i], rtol=0, atol=CLOSE[dtype] * 10
                )
            assert kept.length == kept.capacity
            assert all(store.keys.length == kept.capacity for store in kept.stores)
    assert len(graphs) == 1  # one graph for all steps and both caches


@pytest.mark.parametrize("size", [T, 300])  # Python makes numbers above 256 anew each time
def test_from_the_third_step_on_the_graph_is_called_directly(size, monkeypatch):
    model = make(block_size=size)
    step, _ = traced(model, monkeypatch)
    asked = []
    compiled = step._step
    step._step = lambda *arguments: (asked.append(1), compiled(*arguments))[1]
    assert tokens(model, size - 3, step=step) == tokens(model, size - 3)
    assert len(asked) == 2


def test_steps_behind_two_caches_may_take_turns(monkeypatch):
    model = make()
    step, _ = traced(model, monkeypatch)
    texts = [torch.randint(V, (1, T), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    caches = [model.new_cache(1) for _ in texts]
    with torch.no_grad():
        told = [model(text) for text in texts]
        for text, kept in zip(texts, caches, strict=True):
            model(text[:, :3], kept)
        for i in range(3, T):
            for text, kept, logits in zip(texts, caches, told, strict=True):
                torch.testing.assert_close(
                    step(text[:, i : i + 1], kept)[0, 0], logits[0, i], rtol=0, atol=1e-10
                )


PLAIN = {
    "unequal texts": (lambda: make(), ((1, 2, 3), (4,))),
    "a window that rolls": (
        lambda: make(attention=lambda: MultiHeadAttention(C, n_head=H, mask=SlidingWindow(5))),
        ((1, 2),),
    ),
    "linear": (lambda: make(attention=lambda: LinearAttention(C, n_head=H)), ((1, 2),)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_not_compiled_goes_the_plain_way_without_a_word(name, monkeypatch):
    model, prompts = PLAIN[name][0](), PLAIN[name][1]
    step, graphs = traced(model, monkeypatch)
    assert tokens(model, 40, prompts, step=step) == tokens(model, 40, prompts, cache=False)
    assert not graphs


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("prompts", [((1, 2, 3),), ((1, 2, 3), (4, 5, 6))], ids=["one text", "two texts"])
def test_greedy_tokens_are_the_same_also_past_the_context(prompts, dtype, monkeypatch):
    model = make(dtype)
    step, graphs = traced(model, monkeypatch)
    assert tokens(model, 3 * T, prompts, step=step) == tokens(model, 3 * T, prompts, cache=False)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", MODELS)
def test_several_texts_read_with_packed_weights_write_the_same(name, monkeypatch):
    monkeypatch.setattr(decoding, "LARGE", 1)
    used, packed = [], decoding.packed_linear
    monkeypatch.setattr(decoding, "packed_linear", lambda *given: (used.append(1), packed(*given))[1])
    model, prompts = MODELS[name](torch.float32), ((1, 2, 3), (4, 5, 6))
    step, _ = traced(model, monkeypatch)
    assert tokens(model, prompts=prompts, step=step) == tokens(model, prompts=prompts, cache=False)
    assert bool(used) == can_pack(next(model.parameters()))


def test_a_cache_that_lies_by_channels_is_compiled_as_well(monkeypatch):
    monkeypatch.setattr(cache, "LONG", 1)
    model = make(attention=lambda: MultiHeadAttention(C, n_head=H, n_kv_head=2))
    step, graphs = traced(model, monkeypatch)
    assert tokens(model, 3 * T, step=step) == tokens(model, 3 * T, cache=False)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", MODELS)
def test_as_a_captured_graph_reads_all_slots_the_tokens_are_the_same(name):
    """What CUDA captures, without capturing it: all slots of the cache, for any number of texts that stand alike."""
    model = MODELS[name](torch.float64)
    step = CompiledStep(model, False)
    step.on_cpu = False
    prompts = ((1, 2, 3), (4, 5, 6))
    assert tokens(model, 3 * T, prompts, step=step) == tokens(model, 3 * T, prompts, cache=False)


def test_threads_that_share_a_step_write_what_one_does(monkeypatch):
    model = make()
    step, _ = traced(model, monkeypatch)
    prompts = [[1 + i, 2, 3] for i in range(6)]
    alone = [tokens(model, prompts=(prompt,)) for prompt in prompts]
    tokens(model, step=step)  # is compiled
    switched = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(max_workers=6) as pool:
            together = list(pool.map(lambda prompt: tokens(model, prompts=(prompt,), step=step), prompts))
    finally:
        sys.setswitchinterval(switched)
    assert together == alone


def test_without_a_compiler_it_says_so_and_writes_the_same(monkeypatch):
    def none():
        raise RuntimeError("no g++")

    monkeypatch.setattr(runtime, "_probe_compiler", none)
    model = make()
    with pytest.warns(UserWarning, match="no compiler works"):
        step = CompiledStep(model, True)
    assert tokens(model, 3 * T, step=step) == tokens(model, 3 * T)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_compiled_in_earnest(dtype):
    torch._dynamo.reset()
    model = make(dtype, position=Rotary(head_dim=C // H))
    step = CompiledStep(model, "strict")
    assert tokens(model, 3 * T, step=step) == tokens(model, 3 * T, cache=False)
    text = torch.randint(V, (1, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        told, kept = model(text), model.new_cache(1)
        model(text[:, :4], kept)
        for i in range(4, T):
            torch.testing.assert_close(
                step(text[:, i : i + 1], kept)[0, 0], told[0, i], rtol=0, atol=10 * CLOSE[dtype]
            )
