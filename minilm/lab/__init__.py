"""Ablation studies: the same training run in several variants and with several seeds, and what the difference is.

study.py    which runs there are, checked before the first          jobs.py     hands them to Hydra's launchers
results.py  what the runs left in their folders                     live.py     the table while they train
stats.py    means, intervals, paired differences                    charts.py   figures, as SVG
report.py   report.md, report.html and the CSV files                run.py      all of it in order
"""
