"""One more token: how long it takes and what it must remember, with a cache and without, against the context."""

from collections.abc import Callable
from functools import partial
from typing import Any

from minilm.attention.cache import KVCache
from minilm.bench.base import Bench, Claim, Report, Table
from minilm.bench.measure import Progress, median_seconds
from minilm.bench.report import COLORS, log_axes, show_bytes, show_seconds
from minilm.bench.setting import Setting
from minilm.cost import FLOAT32
from minilm.errors import ConfigError
from minilm.model import GPT
from minilm.plots import INK
from minilm.runtime import autocast, inference

PIECE = 512  # tokens that are read into a cache at a time

Case = tuple[str, int]  # cached or uncached, tokens of context


class DecodeBench(Bench):
    """The last of `contexts` tokens of one text, by a model with random weights.

    contexts: above block_size only where the model forgets, and so never fills. uncached_to: the longest context
    that is also read without a cache. budget: seconds of samples after which a case is not repeated further.
    flat, steep: claims on the time at the longest context over that at the shortest, cached and uncached.
    """

    def __init__(
        self,
        *,
        contexts: list[int],
        uncached_to: int = 4096,
        repeats: int = 16,
        budget: float = 20.0,
        flat: float = 1.5,
        steep: float = 10.0,
    ) -> None:
        self.contexts = sorted(set(contexts))
        if len(self.contexts) < 2 or self.contexts[0] < repeats + 2:
            raise ConfigError(
                f"bench.contexts={contexts}: two or more, each above bench.repeats={repeats} by 2"
            )
        self.uncached_to, self.repeats, self.budget = uncached_to, repeats, budget
        self.flat, self.steep = flat, steep

    def run(self, setting: Setting, progress: Progress) -> Report:
        model = setting.model()
        size = model.config.block_size
        if self.contexts[-1] > size and not model.rolls:
            raise ConfigError(
                f"bench.contexts: {self.contexts[-1]} tokens exceed model.block_size={size}, and this model does not "
                "forget; set it higher, or choose mask=sliding or attention=linear with position=rope"
            )
        uncached = [n for n in self.contexts if n <= self.uncached_to]
        progress.expect(len(self.contexts) + self.repeats * (len(self.contexts) + len(uncached)))
        cached: dict[Case, Callable[[], object]] = {}
        held = {}
        with inference(model), autocast(setting.device, setting.precision):
            for n in self.contexts:
                cache = self.fill(model, n, setting)
                cached["cached", n] = partial(model, setting.tokens(1, 1), cache)
                held[n] = cache.nbytes
                progress.step()
            whole = {("uncached", n): partial(model, setting.tokens(1, n), keep=1) for n in uncached}
            clock = partial(
                median_seconds,
                device=setting.device,
                repeats=self.repeats,
                budget=self.budget,
                least=0,  # a sample is one call, for each call of a cached step adds a token
                progress=progress,
            )
            # one kind after the other: a pass over a whole context would leave the next step a cold processor
            seconds = clock(cached) | clock(whole)
        formula = {n: setting.cost.cache_bytes(n) for n in self.contexts}
        count = sum(setting.cost.parameters().values())
        return Report(
            title=f"One more token: {count / 1e6:.3g} M parameters, {setting.precision}",
            tables=[self.table(seconds, held, formula)],
            claims=self.claims(seconds, held, formula),
            data={
                "rows": [
                    {
                        "context": n,
                        "cached_seconds": seconds["cached", n],
                        "uncached_seconds": seconds.get(("uncached", n)),
                        "cache_bytes": held[n],
                        "formula_bytes": formula[n],
                    }
                    for n in self.contexts
                ]
            },
            draw=partial(self.draw, seconds, held, formula),
            notes=[
                "Time is the median of interleaved single steps, for one text; weights are random. A cached step reads "
                f"every weight and the cache, {self.read(setting, self.contexts[-1]):.2f} times the bytes at "
                f"{self.contexts[-1]} tokens of those at {self.contexts[0]}."
            ],
        )

    def fill(self, model: GPT, context: int, setting: Setting) -> KVCache:
        """A cache of which the steps to be measured make one of `context` tokens."""
        cache = model.new_cache(1, context)
        for piece in setting.tokens(1, context - self.repeats - 1).split(PIECE, dim=1):
            model(piece, cache, keep=1)
        return cache

    def read(self, setting: Setting, context: int) -> float:
        """Bytes that a cached step reads, over those at the shortest context."""
        cost = setting.cost
        weights = FLOAT32 * cost.multiplied()
        return (weights + cost.cache_bytes(context)) / (weights + cost.cache_bytes(self.contexts[0]))

    def table(self, seconds: dict[Case, float], held: dict[int, int], formula: dict[int, int]) -> Table:
        rows = []
        for n in self.contexts:
            cached, uncached = seconds["cached", n], seconds.get(("uncached", n))
            rows.append(
                [
                    str(n),
                    show_seconds(cached),
                    show_seconds(uncached) if uncached else "–",
                    f"{uncached / cached:.1f}" if uncached else "–",
                    show_bytes(held[n]),
                    show_bytes(formula[n]),
                ]
            )
        columns = ["context", "cached", "uncached", "times as fast", "cache", "by formula"]
        return Table("One more token", columns, rows)

    def claims(
        self, seconds: dict[Case, float], held: dict[int, int], formula: dict[int, int]
    ) -> list[Claim]:
        first, last = self.contexts[0], self.contexts[-1]
        ratio = seconds["cached", last] / seconds["cached", first]
        between = f"at {last} tokens over that at {first}"
        claims = [Claim(f"cached time {between}", f"at most {self.flat}", f"{ratio:.2f}", ratio <= self.flat)]
        if ("uncached", last) in seconds:
            ratio = seconds["uncached", last] / seconds["uncached", first]
            claims.append(
                Claim(
                    f"uncached time {between}", f"at least {self.steep}", f"{ratio:.1f}", ratio >= self.steep
                )
            )
        off = max(abs(held[n] - formula[n]) for n in self.contexts)
        claims.append(Claim("bytes of the cache off the formula", "0", str(off), off == 0))
        if formula[last] == formula[first]:
            same = held[last] == held[first]
            claims.append(Claim(f"cache {between}", "1", f"{held[last] / held[first]:.3g}", same))
        return claims

    def draw(
        self, seconds: dict[Case, float], held: dict[int, int], formula: dict[int, int], figure: Any
    ) -> None:
        axes = log_axes(figure, (1, 2, 1), "tokens of context", "a new token, seconds")
        for kind, color in (("uncached", COLORS[0]), ("cached", COLORS[1])):
            sizes = [n for n in self.contexts if (kind, n) in seconds]
            axes.plot(
                sizes, [seconds[kind, n] for n in sizes], color=color, marker="o", markersize=4, label=kind
            )
        axes.legend(frameon=False, fontsize=8)
        axes = log_axes(figure, (1, 2, 2), "tokens of context", "cache, bytes")
        axes.plot(self.contexts, [held[n] for n in self.contexts], "o", color=COLORS[1], label="allocated")
        axes.plot(
            self.contexts, [formula[n] for n in self.contexts], color=INK, linewidth=1, label="by formula"
        )
        axes.legend(frameon=False, fontsize=8)
