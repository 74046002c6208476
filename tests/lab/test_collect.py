"""docs/studies/collect.py copies finished studies beside itself and writes their index."""

import shutil
import subprocess
import sys

from conftest import ROOT

from lab.fakes import findings_of, leave_run
from minilm.lab.report import write


def test_an_index_of_studies_with_what_people_say_of_them(planned, tmp_path):
    study = planned("vary=model.n_head=[1,2]", "seeds=2")
    for job in study.jobs:
        leave_run(job, [2.0, 1.0 + 0.1 * job.seed])
    study.save()
    write(findings_of(study))
    docs = tmp_path / "docs"
    (docs / study.folder.name).mkdir(parents=True)
    (docs / study.folder.name / "words.md").write_text("Two heads are as good as one.")
    shutil.copy(ROOT / "docs" / "studies" / "collect.py", docs)

    subprocess.run([sys.executable, docs / "collect.py", study.folder], check=True)
    index = (docs / "README.md").read_text()
    assert "## What does model.n_head change? ([model.n_head](model.n_head/report.md))" in index
    assert "| 2 | 2 of 2 | 1.1500" in index
    assert "Two heads are as good as one." in index
    for name in ("report.html", "results.csv", "differences.svg", "study.yaml"):
        assert (docs / "model.n_head" / name).exists()

    wrong = subprocess.run([sys.executable, docs / "collect.py", "nowhere"], capture_output=True, text=True)
    assert wrong.returncode
    assert wrong.stderr.strip() == "collect: nowhere holds no report.md: name the folders of finished studies"
