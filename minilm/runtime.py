"""The machine: device, precision, threads, randomness, compilation."""

import contextlib
import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn

from minilm.errors import ConfigError

Precision = Literal["auto", "fp32", "bf16", "fp16"]
PRECISIONS = get_args(Precision)
Compile = bool | Literal["strict"]
MAX_THREADS = 256  # or as many as there are processors; a process dies of starting very many more
KEPT, KEPT_ONCE = (
    (1 << 31) - 1,
    1 << 25,
)  # bytes, the most that mallopt takes, and took as a threshold in older glibc
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """'auto' is cuda, else mps, else cpu; a named device must be there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name}: expected auto, cpu, cuda, cuda:N or mps") from None
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if device.type not in count:
        raise ConfigError(f"device={name}: expected auto, cpu, cuda, cuda:N or mps")
    if (device.index or 0) >= count[device.type]:
        raise ConfigError(
            f"device={name}: this machine has {count[device.type]} {device.type} device(s); try auto"
        )
    return device


def resolve_precision(name: str, device: torch.device) -> str:
    """'auto' is bf16 where the processor multiplies bf16 matrices in hardware, else fp32."""
    if name not in PRECISIONS:
        raise ConfigError(f"precision={name}: expected one of {', '.join(PRECISIONS)}")
    if name == "fp16" and device.type != "cuda":
        raise ConfigError(f"precision=fp16 needs a CUDA device, this is {device}; use bf16 or fp32")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    if device.type == "cpu":
        has = torch.cpu.get_capabilities()
        return "bf16" if has.get("amx_bf16") or has.get("avx512_bf16") else "fp32"
    return "fp32"


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Matrix products in bf16 or fp16; weights, sums and losses stay float32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def set_up_cpu(threads: int | None) -> None:
    """So many threads, None for torch's own choice; and memory that was freed is kept for what comes next.

    Else the C library gives the tensors of each step back to the system, and the pages of the next step's, each fetched
    anew, take a fifth of its time.
    """
    _keep_freed_memory()
    if threads is not None:
        most = max(MAX_THREADS, os.cpu_count() or 1)
        if not 1 <= threads <= most:
            raise ConfigError(
                f"threads={threads}: a positive whole number up to {most}, or null for torch's own choice"
            )
        torch.set_num_threads(threads)


def _keep_freed_memory() -> None:
    """Has glibc serve tensors of up to KEPT bytes from its heap, and keep as many free; others are left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, KEPT) or mallopt(M_MMAP_THRESHOLD, KEPT_ONCE)


def set_deterministic(strict: bool) -> None:
    """Strict: only algorithms that give the same bits each time, and RuntimeError from torch where there is none.

    On the CPU all that minilm uses are such. CUDA's usual ones add in whatever order the threads come.
    """
    if strict:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    # to say it imports the compiler, a second or more
    if strict != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(strict)


def check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed={seed}: a whole number from 0 to 2^63 - 1")


@dataclass(frozen=True)
class MachineConfig:
    """Of the top level of configs/train.yaml, what says how a machine is used."""

    seed: int
    device: str
    precision: Precision
    threads: int | None
    compile: Compile

    def __post_init__(self) -> None:
        check_seed(self.seed)


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Make all of torch's randomness a function of (seed, step, rank).

    Called before every update, so that nothing done in between (evaluation, sampling, a resume) changes training,
    and no random state has to be carried over.
    """
    mixed = torch.tensor([seed, step, rank], dtype=torch.int64).mul(torch.tensor([1_000_003, 1_009, 1])).sum()
    torch.manual_seed(int(mixed) & 0x7FFF_FFFF_FFFF_FFFF)


def compile_model(function: Callable[..., Any], mode: bool | str, **how: Any) -> Callable[..., Any]:
    """torch.compile of a function or model, with a fall-back: where no compiler works, one warning, and it as it is.

    mode: false, true, or 'strict', which raises instead of falling back. how: passed on to torch.compile.
    """
    if mode is False:
        return function
    if mode not in (True, "strict"):
        raise ConfigError(f"compile={mode}: expected true, false or strict")
    print(f"compile={str(mode).lower()}: the first step compiles, which may take a minute", file=sys.stderr)
    if mode is True:
        torch._dynamo.config.suppress_errors = True  # what the compiler cannot do of a model stays plain
        try:
            _probe_compiler()
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"compile=true: no compiler works, going on without it ({reason})", stacklevel=2)
            return function
    return torch.compile(function, **how)


def _probe_compiler() -> None:
    """Compiles a tiny function forward and backward: a missing compiler shows at the backward pass at the latest."""
    with torch._dynamo.config.patch(suppress_errors=False):
        torch.compile(lambda x: x.sin().square().sum())(torch.ones(64, requires_grad=True)).backward()


_lock = threading.Lock()
_inside: "WeakKeyDictionary[nn.Module, list[bool]]" = (
    WeakKeyDictionary()
)  # for each who is within, the mode before


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the last thread that is done leaves the model in the mode it was in."""
    with _lock:
        modes = _inside.setdefault(model, [])
        modes.append(model.training)
        if model.training:  # to set it visits every module, which takes as long as a step of a small model
            model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        with _lock:
            was_training = modes[0]
            modes.pop()
            if was_training and not modes:
                model.train()
