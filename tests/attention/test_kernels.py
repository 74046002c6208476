"""Laws of the arithmetic: softmax(Q Kᵀ · scale + bias) V whichever way it is computed.

The references are numbers worked by hand and the loops of naive.py. Where values are the unit vectors, an output is
the row of weights itself, so that weights can be seen through kernels that never show them.
"""

import itertools
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minilm.attention import cache
from minilm.attention.frame import Frame
from minilm.attention.kernels import (
    BACKENDS,
    SHORT,
    Flex,
    Fused,
    Reference,
    attend,
    by_rows,
    resolve_backend,
    resolve_scale,
    sdpa,
)
from minilm.attention.masks import Causal, Full, Predicate, Prefix, SlidingWindow
from minilm.attention.positions import Alibi, NoPosition
from minilm.errors import ConfigError

from . import naive
from .test_masks import MASKS

F64 = torch.float64
MASKS = {**MASKS, "strictly before": Predicate(lambda q, k: k < q, causal=True)}
TOLERANCE = {F64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
TRAINABLE = ("reference", "fused")  # on a CPU


def draw(n=5, m=5, *, B=2, H=4, G=4, D=3, E=3, dtype=F64, seed=0, grad=False):
    rng = torch.Generator().manual_seed(seed)
    shapes = ((B, H, n, D), (B, G, m, D), (B, G, m, E))
    return [torch.randn(s, generator=rng, dtype=F64).to(dtype).requires_grad_(grad) for s in shapes]


def close(a, b, dtype=F64, times=1.0):
    """Equal to the tolerance of the dtype, in units of the largest number there is, or of 1."""
    unit = b.detach().abs().max().clamp(min=1)
    torch.testing.assert_close(a / unit, b / unit, rtol=0, atol=times * TOLERANCE[dtype])


def weights(q, k, **options):
    """(B, H, n, m): what each query makes of unit vectors as values."""
    m = k.shape[-2]
    return attend(q, k, torch.eye(m, dtype=q.dtype).expand(*k.shape[:2], m, m), **options)


# Scaled dot-product attention


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_case_worked_by_hand(backend):
    q = torch.tensor([[1.0, 0.0]], dtype=F64)
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=F64)
    v = torch.tensor([[10.0], [0.0], [-10.0]], dtype=F64)
    e = [math.exp(x / math.sqrt(2)) for x in (1, 0, -1)]
    assert sum(e) == pytest.approx(3.521, abs=1e-3)
    told = torch.tensor([[x / sum(e) for x in e]], dtype=F64)
    torch.testing.assert_close(told, torch.tensor([[0.576, 0.284, 0.140]], dtype=F64), rtol=0, atol=1e-3)
    torch.testing.assert_close(
        weights(q[None, None], k[None, None], backend=backend)[0, 0], told, rtol=0, atol=1e-12
    )
    out = attend(q, k, v, backend=backend)
    assert out.shape == (1, 1)
    assert out.item() == pytest.approx(4.36, abs=1e-3)
    assert out.item() == pytest.approx(10 * (e[0] - e[2]) / sum(e), abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_querys_row_sums_to_one_and_not_every_keys_column(backend):
    q, k, _ = draw(n=6, m=4)
    w = weights(q, k, backend=backend)
    close(w.sum(dim=-1), torch.ones(2, 4, 6, dtype=F64))
    assert (w.sum(dim=-2) - 1).abs().amax(dim=-1).min() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_it_equals_loops_over_numbers(name, alibi, backend):
    position = Alibi(n_head=4) if alibi else NoPosition()
    slopes = naive.SLOPES[4] if alibi else None
    sizes = [(5, 5), (3, 7), (1, 6)] if name == "prefix of 4" else [(5, 5), (3, 7), (1, 6), (7, 3)]
    start = 0 if name == "prefix of 4" else 100  # for the loops, to which a position below 0 is an empty slot
    for (n, m), (G, E) in itertools.product(sizes, ((4, 3), (2, 5), (1, 2))):
        q, k, v = draw(n, m, G=G, E=E)
        q_pos, k_pos = [range(start + m - n, start + m)] * 2, [range(start, start + m)] * 2
        told = naive.attend(
            q, k, v, allows=naive.ALLOWS[name], scale=0.7, slopes=slopes, q_pos=q_pos, k_pos=k_pos
        )
        close(attend(q, k, v, mask=MASKS[name], scale=0.7, position=position, backend=backend), told)


def test_leading_dimensions_may_be_missing():
    q, k, v = draw(B=1, H=1, G=1)
    whole = attend(q, k, v)
    assert torch.equal(attend(q[0], k[0], v[0]), whole[0])
    assert torch.equal(attend(q[0, 0], k[0, 0], v[0, 0]), whole[0, 0])


# Scale


def test_scales_by_name_and_number():
    assert [resolve_scale(s, 64) for s in ("sqrt", "none", "inverse", 0.3, 2)] == [1 / 8, 1, 1 / 64, 0.3, 2]
    for wrong in ("root", "0.5", 0, -1, math.inf, math.nan):
        with pytest.raises(
            ConfigError, match=rf"attention\.scale={wrong}: expected sqrt, none, inverse or a pos"
        ):
            resolve_scale(wrong, 64)


def test_unscaled_scores_far_apart_kill_the_softmax_and_its_gradient():
    def row(scores):
        """Weights and their derivatives where q·k are these scores."""
        q = torch.tensor([[8.0]], dtype=F64)
        k = (torch.tensor(scores, dtype=F64) / 8)[:, None]
        p = weights(q[None, None], k[None, None], scale="none")[0, 0, 0]
        return p, p * (1 - p)

    hard, dead = row([8.0, 0.0, -8.0])
    torch.testing.assert_close(hard, torch.tensor([0.99966, 0.00034, 1e-7], dtype=F64), rtol=0.2, atol=1e-5)
    assert hard[2].item() == pytest.approx(1.1e-7, rel=0.05)
    assert dead.max() < 4e-4
    soft, alive = row([1.0, 0.0, -1.0])
    torch.testing.assert_close(soft, torch.tensor([0.665, 0.245, 0.090], dtype=F64), rtol=0, atol=1e-3)
    assert alive.min() > 0.08


def test_the_derivative_of_a_weight_by_its_own_score_is_p_times_1_minus_p():
    p = torch.tensor([2.0, 0.5, -1.0], dtype=F64)
    jacobian = torch.autograd.functional.jacobian(
        lambda s: weights(torch.ones(1, 1, 1, 1, dtype=F64), s.view(1, 1, 3, 1), scale=1.0)[0, 0, 0], p
    )
    w = p.softmax(-1)
    close(jacobian.diagonal(), w * (1 - w))


def interval(samples):
    """99 % confidence interval of a mean."""
    half = 2.576 * samples.std() / len(samples) ** 0.5
    return (samples.mean() - half).item(), (samples.mean() + half).item()


@pytest.mark.parametrize("d", [1, 4, 16, 64, 256])
def test_the_variance_of_a_dot_product_is_its_width_and_the_scale_restores_one(d):
    rng = torch.Generator().manual_seed(d)
    q, k = torch.randn(2, 40_000, d, generator=rng)
    dots = (q * k).sum(dim=-1).double()
    low, high = (x**0.5 for x in interval(dots**2))
    assert low < d**0.5 < high
    assert high / low < 1.05
    if d == 64:
        assert 7.8 < low < 8 < high < 8.2
    low, high = interval((dots * resolve_scale("sqrt", d)) ** 2)
    assert low < 1 < high


# Masks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
def test_hidden_weights_are_exactly_zero_and_the_others_are_not(name, backend):
    q, k, _ = draw(n=6, m=6)
    w = weights(q, k, mask=MASKS[name], backend=backend)
    told = torch.tensor([[bool(naive.ALLOWS[name](i, j)) for j in range(6)] for i in range(6)])
    assert torch.equal(w != 0, told.expand_as(w))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
def test_fewer_queries_than_keys_are_the_last_ones(name, backend):
    q, k, v = draw(n=8, m=8)
    options = {"mask": MASKS[name], "position": Alibi(n_head=4), "backend": backend}
    whole = attend(q, k, v, **options)
    for n in (1, 3, 7):
        close(attend(q[:, :, -n:], k, v, **options), whole[:, :, -n:])


def rows_without_keys():
    """(frame, mask) and the rows, by batch, that may read nothing."""
    pos, padded = torch.arange(5), torch.tensor([[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]])
    yield "first of a strict mask", Frame(pos, aligned=True), MASKS["strictly before"], [[0], [0]]
    yield "a row that a function forbids", Frame(pos), Predicate(lambda q, k: q != 3), [[3], [3]]
    yield "before every key", Frame(pos - 2, pos), Causal(), [[0, 1], [0, 1]]
    for name, mask in MASKS.items():
        first = [2] if name == "strictly before" else []
        yield f"left padding, {name}", Frame(padded), mask, [[0, 1, *first], [0] if first else []]
    yield "nothing at all", Frame(pos), Predicate(lambda q, k: k < 0), [[0, 1, 2, 3, 4]] * 2


ROWS = {name: rest for name, *rest in rows_without_keys()}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("position", [NoPosition(), Alibi(n_head=4)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_may_read_nothing_is_zero_and_all_gradients_are_finite(name, position, dtype):
    frame, mask, empty = ROWS[name]
    frame = Frame(frame.q_pos, frame.k_pos, position, aligned=frame.aligned)
    seen = {}
    for backend in BACKENDS:
        q, k, v = draw(G=2, dtype=dtype, grad=backend in TRAINABLE)
        out = BACKENDS[backend]()(q, k, v, frame, mask=mask, scale=0.5)
        assert out.isfinite().all()
        for b, rows in enumerate(empty):
            zero = (out[b] == 0).all(dim=-1).all(dim=0)
            assert zero.nonzero().flatten().tolist() == sorted(rows), backend
        seen[backend] = [out]
        if backend in TRAINABLE:
            out.square().sum().backward()
            seen[backend] += [q.grad, k.grad, v.grad]
            assert all(t.grad.isfinite().all() for t in (q, k, v))
            assert all(not q.grad[b, :, row].any() for b, rows in enumerate(empty) for row in rows)
    for backend, told in itertools.product(("fused", "flex"), (seen["reference"],)):
        for ours, theirs in zip(seen[backend], told, strict=False):
            close(ours, theirs, dtype, times=1.5)  # SDPA's own bf16 gradients miss by up to 1.3


def slots_nobody_reads():
    """(frame, mask), the query slots and the key slots that may hold anything."""
    padded = torch.tensor([[-1, -1, 0, 1, 2], [-1, -1, 3, 4, 5]])
    for name, mask in MASKS.items():
        yield f"left padding, {name}", Frame(padded), mask, [0, 1], [0, 1]
    pos = torch.arange(5)
    yield "an empty key among a context's", Frame(pos, torch.tensor([[0, -1, 1, 2, 3]] * 2)), Full(), [], [1]
    yield "a function that hides a key", Frame(pos), Predicate(lambda q, k: k != 2), [], [2]
    yield "left behind by the window", Frame(pos[3:], pos), SlidingWindow(2), [], [0, 1]
    yield "read by none of strict queries", Frame(pos, aligned=True), MASKS["strictly before"], [0], [4]


SLOTS = {name: rest for name, *rest in slots_nobody_reads()}


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SLOTS)
def test_rubbish_in_slots_that_nobody_reads_reaches_no_output_and_no_gradient(name, backend, rubbish):
    frame, mask, queries, keys = SLOTS[name]
    if backend == "flex" and frame.uniform:
        pytest.skip("flex clears empty slots only")
    results = []
    for filler in (0.0, rubbish):
        q, k, v = draw(n=frame.q_pos.shape[-1], G=2)
        for t, slots in ((q, queries), (k, keys), (v, keys)):
            t[:, :, slots] = filler
            t.requires_grad_(backend in TRAINABLE)
        out = BACKENDS[backend]()(
            q, k, v, Frame(frame.q_pos, frame.k_pos, Alibi(n_head=4)), mask=mask, scale=0.5
        )
        results.append([out])
        if backend in TRAINABLE:
            out.square().sum().backward()
            results[-1] += [q.grad, k.grad, v.grad]
            assert not any(g[:, :, s].any() for g, s in ((q.grad, queries), (k.grad, keys), (v.grad, keys)))
    for clean, soiled in zip(*results, strict=True):
        assert clean.isfinite().all()
        close(soiled, clean)


# Heads


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("G", [1, 2, 3])
@pytest.mark.parametrize("name", ["causal", "none", "window of 3"])
def test_shared_keys_and_values_are_repeated_ones(name, G, backend):
    q, k, v = draw(H=6, G=G)
    many = [t.repeat_interleave(6 // G, dim=1) for t in (k, v)]
    options = {"mask": MASKS[name], "position": Alibi(n_head=6), "backend": backend}
    close(attend(q, k, v, **options), attend(q, *many, **options))


# Backends


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_frame_serves_layers_that_differ(backend):
    kernel, pos = BACKENDS[backend](), torch.arange(5)
    shared = Frame(pos, position=Alibi(n_head=4))
    for mask, dtype in itertools.product((Causal(), SlidingWindow(2), SlidingWindow(3)), TOLERANCE):
        q, k, v = draw(dtype=dtype)
        alone = kernel(q, k, v, Frame(pos, position=Alibi(n_head=4)), mask=mask, scale=0.5)
        assert torch.equal(kernel(q, k, v, shared, mask=mask, scale=0.5), alone)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("position", [NoPosition(), Alibi(n_head=4)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("n", [8, 11, 12, 13, 40])
@pytest.mark.parametrize("w", [1, 2, 3])
def test_a_window_in_blocks_equals_the_reference(w, n, position, dtype):
    seen = []
    for kernel in (Reference(), Fused()):
        q, k, v = draw(n, n, G=2, dtype=dtype, grad=True)
        out = kernel(q, k, v, Frame.of(q[:, 0], position), mask=SlidingWindow(w), scale=0.5)
        out.square().mean().backward()
        seen.append([out, q.grad, k.grad, v.grad])
    for ours, theirs in zip(*seen, strict=True):
        close(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("name", ["causal", "none", "prefix of 4"])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (128, 128), (300, 300), (40, 200)])
def test_training_in_any_precision_equals_the_reference(n, m, name, alibi, dtype):
    """Sizes beside those of the blocks of rows in which a CPU trains in half precision."""
    seen = []
    for backend in TRAINABLE:
        q, k, v = draw(n, m, G=2, D=8, E=4, dtype=dtype, grad=True)
        position = Alibi(n_head=4) if alibi else None
        out = attend(q, k, v, mask=MASKS[name], position=position, backend=backend)
        out.square().sum().backward()
        seen.append([out, q.grad, k.grad, v.grad])
    for ours, theirs in zip(*seen, strict=True):
        close(ours, theirs, dtype)


@pytest.mark.parametrize("mask", [None, torch.bool, F64], ids=str)
@pytest.mark.parametrize("G", [1, 2, 4])
def test_one_query_reads_a_cache_that_lies_by_channels(G, mask, monkeypatch):
    monkeypatch.setattr(cache, "LONG", 1)
    q, k, v = draw(1, 6, G=G, E=5)
    kept = [cache.Growing(t, 9) for t in (k, v)]
    for series, t in zip(kept, (k, v), strict=True):
        series.append(t[..., :2, :])
        assert series.append(t[..., 2:, :]).stride(-2) == 1
    bias = None if mask is None else torch.randn(2, 1, 1, 6, dtype=F64)
    if mask == torch.bool:
        bias = bias > 0
        bias[..., 0] = True  # who may read nothing is not this function's business
    told = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.5, enable_gqa=True)
    k, v = (series.data[..., :6, :] for series in kept)
    close(sdpa(q, k, v, attn_mask=bias, scale=0.5, dropout_p=0.0), told)


@pytest.mark.parametrize("causal", [False, True])
def test_the_products_by_rows_are_exact(causal):
    q, k, v = draw(300, 300, G=2)
    ours = by_rows(q, k, v, attn_mask=None, is_causal=causal, scale=0.5, dropout_p=0.0)
    close(ours, attend(q, k, v, mask=Causal() if causal else Full(), scale=0.5, backend="reference"))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else [out]
        self.elements = max([self.elements, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return out


def largest(backend, mask, n, backward=True, dtype=torch.float32):
    q, k, v = draw(n, n, B=1, H=2, G=2, D=8, E=8, dtype=dtype, grad=backward)
    with Largest() as seen:
        out = attend(q, k, v, mask=mask, backend=backend)
        if backward:
            out.sum().backward()
    return seen.elements


@pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(16)], ids=str)
def test_memory_grows_as_n_where_it_can_and_as_n_squared_in_the_reference(mask):
    assert largest("fused", mask, 1024) <= 2.1 * largest("fused", mask, 512) < 1024 * 1024 / 8
    assert largest("reference", mask, 1024) == 4 * largest("reference", mask, 512) == 2 * 1024 * 1024


def test_half_precision_keeps_the_weights_of_short_texts_only_and_only_to_train():
    short, above = (largest("fused", Causal(), n, dtype=torch.bfloat16) for n in (SHORT, SHORT + 1))
    assert above < SHORT * SHORT / 8 < short
    assert largest("fused", Causal(), SHORT, backward=False, dtype=torch.bfloat16) < SHORT * SHORT / 8


def test_a_subclass_of_a_mask_is_taken_at_its_own_word():
    class Strict(Causal):
        def allows(self, q_pos, k_pos):
            return k_pos < q_pos

    q, k, v = draw()
    for backend in BACKENDS:
        close(attend(q, k, v, mask=Strict(), backend=backend), attend(q, k, v, mask=lambda q, k: k < q))


@pytest.mark.parametrize("backend", TRAINABLE)
def test_dropout_drops_weights_and_keeps_the_mean(backend):
    q, k, v = draw(n=3, m=3, B=4000, H=1, G=1)
    q, k, v = (t[:1].expand_as(t).contiguous() for t in (q, k, v))
    torch.manual_seed(0)
    out = attend(q, k, v, dropout=0.5, backend=backend)
    assert out.std(dim=0).min() > 0.1
    error = out.std(dim=0) / 4000**0.5
    assert ((out.mean(dim=0) - attend(q, k, v)[0]).abs() < 4 * error).all()


def test_unknown_backends_are_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"attention\.backend=flash: expected one of reference, fused, flex"
    ):
        resolve_backend("flash")


# FlexAttention


@pytest.mark.skipif(torch.cuda.is_available(), reason="has gradients there")
def test_flex_refuses_to_train_where_it_has_no_gradients():
    q, k, v = draw(grad=True)
    with pytest.raises(ConfigError, match=r"backend=flex has no gradients on device=cpu: .*backend=fused"):
        attend(q, k, v, backend="flex")
    with torch.no_grad():
        close(attend(q, k, v, backend="flex"), attend(q, k, v))


def test_flex_refuses_dropout_when_it_is_built():
    with pytest.raises(ConfigError, match=r"attention\.dropout=0\.1: .*flex has no dropout"):
        resolve_backend("flex", 0.1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_as_it_ships_without_a_compiler(monkeypatch):
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/nonexistent")
    q, k, v = draw(G=2, n=4, m=6)
    position = Alibi(n_head=4)
    for mask in (Causal(), MASKS["every other"]):
        close(
            attend(q, k, v, mask=mask, position=position, backend="flex"),
            attend(q, k, v, mask=mask, position=position),
        )


def agree_compiled(device):
    """Compiled FlexAttention, its masks and its biases against the reference."""
    pos = torch.arange(130, device=device)
    rows = torch.stack([pos - 3, pos]).clamp(min=-1)
    cases = [
        (Frame(pos, position=Alibi(n_head=4), aligned=True), SlidingWindow(40)),
        (Frame(pos[-70:], pos), Predicate(lambda q, k: (k <= q) & ((q - k) % 2 == 0))),
        (Frame(rows[:, -64:], rows, Alibi(n_head=4)), Causal()),
        (Frame(rows), Prefix(20)),
    ]
    for frame, mask in cases:
        q, k, v = (
            t.to(device) for t in draw(frame.q_pos.shape[-1], 130, G=2, D=16, E=16, dtype=torch.float32)
        )
        yield frame, mask, q, k, v


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
def test_flex_compiled_on_a_cpu():
    import minilm.attention.kernels as kernels

    for frame, mask, q, k, v in agree_compiled("cpu"):
        torch.compiler.reset()  # anew for each shape: with sizes left open, torch 2.13 makes C++ that does not compile
        with torch.no_grad():
            blocks, score_mod = Flex._blocks(frame, mask, compiling=True)
            flex = kernels.compiled(kernels.flex_attention)
            out = flex(q, k, v, score_mod=score_mod, block_mask=blocks, scale=0.25, enable_gqa=True)
        close(out, Reference()(q, k, v, frame, mask=mask, scale=0.25), torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Prefix(16)], ids=str)
def test_shared_heads_on_cuda_do_not_bring_back_the_table(mask, dtype):
    q, k, v = (t.cuda() for t in draw(8192, 8192, B=1, H=32, G=8, D=64, E=64, dtype=dtype))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(q, k, v, mask=mask)
    assert torch.cuda.max_memory_allocated() - before < 32 * 8192 * 8192  # less than a byte a weight


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_compiled_on_cuda_forward_and_backward():
    for frame, mask, q, k, v in agree_compiled("cuda"):
        seen = []
        for backend in ("reference", "flex"):
            ours = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            out = BACKENDS[backend]()(*ours, frame, mask=mask, scale=0.25)
            out.square().mean().backward()
            seen.append([out, *(t.grad for t in ours)])
        for told, flex in zip(*seen, strict=True):
            torch.testing.assert_close(flex, told, rtol=1e-3, atol=1e-3)  # TF32
