"""Which runs a study has, and what is refused before the first of them."""

import pytest
import yaml
from conftest import ROOT

from lab.fakes import SMALL, composing, leave_run
from minilm import checkpoint
from minilm.config import compose
from minilm.errors import ConfigError
from minilm.lab import study as module
from minilm.lab.study import TOLERANCE
from minilm.words import choices

STUDIES = sorted(path.stem for path in (ROOT / "configs" / "study").glob("*.yaml") if path.stem != "own")


def test_variants_are_named_by_their_values(planned):
    study = planned("vary=attention.scale=[sqrt,none,0.25]", "seeds=2")
    assert [v.name for v in study.variants] == ["sqrt", "none", "0.25"]
    assert [v.config["attention"]["scale"] for v in study.variants] == ["sqrt", "none", 0.25]
    assert study.base.name == "sqrt"
    assert study.folder.as_posix() == "runs/studies/attention.scale"


def test_jobs_go_seed_by_seed_each_in_its_own_folder(planned):
    study = planned("vary=model.n_head=[1,2]", "seeds=[7,3]", "out_dir=here")
    assert [(job.seed, job.folder.as_posix()) for job in study.jobs] == [
        (7, "here/1/seed_7"),
        (7, "here/2/seed_7"),
        (3, "here/1/seed_3"),
        (3, "here/2/seed_3"),
    ]
    assert study.jobs[1].words[-3:] == ["model.n_head=2", "seed=7", "out_dir=here/2/seed_7"]


def test_several_keys_are_combined(planned):
    study = planned("vary=mask=[causal,sliding] model.n_head=[1,2]", "seeds=1")
    assert [v.name for v in study.variants] == [
        "mask=causal n_head=1",
        "mask=causal n_head=2",
        "mask=sliding n_head=1",
        "mask=sliding n_head=2",
    ]
    assert len({v.folder for v in study.variants}) == 4


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("a=[1,2]", ["a=1", "a=2"]),
        ("a=x,null", ["a=x", "a=null"]),
        ("a=[[1,2],[3,4]]", ["a=[1,2]", "a=[3,4]"]),
    ],
)
def test_values_are_read_as_hydra_reads_them(word, wanted):
    assert choices(word) == wanted


@pytest.mark.parametrize("word", ["a", "a=1", "a=[1]", "=[1,2]", "a=[1,2"])
def test_what_is_no_list_of_values_is_refused(word):
    with pytest.raises(ConfigError, match="two or more values"):
        choices(word)


def test_a_variants_own_word_wins_over_the_command_line_and_that_over_the_base(planned):
    study = planned("study=norms", "data=tales", "data.n_bytes=60000", "train.max_steps=90", small=False)
    assert {v.steps for v in study.variants} == {90}
    assert {v.config["model"]["block_size"] for v in study.variants} == {128}
    assert [v.config["model"]["norm"] for v in study.variants] == ["rmsnorm", "layernorm", "rmsnorm"]


@pytest.mark.parametrize("name", STUDIES)
def test_every_shipped_study_can_run(name, planned):
    study = planned(f"study={name}", "data=tales", "data.n_bytes=60000", small=False)
    assert study.config.question
    assert study.config.theory
    assert len(study.variants) >= 3
    assert len(study.seeds) == 3
    assert all(v.floor is not None for v in study.variants)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vary=attention.scale=[sqrt,-3]"], r"variant -3: .*scale"),
        (["vary=model.n_head=[1,5]"], r"variant 5: .*n_head"),
        (["vary=mask=[causal,cuasal]"], r"variant cuasal: mask=cuasal: did you mean causal"),
        (["vary=optim.lrr=[1,2]"], r"variant 1: optim.lrr: no such key; did you mean optim.lr"),
        (["vary=data.path=[text.txt,none.txt]"], r"variant none.txt: data.path=none.txt: cannot be read"),
        (["vary=model.block_size=[16,100000]"], r"variant 100000: .*block_size"),
        (["vary=model.n_head=[1,2]", "seed=3"], r"seed=3: a study sets it"),
        (["vary=model.n_head=[2,2]"], r"two variants are the same"),
        (["vary=seed=[1,2]"], r"seed=1: a study sets it"),
        (["vary=model.n_head=[1,2]", "seeds=0"], r"seeds=0"),
        (["vary=model.n_head=[1,2]", "seeds=[1,1]"], r"seeds"),
        (["vary=model.n_head=[1,2]", "seeds=many"], r"study.seeds=many: expected a whole number"),
        (["vary=model.n_head=[1,2]", "study.budget=money"], r"study.budget=money: expected steps or tokens"),
        (["vary=model.n_head=[1,2]", "study.evaluate_at=[0]"], r"evaluate_at"),
        (["vary=model.n_head=[1,2]", "study=heads"], r"variants of its own"),
        (["seeds=3"], r"fewer than two variants"),
    ],
)
def test_what_cannot_run_is_refused_by_name(words, message, planned):
    with pytest.raises(ConfigError, match=message):
        planned(*words)


OTHERWISE = {
    "train.max_steps=50": "40",
    "optim.lr=0.5": r"[\d.]+",
    "precision=bf16": "fp32",
    "compile=True": "False",
    "device=auto": "cpu",
}


def test_a_folder_with_other_runs_is_refused(planned):
    study = planned("vary=model.n_head=[1,2]", "seeds=1")
    leave_run(study.jobs[0], [1.0])
    path = study.jobs[0].folder / "config.yaml"
    path.write_text(yaml.safe_dump(study.jobs[0].variant.config | {"seed": 1}))
    planned("vary=model.n_head=[1,2]", "seeds=3")  # more seeds may join
    planned("vary=model.n_head=[1,2]", "seeds=1", "threads=1", "wandb.mode=offline", "tensorboard=true")
    for word, then in OTHERWISE.items():
        key, _, now = word.partition("=")
        with pytest.raises(ConfigError, match=rf"holds a run with {key}={then}, and this study says {now}"):
            planned("vary=model.n_head=[1,2]", "seeds=1", word)


# ---- fair comparison ----


@pytest.mark.parametrize("what", ["params", "flops"])
def test_matched_variants_cost_the_same(what, planned):
    study = planned(
        "vary=model.n_kv_head=[2,1] model.mlp=[relu2,swiglu]", f"study.match={what}", "model.n_head=2"
    )
    costs = [v.parameters if what == "params" else v.flops_per_token for v in study.variants]
    assert max(costs) / min(costs) - 1 <= TOLERANCE
    assert costs[2] != planned("vary=model.n_kv_head=[1,2]", "model.n_head=2").base.parameters
    assert len(study.chosen) == 4
    assert all("model.n_inner=" in line for line in study.chosen)
    assert any(word.startswith("model.n_inner=") for word in study.variants[2].words)


def test_variants_too_far_apart_to_match_are_refused(planned):
    with pytest.raises(ConfigError, match=r"variant 4: study.match=params finds no model.n_inner"):
        planned("vary=model.n_layer=[1,4]", "study.match=params")
    with pytest.raises(ConfigError, match=r"variant none: study.match=flops finds no model.n_inner"):
        planned("vary=model.mlp=[relu2,none]", "study.match=flops")


def test_equal_tokens(planned):
    study = planned("vary=train.batch_size=[4,8,3]", "study.budget=tokens", "train.max_steps=60")
    assert [v.steps for v in study.variants] == [60, 30, 80]


def test_equal_flops(planned):
    study = planned("vary=model.n_layer=[1,3]", "study.budget=flops", "train.max_steps=900")
    spent = [v.steps * v.cost.flops for v in study.variants]
    assert study.variants[1].steps < 500
    assert spent[1] == pytest.approx(spent[0], rel=0.01)


@pytest.fixture
def clock(monkeypatch):
    """clock(**seconds): what a step of each variant takes from now on."""

    def set_to(**seconds):
        taken = {name.lstrip("_"): value for name, value in seconds.items()}
        monkeypatch.setattr(module, "median_seconds", lambda cases, *args, **options: taken)

    return set_to


SECONDS = ("vary=model.n_layer=[1,3]", "study.budget=seconds")


def test_equal_seconds_are_measured_once_and_then_kept(planned, clock):
    clock(_1=0.01, _3=0.02)
    study = planned(*SECONDS, "train.max_steps=100")
    assert [v.steps for v in study.variants] == [100, 50]
    study.save()
    clock(_1=0.01, _3=0.04)
    assert [v.steps for v in planned(*SECONDS, "train.max_steps=100").variants] == [100, 50]


@pytest.mark.parametrize(
    ("before", "now", "steps"),
    [
        ([*SECONDS, "train.max_steps=100"], [*SECONDS, "train.max_steps=200"], [200, 50]),
        (
            [*SECONDS, "train.max_steps=100"],
            [*SECONDS, "train.max_steps=100", "train.batch_size=2"],
            [100, 25],
        ),
        (["vary=model.n_layer=[1,3]", "study.budget=flops"], SECONDS, [40, 10]),
        (["vary=model.n_layer=[1,3]"], SECONDS, [40, 10]),
    ],
    ids=["steps", "words", "flops", "budget"],
)
def test_what_was_measured_for_another_study_is_measured_again(before, now, steps, planned, clock):
    clock(_1=0.01, _3=0.02)
    planned(*before).save()
    clock(_1=0.01, _3=0.04)
    assert [v.steps for v in planned(*now).variants] == steps


# ---- from the weights of another run ----


@pytest.fixture
def first(planned, call, tmp_path):
    """A run with bytes as tokens, learned positions and another shape than what is planned by default."""
    words = [
        *SMALL,
        "data.path=text.txt",
        "tokenizer=byte",
        "position=learned",
        "model.n_head=2",
        "model.n_layer=1",
    ]
    result = call("train", *words, "train.max_steps=2", "train.sample_tokens=0", "out_dir=first")
    assert result.status == 0, result.err
    return tmp_path / "first"


FROM_FIRST = (
    "init_from=first",
    "data=file",
    "data.path=text.txt",
    "device=cpu",
    "precision=fp32",
    "threads=1",
)


def test_a_study_of_a_models_weights_is_planned_with_its_shape_and_tokenizer(first, planned):
    study = planned("vary=optim.lr=[0.01,0.02]", "recipe=study_cpu", *FROM_FIRST, small=False)
    saved = checkpoint.load(first)
    for variant in study.variants:
        setting = variant.cost.setting
        for section in ("model", "position", "tokenizer"):
            assert variant.config[section] == saved.config[section]
        assert setting.vocab_size == 256
        assert variant.parameters == sum(tensor.numel() for tensor in saved.weights.values())


def test_all_its_runs_begin_with_the_checkpoint_that_was_there_in_the_beginning(first, planned, tmp_path):
    (tmp_path / "runs" / "latest").unlink()
    (tmp_path / "runs" / "latest").symlink_to(first)
    words = ("vary=optim.lr=[0.01,0.02]", "init_from=runs/latest", *FROM_FIRST[1:])
    study = planned(*words, small=False)
    pinned = f"init_from={checkpoint.find(first)}"
    assert all(pinned in job.words for job in study.jobs)
    assert all("init_from=runs/latest" not in job.words for job in study.jobs)


def test_weights_in_a_folder_with_a_comma(first, planned, tmp_path):
    first.rename(tmp_path / "a, b")
    words = ("vary=optim.lr=[0.01,0.02]", "init_from='a, b'", *FROM_FIRST[1:])
    (again,) = {v.config["init_from"] for v in planned(*words, small=False).variants}
    assert again == str(checkpoint.find("a, b"))
    study = planned(*words, small=False)
    with composing():
        composed = compose("train", study.jobs[0].words[:-1])
    assert composed["init_from"] == again


def test_a_variant_that_the_weights_do_not_fit_is_refused(first, planned):
    with pytest.raises(
        ConfigError, match=r"variant 3: model.n_layer=3: .*has 1, and its weights fit nothing"
    ):
        planned("vary=model.n_layer=[1,3]", *FROM_FIRST, small=False)
