"""A step of decoding, compiled: the model's own forward, at the speed at which memory can be read.

One token for one text multiplies each weight once, so a step cannot be faster than reading all weights. Two things
keep it from that: a matrix library made for more rows, and Python between hundreds of small operations. So the
forward is traced once, each product of a single row is written as the sum that it is, and the compiler makes loops
of it all. The few rows of several texts stay the library's business: it is given large weights packed, in a second
copy, and small ones, to which a call of ours would add more than it saves, as columns.

Compiled are steps behind caches that grow, of texts that stand alike; on CUDA they are a captured graph. Every other
step goes the plain way.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minilm.attention.cache import Growing, KeyValues, KVCache, Slot
from minilm.attention.frame import Frame
from minilm.attention.positions import at_least_float32
from minilm.model import GPT
from minilm.packed import can_pack, packed_linear
from minilm.runtime import compile_model

Pair = tuple[Tensor, Tensor]
Inputs = tuple[
    Tensor, Tensor, Tensor
]  # tokens (B, past + 1), their position (1,), positions of the keys (m,)

STREAMS = 8  # a core that reads so many rows at a time waits less for memory than one that reads a single one
LARGE = 1 << 18  # numbers in a matrix, from which on it is read in streams, or packed
# what the compiler is spared: checks of the arguments, which are the same at every step
OPTIONS: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}


class Call(NamedTuple):
    """Of a compiled graph: what it was given and what it gave."""

    graph: Callable[..., Any]
    arguments: tuple[Any, ...]
    out: Any


class CompiledStep:
    """model(tokens, cache) for (B, 1) tokens, compiled where it can be; the same numbers up to rounding.

    mode: as `compile_model` has it. The first step takes as long as compiling does: seconds to a minute. Threads may
    share it; they take turns.
    """

    def __init__(self, model: GPT, mode: bool | str = True) -> None:
        self.model = model
        self.on_cpu = next(model.parameters()).device.type == "cpu"
        how: dict[str, Any] = {"backend": self._backend} if self.on_cpu else {"mode": "reduce-overhead"}
        self._step = compile_model(self._forward, mode, **how)
        self._cache: KVCache | None = None  # that of the last step, and what of it is written
        self._series: list[tuple[Growing, Growing]] = []
        self._pairs: list[Pair] = []
        self._by_channels = False
        self._calls: list[Call] = []  # of the graph, behind that cache
        self._again: Callable[[Inputs], Tensor] | None = None
        self._turn = Lock()

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """(B, 1) -> logits (B, 1, V)"""
        with self._turn, torch.no_grad():
            return self._read(tokens, cache)

    def _read(self, tokens: Tensor, cache: KVCache) -> Tensor:
        frame = cache.advance(tokens, self.model.position)
        tokens = self.model.with_past(tokens, cache)
        if cache is not self._cache:
            self._cache, self._calls, self._again = cache, [], None
            self._series = grown(cache) if frame.uniform else []
            self._by_channels = bool(self._series) and self._series[0][0].by_channels
            self._pairs = [(self._lying(keys), self._lying(values)) for keys, values in self._series]
        if not self._series:
            return self.model.read(tokens, frame, cache.stores)
        inputs = tokens, frame.q_pos, frame.k_pos
        if self._again is not None:
            logits = self._again(inputs)
        elif self.on_cpu:
            self._mark(frame.k_pos)
            logits = self._step(*inputs, self._pairs)
            if len(self._calls) == 2:
                self._again = repeated(self._calls, inputs, logits)
                self._calls.clear()
        else:  # a captured graph reads all slots, and the mask hides those to come
            assert cache.capacity is not None  # its series grow
            slots = torch.arange(cache.capacity, device=tokens.device)
            for data in (data for pair in self._pairs for data in pair):  # written in place, where they are
                torch._dynamo.mark_static_address(data, guard=False)
            logits = self._step(tokens, frame.q_pos, slots, self._pairs).clone()
        for keys, values in self._series:
            keys.skip(1)
            values.skip(1)
        return logits

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = by_sums(graph, inputs)

        def run(*arguments: Any) -> Any:
            out = compiled(*arguments)
            self._calls.append(Call(compiled, arguments, out))
            return out

        return run

    def _lying(self, series: Growing) -> Tensor:
        """Its data as it lies in memory."""
        return series.data.mT if self._by_channels else series.data

    def _mark(self, k_pos: Tensor) -> None:
        """One graph for caches of any capacity, however full."""
        torch._dynamo.mark_dynamic(k_pos, 0)
        for data in (data for pair in self._pairs for data in pair):
            torch._dynamo.mark_dynamic(data, 3 if self._by_channels else 2)

    def _forward(self, tokens: Tensor, at: Tensor, k_pos: Tensor, pairs: Sequence[Pair]) -> Tensor:
        """tokens: (B, past + 1). at: (1,), the position of the token, which is its slot as well."""
        frame = Frame(at, k_pos, self.model.position, newest=self.on_cpu)
        end = k_pos.shape[0]

        def slot(data: Tensor) -> Slot:
            return Slot(data, at, end, by_channels=self._by_channels)

        stores = [KeyValues(slot(keys), slot(values)) for keys, values in pairs]
        return self.model.read(tokens, frame, stores)


def grown(cache: KVCache) -> list[tuple[Growing, Growing]]:
    """The layers' keys and values; none where a step is not to be compiled."""
    found = []
    for store in cache.stores:
        if not isinstance(store, KeyValues):
            return []
        if not (isinstance(store.keys, Growing) and isinstance(store.values, Growing)):
            return []
        found.append((store.keys, store.values))
    return found


def repeated(calls: list[Call], inputs: Inputs, logits: Tensor) -> Callable[[Inputs], Tensor] | None:
    """The third step behind a cache, and all that follow, once two have shown what changes from one to the next.

    torch.compile asks at each call whether its graph still fits, which takes longer than a small model's step does.
    Behind one cache only the inputs and the number of slots change: the graph is called with those new, and all else
    as it was. inputs, logits: of the second step. None where the calls do not show just that.
    """
    (first, before, _), (graph, now, out) = calls
    if first is not graph:
        return None
    arguments = list(now)
    changed = [i for i, (a, b) in enumerate(zip(before, now, strict=True)) if not same(a, b)]
    tensors = {i: j for i in changed for j, tensor in enumerate(inputs) if now[i] is tensor}
    counts = [i for i in changed if isinstance(now[i], int) and now[i] == len(inputs[-1])]
    if len(out) != 1 or out[0] is not logits or sorted([*tensors, *counts]) != changed:
        return None

    def again(inputs: Inputs) -> Tensor:
        for i, j in tensors.items():
            arguments[i] = inputs[j]
        for i in counts:
            arguments[i] = len(inputs[-1])
        return graph(*arguments)[0]

    return again


def same(a: Any, b: Any) -> bool:
    """Whether a graph is given the same thing: that tensor, or a number of that value."""
    return a == b if isinstance(a, int) and isinstance(b, int) else a is b


def by_sums(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend of torch.compile: inductor, given each product of one row as a sum."""
    for node in graph.graph.nodes:
        if node.target is F.linear:
            node.target = linear_by_sums
            node.kwargs = {**node.kwargs, "kept": node.args[1].op == "placeholder"}
        elif node.target is F.scaled_dot_product_attention:
            node.target = attention_by_sums
    graph.recompile()
    return torch._inductor.compile(graph, inputs, options=OPTIONS)


def linear_by_sums(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kept: bool = False) -> Tensor:
    """F.linear, where x has a single row as sums over it, of several rows of the weight at a time.

    kept: the weight is the same at each step, so that it pays to pack it for the products of several rows.
    """
    if x.numel() != x.shape[-1]:
        if kept and weight.numel() >= LARGE and can_pack(weight):
            return packed_linear(x, weight, bias)
        y = (weight @ x.flatten(end_dim=-2).T).T.contiguous().view(*x.shape[:-1], -1)
        return y if bias is None else y + bias
    dtype = at_least_float32(x.dtype)
    row, n = made(x.flatten().to(dtype)), len(weight) // STREAMS
    streams = [n] * STREAMS + [len(weight) % STREAMS] if weight.numel() >= LARGE else [len(weight)]
    parts = [(row * part.to(dtype)).sum(dim=-1) for part in weight.split([rows for rows in streams if rows])]
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    if bias is not None:
        y = y + bias.to(dtype)
    return made(y.to(x.dtype).view(*x.shape[:-1], -1))


def attention_by_sums(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, scale: float, **options: Any
) -> Tensor:
    """scaled_dot_product_attention of one query (B, H, 1, D) over keys that it may all read (B, G, m, D).

    A kernel made for blocks of queries, and a call of it from Python, take longer than these two sums do.
    """
    if attn_mask is not None or options.get("is_causal"):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale, **options)
    dtype = at_least_float32(q.dtype)
    query = q.to(dtype).unflatten(1, (k.shape[1], -1)) * scale  # (B, G, H / G, 1, D)
    k, v = k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)  # (B, G, 1, m, D)
    weights = (query * k).sum(dim=-1).softmax(dim=-1)
    return (weights.unsqueeze(-1) * v).sum(dim=-2, keepdim=True).flatten(1, 2).to(q.dtype)


def made(x: Tensor) -> Tensor:
    """x, computed once and kept: the compiler would else compute it anew for each row of a matrix that reads it."""
    return x.as_strided(x.shape, x.stride())
