"""What scripts/bench.py does: one bench, measured, printed and written."""

import sys

from minilm.bench.base import Bench
from minilm.bench.measure import Progress
from minilm.bench.report import print_report, write_report
from minilm.bench.setting import Setting
from minilm.build import construct
from minilm.config import Command
from minilm.console import bar
from minilm.finetune import with_vocab_size


def run(command: Command) -> None:
    """Run the bench that the configuration names. Raises ConfigError before anything is measured."""
    config = with_vocab_size(command)
    bench = construct(config, "bench", Bench)
    name = config["bench"]["_target_"].rpartition(".")[0].rpartition(".")[2]  # minilm.bench.NAME.Class
    setting = Setting.of(config)
    with bar(name) as show:
        report = bench.run(setting, Progress(show))
    print_report(report, sys.stdout)
    for path in write_report(name, report, setting, command.out_dir):
        print(path)
