"""examples/reverse.py: cross-attention learns, in seconds, what the same model without it cannot."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch

from minilm.attention import Frame

PATH = Path(__file__).resolve().parents[2] / "examples" / "reverse.py"
spec = importlib.util.spec_from_file_location("reverse", PATH)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def make(**options):
    torch.manual_seed(0)
    return example.Reverser(**options)


@pytest.fixture(scope="module")
def trained():
    model, losses = make(), []
    example.train(model, report=losses.append)
    assert len(losses) == 4
    return model


def test_words_never_seen_come_out_backwards(trained):
    assert example.exact(trained) > 0.95
    assert trained.reverse(["stressed", "attention"]) == ["desserts", "noitnetta"]


def test_without_cross_attention_nothing_can_be_learnt():
    model, losses = make(blind=True), []
    example.train(model, steps=100, report=losses.append)
    assert example.exact(model) == 0
    assert float(losses[-1].split()[-1]) > 1.5


def test_words_of_a_batch_do_not_know_of_one_another(trained):
    words = example.draw(random.Random(2), 20, held_out=True)
    assert trained.reverse(words) == [trained.reverse([word])[0] for word in words]


def test_written_a_letter_at_a_time_or_read_at_once_the_letters_are_the_same(trained):
    words = ["abcdefgh", "xyz"]
    answers = torch.tensor([example.ids(word[::-1], 9) for word in words])
    tokens = torch.cat((torch.full((2, 1), example.START), answers[:, :-1]), dim=1)
    with torch.no_grad():
        told = trained.decode(tokens, *trained.encode(words), Frame.of(tokens)).argmax(dim=-1)
    for row, word, out in zip(told.tolist(), words, trained.reverse(words), strict=True):
        assert out == "".join(example.LETTERS[i] for i in row[: len(word)])


def test_the_words_keys_and_values_are_projected_once_and_the_letters_one_by_one(trained):
    seen = {"own": [], "cross": []}
    hooks = [
        getattr(getattr(trained.decoder, layer), part).register_forward_hook(
            lambda module, args, out, layer=layer: seen[layer].append(args[0].shape[1])
        )
        for layer in seen
        for part in ("key", "value")
    ]
    trained.reverse(["minilm", "word"])
    for hook in hooks:
        hook.remove()
    assert seen["cross"] == [6, 6]  # once, all letters of the longer word
    assert seen["own"] == [1] * 2 * (example.LONGEST + 1)


def test_the_context_has_another_length_and_another_width():
    model = make()
    states, k_pos = model.encode(["abcdefg", "xyz"])
    assert states.shape == (2, 7, 48)
    assert k_pos.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, -1, -1, -1, -1]]
    tokens = torch.full((2, 4), example.START)
    assert model.decode(tokens, states, k_pos, Frame.of(tokens)).shape == (2, 4, example.V)
    assert model.decoder.cross.key.weight.shape == (64, 48)


def test_held_out_words_are_never_trained_on():
    held, shown = (example.draw(random.Random(3), 300, held_out=out) for out in (True, False))
    assert all(sum(map(example.LETTERS.index, word)) % 10 == 0 for word in held)
    assert not any(sum(map(example.LETTERS.index, word)) % 10 == 0 for word in shown)
