"""What a model costs, from its configuration alone: parameters, arithmetic, memory. Nothing is built or run.

A multiply-add is 2 FLOPs, and matrix products alone are counted: what lies between them moves memory rather than
computes (Kaplan et al. 2020, sec. 2.1). Attention is counted over all n² pairs of positions, as torch's own counter
does (Chowdhery et al. 2022, app. B); a kernel that skips the pairs which a causal mask forbids does half of it.

Memory is in bytes, of PyTorch without compilation, weights and optimizer state in float32.

Symbols: C model width, D head width, H query heads, G key heads, L layers, V vocabulary, n tokens of context.
"""

import math
from dataclasses import dataclass

from minilm.attention.kernels import ROWS, SHORT
from minilm.attention.masks import Causal, Full, Mask, SlidingWindow
from minilm.embedding import histories
from minilm.model import GPTConfig
from minilm.muon import ITERATIONS

FLOAT32 = 4  # bytes
ABSOLUTE = ("Learned", "Sinusoidal")  # positions that end at block_size


@dataclass(frozen=True)
class MLP:
    """A feed-forward layer: its matrices, C × hidden each, and how many (n, hidden) tensors its backward pass needs."""

    matrices: int
    hidden: int
    kept: int


@dataclass(frozen=True)
class Flops:
    """FLOPs for one token. attention: where tokens meet, n·d each with the softmax. rest: all other products."""

    attention: float
    rest: float

    @property
    def total(self) -> float:
        return self.attention + self.rest


@dataclass(frozen=True)
class Memory:
    """Bytes of a training step. The peak is below the sum: gradients come as activations go."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


@dataclass(frozen=True)
class Cost:
    """The costs of one model.

    position: the name of its class. backend: of softmax attention. chunk: of linear attention, None for softmax.
    device: the type of device that it trains on. documents: each window has a mask of its own, which keeps to them.
    """

    model: GPTConfig
    mask: Mask = Causal()  # noqa: RUF009 (frozen, without state)
    position: str = "Rotary"
    qk_norm: bool = False
    backend: str = "fused"
    chunk: int | None = None
    device: str = "cpu"
    documents: bool = False

    @property
    def kv_width(self) -> int:
        """G · D"""
        return (self.model.n_kv_head or self.model.n_head) * self.model.head_dim

    @property
    def mlp(self) -> MLP:
        hidden, gated = self.model.mlp_hidden, self.model.mlp == "swiglu"
        if self.model.mlp == "none":
            return MLP(matrices=0, hidden=0, kept=0)
        return MLP(matrices=3, hidden=hidden, kept=4) if gated else MLP(matrices=2, hidden=hidden, kept=2)

    def matrices(self) -> dict[str, int]:
        """Numbers in the matrices inside the blocks, by part."""
        c, mlp = self.model, self.mlp
        return {
            "attention": c.n_layer * 2 * c.n_embd * (c.n_embd + self.kv_width),
            "mlp": c.n_layer * mlp.matrices * c.n_embd * mlp.hidden,
        }

    def parameters(self) -> dict[str, int]:
        """Trainable numbers by part; a tied head has none of its own."""
        c, mlp = self.model, self.mlp
        biases = {
            "attention": 2 * (c.n_embd + self.kv_width),
            "mlp": (mlp.matrices - 1) * mlp.hidden + c.n_embd if mlp.matrices else 0,
        }
        inner = {part: count + c.bias * c.n_layer * biases[part] for part, count in self.matrices().items()}
        rows = sum(min(histories(c.vocab_size, order), c.ngram_rows) for order in c.ngrams)
        norm = c.n_embd * (2 if c.norm == "layernorm" and c.bias else 1)
        return {
            "embedding": (c.vocab_size + rows) * c.n_embd,
            "position": c.block_size * c.n_embd if self.position == "Learned" else 0,
            **inner,
            "norms": (2 * c.n_layer + 1) * norm,
            "head": 0 if c.tie_embeddings else c.vocab_size * c.n_embd,
        }

    def multiplied(self) -> int:
        """Numbers that every token is multiplied by: the matrices inside the blocks, and the head's."""
        return sum(self.matrices().values()) + self.model.vocab_size * self.model.n_embd

    def flops(self, context: int, *, training: bool = False) -> Flops:
        """For one of `context` tokens: a forward pass, or a forward and a backward one.

        A backward pass has two products for each of the forward one's. A fused kernel makes the scores once more,
        for it has not kept them: 5 instead of 4 (Dao 2023).
        """
        c = self.model
        rest = 2.0 * self.multiplied()
        if self.chunk is None:
            attention = 2.0 * 2 * self._keys(context) * c.n_embd  # Q Kᵀ and weights · V
        elif isinstance(self.mask, Full):  # φ(K)ᵀ V, φ(Q) · that, and the denominator
            attention = 2.0 * c.head_dim * (c.n_embd + self.kv_width) + 2 * c.n_embd
        else:  # the first two, and scores and weights within chunks, the last of which is filled up
            size = min(self.chunk, context)
            filled = -(-context // size) * size / context
            attention = filled * (2 * c.head_dim * (c.n_embd + self.kv_width) + 2 * 2 * size * c.n_embd)
        if training:
            rest *= 3
            attention *= 3.5 if self.chunk is None and self.backend != "reference" else 3
        return Flops(c.n_layer * attention, rest)

    def _keys(self, context: int) -> float:
        """How many keys a query meets: all, but in a fused window two blocks of its size, in the first block one."""
        if not self._goes_by_blocks(context):
            return context
        window = self.mask.reach or context
        return (2 * math.ceil(context / window) - 1) * window**2 / context

    def _goes_by_blocks(self, context: int) -> bool:
        return (
            self.backend == "fused"
            and not self.documents
            and isinstance(self.mask, SlidingWindow)
            and context >= 4 * self.mask.window
        )

    def optimizer_flops(self, optimizer: str) -> float:
        """Of one step. Muon takes 3 products an iteration of each matrix a × b, a ≤ b (Jordan et al. 2024)."""
        if optimizer != "Muon":
            return 0
        width, mlp = self.model.n_embd, self.mlp
        shapes = [(width, width)] * 2 + [(self.kv_width, width)] * 2 + [(width, mlp.hidden)] * mlp.matrices
        return self.model.n_layer * ITERATIONS * sum(2 * a * a * (2 * b + a) for a, b in map(sorted, shapes))

    def cache_bytes(self, context: int, batch: int = 1, element: int = FLOAT32) -> int:
        """Of a cache for `context` tokens: their keys and values, or the last ones' where the mask reaches no farther.

        A window's cache that rolls is whole from the start. Linear attention keeps two sums instead, (G, D, D) and
        (G, D), whatever the context.
        """
        slots = min(context, self.mask.reach or context)
        if self.mask.reach and self.mask.reach <= self.model.block_size and self.position not in ABSOLUTE:
            slots = self.mask.reach
        kept = self.kv_width * (2 * slots if self.chunk is None else self.model.head_dim + 1)
        return self.model.n_layer * kept * element * batch

    def memory(self, batch: int, *, optimizer: str, precision: str, accumulates: bool = False) -> Memory:
        """Of a step over `batch` windows of block_size tokens at a time.

        precision: fp32, or bf16 or fp16, in which products and what they keep take half. accumulates: several such
        batches make one step, so the gradients are there from the second on.
        """
        c, half = self.model, precision != "fp32"
        tokens = batch * c.block_size
        inner, table = sum(self.matrices().values()), c.vocab_size * c.n_embd
        weights = FLOAT32 * sum(self.parameters().values())
        state = 2 * weights - (
            FLOAT32 * inner if optimizer == "Muon" else 0
        )  # Muon has one moment, AdamW two
        logits = FLOAT32 * tokens * c.vocab_size
        blocks = c.n_layer * (tokens * self._block_bytes(half) + self._table_bytes(batch))
        blocks += 2 * (inner + table) if half else 0  # the weights in half precision
        activations = blocks + tokens * self._norm_bytes(half, readers=1) + logits
        peak = max(
            # the loss: logits, and the gradients of the log-probabilities and of the logits
            activations + (2.5 if half else 3) * logits,
            # the last block: the head's gradient, and two of the hidden layer
            blocks + FLOAT32 * table + 2 * tokens * self.mlp.hidden * (2 if half else FLOAT32),
            # the end: all gradients, a tied table's from both its ends and summed
            weights + (2 * FLOAT32 * table if c.tie_embeddings else 0),
        )
        held = weights + state + (weights if accumulates else 0)
        return Memory(weights, weights, state, int(activations), int(held + peak))

    def _block_bytes(self, half: bool) -> float:
        """What a block's backward pass needs of one token."""
        c, kv, element = self.model, self.kv_width, 2 if half else FLOAT32
        norms = self._norm_bytes(half, readers=3) + self._norm_bytes(
            half, readers=max(0, self.mlp.matrices - 1)
        )
        qk_norm = FLOAT32 * (c.n_embd + kv) if self.qk_norm else 0
        merged = element * c.n_embd
        hidden = element * self.mlp.kept * self.mlp.hidden
        dropout = 2 * FLOAT32 * c.n_embd if c.dropout else 0  # which channels are kept, as numbers
        return norms + qk_norm + self._heads_bytes(element) + merged + hidden + dropout

    def _heads_bytes(self, element: int) -> float:
        """What a token leaves inside attention, from queries, keys and values to the heads' output."""
        c, kv = self.model, self.kv_width
        if self.chunk is not None:
            # features of queries and keys, also for the denominator; scores within chunks, sums from one to the next
            features = 4 * FLOAT32 * (c.n_embd + kv)
            chunks = c.n_head * self.chunk + c.n_embd * c.head_dim // self.chunk
            return features + element * (3 * c.n_embd + 2 * kv + (c.n_embd if kv < c.n_embd else 0) + chunks)
        if self.backend == "reference":
            # keys and values, a copy for each head; the weights, as made and with unreadable rows cleared
            return element * (3 * c.n_embd + 2 * c.n_head * c.block_size)
        if weights := self._kept_weights(element):  # queries, keys and values for each head, the output
            return element * (4 * c.n_embd + c.n_head * weights)
        # the output, and a logarithm a row; in a window queries, keys and values again by blocks, each key in two
        blocks = c.n_embd + 4 * kv if self._goes_by_blocks(c.block_size) else 0
        return element * (2 * c.n_embd + 2 * kv + blocks) + FLOAT32 * c.n_head

    def _kept_weights(self, element: int) -> float:
        """How many weights a query leaves where the fused kernel goes `by_rows`; 0 where it does not."""
        size = self.model.block_size
        if self._goes_by_blocks(size):
            size = 2 * (self.mask.reach or size)
        if self.device != "cpu" or element == FLOAT32 or size > SHORT:
            return 0
        if not isinstance(self.mask, Causal) or self.position == "Alibi" or self.documents:
            return size
        blocks = range(0, size, ROWS)  # each reads to its own end
        return sum(min(ROWS, size - start) * min(start + ROWS, size) for start in blocks) / size

    def _norm_bytes(self, half: bool, readers: int) -> int:
        """What a norm keeps of one token, and the linear layers that read it: one tensor, or a half each."""
        width = self.model.n_embd
        kept = 2 if self.model.norm == "rmsnorm" else 1  # x, and PyTorch's RMSNorm also x / rms
        return FLOAT32 * width * kept + width * (2 * readers if half else FLOAT32)

    def _table_bytes(self, batch: int) -> int:
        """A layer's (n, n) table of the mask or the bias, where a fused kernel has no word for it; one for each window
        where they hold documents."""
        size = self.model.block_size
        if self.backend != "fused" or self.chunk is not None or self._goes_by_blocks(size):
            return 0
        if self.position == "Alibi":
            tables = batch if self.documents else 1
            return FLOAT32 * tables * size**2 * self.model.n_head // self.model.n_layer  # one for all layers
        if self.documents:
            return FLOAT32 * batch * size**2
        return 0 if isinstance(self.mask, Causal | Full) else FLOAT32 * size**2
