"""Races: claims are about the worst seed, and a run is trained as it would be by itself."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from minilm.bench import race
from minilm.bench.measure import Progress
from minilm.bench.race import RaceBench
from minilm.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def configuration(*words):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_container(compose("train", overrides=list(words)), resolve=True)


SAID = {"data": {"path": "my.txt"}, "threads": 1, "device": "cpu", "compile": False}
RUNS = {  # recipe, seed: (seconds, loss) at each evaluation
    ("slow", 1): [(30.0, 2.5), (60.0, 1.9)],
    ("quick", 1): [(2.0, 1.89)],
    ("quick", 2): [(3.0, 1.91)],
}


@pytest.mark.parametrize(
    ("faster", "loss", "hold"), [(20.0, 1.91, [True, True]), (20.1, 1.9, [False, False])]
)
def test_a_race_claims_of_its_slowest_and_of_its_worst_seed(faster, loss, hold, monkeypatch, tmp_path):
    ran = []
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("text")

    def compose(name, words):
        said = dict(word.split("=") for word in words)
        return {"recipe": said["recipe"], "seed": int(said["seed"])}

    def trained(config):
        assert Path(config["data"]["path"]).is_absolute()
        assert config["threads"] == 1
        ran.append((config["recipe"], config["seed"]))
        return RUNS[ran[-1]]

    monkeypatch.setattr(race, "compose", compose)
    monkeypatch.setattr(race, "trained", trained)
    bench = RaceBench(baseline="slow", challenger="quick", faster=faster, loss=loss, seeds=[1, 2])
    report = bench.run(SimpleNamespace(config=SAID), Progress())
    assert ran == [("slow", 1), ("quick", 1), ("quick", 2)]
    assert [claim.holds for claim in report.claims] == hold
    assert [claim.measured for claim in report.claims] == ["20.0", "1.9100"]
    report.draw(Figure())


def test_a_run_of_a_race_trains_as_its_configuration_says(text_file):
    words = ["data=file", f"data.path={text_file}", "train.max_steps=3", "train.eval_interval=2"]
    small = ["model.n_embd=16", "model.block_size=16", "schedule.warmup=0", "train.sample_tokens=0"]
    curve = race.trained(configuration(*words, *small))
    assert len(curve) == 2  # after step 2 and after the last one
    assert 0 < curve[0][0] < curve[1][0]
    assert curve[1][1] < math.log(256)


def test_a_run_of_a_race_that_fails_says_why():
    config = configuration("data=file", "data.path=/nowhere")
    with pytest.raises(ConfigError, match=r"a run of the race failed: .*data\.path=/nowhere"):
        race.trained(config)
