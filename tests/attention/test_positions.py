"""Laws of position schemes: the published formulas, in float64, whatever the model is cast to."""

import math
from functools import partial

import pytest
import torch

from minilm.attention.layer import MultiHeadAttention
from minilm.attention.positions import (
    Alibi,
    Learned,
    NoPosition,
    Position,
    Rotary,
    Sinusoidal,
    StretchedRotary,
    rotate,
)
from minilm.errors import ConfigError
from minilm.model import GPT, GPTConfig

from .naive import SLOPES, turn

F64 = torch.float64


def test_sinusoidal_is_the_formula():
    x, pos = torch.zeros(1, 3, 6, dtype=F64), torch.tensor([0, 1, 5000])
    added = Sinusoidal(n_embd=6).embed(x, pos)
    for t, p in enumerate(pos.tolist()):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            assert added[0, t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert added[0, t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_learned_adds_the_row_of_each_position_and_trains_it():
    learned, x = Learned(n_embd=4, block_size=5).double(), torch.randn(2, 3, 4, dtype=F64)
    pos = torch.tensor([[-1, 0, 1], [2, 3, 4]])
    y = learned.embed(x, pos)
    for b, t in ((0, 1), (0, 2), (1, 0), (1, 2)):
        torch.testing.assert_close(y[b, t], x[b, t] + learned.table.weight[pos[b, t]])
    assert y.isfinite().all()  # an empty slot too
    y.sum().backward()
    assert learned.table.weight.grad is not None


def test_learned_says_how_many_positions_it_knows():
    with pytest.raises(ConfigError, match=r"6 tokens, .*model\.block_size=5 .*position=rope"):
        Learned(n_embd=4, block_size=5).embed(torch.zeros(1, 6, 4), torch.arange(6))


def test_rotary_is_a_product_of_complex_numbers():
    x, pos = torch.randn(2, 3, 4, 6, dtype=F64), torch.tensor([0, 1, 17, 100_000])
    y = rotate(x, Rotary(head_dim=6, base=500.0).rotation(pos, 6, F64))
    for b, h, t in torch.cartesian_prod(*(torch.arange(s) for s in x.shape[:3])).tolist():
        told = torch.tensor(turn(x[b, h, t].tolist(), pos[t].item(), 500.0), dtype=F64)
        torch.testing.assert_close(y[b, h, t], told, rtol=0, atol=1e-10)


def test_rotary_equals_that_of_llama():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    )
    q, k, pos = (
        torch.randn(2, 4, 40, 16),
        torch.randn(2, 2, 40, 16),
        torch.stack([torch.arange(40), torch.arange(3, 43)]),
    )
    told = llama.apply_rotary_pos_emb(q, k, *llama.LlamaRotaryEmbedding(config)(q, pos))
    rotation = Rotary(head_dim=16).rotation(pos, 16, torch.float32)
    for ours, theirs in zip((rotate(q, rotation), rotate(k, rotation)), told, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=3e-5
        )  # theirs makes the angle itself in float32


def test_rotary_scores_know_distances_only():
    rotary, q, k = Rotary(head_dim=8), torch.randn(1, 1, 5, 8, dtype=F64), torch.randn(1, 1, 5, 8, dtype=F64)

    def scores(shift):
        rotation = rotary.rotation(torch.arange(5) + shift, 8, F64)
        return rotate(q, rotation) @ rotate(k, rotation).mT

    torch.testing.assert_close(scores(0), scores(12345), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        rotate(q, rotary.rotation(torch.arange(5), 8, F64)).norm(dim=-1), q.norm(dim=-1)
    )


def test_a_row_of_its_own_positions_turns_as_it_would_alone():
    pos, x = torch.tensor([[-1, 0, 1], [4, 5, 6]]), torch.randn(2, 3, 3, 4, dtype=F64)
    rotary = Rotary(head_dim=4)
    together = rotate(x, rotary.rotation(pos, 4, F64))
    for b in range(2):
        torch.testing.assert_close(together[b : b + 1], rotate(x[b : b + 1], rotary.rotation(pos[b], 4, F64)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_casting_a_model_leaves_its_angles_and_slopes_exact(dtype):
    pos = torch.tensor([1, 4095, 1_000_003])
    cos, sin = Rotary(head_dim=8).to(dtype).rotation(pos, 8, dtype)
    angle = pos.double()[:, None] * torch.tensor([10000 ** (-2 * i / 8) for i in range(4)], dtype=F64)
    for ours, told in ((cos, angle.cos()), (sin, angle.sin())):
        torch.testing.assert_close(ours.double(), told, rtol=0, atol=1e-9 if dtype == F64 else 1e-7)
    added = Sinusoidal(n_embd=8).to(dtype).embed(torch.zeros(1, 3, 8, dtype=dtype), pos)[0]
    told = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2).to(dtype)
    torch.testing.assert_close(added, told, rtol=0, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("n_head", SLOPES)
def test_alibi_falls_off_along_the_published_series(n_head):
    alibi = Alibi(n_head=n_head).to(torch.bfloat16)
    head, far = torch.arange(n_head), torch.tensor(1000)
    falls = -alibi.bias(head, far, torch.tensor(0), F64) / 1000
    torch.testing.assert_close(falls, torch.tensor(SLOPES[n_head], dtype=F64), rtol=1e-14, atol=0)
    both = [alibi.bias(head, torch.tensor(a), torch.tensor(b), F64) for a, b in ((3, 5), (5, 3), (4, 4))]
    assert torch.equal(both[0], both[1])
    assert not both[2].any()


@pytest.mark.parametrize("n_head", [1, 2, 3, 5, 8, 12, 16, 20, 32])
def test_alibi_slopes_equal_those_of_bloom(n_head):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), n_head, torch.float32)[:, 0, 1]
    ours = Alibi(n_head=n_head).bias(torch.arange(n_head), torch.tensor(0), torch.tensor(1), torch.float32)
    torch.testing.assert_close(-ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "scheme",
    [NoPosition(), Sinusoidal(n_embd=8), Rotary(head_dim=4), Alibi(n_head=2)],
    ids=lambda s: type(s).__name__,
)
def test_only_learned_positions_are_weights(scheme):
    assert scheme.state_dict() == {}


def test_no_position_changes_nothing():
    x, scheme = torch.randn(1, 3, 4), NoPosition()
    assert scheme.embed(x, torch.arange(3)) is x
    assert rotate(x, scheme.rotation(torch.arange(3), 4, torch.float32)) is x
    assert not scheme.biased
    assert issubclass(NoPosition, Position)


class Embeds(Position):
    def embed(self, x, pos):
        return x + pos.unsqueeze(-1)


class Rotates(Position):
    def rotation(self, pos, head_dim, dtype):
        angle = pos.to(dtype).unsqueeze(-1).expand(*pos.shape, head_dim // 2)
        return angle.cos(), angle.sin()


class Biases(Position):
    def bias(self, head, q_pos, k_pos, dtype):
        return (k_pos - q_pos).to(dtype) * (head + 1)


class EmbedsDistances(Embeds):
    relative = True


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("scheme", [Embeds, Rotates, Biases])
def test_a_scheme_is_its_hooks_and_need_say_nothing_else(scheme, backend):
    def logits(position):
        torch.manual_seed(0)
        layer = partial(MultiHeadAttention, 8, n_head=2, backend=backend)
        config = GPTConfig(vocab_size=5, block_size=6, n_layer=1, n_head=2, n_embd=8)
        return GPT(config, position=position, attention=layer).double()(torch.tensor([[1, 2, 3, 4, 1, 2]]))

    assert not torch.allclose(logits(scheme()), logits(NoPosition()), atol=1e-6)


@pytest.mark.parametrize(
    ("scheme", "biased", "relative"),
    [
        (Position, False, True),
        (NoPosition, False, True),
        (Rotary, False, True),
        (StretchedRotary, False, True),
        (Alibi, True, True),
        (Sinusoidal, False, False),
        (Learned, False, False),
        (Rotates, False, True),
        (Biases, True, True),
        (Embeds, False, False),
        (type("Inherits", (Embeds,), {}), False, False),
        (EmbedsDistances, False, True),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_a_scheme_is_follows_from_its_hooks(scheme, biased, relative):
    assert (scheme.biased, scheme.relative) == (biased, relative)


def test_positions_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"head_dim=3 .*position=rope .*even"):
        Rotary(head_dim=3)
    with pytest.raises(ConfigError, match=r"position\.base=1: "):
        Rotary(head_dim=4, base=1)
    with pytest.raises(ConfigError, match=r"model\.n_embd=5: .*even"):
        Sinusoidal(n_embd=5)


# ---- a stretched context ----


def test_slow_pairs_turn_slower_fast_ones_as_before_and_those_between_in_proportion():
    # base 256: pairs turn 4⁰, 4⁻¹, 4⁻², 4⁻³ radians a position, so 8, 2, 1/2 and 1/8 times in 16π tokens, about 50
    stretched = StretchedRotary(
        head_dim=8, base=256, factor=10, low_turns=0.5, high_turns=3.5, original_block_size=50
    )
    found = stretched.frequencies(8, torch.arange(3)).tolist()
    turns = 50 / (2 * math.pi) / 4
    share = (turns - 0.5) / 3
    assert found == pytest.approx([1, (share + (1 - share) / 10) / 4, 1 / 160, 1 / 640], rel=1e-12)


@pytest.mark.parametrize(
    "said", [{"factor": 0.5}, {"low_turns": 4.0}, {"low_turns": 0.0}, {"original_block_size": 0}], ids=str
)
def test_a_stretch_that_is_none_is_refused(said):
    with pytest.raises(ConfigError, match=r"position\.factor=.*: a factor of 1 or more"):
        StretchedRotary(head_dim=8, **said)
