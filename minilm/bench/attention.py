"""Time and memory of attention against the context: n² arithmetic always, n² memory only where weights are made."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from minilm.attention.kernels import BACKENDS, attend
from minilm.attention.masks import Mask
from minilm.attention.positions import Position
from minilm.bench.base import Bench, Claim, Report, Table
from minilm.bench.measure import Progress, fit_exponent, fit_growth, free_bytes, median_seconds, peak_bytes
from minilm.bench.report import COLORS, log_axes, show_bytes, show_seconds
from minilm.bench.setting import Setting
from minilm.build import construct
from minilm.cost import FLOAT32
from minilm.errors import ConfigError
from minilm.plots import INK

PASSES = {"forward": False, "forward+backward": True}
MATRICES = 4  # (H, n, n) tensors that the reference holds at once, and some room
TOLERANCE = 0.15  # of a fitted exponent

Case = tuple[str, str, int]  # backend, pass, n


class AttentionBench(Bench):
    """One window of n tokens through the attention of one layer, its projections left out.

    lengths: the values of n, each twice the one before. fit_from: the smallest n whose cost is more than overhead;
    exponents are fitted from there on. budget: seconds of samples after which a case is not repeated further.
    """

    def __init__(
        self,
        *,
        lengths: list[int],
        backends: list[str],
        fit_from: int,
        repeats: int = 5,
        budget: float = 15.0,
    ) -> None:
        if any(b != 2 * a for a, b in pairwise(lengths)) or min(lengths, default=0) < 1:
            raise ConfigError(f"bench.lengths={lengths}: positive numbers, each twice the one before")
        if sum(n >= fit_from for n in lengths) < 3:
            raise ConfigError(f"bench.lengths={lengths}: three or more from bench.fit_from={fit_from} on")
        if unknown := [name for name in backends if name not in BACKENDS]:
            raise ConfigError(f"bench.backends: no {unknown[0]}; expected some of {', '.join(BACKENDS)}")
        self.lengths, self.backends, self.fit_from = lengths, backends, fit_from
        self.repeats, self.budget = repeats, budget

    def run(self, setting: Setting, progress: Progress) -> Report:
        cases, skipped = self.cases(setting)
        progress.expect(len(cases) * (1 + self.repeats))
        peaks = {}
        for case, work in cases.items():
            peaks[case] = peak_bytes(work, setting.device)
            progress.step()
        seconds = median_seconds(
            cases, setting.device, repeats=self.repeats, budget=self.budget, progress=progress
        )
        powers = self.powers(seconds, peaks)
        shape = setting.cost.model
        return Report(
            title=f"Attention: {shape.n_head} heads of {shape.head_dim}, one window of n tokens, {setting.precision}",
            tables=[self.table(name, seconds, peaks) for name in PASSES],
            claims=self.claims(powers, peaks),
            data={
                "rows": [
                    {
                        "backend": case[0],
                        "pass": case[1],
                        "n": case[2],
                        "seconds": seconds[case],
                        "peak_bytes": peak,
                    }
                    for case, peak in peaks.items()
                ],
                "exponents": [
                    {"of": what, "backend": backend, "pass": name, "law": law, "fitted": power}
                    for (what, backend, name), (law, power) in powers.items()
                ],
                "fit_from": self.fit_from,
            },
            draw=partial(self.draw, seconds, peaks),
            notes=[
                "Time is the median of interleaved repeats. Memory is the most that is held at once beside queries, "
                f"keys and values. Exponents are fitted over n = {self.fit_from} … {self.lengths[-1]}, those of memory "
                "to its growth: buffers of a fixed size are left out.",
                *(f"Left out for want of memory: {' '.join(map(str, case))}." for case in skipped),
            ],
        )

    def cases(self, setting: Setting) -> tuple[dict[Case, Callable[[], object]], list[Case]]:
        """The calls to measure, and those that would not fit in memory."""
        shape, device = setting.cost.model, setting.device
        if setting.cost.chunk is not None:
            raise ConfigError(
                "bench=attention compares the backends of softmax attention, which attention=linear does without; "
                "see bench=decode attention=linear"
            )
        mask = construct(setting.config, "mask", Mask)
        position = construct(
            setting.config,
            "position",
            Position,
            n_embd=shape.n_embd,
            n_head=shape.n_head,
            head_dim=shape.head_dim,
            block_size=self.lengths[-1],
        )
        groups = shape.n_kv_head or shape.n_head
        free = free_bytes(device)
        cases: dict[Case, Callable[[], object]] = {}
        skipped = []
        for n in self.lengths:
            inputs = [
                torch.randn(1, heads, n, shape.head_dim, device=device, dtype=setting.dtype)
                for heads in (shape.n_head, groups, groups)
            ]
            square = FLOAT32 * shape.n_head * n * n  # the precision that the reference works in
            for backend in self.backends:
                kernel = partial(attend, mask=mask, position=position.to(device), backend=backend)
                for name, backward in PASSES.items():
                    if backend == "reference" and MATRICES * square > free:
                        skipped.append((backend, name, n))
                    else:
                        cases[backend, name, n] = partial(_call, kernel, inputs, backward)
        return cases, skipped

    def powers(
        self, seconds: dict[Case, float], peaks: dict[Case, int]
    ) -> dict[tuple[str, str, str], tuple[int, float]]:
        """(what, backend, pass) -> the power of n that the law says, and the fitted one."""
        powers = {}
        for backend in self.backends:
            for name in PASSES:
                sizes = [n for n in self.lengths if n >= self.fit_from and (backend, name, n) in seconds]
                if len(sizes) > 2:
                    time = fit_exponent(sizes, [seconds[backend, name, n] for n in sizes])
                    memory = fit_growth(sizes, [peaks[backend, name, n] for n in sizes])
                    powers["time", backend, name] = (2, time)
                    powers["memory", backend, name] = (2 if backend == "reference" else 1, memory)
        return powers

    def claims(
        self, powers: dict[tuple[str, str, str], tuple[int, float]], peaks: dict[Case, int]
    ) -> list[Claim]:
        claims = [
            Claim(
                f"{what} of {backend}, {name}: power of n",
                f"{law} ± {TOLERANCE}",
                f"{power:.2f}",
                abs(power - law) <= TOLERANCE,
            )
            for (what, backend, name), (law, power) in powers.items()
        ]
        n = self.lengths[-1]
        reference, fused = peaks.get(("reference", "forward", n)), peaks.get(("fused", "forward", n))
        if reference and fused:
            text = f"peak memory of fused over reference, forward, at n = {n}"
            claims.append(Claim(text, "below 1/20", f"1/{reference / fused:,.0f}", reference > 20 * fused))
        return claims

    def table(self, name: str, seconds: dict[Case, float], peaks: dict[Case, int]) -> Table:
        columns = ["n"]
        for backend in self.backends:
            columns += [f"{backend}: time", "×", "memory", "×"]
        rows = []
        for n in self.lengths:
            row = [str(n)]
            for backend in self.backends:
                row += [*_grown(seconds, (backend, name, n), show_seconds)]
                row += [*_grown(peaks, (backend, name, n), show_bytes)]
            rows.append(row)
        return Table(f"{name}; × is what doubling n does: 4 for n², 2 for n", columns, rows)

    def draw(self, seconds: dict[Case, float], peaks: dict[Case, int], figure: Any) -> None:
        panels: list[tuple[str, Mapping[Case, float], tuple[int, ...]]] = [
            ("time, seconds", seconds, (2,)),
            ("peak memory, bytes", peaks, (2, 1)),
        ]
        for place, (label, values, laws) in enumerate(panels, start=1):
            axes = log_axes(figure, (1, 2, place), "n, tokens of context", label)
            for backend, color in zip(self.backends, COLORS, strict=False):
                for name, style in zip(PASSES, ("-", "--"), strict=True):
                    sizes = [n for n in self.lengths if (backend, name, n) in values]
                    points = [values[backend, name, n] for n in sizes]
                    text = f"{backend}, {name}"
                    axes.plot(sizes, points, style, color=color, marker="o", markersize=3.5, label=text)
            for law, backend in zip(laws, (self.backends[0], self.backends[-1]), strict=False):
                sizes = [n for n in self.lengths if (backend, "forward", n) in values and n >= self.fit_from]
                end = 2 * max(
                    values[backend, name, sizes[-1]] for name in PASSES
                )  # beside the curves, not on them
                line = [end * (n / sizes[-1]) ** law for n in sizes]
                text = "the law, n²" if law == 2 else "the law, n"
                axes.plot(sizes, line, ":" if law == 2 else "-.", color=INK, linewidth=1.2, label=text)
            axes.legend(frameon=False, fontsize=8)


def _call(kernel: Callable[..., torch.Tensor], inputs: list[torch.Tensor], backward: bool) -> None:
    if not backward:
        with torch.no_grad():
            kernel(*inputs)
        return
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = kernel(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def _grown(values: Mapping[Case, float], case: Case, show: Callable[[float], str]) -> tuple[str, str]:
    """A value, and how many times it is that of half the length."""
    half = (*case[:2], case[2] // 2)
    if case not in values:
        return "–", ""
    return show(values[case]), f"{values[case] / values[half]:.2f}" if half in values else ""
