"""Laws of the layer: for oneself and for another sequence, whatever it is put together from."""

import itertools
import subprocess
import sys

import pytest
import torch

from minilm.attention import (
    Alibi,
    Causal,
    Fixed,
    Frame,
    Full,
    KVCache,
    Learned,
    LinearAttention,
    MultiHeadAttention,
    NoPosition,
    Rotary,
    Sinusoidal,
    SlidingWindow,
)
from minilm.attention.kernels import BACKENDS
from minilm.errors import ConfigError

from . import naive
from .test_kernels import MASKS, TOLERANCE, TRAINABLE, close

F64 = torch.float64
C, H, D, N = 16, 4, 4, 9
POSITIONS = {
    "none": NoPosition,
    "sinusoidal": lambda: Sinusoidal(n_embd=C),
    "learned": lambda: Learned(n_embd=C, block_size=N),
    "rope": lambda: Rotary(head_dim=D),
    "alibi": lambda: Alibi(n_head=H),
}


def make(**options):
    torch.manual_seed(0)
    layer = MultiHeadAttention(C, n_head=H, **options).to(F64)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape) / C**0.5)
    return layer


def draw(*shape, seed=1, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


# The computation


def rms(x):
    return x / (x.square().mean(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


@pytest.mark.parametrize("position", ["none", "rope", "alibi"])
@pytest.mark.parametrize(
    ("n_kv_head", "qk_norm", "bias"), [(4, False, False), (2, True, False), (1, True, True)]
)
@pytest.mark.parametrize("mask", ["causal", "window of 3", "none"])
def test_it_is_projections_heads_and_loops(mask, n_kv_head, qk_norm, bias, position):
    layer, x = make(mask=MASKS[mask], n_kv_head=n_kv_head, qk_norm=qk_norm, bias=bias), draw(2, N, C)

    def heads(linear, norm, turned):
        y = x @ linear.weight.T + (linear.bias if bias else 0)
        y = torch.stack([y[..., i : i + D] for i in range(0, y.shape[-1], D)], dim=1)  # (B, heads, N, D)
        y = rms(y) if norm else y
        if turned:
            turn = [[[naive.turn(r.tolist(), t, 10000.0) for t, r in enumerate(h)] for h in b] for b in y]
            y = torch.tensor(turn, dtype=F64)
        return y

    rope = position == "rope"
    q, k, v = (
        heads(layer.query, qk_norm, rope),
        heads(layer.key, qk_norm, rope),
        heads(layer.value, False, False),
    )
    pos = [range(N)] * 2
    mixed = naive.attend(
        q, k, v, allows=naive.ALLOWS[mask], scale=D**-0.5, q_pos=pos, k_pos=pos,
        slopes=naive.SLOPES[H] if position == "alibi" else None,
    )  # fmt: skip
    told = torch.cat(list(mixed.unbind(1)), dim=-1) @ layer.out.weight.T + (layer.out.bias if bias else 0)
    close(layer(x, frame=Frame.of(x, POSITIONS[position]())), told)


def test_it_equals_the_attention_of_llama():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=C, num_attention_heads=H, num_key_value_heads=2, attention_bias=False, head_dim=D,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="eager",
    )  # fmt: skip
    theirs, ours, x = llama.LlamaAttention(config, 0).double(), make(n_kv_head=2), draw(2, N, C)
    pairs = zip("qkvo", (ours.query, ours.key, ours.value, ours.out), strict=True)
    theirs.load_state_dict({f"{name}_proj.weight": linear.weight for name, linear in pairs})
    angles = llama.LlamaRotaryEmbedding(config)(x, torch.arange(N)[None])
    future = torch.full((N, N), -torch.inf, dtype=F64).triu(1)[None, None]
    told, _ = theirs(x, position_embeddings=angles, attention_mask=future)
    torch.testing.assert_close(ours(x, frame=Frame.of(x, Rotary(head_dim=D))), told, rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_backends_agree_on_outputs_and_gradients(mask, position):
    def run(layer, scheme, x, backend):
        layer.kernel = BACKENDS[backend]()
        layer.zero_grad()
        x = x.clone().requires_grad_(backend in TRAINABLE)
        frame = Frame.of(x, scheme)
        with torch.set_grad_enabled(backend in TRAINABLE):
            out = layer(scheme.embed(x, frame.q_pos), frame=frame)
        if backend in TRAINABLE:
            out.square().mean().backward()
        return [out, x.grad, *(p.grad for p in layer.parameters())]

    for scale, G in itertools.product(("sqrt", "none", "inverse", 0.3), (4, 2, 1)):
        layer = make(mask=MASKS[mask], scale=scale, n_kv_head=G, qk_norm=True)
        for dtype in TOLERANCE if scale == "sqrt" else (F64,):
            torch.manual_seed(0)
            case = layer.to(dtype), POSITIONS[position]().to(dtype), draw(2, N, C, dtype=dtype)
            told, fused = (run(*case, backend) for backend in TRAINABLE)
            for a, b in zip(fused, told, strict=True):
                close(a, b, dtype)
            if scale == "sqrt":
                close(run(*case, "flex")[0], told[0], dtype)


# Order


def test_without_positions_shuffled_tokens_give_shuffled_outputs():
    for layer in (make(mask=Full()), LinearAttention(C, n_head=H, mask=Full()).to(F64)):
        x, shuffled = draw(2, N, C), torch.randperm(N, generator=torch.Generator().manual_seed(0))
        close(layer(x[:, shuffled]), layer(x)[:, shuffled], F64)


@pytest.mark.parametrize("name", [*POSITIONS, "mask"])
def test_every_scheme_and_a_causal_mask_break_the_symmetry(name):
    layer = make(mask=Causal() if name == "mask" else Full())
    scheme = POSITIONS.get(name, NoPosition)().to(F64)
    x, shuffled = draw(2, N, C), torch.randperm(N, generator=torch.Generator().manual_seed(0))

    def run(x):
        frame = Frame.of(x, scheme)
        return layer(scheme.embed(x, frame.q_pos), frame=frame)

    gap = (run(x[:, shuffled]) - run(x)[:, shuffled]).abs().max()
    assert gap < 1e-10 if name == "none" else gap > 1e-2


def test_the_future_never_leaks():
    for mask in ("causal", "window of 3", "every other"):
        layer, x = make(mask=MASKS[mask]), draw(1, N, C).requires_grad_()
        layer(x)[0, 4].sum().backward()
        assert not x.grad[0, 5:].any()
        assert x.grad[0, 4].any()


# Another sequence


@pytest.mark.parametrize("backend", TRAINABLE)
def test_a_context_of_another_length_and_width_is_read_as_a_set(backend):
    layer = make(mask=Full(), context_dim=6, backend=backend, n_kv_head=2)
    x, context = draw(2, 3, C), draw(2, 7, 6)
    y = layer(x, context=context)
    assert y.shape == (2, 3, C)
    close(layer(x, context=context.flip(1)), y)
    close(layer(x[:, 1:2], context=context), y[:, 1:2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_slots_of_a_context_are_not_there(backend):
    layer = make(mask=Full(), backend=backend).requires_grad_(False)
    x, context = draw(2, 3, C), draw(2, 5, C)
    k_pos = torch.tensor([[0, 1, 2, 3, 4], [0, -1, 1, -1, -1]])
    y = layer(x, context=context, frame=Frame(torch.arange(3), k_pos))
    close(y[:1], layer(x[:1], context=context[:1]))
    close(y[1:], layer(x[1:], context=context[1:, [0, 2]]))


def test_a_contexts_keys_and_values_are_projected_once():
    layer, store, calls = make(mask=Full(), context_dim=6), Fixed(), []
    for name in ("query", "key", "value"):
        getattr(layer, name).register_forward_hook(lambda module, args, out, name=name: calls.append(name))
    x, context = draw(2, 5, C), draw(2, 7, 6)
    steps = [layer(token, context=context, cache=store) for token in x.split(1, dim=1)]
    assert sorted(calls) == ["key"] + ["query"] * 5 + ["value"]
    close(torch.cat(steps, dim=1), layer(x, context=context))


def test_a_frame_that_knows_other_keys_is_refused():
    layer, x = make(), draw(1, 3, C)
    store = layer.new_store(1, 8)
    layer.requires_grad_(False)(x, cache=store)
    with pytest.raises(ConfigError, match=r"6 keys, but a frame of 3: .*cache\.advance"):
        layer(x, cache=store)
    with pytest.raises(ConfigError, match=r"5 keys, but a frame of 3"):
        layer(x, context=draw(1, 5, C), frame=Frame.of(x))


# Dropout, casts, compilers


def test_dropout_is_for_training_alone():
    for backend in TRAINABLE:
        layer, x = make(dropout=0.5, backend=backend), draw(1, N, C)
        assert not torch.equal(layer(x), layer(x))
        layer.eval()
        assert torch.equal(layer(x), layer(x))
        close(layer(x), make(backend=backend)(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["causal", "window of 3"])
def test_under_autocast_all_backends_compute_in_its_precision(mask, backend):
    layer = make(mask=MASKS[mask], qk_norm=True, n_kv_head=2, backend=backend).float().requires_grad_(False)
    kernel, seen = layer.kernel, []
    layer.kernel = lambda q, k, v, *rest, **named: seen.extend((q, k, v)) or kernel(q, k, v, *rest, **named)
    x = draw(2, N, C, dtype=torch.float32)
    told = layer(x, frame=Frame.of(x, Rotary(head_dim=D)))
    seen.clear()
    cache = KVCache([layer.new_store(2, N)], capacity=N, reach=layer.reach)
    with torch.autocast("cpu", torch.bfloat16):
        once = layer(x, frame=Frame.of(x, Rotary(head_dim=D)))
        pieces = [
            layer(piece, frame=cache.advance(piece, Rotary(head_dim=D)), cache=cache.stores[0])
            for piece in x.split([4, 1, 4], dim=1)
        ]
    assert {t.dtype for t in seen} == {torch.bfloat16}
    close(once.float(), told, torch.bfloat16)
    close(torch.cat(pieces, dim=1).float(), told, torch.bfloat16)


@pytest.mark.parametrize("position", ["rope", "sinusoidal", "alibi"])
def test_far_from_the_start_a_bf16_layer_still_knows_where_it_is(position):
    """Were a table cast down with the weights, position 4,095 would be off by whole turns."""
    scheme, x = POSITIONS[position](), draw(1, N, C) / 4
    pos = torch.arange(N) + 4095

    def run(dtype):
        layer = make(qk_norm=True).to(dtype)
        frame = Frame(pos, position=scheme.to(dtype))
        return layer(scheme.embed(x.to(dtype), pos), frame=frame).to(F64)

    torch.testing.assert_close(run(torch.bfloat16), run(F64), rtol=0, atol=4e-2)


def test_a_compiler_sees_one_graph():
    for layer in (make(), make(mask=SlidingWindow(2)), make(mask=MASKS["prefix of 4"], backend="reference")):
        x = draw(1, N, C)
        close(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


# On its own


def test_it_needs_torch_alone():
    script = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"hydra", "omegaconf", "tokenizers", "wandb", "tiktoken", "pydantic", "transformers",
                                  "safetensors", "rich", "matplotlib"}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
from minilm.attention import MultiHeadAttention
layer = MultiHeadAttention(64, n_head=4)
assert layer(torch.randn(2, 5, 64)).shape == (2, 5, 64)
ours = sorted(name for name in sys.modules if name.startswith("minilm."))
assert all(name.startswith("minilm.attention") or name == "minilm.errors" for name in ours), ours
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_head": 3}, r"model\.n_head=3 must divide model\.n_embd=16; try model\.n_head=2"),
        ({"n_head": 4, "n_kv_head": 3}, r"model\.n_kv_head=3 must divide model\.n_head=4; try 2"),
        ({"n_head": 4, "n_kv_head": 0}, r"model\.n_kv_head=0: positive"),
        ({"n_head": -4}, r"model\.n_head=-4, .*positive"),
        ({"n_head": 4, "scale": 0}, r"attention\.scale=0: "),
        (
            {"n_head": 4, "backend": "fast"},
            r"attention\.backend=fast: expected one of reference, fused, flex",
        ),
        ({"n_head": 4, "dropout": 1.0}, r"attention\.dropout=1\.0: a probability"),
        ({"n_head": 4, "dropout": 0.1, "backend": "flex"}, r"attention\.dropout=0\.1: .*no dropout"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_numbers(options, message):
    with pytest.raises(ConfigError, match=message):
        MultiHeadAttention(16, **options)


def test_a_cache_lives_on_the_layers_dtype_and_heads():
    store = make(n_kv_head=2).to(torch.bfloat16).new_store(3, 7)
    assert store.keys.data.shape == store.values.data.shape == (3, 2, 7, D)
    assert store.keys.data.dtype == torch.bfloat16
    assert isinstance(KVCache([store], capacity=7, reach=None).nbytes, int)
