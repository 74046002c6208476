"""Measurements that state what they expect. A bench is a small class here and one file in configs/bench/:

    class MyBench(Bench):
        def __init__(self, *, repeats: int = 5): ...
        def run(self, setting: Setting, progress: Progress) -> Report: ...

Its report holds what it measured, as tables and a picture, and the claims that bears out or not. Printing and
writing it is not a bench's business.
"""

from minilm.bench.base import Bench, Claim, Report, Table
from minilm.bench.measure import Progress
from minilm.bench.setting import Setting

__all__ = ["Bench", "Claim", "Progress", "Report", "Setting", "Table"]
