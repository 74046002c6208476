"""The words that a launcher gets for each run of a study, and which runs are done."""

import json
from dataclasses import replace

import pytest
from conftest import ROOT

from lab.fakes import composing, leave_run
from minilm.config import compose
from minilm.lab.jobs import launcher_words
from minilm.lab.longer import LONGER
from minilm.lab.results import read

STUDIES = sorted(path.stem for path in (ROOT / "configs" / "study").glob("*.yaml") if path.stem != "own")


def composed(study):
    with composing():
        return [compose("train", launcher_words(study, job)) for job in study.jobs]


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("name", STUDIES)
def test_hydra_reads_the_words_of_every_shipped_study(name, planned):
    study = planned(f"study={name}", "seeds=1", "data=tales", "data.n_bytes=60000", small=False)
    for variant, config in zip(study.variants, composed(study), strict=True):
        aside = ("wandb", "out_dir", "resume")
        assert without(config, *aside) == without(variant.config, *aside)
        assert config["resume"] == "auto"
        assert config["wandb"] == variant.config["wandb"] | {"group": name, "name": f"{variant.name} 1"}


@pytest.mark.parametrize(
    "name", ["12", "a, b", "[1", "{x: y", "it's", 'a "b"', "${seed} \\", "é = ~", "null", "3 ", "'x'"]
)
def test_any_name_arrives_as_it_is(name, planned):
    study = planned("vary=model.n_head=[1,2]", "seeds=1")
    variants = [replace(study.base, name=name)]
    (config,) = composed(replace(study, config=replace(study.config, name=name), variants=variants))
    assert config["wandb"]["group"] == name
    assert config["wandb"]["name"] == f"{name} 1"


def test_names_that_were_said_stay(planned):
    study = planned("vary=model.n_head=[1,2]", "seeds=1", "wandb.group=mine", "wandb.name=null")
    assert [config["wandb"]["group"] for config in composed(study)] == ["mine", "mine"]
    assert [config["wandb"]["name"] for config in composed(study)] == [None, None]


@pytest.mark.parametrize(
    ("asked", "found", "state"),
    [([], None, "done"), ([1], None, "running"), ([1, 2], [1], "running"), ([1, 2], [1, 2, 4], "done")],
)
def test_a_run_is_done_when_all_lengths_are_evaluated(asked, found, state, planned):
    study = planned("vary=model.n_head=[1,2]", "seeds=1")
    job = study.jobs[0]
    leave_run(job, [2.0])
    if found:
        (job.folder / LONGER).write_text(json.dumps({str(n): 1.5 for n in found}))
    assert read(job, asked).state == state
