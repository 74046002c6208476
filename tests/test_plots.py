import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import minilm
from minilm.build import restore
from minilm.maps import picture_of
from minilm.plots import limits, plot_loss, series, smooth, summary, title
from minilm.tracking import MetricsLog

NAN = float("nan")


def write(run, records):
    run.mkdir(parents=True, exist_ok=True)
    with MetricsLog(run / "metrics.jsonl") as log:
        for step, record in records:
            log.write({"step": step, "tokens": 100 * step, "train_seconds": 0.1 * step, **record})


CURVE = [(step, {"train/loss": 1 + 3 / step}) for step in range(1, 200)]


@pytest.mark.parametrize(
    "records",
    [
        [(0, {"val/loss": 4.2})],
        [(1, {"train/loss": 4.2})],
        [(0, {"val/loss": 4.2}), *CURVE, (200, {"train/loss": 1.0, "val/loss": 1.1})],
        [(1, {"train/loss": NAN}), (2, {"train/loss": NAN, "val/loss": NAN})],
        [*CURVE, (200, {"train/loss": 1e30}), (201, {"train/loss": NAN})],
        [(1, {"train/loss": 2.0, "lr": 0.1}), (2, {"lr": 0.1}), (3, {"train/loss": 2.0})],
    ],
)
@pytest.mark.parametrize("floor", [None, 0.9])
def test_every_run_has_its_picture(tmp_path, records, floor):
    write(tmp_path / "run $x_2^", records)
    path = plot_loss(tmp_path / "run $x_2^", floor=floor)
    assert path == tmp_path / "run $x_2^" / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(path.parent)) == ["loss.png", "metrics.jsonl"]


def test_nothing_measured_draws_nothing(tmp_path):
    write(tmp_path, [(1, {"lr": 0.1})])
    assert plot_loss(tmp_path) is None
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("drawn", ["the loss", "where heads look"])
def test_a_picture_is_let_go_at_once(tmp_path, tiny_run, drawn):
    """Its parts hold one another, so that nothing but the collector frees them: megabytes at each evaluation."""
    from matplotlib.figure import Figure

    def figures():
        return sum(type(thing) is Figure for thing in gc.get_objects())

    write(tmp_path, CURVE)
    model, tokenizer, saved = restore(tiny_run[0], torch.device("cpu"))
    heads = picture_of(model, tokenizer, saved.config)
    gc.collect()
    gc.disable()  # so that it is no accident
    try:
        before = figures()
        plot_loss(tmp_path) if drawn == "the loss" else heads([1, 2, 3])
        assert figures() == before
    finally:
        gc.enable()


def test_neither_pyplot_nor_torch_is_needed(tmp_path):
    write(tmp_path, CURVE)
    code = (
        "import sys; from minilm.plots import plot_loss; assert 'matplotlib' not in sys.modules;"
        "plot_loss('.'); assert not {'matplotlib.pyplot', 'torch', 'rich'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(minilm.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


def test_series_keeps_gaps():
    records = [{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}]
    np.testing.assert_equal(series(records, "a"), [[1, 2], [3, NAN]])
    assert series(records, "b").shape == (0, 2)


@pytest.mark.parametrize("n", [1, 2, 29, 30, 31, 1000])
def test_smoothing_keeps_what_is_smooth(n):
    line = np.linspace(3, 1, n)
    np.testing.assert_allclose(smooth(np.full(n, 2.5)), 2.5)
    inside = slice(0, n - n // 30)  # at the end there are no neighbours to come
    np.testing.assert_allclose(smooth(line)[inside], line[inside])
    assert smooth(line)[0] == 3


def test_smoothing_calms_noise_and_keeps_gaps():
    noise = np.random.default_rng(0).normal(size=1000)
    assert smooth(noise)[200:].std() < 0.2
    noise[500:510] = NAN
    np.testing.assert_array_equal(np.isnan(smooth(noise)), np.isnan(noise))


def test_limits_show_the_floor_and_not_the_divergence():
    falling, none = np.array([4.0, 2.0, 1.0]), np.array([])
    assert limits(falling, none, 0.5)[0] < 0.5
    assert limits(falling, none, None)[1] > 4.0
    low, high = limits(np.array([4.0, 2.0, 1e9, 1e9, NAN]), none, None)
    assert low < 2.0
    assert 4.0 < high < 10.0
    for train in (none, np.array([NAN]), np.array([2.0])):
        low, high = limits(train, none, None)
        assert low < high


def test_title_and_summary(tmp_path):
    assert title(tmp_path / "runs" / "2026-01-02" / "03-04-05") == "2026-01-02/03-04-05"
    assert title(tmp_path / "mine") == "mine"
    records = [{"step": 200, "tokens": 1_640_000, "train_seconds": 61.2}]
    val = np.array([[0, 4.0], [100, 1.25], [200, 1.5]])
    assert summary(records, val, 1.0) == (
        "1.64 M tokens  ·  0:01:01 of training  ·  best validation loss 1.2500 at step 100, 0.250 above the floor"
    )
    assert summary(records, np.zeros((0, 2)), None) == "1.64 M tokens  ·  0:01:01 of training"
