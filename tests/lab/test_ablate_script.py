"""scripts/ablate.py from end to end: a study's folder, one that was killed, one with a run that fails."""

import csv
import io
import json
import re
import shlex
import signal
from pathlib import Path

import pytest
import yaml

from minilm import checkpoint, training
from minilm.lab import live, stats
from minilm.lab.live import Live

CLOCK = ("tokens_per_second", "train_seconds")
STUDY = ("vary=attention.scale=[sqrt,none]", "seeds=2", "study.evaluate_at=[1,2]", "out_dir=study")


def results(folder):
    return list(csv.DictReader((folder / "results.csv").open()))


def without_clock(folder: Path) -> dict[str, object]:
    """All that a study reports, but for what a clock measured."""
    found: dict[str, object] = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    found["results.csv"] = [{k: v for k, v in row.items() if k not in CLOCK} for row in results(folder)]
    found["report.html"] = re.sub(r'<span class="clock">.*?</span>', "", str(found["report.html"]))
    lines = str(found["report.md"]).splitlines()
    at = lines.index("## What it cost")
    last_two_cells = re.compile(r"\|[^|]*\|[^|]*\|$")
    found["report.md"] = lines[:at] + [last_two_cells.sub("", line) for line in lines[at:]]
    return found


@pytest.fixture(autouse=True)
def no_pictures_of_single_runs(monkeypatch):
    monkeypatch.setattr(training, "plot_loss", lambda *args, **options: None)


@pytest.fixture(scope="module")
def whole(forked, tiny, tmp_path_factory):
    """A study that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    result = forked("ablate", *STUDY, *tiny, cwd=folder)
    assert result.status == 0, result.err
    return folder / "study", result


def test_a_study_leaves_its_runs_and_a_report(whole):
    folder, result = whole
    names = {path.name for path in folder.iterdir()}
    assert {"report.html", "report.md", "results.csv", "summary.csv", "study.yaml", "sqrt", "none"} <= names
    assert {row["state"] for row in results(folder)} == {"done"}
    assert sum(line.startswith(("sqrt, seed", "none, seed")) for line in result.out.splitlines()) == 4
    assert result.out.splitlines()[-1] == "study/report.html"
    assert "minus sqrt [95 %]" in result.out
    log = (folder / "none" / "seed_2" / "log.txt").read_text()
    assert "step 20/20" in log  # a run's own words go there and not on the table


def test_the_loss_in_the_report_is_the_runs_own(whole):
    folder, _ = whole
    for row in results(folder):
        run = folder / row["variant"] / f"seed_{row['seed']}"
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        assert float(row["val_loss"]) == last["val/loss"] == float(row["val_loss_at_1x"])
        assert float(row["val_loss_at_2x"]) != last["val/loss"]


def test_its_command_makes_a_run_again(whole, forked, tmp_path):
    folder, _ = whole
    row = results(folder)[3]
    words = shlex.split(row["command"])[2:]
    assert forked("train", *words, cwd=tmp_path).status == 0
    run = tmp_path / "study" / row["variant"] / f"seed_{row['seed']}"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val/loss"] == float(row["val_loss"])


def test_a_killed_study_ends_as_the_unbroken_one(whole, forked, tiny, tmp_path):
    unbroken, _ = whole
    killed = forked("ablate", *STUDY, *tiny, cwd=tmp_path, at="_update 12 2", send=[signal.SIGKILL])
    assert killed.status == -signal.SIGKILL
    half = tmp_path / "study" / "sqrt" / "seed_2"
    assert checkpoint.find(half).name == "step_00000008"
    assert not (tmp_path / "study" / "none" / "seed_2").exists()
    kept = tmp_path / "study" / "none" / "seed_1" / "metrics.jsonl"
    before = kept.stat().st_mtime_ns

    again = forked("ablate", *STUDY, *tiny, cwd=tmp_path)
    assert again.status == 0, again.err
    assert "2 of 4 runs are done already" in again.out
    assert kept.stat().st_mtime_ns == before
    assert without_clock(tmp_path / "study") == without_clock(unbroken)


def test_an_interrupt_stops_the_study_and_loses_nothing(forked, tiny, tmp_path):
    stopped = forked("ablate", *STUDY, *tiny, cwd=tmp_path, at="_update 5 1", send=[signal.SIGINT])
    assert stopped.status == 128 + signal.SIGINT
    assert "the same command goes on" in stopped.err
    assert checkpoint.find(tmp_path / "study" / "sqrt" / "seed_1").name == "step_00000006"
    assert not (tmp_path / "study" / "none").exists()
    assert not (tmp_path / "study" / "sqrt" / "seed_1" / "failed.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_other_launchers_come_to_the_same(launcher, whole, forked, tiny, tmp_path):
    result = forked("ablate", *STUDY, *tiny, f"hydra/launcher={launcher}", cwd=tmp_path)
    assert result.status == 0, result.err
    ours, theirs = without_clock(tmp_path / "study"), without_clock(whole[0])
    assert ours["results.csv"] == theirs["results.csv"]
    assert ours["summary.csv"] == theirs["summary.csv"]


# ---- in this process ----


def test_a_run_that_fails_is_told_and_the_others_go_on(call, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("vary=optim.lr=[0.01,1e30]", "seeds=2", "optim=adamw", "out_dir=study")
    result = call("ablate", *words, *tiny)
    assert result.status == 1
    assert [row["state"] for row in results(tmp_path / "study")] == ["done", "failed", "done", "failed"]
    assert "1e+30, seed 2: failed: step 1: the loss is" in result.out
    assert "the loss is nan" in (tmp_path / "study" / "report.md").read_text()
    assert "2 of 4 runs failed" in result.err


def test_what_no_mistake_of_the_users_explains_fails_alone_too(call, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = training.Trainer.fit

    def fit(self):
        if self.seed == 1:
            raise LookupError("no room\nat all")
        plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "fit", fit)
        assert call("ablate", *STUDY, *tiny).status == 1
    assert [row["reason"] for row in results(tmp_path / "study")] == ["LookupError: no room"] * 2 + [""] * 2
    assert "Traceback" in (tmp_path / "study" / "sqrt" / "seed_1" / "log.txt").read_text()
    assert call("ablate", *STUDY, *tiny).status == 0  # the failed ones are tried again


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vary=attention.scale=[sqrt,-3]"], "ablate: variant -3: attention.scale"),
        (["study=attention_scael"], "ablate: study=attention_scael: did you mean attention_scale?"),
        (["study.buget=steps"], "ablate: study.buget: no such key; did you mean study.budget?"),
        (
            ["vary=model.n_head=[1,2]", "train.max_step=3"],
            "train.max_step: no such key; did you mean train.max_steps?",
        ),
        (["vary=model.n_head=[1,2]", "hydra/launcher=nowhere"], "hydra/launcher=nowhere: expected one of"),
    ],
)
def test_mistakes_get_one_line_before_the_first_run(words, message, call, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("ablate", *words, *tiny)
    assert result.status == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_help_names_the_studies(call):
    text = call("ablate", "--help").out
    assert "attention_scale" in text
    assert "vary=" in text


NAMED = """
defaults: [own]
name: "12"
variants:
  one head: model.n_head=1
  2 heads, 1 of keys: [model.n_head=2, model.n_kv_head=1]
"""


def test_names_are_free_and_lengths_may_be_asked_for_later(call, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine/study").mkdir(parents=True)
    Path("mine/study/named.yaml").write_text(NAMED)
    words = ("study=named", f"--config-dir={Path('mine').resolve()}", "seeds=1", "out_dir='a, b'", *tiny)
    result = call("ablate", *words, "study.evaluate_at=[1]")
    assert result.status == 0, result.err
    run = tmp_path / "a, b" / "2_heads_1_of_keys" / "seed_1"
    assert yaml.safe_load((run / "config.yaml").read_text())["wandb"]["group"] == "12"
    before = (run / "metrics.jsonl").stat().st_mtime_ns

    result = call("ablate", *words, "study.evaluate_at=[1,2]")
    assert result.status == 0, result.err
    assert all(row["val_loss_at_2x"] for row in results(tmp_path / "a, b"))
    assert (run / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_study_of_finetuning_begins_with_the_weights_and_goes_on(call, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = call("train", *tiny, "train.max_steps=4", "out_dir=first")
    assert first.status == 0, first.err
    few = [word for word in tiny if not word.startswith(("model.", "train.max_steps"))]
    words = ("vary=optim.lr=[0.001,0.002]", "seeds=1", "out_dir=study", *few, "init_from=runs/latest")
    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "_update", stopping(training.Trainer._update, at=12))
        assert call("ablate", *words, "train.max_steps=16").status == 1
    words = (*words[:-1], "init_from=first")  # runs/latest has moved on
    result = call("ablate", *words, "train.max_steps=16")
    assert result.status == 0, result.err
    for row in results(tmp_path / "study"):
        run = tmp_path / "study" / row["variant"] / "seed_1"
        assert checkpoint.find(run).name == "step_00000016"
        assert checkpoint.load(run).config["init_from"] == str(checkpoint.find("first"))
    assert call("ablate", *words, "train.max_steps=16").status == 0


def stopping(update, at):
    def disturbed(self, *args, **options):
        if self.step == at:
            raise MemoryError("no room")
        return update(self, *args, **options)

    return disturbed


# ---- the table ----


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_the_table_shows_each_run(planned, monkeypatch):
    from lab.fakes import leave_run

    monkeypatch.setattr(live, "REFRESH_SECONDS", 0.01)
    monkeypatch.setenv("COLUMNS", "110")
    study = planned("vary=model.n_head=[1,2]", "seeds=[1,22]")
    leave_run(study.jobs[0], [2.0, 1.5])
    screen = Terminal()
    with Live(study, screen):
        leave_run(study.jobs[1], [2.0, 1.25])
        job = study.jobs[2]
        job.folder.mkdir(parents=True)
        record = {"step": 10, "tokens": 640, "train_seconds": 5.0, "train/loss": 3.125}
        (job.folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        (study.jobs[3].folder).mkdir(parents=True)
        (study.jobs[3].folder / "failed.txt").write_text("no room")
    last = screen.getvalue().rpartition("variant")[2]
    rows = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).split() for line in last.splitlines()]
    assert ["1", "1", "40/40", "1.5000", "done"] in rows
    assert ["2", "1", "40/40", "1.2500", "done"] in rows
    assert ["1", "22", "10/40", "3.1250", "0:00:15", "running"] in rows
    assert ["2", "22", "0/40", "no", "room"] in rows
    assert "3 of 4 runs have ended" in last


# ---- what is planted is found, and nothing else ----

PLANTED = """
defaults: [own]
question: Is there what was put there?
variants: {once: [], twice: [], slow: optim.lr=0.0001}
"""


def planted(call, tiny, seeds):
    """The folder of a study of a variant, the same under another name, and a rate 100 times lower."""
    Path("mine/study").mkdir(parents=True)
    Path("mine/study/planted.yaml").write_text(PLANTED)
    words = ("study=planted", f"seeds={seeds}", "optim=adamw", "optim.lr=0.01", "train.sample_tokens=0")
    result = call("ablate", f"--config-dir={Path('mine').resolve()}", *tiny, *words)
    assert result.status == 0, result.err
    return Path("runs/studies/planted")


def test_a_planted_effect_is_found_and_a_planted_null_is_not(call, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = csv.DictReader((planted(call, tiny, 3) / "summary.csv").open())
    assert [row["verdict"] for row in rows] == ["", "no difference shown", "higher"]


@pytest.mark.slow
def test_twenty_times(call, tiny, tmp_path, monkeypatch):
    """The same with three new seeds each time; and a null that is not exact, a variant against its other seeds."""
    monkeypatch.chdir(tmp_path)
    losses: dict[str, list[float]] = {"once": [], "twice": [], "slow": []}
    for row in results(planted(call, tiny, 60)):
        losses[row["variant"]].append(float(row["metric"]))

    def study(i, name, shift=0):
        return dict(enumerate(losses[name][3 * (i - shift) :][:3]))

    found = [
        stats.differences(study(i, "once"), {n: study(i, n) for n in ("twice", "slow")}) for i in range(20)
    ]
    assert sum(each["twice"].verdict == "not shown" for each in found) >= 18
    assert sum(each["slow"].verdict == "higher" for each in found) >= 18
    others = [stats.differences(study(i, "once"), {"b": study(i, "once", shift=1)}) for i in range(1, 20)]
    assert sum(each["b"].verdict != "not shown" for each in others) <= 3  # 1 of 20 is expected
