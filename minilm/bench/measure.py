"""Clocks, memory and laws."""

import math
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

import numpy as np
import torch

from minilm.errors import ConfigError

K = TypeVar("K", bound=Hashable)

LEAST_SECONDS = 0.02
LEAST_SAMPLES = 3


class Progress:
    """Counts the steps of a bench. show: called with those that are done, and those there are."""

    def __init__(self, show: Callable[[int, int], object] = lambda done, total: None) -> None:
        self.show, self.done, self.total = show, 0, 0

    def expect(self, steps: int) -> None:
        """So many steps more are to come."""
        self.total += steps

    def step(self, steps: int = 1) -> None:
        self.done += steps
        self.show(self.done, self.total)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seconds_of(work: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Mean wall-clock seconds of a call."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / calls


def median_seconds(
    cases: Mapping[K, Callable[[], object]],
    device: torch.device,
    *,
    repeats: int,
    budget: float = math.inf,
    least: float = LEAST_SECONDS,
    progress: Progress | None = None,
) -> dict[K, float]:
    """Median wall-clock seconds of a call of each case.

    The cases take turns, so that a machine which slows down slows all of them; each is warmed up first. A sample is
    the mean of as many calls as fill `least` seconds; 0 is one call. budget: seconds after which a case is left out
    of further rounds, once it has three samples.
    """
    calls = dict.fromkeys(cases, 1)
    for name, work in cases.items():
        if seconds_of(work, device) < least:  # the first call, which is slower than those to come
            calls[name] = math.ceil(least / max(seconds_of(work, device), 1e-7))
    samples: dict[K, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, work in cases.items():
            taken = samples[name]
            if len(taken) < LEAST_SAMPLES or sum(taken) * calls[name] < budget:
                taken.append(seconds_of(work, device, calls[name]))
            if progress is not None:
                progress.step()
    return {name: median(taken) for name, taken in samples.items()}


class Product:
    """One product of matrices, (m, k) by (k, n), to be timed."""

    def __init__(
        self,
        m: int,
        k: int,
        n: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.flops = 2 * m * k * n
        self.a, self.b = (torch.randn(shape, dtype=dtype, device=device) for shape in ((m, k), (k, n)))

    def __call__(self) -> torch.Tensor:
        return self.a @ self.b


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most memory that `work` holds at once on top of what was there before, in bytes.

    It is what PyTorch's allocator handed out, kernels' own buffers included: on CUDA its statistics, on the
    CPU the profiler's record of each allocation, which misses only the scratch space of the matrix library.
    """
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler's own lines off standard error
    if device.type != "cpu":
        raise ConfigError(f"device={device.type}: its peak memory is not known here; measure on cuda or cpu")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as record:
        work()
    assert record.profiler is not None
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(0, int(np.cumsum([0, *changes]).max()))


def free_bytes(device: torch.device) -> float:
    """Memory that is free now, in bytes; infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The p of value ∝ size^p: the slope of a straight line through the logarithms, by least squares."""
    slope, _ = np.polyfit(np.log(sizes), np.log(values), 1)
    return float(slope)


def fit_growth(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The p of value = fixed + c · size^p, fitted to the steps from one size to the next, in which `fixed` is not.

    Each size must be the same multiple of the one before.
    """
    return fit_exponent(sizes[1:], np.diff(values).tolist())
