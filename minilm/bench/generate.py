"""Decoding beside its limit: the memory that must be read for each token; and beside others that do the same."""

import logging
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from minilm.bench.base import Bench, Claim, Report, Table
from minilm.bench.measure import Progress, seconds_of
from minilm.bench.report import COLORS
from minilm.bench.setting import Setting
from minilm.decoding import CompiledStep
from minilm.errors import ConfigError
from minilm.generation import Generator
from minilm.model import GPT
from minilm.plots import INK
from minilm.runtime import DTYPES
from minilm.sampling import Sampler

Precision = Literal["fp32", "bf16"]
Writer = Callable[[int], object]  # generates so many tokens
READ_BYTES = 1 << 30  # many times what a processor's caches hold
#: the simple ways to read memory; the quickest counts
READERS: dict[str, Callable[[Tensor], object]] = {
    "sum": torch.sum,
    "dot": lambda buffer: torch.dot(*buffer.chunk(2)),
}


class GenerateBench(Bench):
    """Greedy generation of `new_tokens` from a prompt of `prompt` tokens, by models with random weights.

    precisions: of all weights. batch: texts at once. uncached: also without a cache. peer: also by transformers'
    GPT-2 of the same sizes. over_peer, of_memory: claims, one for each of `precisions`; with over_uncached, over_single
    and tokens_per_second, of the compiled step. None claims nothing.
    """

    def __init__(
        self,
        *,
        precisions: list[Precision],
        prompt: int = 32,
        new_tokens: int = 64,
        batch: int | None = 32,
        uncached: bool = False,
        peer: bool = True,
        repeats: int = 3,
        over_peer: list[float | None],
        of_memory: list[float | None],
        over_uncached: float | None = None,
        over_single: float | None = None,
        tokens_per_second: float | None = None,
    ) -> None:
        for key, claims in (("over_peer", over_peer), ("of_memory", of_memory)):
            if len(claims) != len(precisions):
                raise ConfigError(f"bench.{key}={claims}: one for each of bench.precisions={precisions}")
        if prompt < 1 or new_tokens < 4 or repeats < 1:
            raise ConfigError(
                f"bench.prompt={prompt}, bench.new_tokens={new_tokens}, bench.repeats={repeats}: at least 1, 4 and 1"
            )
        if batch is not None and batch < 2:
            raise ConfigError(f"bench.batch={batch}: 2 texts or more, or null")
        self.precisions, self.prompt, self.new_tokens, self.batch = precisions, prompt, new_tokens, batch
        self.uncached, self.peer, self.repeats = uncached, peer, repeats
        self.over_peer = dict(zip(precisions, over_peer, strict=True))
        self.of_memory = dict(zip(precisions, of_memory, strict=True))
        self.over_uncached, self.over_single = over_uncached, over_single
        self.tokens_per_second = tokens_per_second

    def run(self, setting: Setting, progress: Progress) -> Report:
        plain = setting.model()
        if self.prompt + self.new_tokens > plain.config.block_size:
            raise ConfigError(
                f"bench.prompt={self.prompt} and bench.new_tokens={self.new_tokens} exceed "
                f"model.block_size={plain.config.block_size}"
            )
        writers: dict[tuple[str, str], Writer] = {}
        for precision in self.precisions:
            model = setting.model().to(DTYPES[precision]).eval()
            writers |= {(precision, name): writer for name, writer in self.writers(model, setting).items()}
        progress.expect((self.repeats + 1) * (len(writers) + 1))
        with torch.no_grad():
            rates, gigabytes, way = self.measure(writers, setting, progress)
        table = {precision: self.row(rates, precision) for precision in self.precisions}
        weights = setting.cost.multiplied()  # numbers that a step reads whole
        limits = {p: gigabytes * 1e9 / (weights * DTYPES[p].itemsize) for p in self.precisions}
        count = sum(setting.cost.parameters().values())
        return Report(
            title=f"Decoding: {count / 1e6:.3g} M parameters, {torch.get_num_threads()} threads",
            tables=[self.table(table, limits)],
            claims=[claim for p in self.precisions for claim in self.claims(p, table[p], limits[p])],
            data={
                "rows": [
                    {"precision": p, "name": name, "tokens_per_second": rate}
                    for (p, name), rate in rates.items()
                ],
                "gigabytes_per_second": gigabytes,
                "limits": limits,
            },
            draw=partial(self.draw, table, limits),
            notes=[
                f"Tokens a second after the first, {self.new_tokens} greedy tokens from a prompt of {self.prompt}; the "
                f"median of {self.repeats} rounds, in which all take turns. Memory was read at {gigabytes:.1f} GB/s by "
                f"torch.{way}; the limit is to read {weights * 4 / 1e6:.0f} MB of weights (fp32) for each token."
            ],
        )

    def writers(self, model: GPT, setting: Setting) -> dict[str, Writer]:
        """What generates, by name; each is called with a number of tokens."""
        prompt = setting.tokens(1, self.prompt)
        greedy = Sampler(temperature=0)

        def ours(rows: int = 1, **options: Any) -> Writer:
            generator = Generator(model, greedy, **options)
            return lambda n: list(generator.tokens(prompt.tolist() * rows, n))

        step = CompiledStep(model, "strict")
        found = {"compiled": ours(step=step), "plain": ours()}
        if self.batch:
            found[f"{self.batch} texts"] = ours(self.batch, step=step)
        if self.uncached:
            found["uncached"] = ours(cache=False)
        if self.peer:
            found["transformers"] = transformers_writer(model, prompt)
        return found

    def measure(
        self, writers: dict[tuple[str, str], Writer], setting: Setting, progress: Progress
    ) -> tuple[dict[tuple[str, str], float], float, str]:
        """Tokens a second of each, for one text; and gigabytes a second of the quickest way to read memory."""
        buffer = torch.ones(READ_BYTES // 4, device=setting.device)
        samples: dict[tuple[str, str], list[float]] = {key: [] for key in writers}
        reads: dict[str, list[float]] = {way: [] for way in READERS}
        for round in range(self.repeats + 1):  # the first warms up and compiles
            for key, write in writers.items():
                prefill = seconds_of(partial(write, 1), setting.device)
                whole = seconds_of(partial(write, self.new_tokens), setting.device)
                if round:
                    samples[key].append((self.new_tokens - 1) / (whole - prefill))
                progress.step()
            for way, read in READERS.items():
                seconds = seconds_of(partial(read, buffer), setting.device)
                if round:
                    reads[way].append(buffer.nbytes / seconds / 1e9)
            progress.step()
        rates = {key: median(taken) for key, taken in samples.items()}
        gigabytes, way = max((median(taken), way) for way, taken in reads.items())
        return rates, gigabytes, way

    def row(self, rates: dict[tuple[str, str], float], precision: str) -> dict[str, float]:
        """Tokens a second by name, of all texts of a batch together."""
        many = f"{self.batch} texts"
        return {
            name: rate * (self.batch or 1) if name == many else rate
            for (p, name), rate in rates.items()
            if p == precision
        }

    def table(self, rows: dict[Precision, dict[str, float]], limits: dict[Precision, float]) -> Table:
        names = list(rows[self.precisions[0]])
        shown = [
            [p, *(f"{rows[p][name]:,.4g}" for name in names), f"{limits[p]:,.4g}"] for p in self.precisions
        ]
        return Table("Tokens a second", ["", *names, "memory's limit"], shown)

    def claims(self, precision: Precision, rates: dict[str, float], limit: float) -> list[Claim]:
        ours, claims = rates["compiled"], []

        def claim(text: str, least: float | None, found: float | None) -> None:
            if least is not None and found is not None:
                claims.append(
                    Claim(f"{precision}: {text}", f"at least {least:g}", f"{found:,.4g}", found >= least)
                )

        def over(name: str) -> float | None:
            return ours / rates[name] if name in rates else None

        many = rates.get(f"{self.batch} texts")
        claim("compiled over transformers", self.over_peer[precision], over("transformers"))
        claim("compiled, share of memory's limit", self.of_memory[precision], ours / limit)
        claim("compiled over uncached", self.over_uncached, over("uncached"))
        claim(f"{self.batch} texts over one", self.over_single, many and many / ours)
        claim("compiled, tokens a second", self.tokens_per_second, ours)
        return claims

    def draw(
        self, rows: dict[Precision, dict[str, float]], limits: dict[Precision, float], figure: Any
    ) -> None:
        axes = figure.subplots(1, len(self.precisions), squeeze=False)[0]
        for ax, precision in zip(axes, self.precisions, strict=True):
            names, rates = list(rows[precision]), list(rows[precision].values())
            bars = ax.barh(names, rates, color=[COLORS[1] if name == "compiled" else INK for name in names])
            ax.bar_label(bars, fmt="{:,.4g}", padding=3, fontsize=8)
            ax.axvline(limits[precision], color=COLORS[0], linewidth=1)
            ax.annotate("memory's limit, one text", (limits[precision], 1.01), xycoords=("data", "axes fraction"),
                        color=COLORS[0], fontsize=8, ha="center")  # fmt: skip
            ax.set_xlabel(f"{precision}, tokens a second", color=INK)
            ax.margins(x=0.2)
            ax.invert_yaxis()
            ax.spines[["top", "right"]].set_visible(False)


def transformers_writer(model: GPT, prompt: Tensor) -> Writer:
    """Greedy generation with a cache by transformers' GPT-2 of the same sizes and number type; of random weights."""
    try:
        from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise ConfigError(
            "bench.peer=true needs transformers: pip install -e '.[bench]', or bench.peer=false"
        ) from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    c, weight = model.config, model.head.weight
    shape = GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_embd=c.n_embd,
        n_layer=c.n_layer,
        n_head=c.n_head,
        bos_token_id=None,
        eos_token_id=None,
    )
    peer: Any = GPT2LMHeadModel(shape)
    peer.to(weight.device, weight.dtype).eval()
    everything = torch.ones_like(prompt)

    def write(n: int) -> object:
        options = GenerationConfig(max_new_tokens=n, do_sample=False, use_cache=True, pad_token_id=0)
        return peer.generate(prompt, attention_mask=everything, generation_config=options)

    return write
