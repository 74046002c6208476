"""Laws of masks: each is its truth table, and what it says of its reach and lookahead is true of it."""

import math

import pytest
import torch

from minilm.attention.masks import Causal, Full, Predicate, Prefix, SlidingWindow
from minilm.errors import ConfigError

from .naive import ALLOWS

MASKS = {
    "causal": Causal(),
    "none": Full(),
    "window of 1": SlidingWindow(1),
    "window of 3": SlidingWindow(3),
    "prefix of 4": Prefix(4),
    "every other": Predicate(lambda q, k: (k <= q) & ((q - k) % 2 == 0), causal=True),
}
N = 9


def table(mask):
    pos = torch.arange(N)
    return torch.as_tensor(mask.allows(pos[:, None], pos[None, :])).expand(N, N)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_its_predicate_over_tensors_and_over_numbers(name):
    told = [[bool(ALLOWS[name](q, k)) for k in range(N)] for q in range(N)]
    assert table(MASKS[name]).tolist() == told
    assert [[bool(MASKS[name].allows(q, k)) for k in range(N)] for q in range(N)] == told


def test_small_tables_written_out():
    assert table(SlidingWindow(2))[:4, :4].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    assert table(Prefix(2))[:4, :4].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert torch.equal(table(Prefix(0)), table(Causal()))
    assert torch.equal(table(SlidingWindow(N)), table(Causal()))


@pytest.mark.parametrize("name", [*MASKS, "prefix of 0"])
def test_reach_and_lookahead_are_tight_bounds(name):
    mask = MASKS.get(name, Prefix(0))
    allowed = table(mask)
    back = [q - k for q in range(N) for k in range(N) if allowed[q, k]]
    assert mask.reach is None or mask.reach == max(back) + 1
    ahead = [k for q in range(N) for k in range(q + 1, N) if allowed[q, k]]
    assert mask.lookahead == (max(ahead) + 1 if ahead else 0) or (
        mask.lookahead == math.inf and N - 1 in ahead
    )


def test_a_function_counts_as_reading_ahead_unless_it_says_otherwise():
    assert Predicate(lambda q, k: k <= q).lookahead == math.inf
    assert Predicate(lambda q, k: k <= q, causal=True).lookahead == 0


def test_impossible_masks_are_refused_by_key_and_number():
    with pytest.raises(ConfigError, match=r"mask\.window=0: .*at least 1"):
        SlidingWindow(0)
    with pytest.raises(ConfigError, match=r"mask\.length=-1: .*0 positions or more"):
        Prefix(-1)


def test_equal_masks_are_one_key():
    assert len({SlidingWindow(3), SlidingWindow(3), SlidingWindow(4), Causal(), Causal()}) == 3
