"""What the README promises of two runs of one command: the same bits, or how nearly the same."""

import pytest
import torch
from test_train_script import assert_same_end, records

from minilm.runtime import set_deterministic

CLOSE = 1e-4  # relative, of the losses of twenty steps


def losses(run):
    return [record["train/loss"] for record in records(run)]


@pytest.fixture(scope="module")
def again(tmp_path_factory, forked, tiny):
    """again(*words): the tests' smallest run once more, in a process and a folder of its own."""

    def train(*words):
        folder = tmp_path_factory.mktemp("again")
        result = forked("train", *tiny, "out_dir=run", *words, cwd=folder)
        assert result.status == 0, result.err
        return folder / "run"

    return train


@pytest.mark.parametrize("words", [[], ["deterministic=true"]], ids=["usual", "strict"])
def test_one_command_gives_the_same_bits_each_time(again, tiny_run, words):
    """tiny_run was started as a person does it, these by a fork: only the clock may differ."""
    assert_same_end(again(*words), tiny_run[0])


def test_another_number_of_threads_is_close(again, tiny_run):
    assert losses(again("threads=2")) == pytest.approx(losses(tiny_run[0]), rel=CLOSE)


@pytest.mark.slow
def test_compiled_is_close(again, tiny_run):
    assert losses(again("compile=strict")) == pytest.approx(losses(tiny_run[0]), rel=CLOSE)


def test_the_seed_makes_another_run(again, tiny_run):
    """What makes the tests above worth something: these runs have randomness to differ by."""
    assert losses(again("seed=2")) != losses(tiny_run[0])


def test_strict_refuses_what_has_no_such_algorithm():
    def unordered():
        return torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

    try:
        set_deterministic(True)
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            unordered()
    finally:
        set_deterministic(False)
    unordered()
