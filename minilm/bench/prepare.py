"""How fast text becomes tokens on a disk, beside tiktoken's own rate in one thread; and what memory that takes."""

import json
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from minilm.bench.base import Bench, Claim, Report, Table
from minilm.bench.child import answer
from minilm.bench.measure import Progress, median_seconds
from minilm.bench.report import COLORS, show_bytes, show_seconds
from minilm.bench.setting import Setting
from minilm.bench.step import peak_resident
from minilm.build import construct
from minilm.console import short
from minilm.data import PyDoc, TokenData, Windows
from minilm.errors import ConfigError
from minilm.plots import INK
from minilm.shards import SHARD, Shards
from minilm.sources import Folder, cores
from minilm.tokenizer import BPE, Tokenizer, from_dict

ALONE, PIPELINE = "tiktoken, one thread, texts in memory", "data=folder, from the file to the shards"
DOCUMENT = 2000  # characters
STEPS, BATCH, BLOCK = 2000, 16, 256  # of training's reads in the process that is weighed


class PrepareBench(Bench):
    """A JSONL file through the whole of `data=folder`, in turn with tiktoken on the same texts with the same ranks.

    megabytes: of text, Python's own language reference over and over, cut into documents elsewhere each time. rate:
    claimed of the pipeline's tokens a second, over tiktoken's in one thread times the cores. mapped: megabytes of
    tokens that a process reads windows of at random; claimed is that it grows by a twentieth of them at most.
    """

    def __init__(self, *, megabytes: int, rate: float, mapped: int, repeats: int = 3) -> None:
        if min(megabytes, mapped, repeats) < 1:
            raise ConfigError("bench.megabytes, bench.mapped, bench.repeats: positive whole numbers")
        self.megabytes, self.rate, self.mapped, self.repeats = megabytes, rate, mapped, repeats

    def run(self, setting: Setting, progress: Progress) -> Report:
        tokenizer = construct(
            setting.config, "tokenizer", Tokenizer, method="fit", texts=PyDoc().read(), end=True
        )
        if not isinstance(tokenizer, BPE):
            raise ConfigError("tokenizer: this bench is about byte pairs; choose tokenizer=bpe or gpt2")
        texts = documents(self.megabytes * 10**6)
        progress.expect(2 * self.repeats + 2)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "texts.jsonl")
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
            made: list[TokenData] = []
            cases: dict[str, Callable[[], object]] = {
                ALONE: lambda: [tokenizer._encoding.encode_ordinary(text) for text in texts],
                PIPELINE: lambda: made.append(prepared(path, tokenizer)),
            }
            seconds = median_seconds(cases, setting.device, repeats=self.repeats, least=0, progress=progress)
            data = made[-1]
            words = {"path": str(path), "tokenizer": tokenizer.to_dict()}
            preparing = answer(weigh_preparing, words)
            progress.step()
        reading = answer(weigh_reading, {"bytes": self.mapped * 10**6})
        progress.step()
        n_tokens, n_cores = len(data.train) + len(data.val) - len(texts), cores()  # without the end tokens
        rates = {name: n_tokens / taken for name, taken in seconds.items()}
        ratio = rates[PIPELINE] / rates[ALONE] / n_cores
        grown = reading["grown"]
        rows = [
            [name, show_seconds(seconds[name]), short(rates[name]), f"{rates[name] / rates[ALONE]:.2f}"]
            for name in cases
        ]
        weights = [
            [f"preparing {self.megabytes} MB: the process that reads", show_bytes(preparing["peak"])],
            ["the largest that tokenizes", show_bytes(preparing["child"])],
            [f"training's reads in {self.mapped} MB of tokens: what they add", show_bytes(grown)],
        ]
        return Report(
            title=f"{short(n_tokens)} tokens of {self.megabytes} MB, {n_cores} cores",
            tables=[
                Table("Tokenization", ["", "time", "tokens/s", "×"], rows),
                Table("Peak memory", ["", "resident"], weights),
            ],
            claims=[
                Claim(
                    f"tokens a second of {PIPELINE}, over {n_cores} × those of {ALONE}",
                    f"≥ {self.rate}",
                    f"{ratio:.2f}",
                    ratio >= self.rate,
                ),
                Claim(
                    f"{STEPS * BATCH:,} windows at random: growth over the size of the tokens",
                    "≤ 0.05",
                    f"{grown / self.mapped / 1e6:.3f}",
                    grown <= 0.05 * self.mapped * 1e6,
                ),
            ],
            data={
                "seconds": seconds,
                "tokens_per_second": rates,
                "cores": n_cores,
                "ratio": ratio,
                "preparing": preparing,
                "reading": reading,
            },
            draw=partial(_draw, rates),
            notes=[
                "Times are medians of interleaved repeats; those of the pipeline hold the start of its processes, the "
                "split, checksums, and waiting for the disk.",
                f"The process that reads holds what is to be the next shard, {short(SHARD)} tokens at most.",
            ],
        )


def documents(characters: int) -> list[str]:
    """So much English, in documents that are all different."""
    text = PyDoc().read()

    def cut():
        for turn in range(DOCUMENT):
            for start in range(turn, len(text) - DOCUMENT, DOCUMENT):
                yield text[start : start + DOCUMENT]

    return list(islice(cut(), max(1, characters // DOCUMENT)))


def prepared(path: Path, tokenizer: Tokenizer) -> TokenData:
    with tempfile.TemporaryDirectory() as cache:
        return Folder(path=str(path), val_fraction=0.01).prepare(tokenizer, Path(cache))


# ---- in processes of their own ----


def weigh_preparing(config: dict[str, Any]) -> None:
    """Print the peaks of preparing a file."""
    prepared(Path(config["path"]), from_dict(config["tokenizer"]))
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(json.dumps({"peak": peak_resident(), "child": child}))


def weigh_reading(config: dict[str, Any]) -> None:
    """Print what reading windows at random adds to a process, of files without content, which take no room."""
    with tempfile.TemporaryDirectory() as folder:
        left = config["bytes"]
        arrays: list[np.ndarray] = []
        while left > 0:
            path, size = Path(folder, f"{len(arrays)}.bin"), min(left, 2 * SHARD)
            with open(path, "wb") as file:
                file.truncate(size)
            arrays.append(np.memmap(path, np.uint16, mode="r"))
            left -= size
        windows = Windows(Shards(arrays), BLOCK, seed=0)
        windows.batch(0, BATCH)
        before = peak_resident()
        for step in range(1, STEPS + 1):
            windows.batch(step * BATCH, BATCH)
        print(json.dumps({"grown": peak_resident() - before}))


def _draw(rates: dict[str, float], figure: Any) -> None:
    axes = figure.add_subplot()
    bars = axes.barh(
        list(rates), [rate / 1e6 for rate in rates.values()], color=COLORS[: len(rates)], height=0.5
    )
    axes.bar_label(bars, fmt="{:.2f}", padding=4)
    axes.invert_yaxis()
    axes.set_xlabel("million tokens a second", color=INK)
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
