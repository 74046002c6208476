"""Laws of linear attention: the sum over keys, carried along in a state that never grows."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from minilm.attention import Causal, Fixed, Frame, Full, KVCache, LinearAttention, NoPosition, Rotary
from minilm.attention.linear import feature_map
from minilm.attention.masks import Predicate, Prefix, SlidingWindow
from minilm.attention.positions import Alibi
from minilm.errors import ConfigError
from minilm.model import GPT, GPTConfig

from . import naive
from .test_layer import POSITIONS, C, D, H, N, draw

F64 = torch.float64
SCHEMES = ("none", "sinusoidal", "learned", "rope")


def make(dtype=F64, **options):
    torch.manual_seed(0)
    layer = LinearAttention(C, n_head=H, **options).to(dtype)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape) / C**0.5 * 2)
    return layer


def close(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def cache_of(layer, batch=2):
    return KVCache(
        [layer.new_store(batch, None)], capacity=None, reach=layer.reach, lookahead=layer.mask.lookahead
    )


def read(layer, x, scheme, sizes, pos=None):
    """x in pieces of these sizes behind a cache; and the cache."""
    cache, pieces, at = cache_of(layer, len(x)), [], 0
    for piece in x.split(sizes, dim=1):
        frame = cache.advance(piece, scheme, None if pos is None else pos[:, at : at + piece.shape[1]])
        with torch.no_grad():
            pieces.append(layer(scheme.embed(piece, frame.q_pos), frame=frame, cache=cache.stores[0]))
        at += piece.shape[1]
    return torch.cat(pieces, dim=1), cache


def projected(layer, x):
    """Normed queries and keys, and values, each (B, heads, N, D)."""
    q, k, v = (layer.split(part(x)) for part in (layer.query, layer.key, layer.value))
    return layer.q_norm(q), layer.k_norm(k), v


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("scheme", ["none", "rope"])
@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
def test_it_equals_loops_over_numbers(mask, scheme, qk_norm):
    position, x = POSITIONS[scheme](), draw(2, N, C)
    for G, chunk in itertools.product((4, 2, 1), (1, 2, 4, 64)):
        layer = make(mask=mask, n_kv_head=G, chunk=chunk, qk_norm=qk_norm)
        pos = [range(N)] * 2
        mixed = naive.attend_linear(
            *projected(layer, x),
            causal=mask == Causal(),
            q_pos=pos,
            k_pos=pos,
            base=10000.0 if scheme == "rope" else None,
        )
        close(layer(x, frame=Frame.of(x, position)), layer.merge(mixed))


def test_rotary_leaves_the_denominator_alone():
    """Constant values come back as a constant only where numerator and denominator turn alike (Su et al. 2021)."""
    x = draw(1, N, C)
    layer = make()
    q, k, v = projected(layer, x)
    told = naive.attend_linear(
        q, k, torch.ones_like(v), causal=True, q_pos=[range(N)], k_pos=[range(N)], base=1e4
    )
    layer.value.requires_grad_(False).weight.zero_()
    layer.value.bias = torch.nn.Parameter(torch.ones(C, dtype=F64))
    close(layer(x, frame=Frame.of(x, Rotary(head_dim=D))), layer.merge(told))
    close(layer(x), layer.merge(torch.ones_like(v)))
    assert (told - 1).abs().max() > 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("G", [4, 2, 1])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_recurrent_equals_parallel_in_any_pieces(chunk, G, scheme):
    layer, x, position = make(n_kv_head=G, chunk=chunk), draw(2, N, C), POSITIONS[scheme]().to(F64)
    frame = Frame.of(x, position)
    whole = layer(position.embed(x, frame.q_pos), frame=frame)
    for sizes in ([N], [1] * N, [4, 1, 1, 3], [2, 7], [8, 1]):
        close(read(layer, x, position, sizes)[0], whole)


def test_gradients_do_not_depend_on_the_chunks():
    seen = []
    for chunk in (1, 2, 4, 64):
        layer, x = make(chunk=chunk, n_kv_head=2), draw(2, N, C).requires_grad_()
        layer(x, frame=Frame.of(x, Rotary(head_dim=D))).square().sum().backward()
        seen.append([x.grad, *(p.grad for p in layer.parameters())])
    for other in seen[1:]:
        for a, b in zip(other, seen[0], strict=True):
            close(a, b)
    layer = make(chunk=3)
    assert torch.autograd.gradcheck(lambda x: layer(x), draw(1, 5, C).requires_grad_())


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("scheme", [NoPosition(), Rotary(head_dim=D)], ids=lambda s: type(s).__name__)
def test_empty_slots_contribute_nothing_and_read_nothing(scheme, mask):
    layer, x = make(mask=mask, chunk=2), draw(3, 6, C)
    pos = torch.tensor([[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [-1, -1, -1, -1, -1, 0]])
    together = layer(x, frame=Frame(pos, position=scheme))
    for row, empty in enumerate((2, 0, 5)):
        alone = x[row : row + 1, empty:]
        close(together[row : row + 1, empty:], layer(alone, frame=Frame.of(alone, scheme)))
        assert not together[row, :empty].any()
    soiled = x.clone()
    soiled[pos < 0] = torch.nan
    assert torch.equal(layer(soiled, frame=Frame(pos, position=scheme)), together)
    if mask == Causal():
        for sizes in ([3, 3], [1] * 6, [6]):
            close(read(layer, x, scheme, sizes, pos)[0], together)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
def test_a_row_with_nothing_to_read_is_zero_and_all_gradients_are_finite(dtype):
    layer, x = make(dtype), draw(2, 4, C, dtype=dtype).requires_grad_()
    out = layer(x, frame=Frame(torch.tensor([[-1, -1, 0, 1], [-1, -1, -1, -1]])))
    assert not out[0, :2].any()
    assert not out[1].any()
    assert out[0, 2:].all(dim=-1).all()
    out.square().sum().backward()
    assert all(g.isfinite().all() for g in (x.grad, *(p.grad for p in layer.parameters())))
    assert not x.grad[1].any()


def test_features_are_elu_plus_one_and_never_round_to_zero():
    x = torch.linspace(-30, 30, 601, dtype=F64, requires_grad=True)
    close(feature_map(x), F.elu(x) + 1, 1e-14)
    (ours,) = torch.autograd.grad(feature_map(x).sum(), x)
    (theirs,) = torch.autograd.grad(F.elu(x).sum(), x)
    close(ours, theirs, 1e-14)
    assert (feature_map(x.detach().float()) > 0).all()
    assert not (F.elu(x.detach().float()) + 1 > 0).all()  # what it would be, as usually written


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precisions_agree_with_float64(dtype, atol):
    x, exact = draw(2, 200, C), make(n_kv_head=2)
    layer = make(dtype, n_kv_head=2)
    layer.load_state_dict(exact.state_dict())
    exact.load_state_dict(layer.state_dict())  # the same rounded weights
    x = x.to(dtype)
    rope = Rotary(head_dim=D)
    told = exact(x.to(F64), frame=Frame.of(x, rope))
    unit = told.abs().max().item()
    close(layer(x, frame=Frame.of(x, rope)).to(F64), told, atol * unit)
    close(read(layer, x, rope, [100] + [1] * 100)[0].to(F64), told, atol * unit)


# Memory


def storage(cache):
    return sum(t.untyped_storage().nbytes() for s in cache.stores for t in (s.products, s.keys))


def test_memory_is_the_same_after_256_tokens_and_after_65536():
    layer = make(torch.float32, n_kv_head=2)
    cache, bytes_at = cache_of(layer, batch=1), {}
    x = draw(1, 4096, C, dtype=torch.float32)
    with torch.no_grad():
        for piece in (x[:, :255], x[:, :1], *[x] * 15, x[:, :3839], x[:, :1]):
            layer(piece, frame=cache.advance(piece, Rotary(head_dim=D)), cache=cache.stores[0])
            bytes_at[cache.length] = (
                cache.nbytes,
                storage(cache),
                cache._kept.data.untyped_storage().nbytes(),
            )
    formula = 2 * (D * D + D) * 4
    assert list(bytes_at)[1] == 256
    assert list(bytes_at)[-1] == 65_536
    assert set(bytes_at.values()) == {(formula, formula, 8)}


def test_a_model_of_it_never_fills_and_goes_past_its_context():
    config = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=8)
    model = GPT(config, attention=lambda: LinearAttention(8, n_head=2)).to(F64).eval()
    assert model.rolls
    tokens = torch.randint(11, (2, 30), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(2)
    assert cache.capacity is None
    with torch.no_grad():
        pieces = [model(piece, cache) for piece in tokens.split([5, 1, 1, 20, 3], dim=1)]
        close(torch.cat(pieces, dim=1), model(tokens))


# Another sequence


def test_a_context_is_read_whole_and_projected_once():
    layer, store, calls = make(mask=Full(), context_dim=6, n_kv_head=2), Fixed(), []
    for name in ("key", "value"):
        getattr(layer, name).register_forward_hook(lambda module, args, out, name=name: calls.append(name))
    x, context = draw(2, 4, C), draw(2, 7, 6)
    k_pos = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, -1, -1, -1, -1]])
    frame = Frame(torch.arange(1), k_pos)
    steps = [layer(token, context=context, frame=frame, cache=store) for token in x.split(1, dim=1)]
    assert sorted(calls) == ["key", "value"]
    close(torch.cat(steps, dim=1)[:1], layer(x[:1], context=context[:1]))
    close(torch.cat(steps, dim=1)[1:], layer(x[1:], context=context[1:, :3]))
    with pytest.raises(ConfigError, match=r"context: .*mask=Full\(\)"):
        make(context_dim=6)(x, context=context)


# Refusals


@pytest.mark.parametrize(
    "mask", [SlidingWindow(3), Prefix(2), Predicate(lambda q, k: k <= q)], ids=lambda m: type(m).__name__
)
def test_masks_it_cannot_honour_are_refused_by_name(mask):
    with pytest.raises(
        ConfigError, match=rf"mask={type(mask).__name__}.*attention=linear .*mask=causal or mask=none"
    ):
        LinearAttention(C, n_head=H, mask=mask)


def test_alibi_is_refused_when_built_and_when_met():
    with pytest.raises(ConfigError, match=r"position=alibi: .*attention=linear .*position=rope"):
        LinearAttention(C, n_head=H, position=Alibi(n_head=H))
    x = draw(1, 3, C)
    with pytest.raises(ConfigError, match=r"position=alibi: "):
        make()(x, frame=Frame.of(x, Alibi(n_head=H)))
    LinearAttention(C, n_head=H, position=Rotary(head_dim=D))


def test_other_impossible_options_are_refused():
    with pytest.raises(ConfigError, match=r"attention\.chunk=0: "):
        LinearAttention(C, n_head=H, chunk=0)
    cache = cache_of(make(mask=Full()))
    with pytest.raises(ConfigError, match=r"reads the future"):
        cache.advance(draw(2, 3, C))
