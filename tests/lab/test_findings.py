"""What is concluded from runs, and what the report says of it."""

import csv
import json
import math
import re

import numpy as np
import pytest

from lab.fakes import findings_of, leave_run
from minilm.lab.report import command, outcome, write

TALES = ("data=tales", "data.n_bytes=60000", "train.max_steps=40", "model.n_embd=32", "model.n_layer=2")


def filled(study, final, *, health=None):
    """The study's runs, with these final losses: by variant, one for each seed."""
    for job in study.jobs:
        end = final[job.variant.name][study.seeds.index(job.seed)]
        leave_run(job, [3 * end, 2 * end, end], health=health, sample=f"<b>{job.variant.name}</b> & so on")
    return findings_of(study)


@pytest.fixture
def scales(planned):
    study = planned("vary=attention.scale=[sqrt,none,0.25]", "seeds=3", *TALES, small=False)
    final = {"sqrt": [1.0, 1.1, 1.2], "none": [1.5, 1.61, 1.69], "0.25": [1.01, 1.09, 1.2]}
    return filled(
        study, final, health={"score_std": 1.0, "entropy": 2.0, "saturated": 0.01, "gradient": 0.005}
    )


def test_on_the_tales_losses_are_distances_to_the_floor(scales):
    base = scales.rows[0]
    assert scales.metric.name == "distance to the entropy floor, nats per token"
    assert base.mean.value == pytest.approx(1.1 - base.variant.floor)
    x, values = scales.curve(base)
    assert x.tolist() == [13, 27, 40]
    assert values[:, -1] + base.variant.floor == pytest.approx([1.0, 1.1, 1.2])


def test_each_variant_is_held_against_the_base(scales):
    _, none, quarter = scales.rows
    assert none.difference.mean.value == pytest.approx(0.5)
    assert (none.verdict, quarter.verdict) == ("higher", "no difference shown")


def test_predictions_are_held_against_what_was_measured(planned):
    study = planned("study=norms", *TALES, "model.block_size=32", small=False)
    findings = filled(
        study,
        {"rmsnorm": [1.0, 1.1, 1.2], "layernorm": [1.3, 1.4, 1.51], "no norm of q and k": [1.01, 1.09, 1.2]},
    )
    assert [row.outcome for row in findings.rows] == ["", "against the prediction", "nothing against it"]


def test_without_a_floor_it_is_the_loss(planned):
    study = planned("vary=model.n_head=[1,2]", "seeds=2")
    findings = filled(study, {"1": [1.0, 1.1], "2": [1.3, 1.4]})
    assert findings.metric.name == "validation loss, nats per token"
    assert findings.rows[0].mean.value == pytest.approx(1.05)


def test_across_tokenizers_it_is_bits_per_byte(planned):
    study = planned("vary=tokenizer=[char,byte]", "seeds=2")
    findings = filled(study, {"char": [1.0, 1.1], "byte": [1.3, 1.4]})
    assert findings.metric.name == "validation loss, bits per byte"
    assert findings.rows[0].mean.value == pytest.approx(1.05 / math.log(2))


def test_a_loss_that_saw_its_targets_is_compared_with_nothing(planned):
    study = planned("vary=mask=[causal,none]", "seeds=3")
    findings = filled(study, {"causal": [1.0, 1.1, 1.2], "none": [0.1, 0.1, 0.1]})
    assert findings.rows[1].difference is None
    assert "no language-modelling loss" in findings.rows[1].verdict


def test_with_one_seed_nothing_is_said_of_significance(planned):
    study = planned("vary=model.n_head=[1,2]", "seeds=1")
    findings = filled(study, {"1": [1.0], "2": [9.0]})
    paths = write(findings)
    for path in paths[2:]:
        text = path.read_text().partition("<body>")[2] or path.read_text()
        assert "nothing can be said" in text
        assert "higher" not in text.replace("highest", "")
        assert "p < 0.05" not in text


# ---- what is written ----


def test_results_have_a_row_a_run_and_the_summary_a_row_a_variant(scales):
    results, summary, *_ = write(scales)
    runs = list(csv.DictReader(results.open()))
    assert [(row["variant"], row["seed"]) for row in runs] == [
        (job.variant.name, str(job.seed)) for job in scales.study.jobs
    ]
    assert float(runs[1]["val_loss"]) == 1.5
    assert float(runs[1]["metric"]) == pytest.approx(1.5 - scales.rows[0].variant.floor)
    assert runs[1]["command"] == command(scales.results[1])
    rows = list(csv.DictReader(summary.open()))
    assert float(rows[1]["difference"]) == pytest.approx(0.5)
    assert float(rows[1]["difference_low"]) < 0.5 < float(rows[1]["difference_high"])


def test_the_page_stands_alone(scales):
    page = write(scales)[-1].read_text()
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert "<script" not in page
    assert "://" not in re.sub(r'xmlns(?::\w+)?="[^"]*"', "", page)
    assert page.count("<svg") == 6
    assert "&lt;b&gt;none&lt;/b&gt; &amp; so on" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    clips = [
        i for i in ids if not i.startswith(("figure", "axes", "patch", "line", "text", "matplotlib", "xtick"))
    ]
    used = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'xlink:href="#([^"]+)"', page))
    assert used <= set(ids)
    assert all(clips.count(i) == 1 for i in used)


def test_every_colour_of_a_figure_is_one_of_the_pages(scales):
    page = write(scales)[-1].read_text()
    figures = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "var(--v0)" in figures
    assert set(re.findall(r"#[0-9a-f]{6}\b", figures)) <= {"#000000"}


def test_the_same_runs_make_the_same_files(scales):
    first = {path.name: path.read_bytes() for path in write(scales)}
    assert first == {path.name: path.read_bytes() for path in write(scales)}


def test_both_reports_tell_the_same_and_how_to_make_it_again(scales):
    *_, markdown, page = (path.read_text() for path in write(scales))
    for row in outcome(scales).rows:
        for cell in row:
            assert cell in markdown
            assert cell.replace("<", "&lt;") in page
    for result in scales.results:
        assert command(result) in markdown
    assert "Holm's correction over 2 comparisons" in markdown
    assert "torch" in markdown


def test_a_failed_run_is_named_with_its_reason(planned):
    study = planned("vary=model.n_head=[1,2]", "seeds=2")
    for job in study.jobs[:-1]:
        leave_run(job, [2.0, 1.0 + 0.1 * job.seed])
    study.jobs[-1].folder.mkdir(parents=True)
    (study.jobs[-1].folder / "failed.txt").write_text("the disk is full")
    findings = findings_of(study)
    assert [result.state for result in findings.results] == ["done", "done", "done", "failed"]
    for path in write(findings)[2:]:
        assert "2, seed 2: failed: the disk is full" in path.read_text()


def test_no_finished_run_at_all_still_makes_a_report(planned):
    study = planned("vary=model.n_head=[1,2]", "seeds=2")
    study.save()
    assert all(path.exists() for path in write(findings_of(study)))


def test_longer_contexts_are_told_with_the_reason_where_there_are_none(planned):
    study = planned("vary=position=[rope,learned]", "seeds=2", "study.evaluate_at=[1,2]")
    for job in study.jobs:
        leave_run(job, [2.0, 1.0])
        beyond = 1.5 if job.variant.name == "rope" else "cannot: learned positions end at 16"
        (job.folder / "longer.json").write_text(json.dumps({"1": 1.0, "2": beyond}))
    text = write(findings_of(study))[2].read_text()
    assert "| rope | 1.0000 | 1.5000 |" in text
    assert "| learned | 1.0000 | cannot: learned positions end at 16 |" in text
    assert "longer.svg" in text


def test_a_run_whose_loss_was_not_finite_counts_for_nothing(planned):
    study = planned("vary=model.n_head=[1,2]", "seeds=2")
    for job in study.jobs:
        leave_run(job, [2.0, 1.0 + 0.1 * job.seed])
    path = study.jobs[-1].folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"val/loss": 1.2', '"val/loss": null'))
    row = findings_of(study).rows[1]
    assert np.isfinite(row.mean.value)
    assert len(row.final) == 1
