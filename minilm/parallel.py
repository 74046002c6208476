"""Several processes that train one model together, on one machine or more, over torch.distributed.

`World` is what the processes of a run say to one another; a process alone is a world of its own, and says nothing.
`Parallel` is how the model lies in them: whole in each (`DDP`), or in parts (`FSDP`). A global batch is cut into as
many parts as there are processes, so its losses, gradients and updates do not depend on how many there are.

The main process, of rank 0, reads and writes the run's folder and talks; the others only work.
"""

import io
import os
import pickle
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minilm.errors import ConfigError, one_line
from minilm.runtime import resolve_device

T = TypeVar("T")

#: in what gloo and NCCL say of a process that is gone, or silent
LOST = r"(?i)gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting"
#: seconds that a process waits for work of which nobody knows how long it takes: a text to be prepared, say. One that
#: dies is noticed at once all the same, by its connection, which closes
PATIENCE = 30 * 86400.0
#: the groups that this process has been in, held until it ends: where DDP's reducer drops the last hold on a group, it
#: waits for the group's threads while it keeps the interpreter, and a thread that has to free a tensor waits for that
_GROUPS: list[Any] = []


class World:
    """The processes of a run: this one alone. rank: its number among `size`; local_rank: its number on its machine."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, value: T) -> T:
        """The main process's value. Tensors come to the others as shapes without numbers."""
        return value

    def on_main(self, work: Callable[[], T]) -> T:
        """What `work` gives in the main process, which alone does it, for as long as it takes. Its ConfigError is
        raised in all.
        """
        return work()

    def together(self, work: Callable[[], T]) -> T:
        """What `work` gives in each process, one of a machine first (it may fill a cache), for as long as it takes. A
        ConfigError in any is raised in all.
        """
        return work()

    def sum(self, value: float) -> float:
        return value

    def largest(self, value: int) -> int:
        return value

    def refusal(self, message: str) -> ConfigError:
        """To be raised by all processes at once; the main one tells it."""
        return ConfigError(message)

    def alike(self, facts: dict[str, Any]) -> None:
        """ConfigError in all where the processes differ in one of these facts, by its key."""

    def gather(self, tree: Any) -> Any:
        """A tree of dicts and lists in which the main process holds each tensor whole, on the CPU where it was in
        parts. What the others hold is of no use.
        """
        return tree

    def spread(self, states: list[dict[str, Any]], optimizers: list[Optimizer]) -> list[dict[str, Any]]:
        """The main process's states of these optimizers, of which each process gets what it is to hold."""
        return states

    def device(self, name: str) -> torch.device:
        """The device of this process. Raises ConfigError where it is not there."""
        return resolve_device(name)


ALONE = World()


class Told(ConfigError):
    """A mistake that the main process tells of."""


class Processes(World):
    """Those that torchrun, or a queue by submitit, has started; they have found one another."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.dist = dist
        self.patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))
        _GROUPS.extend((dist.group.WORLD, self.patient))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    def share(self, value: T, group: Any = None) -> T:
        box = [_pickled(value) if self.main else None]
        self.dist.broadcast_object_list(box, group=group)
        return pickle.loads(box[0])  # type: ignore[arg-type]

    def on_main(self, work: Callable[[], T]) -> T:
        result, refused = _tried(work) if self.main else (None, None)
        shared, refused = self.share((result, refused), self.patient)
        if refused is not None:
            raise self.refusal(refused)
        return result if self.main else shared  # type: ignore[return-value]

    def together(self, work: Callable[[], T]) -> T:
        result = None
        for turn in (self.local_rank == 0, self.local_rank > 0):
            found, refused = _tried(work) if turn else (None, None)
            result = found if turn else result
            said: list[str | None] = [None] * self.size
            self.dist.all_gather_object(said, refused, self.patient)
            for rank, text in enumerate(said):
                if text is not None:
                    raise self.refusal(text if rank == 0 else f"rank {rank}: {text}")
        return result  # type: ignore[return-value]

    def sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        self.dist.all_reduce(total)
        return type(value)(total.item())

    def largest(self, value: int) -> int:
        found = torch.tensor(value)
        self.dist.all_reduce(found, self.dist.ReduceOp.MAX)
        return int(found)

    def refusal(self, message: str) -> ConfigError:
        return ConfigError(message) if self.main else Told(message)

    def alike(self, facts: dict[str, Any]) -> None:
        found: list[dict[str, Any]] = [{}] * self.size
        self.dist.all_gather_object(found, facts)
        for rank, theirs in enumerate(found):
            for key, value in theirs.items():
                if value != found[0][key]:
                    raise self.refusal(f"{key}: rank 0 has {found[0][key]} and rank {rank} has {value}")

    def gather(self, tree: Any) -> Any:
        seen: dict[int, Tensor] = {}  # tied weights are one tensor, and stay so

        def whole_on_main(value: Any) -> Any:
            if isinstance(value, dict):
                return type(value)((key, whole_on_main(item)) for key, item in value.items())
            if isinstance(value, list):
                return [whole_on_main(item) for item in value]
            if not is_sharded(value):
                return value
            if id(value) not in seen:  # one tensor at a time is whole on a device
                full = whole(value.detach())
                seen[id(value)] = full.cpu() if self.main else full.new_empty(0)
            return seen[id(value)]

        return whole_on_main(tree)

    def spread(self, states: list[dict[str, Any]], optimizers: list[Optimizer]) -> list[dict[str, Any]]:
        return [
            state | {"state": self._own_state(state["state"], optimizer)}
            for state, optimizer in zip(states, optimizers, strict=False)
        ]

    def _own_state(self, state: dict[int, dict[str, Any]], optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        params = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        return {
            i: {key: self._own(value, params.get(i)) for key, value in of_one.items()}
            for i, of_one in state.items()
        }

    def _own(self, value: Any, like: Tensor | None) -> Any:
        """What this process is to hold of a value that is whole in the main one."""
        if not isinstance(value, Tensor):
            return value
        value = value.contiguous() if self.main else torch.empty(value.shape, dtype=value.dtype)
        self.dist.broadcast(value, 0)
        return part(value, like) if like is not None and value.shape == like.shape else value

    def device(self, name: str) -> torch.device:
        device = resolve_device(name)
        if device.type == "mps":
            raise ConfigError(f"device={name} is mps, which trains in one process alone: say device=cpu")
        if device.type != "cuda":
            return device
        if device.index is not None:
            raise ConfigError(
                f"device={name}: each process takes the device of its own number; say device=cuda"
            )
        if (count := torch.cuda.device_count()) < self.local_size:
            raise ConfigError(
                f"device={name}: this machine has {count} CUDA device(s) for {self.local_size} processes; start "
                f"{count}, or say device=cpu"
            )
        device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(device)
        return device


# ---- finding one another ----


@contextmanager
def joined(device: str, timeout: float) -> Iterator[World]:
    """The world that this process was started in, by the environment that torchrun or submitit has set, for a `with`
    block. Processes other than the main one print nothing within it, and a process that has lost the others ends.

    device: as it was asked for. timeout: seconds to wait for the others, but for work that `World.on_main` and
    `World.together` wait for.
    """
    _from_submitit()
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield ALONE
        return
    import torch.distributed as dist

    cuda = torch.cuda.is_available() and not device.startswith("cpu")
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    rank = int(os.environ["RANK"])
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        with ExitStack() as quiet:
            if rank:
                nowhere = quiet.enter_context(open(os.devnull, "w", encoding="utf-8"))
                quiet.enter_context(redirect_stdout(nowhere))
                quiet.enter_context(redirect_stderr(nowhere))
            yield Processes()
        dist.destroy_process_group()
    except ConfigError as error:
        if rank and not isinstance(error, Told):  # nobody else knows of it
            print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
            sys.exit(2)
        dist.destroy_process_group()
        raise
    except RuntimeError as error:
        text = one_line(error)
        if not isinstance(error, dist.DistError) and not re.search(LOST, text):
            raise
        said = re.sub(r"^\[\S+\] ", "", text).partition(". ")[0]
        sys.exit(
            f"rank {rank} ends: another process of the run is gone, or silent for {timeout:g} s ({said})"
        )


def _from_submitit() -> None:
    """A job of submitit's has its place in the job as torchrun would say it."""
    if "SUBMITIT_EXECUTOR" in os.environ and "WORLD_SIZE" not in os.environ:
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        if JobEnvironment().num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False)


def _tried(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """What `work` gives, or what its ConfigError says."""
    try:
        return work(), None
    except ConfigError as error:
        return None, str(error)


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _WithoutNumbers(file).dump(value)
    return file.getvalue()


class _WithoutNumbers(pickle.Pickler):
    """Tensors become shapes on the meta device."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _shape, (tuple(value.shape), value.dtype)
        return NotImplemented


def _shape(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# ---- how a model lies in the processes ----


@dataclass(frozen=True)
class Parallel(ABC):
    """How a model is spread over processes. timeout: seconds that a process waits for the others while they train.

    One process alone trains the model as it is, whichever was asked for.
    """

    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout < 1e6:
            raise ConfigError(f"parallel.timeout={self.timeout}: a number of seconds, above 0")

    def spread(
        self, model: nn.Module, blocks: Iterable[nn.Module], device: torch.device, world: World
    ) -> tuple[nn.Module, Callable[[], AbstractContextManager]]:
        """The model as it is called in training, on `device`, with the main process's weights in all; and a context
        for all micro-batches but the last of a batch, whose gradients may wait for it. blocks: its repeated parts.
        """
        if world.size == 1:
            return model.to(device), nullcontext
        return self.wrap(model, blocks, device)

    @abstractmethod
    def wrap(
        self, model: nn.Module, blocks: Iterable[nn.Module], device: torch.device
    ) -> tuple[nn.Module, Callable[[], AbstractContextManager]]: ...


@dataclass(frozen=True)
class DDP(Parallel):
    """The whole model in each process; gradients are averaged (Li et al. 2020)."""

    def wrap(
        self, model: nn.Module, blocks: Iterable[nn.Module], device: torch.device
    ) -> tuple[nn.Module, Callable[[], AbstractContextManager]]:
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(
            model.to(device),
            device_ids=None if device.index is None else [device.index],
            gradient_as_bucket_view=True,
            find_unused_parameters=_has_unused(model, device),
        )
        return wrapped, wrapped.no_sync


@dataclass(frozen=True)
class FSDP(Parallel):
    """A part of each weight, gradient and moment in each process (Zhao et al. 2023); a block's weights are whole on a
    device only while it is read.

    A process begins with the whole model in its main memory, and hands its device one block at a time. Gradients are
    averaged after each micro-batch, so that they too are never whole for longer.
    """

    def wrap(
        self, model: nn.Module, blocks: Iterable[nn.Module], device: torch.device
    ) -> tuple[nn.Module, Callable[[], AbstractContextManager]]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for p in model.parameters():
            dist.broadcast(p.detach(), 0)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        return model, nullcontext


def _has_unused(model: nn.Module, device: torch.device) -> bool:
    """Whether no gradient reaches some parameter, as of a norm whose layer is none."""
    model(torch.zeros(1, 1, dtype=torch.int64, device=device)).sum().backward()
    unused = any(p.grad is None for p in model.parameters() if p.requires_grad)
    model.zero_grad(set_to_none=True)
    return unused


def is_sharded(x: Any) -> bool:
    """Whether x is a DTensor, of which each process holds a part."""
    return isinstance(x, Tensor) and hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """All of a tensor of which each process may hold a part. Every process has to ask."""
    return x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]


def local(x: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def part(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that each process has whole, held as `like` is: in parts, on its device."""
    if not is_sharded(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(x.to(like.device), mesh, placements, src_data_rank=None)
