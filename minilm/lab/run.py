"""What scripts/ablate.py does: plan, run, report."""

import sys
from pathlib import Path

from minilm.bench.report import print_table
from minilm.config import Command
from minilm.errors import installed
from minilm.lab.findings import Findings
from minilm.lab.jobs import launch
from minilm.lab.live import Live
from minilm.lab.study import plan

NEEDED = ("scipy", "statsmodels", "jinja2")


def ablate(command: Command) -> bool:
    """Run a study to its report. False if a run failed. Raises ConfigError before the first run."""
    for package in NEEDED:
        installed(package, f"the lab needs {package}: pip install -e '.[lab]'")
    from minilm.lab.report import outcome, write

    study = plan(command)
    print(f"{study.config.question}\n")
    runs = f"{len(study.variants)} variants × {len(study.seeds)} seeds"
    print(f"{runs} in {study.folder}; the same command goes on with what was stopped")
    for line in study.chosen:
        print(f"  {line}")
    study.save()
    try:
        with Live(study) as live:
            launch(study)
    except (KeyboardInterrupt, SystemExit):
        print("stopped: the same command goes on from here", file=sys.stderr)
        raise
    findings = Findings(study, live.results)
    paths = write(findings)
    print()
    print_table(outcome(findings), sys.stdout)
    for remark in findings.remarks():
        print(remark)
    print()
    here = Path.cwd()
    for path in paths:
        print(path.relative_to(here) if path.is_relative_to(here) else path)
    failed = [result for result in live.results if result.state != "done"]
    if failed:
        print(
            f"{len(failed)} of {len(live.results)} runs failed; the same command tries them again",
            file=sys.stderr,
        )
    return not failed
