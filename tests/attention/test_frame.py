"""Laws of frames: who stands where is said once, and what follows from it is made once."""

import torch

from minilm.attention.frame import Frame
from minilm.attention.masks import Causal, Full, Predicate, SlidingWindow
from minilm.attention.positions import Alibi, NoPosition, Rotary

from .naive import SLOPES


def test_a_thing_is_made_once_and_shared():
    calls = []
    frame = Frame.of(torch.zeros(1, 4, 2))
    for key in ("a", "b", "a", ("a", 1), ("a", 1)):
        frame.once(key, lambda key=key: calls.append(key))
    assert calls == ["a", "b", ("a", 1)]


def test_a_whole_sequence_reads_itself_and_a_context_is_another():
    x, context = torch.zeros(2, 3, 8), torch.zeros(2, 5, 6)
    own, cross = Frame.of(x), Frame.of(x, context=context)
    assert own.q_pos.tolist() == own.k_pos.tolist() == [0, 1, 2]
    assert own.aligned
    assert (cross.q_pos.tolist(), cross.k_pos.tolist()) == ([0, 1, 2], [0, 1, 2, 3, 4])
    assert not cross.aligned


def test_positions_not_slots_decide_who_reads_whom():
    frame = Frame(torch.tensor([7, 5]), torch.tensor([6, 7, 5]))
    assert frame.allowed(Causal()).int().tolist() == [[1, 1, 1], [0, 0, 1]]
    assert frame.allowed(SlidingWindow(2)).int().tolist() == [[1, 1, 0], [0, 0, 1]]


def test_an_empty_slot_reads_nobody_and_is_read_by_nobody():
    pos = torch.tensor([[-1, 0, 1], [0, 1, 2]])
    for mask, second in ((Causal(), [[1, 0, 0], [1, 1, 0], [1, 1, 1]]), (Full(), [[1, 1, 1]] * 3)):
        allowed = Frame(pos).allowed(mask)
        assert allowed.shape == (2, 1, 3, 3)  # the same for all heads
        assert allowed[1, 0].int().tolist() == second
        assert not allowed[0, 0, 0].any()
        assert not allowed[0, 0, :, 0].any()
        assert allowed[0, 0, 1:, 1:].int().tolist() == [row[:2] for row in second[:2]]


def test_a_predicate_that_looks_at_one_side_only_is_widened():
    frame = Frame(torch.arange(2), torch.arange(3))
    assert frame.allowed(Predicate(lambda q, k: k < 2)).int().tolist() == [[1, 1, 0]] * 2
    assert frame.allowed(Predicate(lambda q, k: q < 1)).int().tolist() == [[1, 1, 1], [0, 0, 0]]


def test_a_bias_is_that_of_the_true_positions_head_by_head():
    frame = Frame(torch.tensor([9, 4]), torch.tensor([[3, 9, 5], [0, 1, -1]]), Alibi(n_head=6))
    bias = frame.bias(6, torch.float64)
    assert bias.shape == (2, 6, 2, 3)
    for h, slope in enumerate(SLOPES[6]):
        assert bias[0, h].tolist() == [[-slope * 6, 0, -slope * 4], [-slope, -slope * 5, -slope]]
    assert Frame.of(torch.zeros(1, 3, 4), NoPosition()).bias(6, torch.float64) is None


def test_angles_are_made_once_for_all_layers_of_a_shape():
    frame = Frame.of(torch.zeros(1, 3, 4), Rotary(head_dim=4))
    assert frame.rotation(4, torch.float32) is frame.rotation(4, torch.float32)
    assert frame.rotation(8, torch.float32)[0].shape == (3, 4)
