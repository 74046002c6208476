"""The table of sizes: each model is timed and trained at each context, and what cannot be is refused by its name."""

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from minilm.bench import race, scale
from minilm.bench.measure import Progress
from minilm.bench.scale import ScaleBench
from minilm.bench.setting import Setting
from minilm.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SMALL = ["model.n_layer=1", "model.ngrams=[]"]


def report(models, contexts, text_file):
    bench = ScaleBench(models=models, contexts=contexts, tokens=64, seconds=0.05, repeats=1)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        words = ["data=file", f"data.path={text_file}", "tokenizer=byte", "device=cpu"]
        config = OmegaConf.to_container(compose("bench", overrides=words), resolve=True)
        return bench.run(Setting.of(config), Progress())


def in_this_process(function, config, *, cwd, **options):
    with contextlib.chdir(cwd):
        function(config)
    return SimpleNamespace(returncode=0)


def test_each_model_is_timed_and_trained_at_each_context(text_file, monkeypatch):
    monkeypatch.setattr(race, "in_child", in_this_process)  # which test_race starts
    monkeypatch.setattr(scale, "SQUARES", (32, 64))
    models = {"small": [*SMALL, "model.n_embd=16"], "wide": [*SMALL, "model.n_embd=32"]}
    found = report(models, [8, 16], text_file)
    rows = found.data["rows"]
    cases = [(row["model"], row["context"]) for row in rows]
    assert cases == [("small", 8), ("small", 16), ("wide", 8), ("wide", 16)]
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert 0 < row["loss"] < math.log(256) + 1
    assert rows[0]["parameters"] == rows[1]["parameters"] < rows[2]["parameters"]
    assert rows[0]["flops_per_token"] < rows[1]["flops_per_token"]
    assert len(found.tables[0].rows) == 4
    found.draw(Figure())


@pytest.mark.parametrize(
    ("models", "contexts", "message"),
    [
        ({"odd": ["model.n_head=3", "model.n_embd=64"]}, [8], r"bench\.models, odd: .*n_head=3"),
        ({"a": ["model.n_lyer=2"]}, [8], r"bench\.models, a: .*n_lyer"),
        ({"a": SMALL}, [7], r"bench\.contexts=\[7\]: each must divide bench\.tokens=64"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(models, contexts, message, text_file):
    with pytest.raises(ConfigError, match=message):
        report(models, contexts, text_file)
