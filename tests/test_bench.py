"""Benches measure what they say: known laws are found, memory is all of it, and a run leaves its three files."""

import json
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from minilm.attention import Causal, attend
from minilm.bench import generate
from minilm.bench.base import Table
from minilm.bench.measure import Progress, fit_exponent, fit_growth, median_seconds, peak_bytes
from minilm.bench.report import print_table, show_bytes, show_seconds
from minilm.bench.run import run
from minilm.bench.step import peak_resident
from minilm.config import Command
from minilm.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
CPU = torch.device("cpu")
TINY = [
    "model=micro",
    "model.n_layer=1",
    "model.n_embd=32",
    "model.n_head=2",
    "model.block_size=64",
    "model.ngrams=[]",
    "device=cpu",
]


def bench(folder: Path, *words: str) -> dict:
    """The JSON that a bench leaves."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = OmegaConf.to_container(compose("bench", overrides=[*TINY, *words]), resolve=True)
    run(Command(config, said=[], out_dir=folder, default_out_dir=False))
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert path.with_suffix(".txt").read_text()
    return json.loads(path.read_text())


# Laws


@pytest.mark.parametrize("power", [0.5, 1, 2, 3])
def test_a_power_law_is_found(power):
    sizes = [256, 512, 1024, 4096]
    assert fit_exponent(sizes, [7e-6 * n**power for n in sizes]) == pytest.approx(power)


def test_noise_moves_a_fit_a_little():
    sizes = [2**i for i in range(8, 14)]
    noise = 1 + 0.05 * np.random.default_rng(0).standard_normal(len(sizes))
    assert fit_exponent(sizes, np.array(sizes) ** 2.0 * noise) == pytest.approx(2, abs=0.05)


def test_growth_leaves_a_fixed_part_out():
    sizes = [256, 512, 1024, 2048]
    values = [1e6 + 3 * n for n in sizes]
    assert fit_exponent(sizes, values) < 0.01
    assert fit_growth(sizes, values) == pytest.approx(1)


# Clocks


def test_cases_take_turns_and_the_median_is_taken():
    calls = []

    def case(name):
        return lambda: (calls.append(name), time.sleep(0.001 if name == "quick" else 0.004))

    seconds = median_seconds({"quick": case("quick"), "slow": case("slow")}, CPU, repeats=3, least=0)
    assert seconds["quick"] < seconds["slow"]
    assert calls == ["quick", "slow"] * 4  # the first round warms up


def test_a_case_over_its_budget_has_three_samples_and_no_more():
    calls = []
    median_seconds(
        {"slow": lambda: (calls.append(1), time.sleep(0.01))}, CPU, repeats=9, budget=0.01, least=0
    )
    assert len(calls) == 1 + 3


def test_quick_work_is_repeated_within_a_sample():
    calls = []
    median_seconds({"quick": lambda: calls.append(1)}, CPU, repeats=1, least=0.001)
    assert len(calls) > 20


# Memory


def test_peak_is_what_is_held_at_once():
    def work():
        a = torch.ones(1000, dtype=torch.float64)
        b = a + 1  # two at once
        del a, b
        torch.ones(500, dtype=torch.float64)

    assert peak_bytes(work, CPU) == pytest.approx(16_000, abs=100)
    assert peak_bytes(lambda: None, CPU) == 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process's peak")
def test_the_operating_system_sees_the_same_peak():
    # in a process of its own, where freed memory goes back to the system at once: weights of 48 MiB
    code = """
import re, sys, torch
from pathlib import Path
from minilm.attention import Causal, attend
from minilm.bench.measure import peak_bytes

q, k, v = torch.randn(3, 1, 3, 2048, 16).unbind()

def work():
    attend(q, k, v, mask=Causal(), backend="reference")

def status(key):
    return int(re.search(rf"{key}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

work()
try:
    Path("/proc/self/clear_refs").write_text("5")
except OSError:
    sys.exit("this kernel does not reset the peak")
before = status("VmRSS")
work()
print(status("VmHWM") - before, peak_bytes(work, torch.device("cpu")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "does not reset" in done.stderr:
        pytest.skip(done.stderr.strip())
    seen, counted = map(int, done.stdout.split())
    assert seen == pytest.approx(counted, rel=0.1)


def test_only_the_reference_holds_the_weights():
    q, k, v = torch.randn(3, 1, 2, 512, 16).unbind()
    weights = 2 * 512 * 512 * 4
    peaks = [
        peak_bytes(lambda b=b: attend(q, k, v, mask=Causal(), backend=b), CPU) for b in ("reference", "fused")
    ]
    assert peaks[0] > 2 * weights
    assert peaks[1] < weights / 2


# Whole benches


def test_attention_bench(tmp_path, capsys):
    found = bench(
        tmp_path, "bench=attention", "bench.lengths=[16,32,64]", "bench.fit_from=16", "bench.repeats=1"
    )
    assert len(found["rows"]) == 2 * 2 * 3
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in found["rows"])
    fitted = {(e["of"], e["backend"], e["pass"]): e["fitted"] for e in found["exponents"]}
    assert fitted["memory", "reference", "forward"] > 1.8
    assert found["machine"]["device"].startswith("cpu")
    out = capsys.readouterr().out
    assert "peak memory of fused over reference" in out
    assert str(tmp_path / "attention.png") in out


def test_decode_bench(tmp_path):
    words = ["bench=decode", "bench.contexts=[16,64]", "bench.repeats=2"]
    found = bench(tmp_path, *words, "vocab_size=50")
    first, last = found["rows"]
    assert last["cache_bytes"] == 4 * first["cache_bytes"] == last["formula_bytes"]
    assert last["uncached_seconds"] > 0


GENERATE = [
    *("bench=generate", "vocab_size=50", "bench.prompt=4", "bench.new_tokens=6", "bench.repeats=1"),
    *("bench.precisions=[fp32]", "bench.over_peer=[0.001]", "bench.of_memory=[null]", "bench.uncached=true"),
]


def test_generate_bench(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "CompiledStep", lambda model, mode: model)
    monkeypatch.setattr(generate, "READ_BYTES", 1 << 12)
    found = bench(tmp_path, *GENERATE, "bench.batch=3", "bench.over_single=1e9")
    names = ["compiled", "plain", "3 texts", "uncached", "transformers"]
    assert [row["name"] for row in found["rows"]] == names
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])
    assert [claim["holds"] for claim in found["claims"]] == [True, False]
    weights = 12 * 32 * 32 + 50 * 32  # the numbers in one layer's matrices, and in the head
    assert found["limits"]["fp32"] * 4 * weights == pytest.approx(found["gigabytes_per_second"] * 1e9)


def test_without_transformers_the_generate_bench_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[bench\]', or bench.peer=false"):
        bench(tmp_path, *GENERATE)


@pytest.mark.parametrize("words", [["attention=linear"], ["mask=sliding", "mask.window=16"]])
def test_decoding_on_and_on_needs_no_more_memory(tmp_path, words):
    found = bench(
        tmp_path, "bench=decode", "bench.contexts=[16,600]", "bench.uncached_to=16", "bench.repeats=2", *words
    )
    first, last = found["rows"]
    assert first["cache_bytes"] == last["cache_bytes"] == last["formula_bytes"]
    assert last["uncached_seconds"] is None


def test_step_bench(tmp_path):
    words = ["bench=step", "train.batch_size=2", "bench.ways=[fp32,bf16]", "bench.repeats=1"]
    found = bench(tmp_path, *words, "model.n_embd=64")
    plain, half = found["rows"]
    assert (plain["way"], half["way"]) == ("fp32", "bf16")
    assert plain["planned_bytes"] > half["planned_bytes"] > 0
    assert all(row["seconds"] > 0 and row["peak"] > row["grown"] > 0 for row in found["rows"])
    assert found["flops"] > 6 * 2 * 64 * 64**2  # 3 passes of 2 FLOPs a token for each weight of one matrix
    assert len(found["claims"]) == 4


def test_the_resident_peak_grows_with_what_a_process_touches():
    before = peak_resident()
    torch.ones(before // 4 + (64 << 20))  # as many bytes again, and more
    assert peak_resident() >= before + (64 << 20)


@pytest.mark.slow
def test_prepare_bench(tmp_path):
    words = [
        "bench=prepare",
        "bench.megabytes=1",
        "bench.repeats=1",
        "bench.mapped=100",
        "tokenizer.vocab_size=500",
    ]
    found = bench(tmp_path, *words)
    one, pipeline = found["tokens_per_second"].values()
    assert found["ratio"] == pytest.approx(pipeline / one / found["cores"])
    assert [claim["holds"] for claim in found["claims"]] == [found["ratio"] >= 0.8, True]
    assert found["preparing"]["peak"] > 0


def test_start_bench(tmp_path):
    found = bench(tmp_path, "bench=start", "bench.repeats=1")
    assert len(found["seconds"]) == 4
    assert found["seconds"]["the first training step"] > found["seconds"]["import torch"] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["bench=step", "bench.ways=[fp32,fp8]"], "fp8: expected fp32 or bf16"),
        (["bench=step", "bench.ways=[fp32]"], "two or more"),
        (["bench=prepare", "tokenizer=byte"], "tokenizer.vocab_size: no such key here"),
        (["bench=prepare", "bench.megabytes=0"], "positive whole numbers"),
        (["bench=step", "bench.ways=[bf16 compiled,fp32]"], "the first not compiled"),
        (["bench=attention", "bench.lengths=[100,300]"], "twice the one before"),
        (["bench=attention", "bench.backends=[flash]"], "no flash; expected some of reference"),
        (["bench=attention", "attention=linear"], "see bench=decode"),
        (
            ["bench=decode", "bench.contexts=[16,100]", "bench.repeats=2"],
            "100 tokens exceed model.block_size=64",
        ),
        (["bench=decode", "bench.contexts=[16]"], "two or more"),
        (["bench=decode", "vocab_size=0"], "vocab_size=0: a positive"),
        ([*GENERATE, "bench.over_peer=[1,2]"], "one for each of bench.precisions"),
        ([*GENERATE, "bench.new_tokens=1000"], "exceed model.block_size=64"),
        ([*GENERATE, "bench.batch=1"], "bench.batch=1: 2 texts or more"),
    ],
)
def test_mistakes_are_told_before_measuring(tmp_path, words, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        bench(tmp_path, *words)


# Looks


def test_tables_are_plain_where_there_is_no_terminal(capsys):
    print_table(Table("Bytes", ["", "n"], [["[weights]", "12"], ["all", "1234"]]), sys.stdout)
    assert capsys.readouterr().out == "Bytes\n              n\n[weights]    12\nall        1234\n\n"


def test_progress_tells_the_steps_done_and_those_there_are():
    told = []
    progress = Progress(lambda *counts: told.append(counts))
    progress.expect(3)
    progress.step()
    progress.expect(1)
    progress.step(2)
    assert told == [(1, 3), (3, 4)]


def test_numbers_are_short():
    assert [show_seconds(s) for s in (0.00123, 2.5, 61, 4000)] == [
        "1.23 ms",
        "2.5 s",
        "1 min 1 s",
        "1 h 7 min",
    ]
    assert [show_bytes(n) for n in (12, 1536, 3 << 30)] == ["12 B", "1.5 KiB", "3 GiB"]


# The check of a GPU


def test_without_a_gpu_its_check_says_what_it_skipped(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    check = runpy.run_path(str(CONFIGS.parent / "scripts" / "gpu_check.py"))
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert check["main"]() == 0
    assert "no CUDA device here; skipped" in capsys.readouterr().out
    check["agree"]("fused", [(Causal(), "sqrt", check["POSITIONS"][1], 2)], torch.float64)
    assert capsys.readouterr().out.startswith("ok    fused agrees with the reference, float64: 1 of 1 cases")


def test_what_a_gpu_trains_at_runs_here_at_a_tiny_size(capsys):
    check = runpy.run_path(str(CONFIGS.parent / "scripts" / "gpu_check.py"))
    words = [word for word in check["GPT2"] if word not in ("compile=strict", "device=cuda")]
    tiny = ["model.n_layer=1", "model.n_head=2", "model.n_embd=32", "model.block_size=16", "vocab_size=64"]
    check["uses_the_device"](*words, *tiny, "device=cpu", widths=(64,))
    out = capsys.readouterr().out
    assert "64 windows of 16 tokens: " in out
    assert "products of 64³: " in out
    assert "by plain matrix products" in out  # as a CPU trains in half precision
