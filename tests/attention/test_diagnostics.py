"""What is observed is what was computed, and observing changes nothing."""

import math

import pytest
import torch
from torch.testing import assert_close

from minilm.attention import (
    Alibi,
    Causal,
    Frame,
    Full,
    Learned,
    MultiHeadAttention,
    NoPosition,
    Prefix,
    Rotary,
    Sinusoidal,
    SlidingWindow,
)
from minilm.attention.diagnostics import Reading, attention_maps, health, observe, vital_signs
from minilm.attention.kernels import repeat_heads
from minilm.attention.linear import LinearAttention
from minilm.errors import ConfigError
from minilm.model import GPT, GPTConfig

N_EMBD, N_HEAD, T, WINDOW = 32, 4, 12, 4
MASKS = [Causal(), Full(), SlidingWindow(WINDOW), Prefix(3)]
POSITIONS = {
    "none": lambda: NoPosition(),
    "sinusoidal": lambda: Sinusoidal(n_embd=N_EMBD),
    "learned": lambda: Learned(n_embd=N_EMBD, block_size=16),
    "rope": lambda: Rotary(head_dim=N_EMBD // N_HEAD),
    "alibi": lambda: Alibi(n_head=N_HEAD),
}


def make(position="rope", attention=MultiHeadAttention, *, n_kv_head=None, **options):
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=11, block_size=16, n_layer=2, n_head=N_HEAD, n_kv_head=n_kv_head, n_embd=N_EMBD
    )
    heads = {"n_head": N_HEAD, "n_kv_head": n_kv_head}
    model = GPT(
        config, position=POSITIONS[position](), attention=lambda: attention(N_EMBD, **heads, **options)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # weights far from uniform
    return model.eval()


def tokens(batch=2, length=T):
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(1))


def reading(q, k, mask, scale):
    """One head's queries (n, D) and keys (m, D)."""
    frame = Frame(torch.arange(len(k) - len(q), len(k)), torch.arange(len(k)))
    return Reading(0, q[None, None], k[None, None], frame, mask, scale)


# Maps


@pytest.mark.parametrize(("n_kv_head", "scale"), [(4, "sqrt"), (2, "none"), (1, 0.3)])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_the_weights_are_those_by_which_each_output_was_mixed(mask, position, scale, n_kv_head):
    model, x, seen = make(position, mask=mask, scale=scale, n_kv_head=n_kv_head).double(), tokens(), []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda layer, args, out: seen.append((layer, args[0], out)))
    maps = attention_maps(model, x)
    assert maps.shape == (2, 2, N_HEAD, T, T)
    for weights, (layer, given, out) in zip(maps, seen, strict=True):
        values = repeat_heads(layer.split(layer.value(given)), N_HEAD)
        assert_close(layer.merge(weights @ values), out, rtol=0, atol=1e-10)
    assert_close(maps.sum(-1), torch.ones(maps.shape[:-1], dtype=torch.float64))
    pos = torch.arange(T)
    hidden = ~mask.allows(pos[:, None], pos[None, :]).expand(T, T)
    assert (maps[..., hidden] == 0).all()


@pytest.mark.parametrize("position", ["rope", "alibi", "learned"])
@pytest.mark.parametrize(
    "mask", [Causal(), SlidingWindow(WINDOW), Prefix(3)], ids=lambda mask: type(mask).__name__
)
def test_behind_a_cache_they_are_the_rows_of_the_whole(mask, position):
    model, x = make(position, mask=mask).double(), tokens()
    whole, cache = attention_maps(model, x), model.new_cache(batch=2)
    for start, end in [(0, 5), (5, 7), *((i, i + 1) for i in range(7, T))]:
        maps = attention_maps(model, x[:, start:end], cache)
        m = maps.shape[-1]
        assert_close(maps, whole[..., start:end, end - m : end])
        assert (whole[..., start:end, : end - m] == 0).all()


def test_prompts_of_different_lengths_read_as_each_would_alone():
    model, x = make(), tokens()
    pos = torch.stack([torch.arange(T), torch.arange(T) - 5]).clamp(min=-1)
    maps = attention_maps(model, x, pos=pos)
    assert_close(maps[:, :1], attention_maps(model, x[:1]))
    assert_close(maps[:, 1:, :, 5:, 5:], attention_maps(model, x[1:, 5:]))
    assert (maps[:, 1, :, :5] == 0).all()
    assert (maps[:, 1, :, :, :5] == 0).all()


def test_a_single_token_reads_itself():
    assert (attention_maps(make(), tokens(length=1)) == 1).all()


def test_of_a_bf16_model_rows_still_sum_to_one():
    maps = attention_maps(make().to(torch.bfloat16), tokens())
    assert maps.dtype == torch.float32
    assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))
    with torch.autocast("cpu", torch.bfloat16):
        maps = attention_maps(make(), tokens())
    assert maps.dtype == torch.float32
    assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))


def test_every_backend_shows_the_same():
    fused, reference = (attention_maps(make(backend=backend), tokens()) for backend in ("fused", "reference"))
    assert_close(fused, reference, rtol=1e-4, atol=1e-6)


def test_a_layer_without_weights_is_refused_by_name():
    model = make(attention=LinearAttention)
    with pytest.raises(ConfigError, match=r"^layer 0 is LinearAttention.*attention=mha$"):
        attention_maps(model, tokens())
    assert health(model, tokens()) == {}


# Observing leaves no trace


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_outputs_are_the_same_bit_for_bit_before_during_and_after(backend):
    model, x = make(backend=backend, mask=SlidingWindow(WINDOW)), tokens()
    before, kernels = model(x), [block.attention.kernel for block in model.blocks]
    with observe(model) as readings:
        assert torch.equal(model(x), before)
    assert [reading.layer for reading in readings] == [0, 1]
    assert torch.equal(model(x), before)
    assert all(block.attention.kernel is kernel for block, kernel in zip(model.blocks, kernels, strict=True))
    assert len(readings) == 2


def test_an_error_within_leaves_no_trace_either():
    model = make()
    kernels = [block.attention.kernel for block in model.blocks]
    with pytest.raises(IndexError):
        attention_maps(model, torch.full((1, 3), 99))
    assert [block.attention.kernel for block in model.blocks] == kernels


@pytest.mark.parametrize("training", [True, False])
def test_health_draws_no_random_number_and_keeps_the_mode(training):
    model, x = make(dropout=0.5).train(training), tokens()
    state = torch.get_rng_state()
    first = health(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert health(model, x) == first


# Figures


def test_figures_of_a_case_worked_by_hand():
    # scores 1/√2, 0, −1/√2; weights 0.576, 0.284, 0.140
    q, k = torch.tensor([[1.0, 0]]), torch.tensor([[1.0, 0], [0, 1], [-1, 0]])
    signs = vital_signs(reading(q, k, Full(), 2**-0.5))
    p = [0.5760, 0.2840, 0.1400]
    assert float(signs["score_std"]) == pytest.approx(math.sqrt((0.5 + 0 + 0.5) / 3))
    assert float(signs["entropy"]) == pytest.approx(-sum(w * math.log(w) for w in p), abs=1e-3)
    assert float(signs["gradient"]) == pytest.approx(sum(w * (1 - w) for w in p) / 3, abs=1e-3)
    assert signs["saturated"] == 0


def test_a_scale_too_large_saturates_and_its_gradient_dies():
    q, k = torch.tensor([[1.0]]), torch.tensor([[8.0], [0], [-8]])
    hard, soft = (vital_signs(reading(q, k, Full(), scale)) for scale in (1.0, 1 / 8))
    assert (hard["saturated"], soft["saturated"]) == (1, 0)
    assert float(hard["gradient"]) == pytest.approx(2 * 0.00034 / 3, rel=0.03)
    assert float(soft["gradient"]) > 0.15
    assert float(hard["score_std"]) == pytest.approx(8 * float(soft["score_std"]))


def test_a_row_with_one_key_is_no_choice_and_is_not_counted():
    signs = vital_signs(reading(torch.zeros(2, 1), torch.zeros(2, 1), Causal(), 1.0))
    assert float(signs["entropy"]) == pytest.approx(math.log(2))
    assert float(signs["gradient"]) == pytest.approx(0.25)
    assert signs["saturated"] == 0


def test_what_the_mask_hides_is_not_counted():
    signs = vital_signs(reading(torch.ones(2, 1), torch.tensor([[1.0], [2]]), Causal(), 1.0))
    assert_close(signs["score_std"], torch.tensor([1.0, 1, 2]).std(correction=0))
    assert_close(signs["entropy"], torch.special.entr(torch.tensor([1.0, 2]).softmax(0)).sum())


@pytest.mark.parametrize(("scale", "spread"), [(1.0, 8.0), (64**-0.5, 1.0)])
def test_dot_products_of_64_random_numbers_spread_by_8_and_the_scale_mends_it(scale, spread):
    q, k = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(0))
    assert float(vital_signs(reading(q, k, Full(), scale))["score_std"]) == pytest.approx(spread, rel=0.03)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_health_of_a_model_has_four_figures_a_layer(mask):
    figures = health(make("alibi", mask=mask), tokens())
    names = ("score_std", "entropy", "saturated", "gradient")
    assert list(figures) == [f"attention/{layer}/{name}" for layer in (0, 1) for name in names]
    assert all(math.isfinite(value) for value in figures.values())
    assert all(0 < figures[f"attention/{layer}/entropy"] <= math.log(T) for layer in (0, 1))
    assert all(0 < figures[f"attention/{layer}/gradient"] <= 0.25 for layer in (0, 1))


def test_where_nobody_has_a_choice_there_is_nothing_to_measure():
    figures = health(make(mask=SlidingWindow(1)), tokens())
    assert math.isfinite(figures["attention/0/score_std"])
    assert math.isnan(figures["attention/0/entropy"])
