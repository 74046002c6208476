"""Architectures of transformers that a model of ours can be: their tensors, and which of ours each of them holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minilm.model import GPTConfig

EPS = torch.finfo(torch.float32).eps  # what an RMSNorm adds where nothing is said
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}  # of layers without a gate

Progress = Callable[[int, int], object]  # (done, total)


@dataclass(frozen=True)
class Part:
    """A tensor of theirs (None: they have none, it is all `constant`) and those of ours that it holds, one after the
    other. None of ours: all of it must be `constant`. turned: (in, out) where ours is (out, in)."""

    theirs: str | None
    ours: tuple[str, ...]
    turned: bool = False
    constant: float = 0.0
    shape: tuple[int, ...] = ()  # where there is none of ours

    def their_shape(self, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        if not self.ours:
            return self.shape
        pieces = [shapes[name] for name in self.ours]
        whole = (sum(piece[0] for piece in pieces), *pieces[0][1:])
        return whole[::-1] if self.turned else whole

    def to_theirs(self, read: Callable[[str], Tensor]) -> Tensor:
        if not self.ours:
            return torch.full(self.shape, self.constant)
        whole = torch.cat([read(name) for name in self.ours])
        return whole.T if self.turned else whole


@dataclass(frozen=True)
class Family:
    """One of transformers' architectures, of Llama's kin.

    gated, qk_norm: what its blocks have. attention_bias, mlp_bias: whether it can have such biases. biased: the
    projections that always have one, None where its config.json decides. norms: the names of a block's two. rope_base:
    what it means where nothing is said.
    """

    model_type: str
    architecture: str
    gated: bool = True
    qk_norm: bool = False
    attention_bias: bool = True
    mlp_bias: bool = False
    biased: tuple[str, ...] | None = None
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    rope_base: float = 10000.0

    def projections(self, *, attention: bool = True, mlp: bool = True) -> tuple[str, ...]:
        """Of a block, those that can have a bias; without attention's or the MLP's where it has none there."""
        names = [f"self_attn.{x}_proj" for x in "qkvo"] if attention and self.attention_bias else []
        names += [f"mlp.{x}_proj" for x in ("gate", "up", "down")] if mlp and self.mlp_bias else []
        return tuple(names)

    def parts(self, c: GPTConfig, biased: tuple[str, ...]) -> Iterator[Part]:
        """biased: projections that have a bias on their side; where ours has one as well, theirs counts as 0."""
        names = {f"self_attn.{x[0]}_proj": f"attention.{x}" for x in ("query", "key", "value", "out")}
        names |= {"mlp.gate_proj": "mlp.gate"} if self.gated else {}
        names |= {"mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.out"}
        yield Part("model.embed_tokens.weight", ("embedding.weight",))
        for i in range(c.n_layer):
            them, us = f"model.layers.{i}.", f"blocks.{i}."
            for n, norm in enumerate(self.norms, start=1):
                yield Part(f"{them}{norm}.weight", (f"{us}norm_{n}.weight",))
            for theirs, ours in names.items():
                yield Part(f"{them}{theirs}.weight", (f"{us}{ours}.weight",))
                if c.bias:
                    yield Part(f"{them}{theirs}.bias" if theirs in biased else None, (f"{us}{ours}.bias",))
            for norm in ("q_norm", "k_norm") if self.qk_norm else ():
                yield Part(f"{them}self_attn.{norm}.weight", (), constant=1.0, shape=(c.head_dim,))
        yield Part("model.norm.weight", ("norm.weight",))
        if not c.tie_embeddings:
            yield Part("lm_head.weight", ("head.weight",))


@dataclass(frozen=True)
class Classic(Family):
    """GPT-2, whose matrices are (in, out), and whose every layer has a bias."""

    def parts(self, c: GPTConfig, biased: tuple[str, ...]) -> Iterator[Part]:
        C, hidden = c.n_embd, c.mlp_hidden
        yield Part("transformer.wte.weight", ("embedding.weight",))
        yield Part("transformer.wpe.weight", ("position.table.weight",))
        names = {
            "attn.c_attn": (("attention.query", "attention.key", "attention.value"), 3 * C),
            "attn.c_proj": (("attention.out",), C),
            "mlp.c_fc": (("mlp.up",), hidden),
            "mlp.c_proj": (("mlp.out",), C),
            "ln_1": (("norm_1",), C),
            "ln_2": (("norm_2",), C),
        }
        layers = [
            (f"transformer.h.{i}.{them}", f"blocks.{i}.", *names[them])
            for i in range(c.n_layer)
            for them in names
        ]
        for theirs, block, ours, width in [*layers, ("transformer.ln_f", "", ("norm",), C)]:
            turned = ".c_" in theirs
            yield Part(f"{theirs}.weight", tuple(f"{block}{name}.weight" for name in ours), turned)
            biases = tuple(f"{block}{name}.bias" for name in ours) if c.bias else ()
            yield Part(f"{theirs}.bias", biases, shape=(width,))
        if not c.tie_embeddings:
            yield Part("lm_head.weight", ("head.weight",))


GPT2 = Classic("gpt2", "GPT2LMHeadModel")
LLAMA = Family("llama", "LlamaForCausalLM", mlp_bias=True)
MISTRAL = Family("mistral", "MistralForCausalLM", attention_bias=False)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", biased=tuple(f"self_attn.{x}_proj" for x in "qkv"))
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", qk_norm=True)
ARCEE = Family("arcee", "ArceeForCausalLM", gated=False, mlp_bias=True)
APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    gated=False,
    qk_norm=True,
    norms=("attention_layernorm", "feedforward_layernorm"),
    rope_base=12_000_000.0,
)
FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, ARCEE, APERTUS)}
