"""Models in Hugging Face's format, both ways: config.json, safetensors, a tokenizer, all of them plain files.

What a model is made of decides which stock architecture of transformers it becomes:

    layernorm, learned positions                    GPT2LMHeadModel
    rmsnorm, rope, swiglu                           LlamaForCausalLM; with a sliding window MistralForCausalLM
    rmsnorm, rope, swiglu, qk_norm                  Qwen3ForCausalLM, the norms' weights all 1
    rmsnorm, rope, relu2 or gelu                    ArceeForCausalLM
    rmsnorm, rope, relu2 or gelu, qk_norm           ApertusForCausalLM, the norms' weights all 1

All of these are read back, and Qwen2ForCausalLM, too. What has no exact counterpart is refused by its key. Tensors are
read, turned and written one at a time, in float32: memory holds no more than the largest of them, twice.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from minilm import checkpoint as checkpoints
from minilm import files, tensors, tokenizer_files
from minilm import tokenizer as tokenizers
from minilm.attention.layer import MultiHeadAttention
from minilm.attention.masks import Causal, SlidingWindow
from minilm.attention.positions import Learned, Rotary, StretchedRotary
from minilm.build import outline, sketch
from minilm.errors import ConfigError
from minilm.model import GPT, GPTConfig
from minilm.tokenizer import Tokenizer

EPS = torch.finfo(torch.float32).eps  # what an RMSNorm adds where nothing is said
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}  # of layers without a gate
OURS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_new": "gelu_tanh"}
BUFFERS = re.compile(
    r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$"
)  # old files hold them; they are no weights

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

    gated, qk_norm: what its blocks have. attention_bias, mlp_bias: whether it can have such biases. norms: the names
    of a block's two. rope_base: what it means where nothing is said.
    """

    model_type: str
    architecture: str
    gated: bool = True
    qk_norm: bool = False
    attention_bias: bool = True
    mlp_bias: bool = False
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    rope_base: float = 10000.0

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
QWEN2 = Family("qwen2", "Qwen2ForCausalLM")
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


# ---- to Hugging Face ----


def export(checkpoint: str | Path, out: str | Path, progress: Progress = lambda done, total: None) -> str:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer open, from a run or checkpoint folder.

    Returns the architecture's name. Raises ConfigError for a key that has no counterpart, before anything is written.
    """
    saved = checkpoints.load(checkpoint, state=False)  # its weights are mapped, and read when they are used
    tokenizer = tokenizers.from_dict(saved.tokenizer)
    model = outline(saved, tokenizer)
    family = family_of(model, saved.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    parts = {part.theirs: part for part in family.parts(model.config, biased=all_projections(family))}
    contents: dict[str, files.Content] = {
        "config.json": _json(their_config(family, model, tokenizer)),
        "tokenizer.json": tokenizer_files.to_json(tokenizer),
        "tokenizer_config.json": _json(tokenizer_config(tokenizer, model.config.block_size)),
        tensors.WHOLE: lambda file: tensors.write(
            file,
            {str(name): part.their_shape(shapes) for name, part in parts.items()},
            lambda name: parts[name].to_theirs(lambda ours: saved.weights[ours].float()),
            {"format": "pt"},
            progress,
        ),
    }
    with files.new_folder(out) as folder:
        for name, content in contents.items():
            files.write_synced(folder / name, content)
    return family.architecture


def all_projections(family: Family) -> tuple[str, ...]:
    mlp = ("gate", "up", "down") if family.mlp_bias else ()
    attention = "qkvo" if family.attention_bias else ""
    return tuple(f"self_attn.{x}_proj" for x in attention) + tuple(f"mlp.{x}_proj" for x in mlp)


def family_of(model: GPT, config: dict[str, Any]) -> Family:
    """The architecture that computes just what this model does; ConfigError names the first key that has none."""
    c, layer = model.config, model.blocks[0].attention

    def refuse(key: str, cure: str) -> ConfigError:
        section, _, name = key.partition(".")
        value = config[section].get(name, getattr(c, name, None)) if name else _choice(config, section)
        return ConfigError(
            f"to=hf: {key}={value} has no counterpart in transformers' stock architectures: {cure}"
        )

    if not isinstance(layer, MultiHeadAttention):
        raise refuse("attention", "attention=mha has")
    if model.config.ngrams:
        raise refuse("model.ngrams", "model.ngrams=[] has")
    if c.mlp == "none":
        raise refuse("model.mlp", "any other has")
    classic, qk_norm = c.norm == "layernorm", isinstance(layer.q_norm, nn.RMSNorm)
    wanted, other = (
        ("learned", "rmsnorm goes with rope") if classic else ("rope", "layernorm goes with learned")
    )
    if not isinstance(model.position, Learned if classic else Rotary):
        raise refuse("position", f"with model.norm={c.norm} it must be position={wanted} ({other})")
    family: Family
    if classic:
        family = GPT2
    elif c.mlp == "swiglu":
        family = QWEN3 if qk_norm else MISTRAL if isinstance(model.mask, SlidingWindow) else LLAMA
    else:
        family = APERTUS if qk_norm else ARCEE
    usual = layer.head_dim**-0.5
    if layer.scale != usual and not (classic and layer.scale == 1):
        raise refuse("attention.scale", "sqrt has" + (", and none" if classic else ""))
    if not isinstance(model.mask, Causal) and family is not MISTRAL:
        raise refuse(
            "mask", "causal has; and sliding, with rmsnorm, rope, swiglu and attention.qk_norm=false"
        )
    if classic and c.mlp == "swiglu":
        raise refuse("model.mlp", "with model.norm=layernorm it must be gelu, gelu_tanh or relu2")
    if classic and (c.n_kv_head or c.n_head) != c.n_head:
        raise refuse("model.n_kv_head", "with model.norm=layernorm each head has keys of its own")
    if classic and qk_norm:
        raise refuse("attention.qk_norm", "with model.norm=layernorm it must be false")
    if qk_norm and c.norm_eps not in (None, EPS):
        raise refuse("model.norm_eps", "with attention.qk_norm it must be null")
    if c.bias and not classic and not (family.attention_bias and family.mlp_bias):
        raise refuse("model.bias", f"{family.architecture}, which fits otherwise, has none")
    return family


def _choice(config: dict[str, Any], section: str) -> str:
    """A class's name as the choice of a group, near enough: SlidingWindow as sliding_window."""
    name = config[section]["_target_"].rpartition(".")[2]
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def their_config(family: Family, model: GPT, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json"""
    c, layer = model.config, model.blocks[0].attention
    assert isinstance(layer, MultiHeadAttention)
    start = list(tokenizer.prompt_start)
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": start[0] if start else tokenizer.end_token,
        "eos_token_id": tokenizer.end_token,
        "pad_token_id": None,
        "dtype": "float32",
    }
    if family is GPT2:
        return common | {
            "n_positions": c.block_size,
            "n_embd": c.n_embd,
            "n_layer": c.n_layer,
            "n_head": c.n_head,
            "n_inner": c.n_inner,
            "activation_function": ACTIVATIONS[c.mlp],
            "layer_norm_epsilon": 1e-5 if c.norm_eps is None else c.norm_eps,
            "scale_attn_weights": layer.scale != 1,
            "resid_pdrop": c.dropout,
            "embd_pdrop": c.dropout,
            "attn_pdrop": layer.dropout,
        }
    assert isinstance(model.position, Rotary)
    window = {"sliding_window": model.mask.window} if isinstance(model.mask, SlidingWindow) else {}
    return common | window | {
        "max_position_embeddings": c.block_size,
        "hidden_size": c.n_embd,
        "intermediate_size": c.mlp_hidden,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_kv_head or c.n_head,
        "head_dim": c.head_dim,
        "hidden_act": "silu" if family.gated else ACTIVATIONS[c.mlp],
        "rms_norm_eps": EPS if c.norm_eps is None else c.norm_eps,
        "rope_theta": model.position.base,
        "rope_parameters": their_rope(model.position),
        "attention_bias": c.bias,
        "mlp_bias": c.bias,
        "attention_dropout": layer.dropout,
    }  # fmt: skip


def their_rope(position: Rotary) -> dict[str, Any]:
    if not isinstance(position, StretchedRotary):
        return {"rope_type": "default", "rope_theta": position.base}
    return {
        "rope_type": "llama3",
        "rope_theta": position.base,
        "factor": position.factor,
        "low_freq_factor": position.low_turns,
        "high_freq_factor": position.high_turns,
        "original_max_position_embeddings": position.original_block_size,
    }


def tokenizer_config(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    """tokenizer_config.json: text that looks like a special token is plain text, as it is here."""
    end = tokenizer.end_token
    special = {} if end is None else {"eos_token": tokenizer.decode_bytes([end]).decode()}
    return special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }


# ---- from Hugging Face ----


def import_model(path: str | Path, out: str | Path, progress: Progress = lambda done, total: None) -> str:
    """Make a checkpoint folder of a folder with config.json, safetensors and a tokenizer, to generate or finetune from.

    Returns the architecture's name. Raises ConfigError, before anything is written, for a kind of model that is not
    known, a setting that has no counterpart here, and tensors that are missing, left over or of another shape.
    """
    source = Path(path).expanduser()
    theirs = _read_json(source / "config.json")
    family = FAMILIES.get(str(theirs.get("model_type")))
    if family is None:
        raise ConfigError(
            f"{source}: model_type={theirs.get('model_type')} is not known; expected one of {', '.join(FAMILIES)}"
        )
    weights = tensors.Folder(source)
    ask = Asked(source, theirs)
    sections = gpt2_sections(ask, weights) if family is GPT2 else llama_sections(ask, family)
    tokenizer = read_tokenizer(source, theirs, ask.number("vocab_size"))
    sections["tokenizer"] = {"_target_": f"minilm.tokenizer.{type(tokenizer).__name__}"}
    model = sketch(sections, tokenizer.vocab_size, len(weights.names()), source)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del shapes["head.weight"]
    parts = list(family.parts(model.config, biased=biased_projections(ask, family)))
    read = reader(source, weights, parts, shapes, model.config.tie_embeddings)
    tied = {"head.weight": "embedding.weight"} if model.config.tie_embeddings else {}
    contents: dict[str, files.Content] = {
        checkpoints.WEIGHTS: lambda file: tensors.write(
            file, shapes, read, checkpoints.weights_header(step=0, tied=tied), progress
        ),
        checkpoints.CONFIG: yaml.safe_dump(sections, sort_keys=False, allow_unicode=True),
        checkpoints.TOKENIZER: json.dumps(tokenizer.to_dict(), ensure_ascii=False),
    }
    with files.new_folder(out) as folder:
        checkpoints.write_parts(folder, contents)
    return family.architecture


@dataclass(frozen=True)
class Asked:
    """A config.json that is asked for its values."""

    source: Path
    config: dict[str, Any]

    def number(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a positive whole number")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 <= value < 1e30:
            raise self.wrong(key, "a number, 0 or more")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def must_be(self, key: str, *allowed: Any) -> None:
        """The first of `allowed` is what its absence means."""
        if self.config.get(key, allowed[0]) not in allowed:
            raise self.wrong(key, f"{json.dumps(allowed[0])} (minilm has no other)")

    def wrong(self, key: str, expected: str) -> ConfigError:
        value = json.dumps(self.config.get(key))
        return ConfigError(f"{self.source / 'config.json'}: {key}={value:.200}: expected {expected}")


def sections_of(shape: dict[str, Any], attention: dict[str, Any], **others: dict[str, Any]) -> dict[str, Any]:
    """The sections of a configuration that make the model."""
    model = asdict(GPTConfig(vocab_size=1, **shape))
    del model["vocab_size"]
    mha = {
        "_target_": "minilm.attention.layer.MultiHeadAttention",
        "scale": "sqrt",
        "qk_norm": False,
        "dropout": 0.0,
    }
    return {
        "model": model,
        "attention": mha | {"backend": "fused"} | attention,
        **others,
    }


def gpt2_sections(ask: Asked, weights: tensors.Folder) -> dict[str, Any]:
    ask.must_be("scale_attn_by_inverse_layer_idx", False)
    ask.must_be("add_cross_attention", False)
    ask.must_be("quantization_config", None)
    activation = str(ask.config.get("activation_function", "gelu_new"))
    if activation not in OURS:
        raise ask.wrong("activation_function", f"one of {', '.join(OURS)}")
    n_embd = ask.number("n_embd", 768)
    width = ask.number("n_inner", 4 * n_embd)
    biases = [name for name in weights.names() if name.endswith(".bias") and not BUFFERS.search(name)]
    shape = {
        "block_size": ask.number("n_positions", 1024),
        "n_layer": ask.number("n_layer", 12),
        "n_head": ask.number("n_head", 12),
        "n_embd": n_embd,
        "norm": "layernorm",
        "norm_eps": _unless(1e-5, ask.real("layer_norm_epsilon", 1e-5)),
        "mlp": OURS[activation],
        "n_inner": _unless(4 * n_embd, width),
        "bias": any(bool(weights.read(name).any()) for name in biases),  # where all are 0, there are none
        "dropout": ask.real("resid_pdrop", 0.1),
        "tie_embeddings": ask.flag("tie_word_embeddings", True),
    }
    scale = "sqrt" if ask.flag("scale_attn_weights", True) else "none"
    return sections_of(
        shape,
        {"scale": scale, "dropout": ask.real("attn_pdrop", 0.1)},
        mask={"_target_": "minilm.attention.masks.Causal"},
        position={"_target_": "minilm.attention.positions.Learned"},
    )


def llama_sections(ask: Asked, family: Family) -> dict[str, Any]:
    ask.must_be("quantization_config", None)
    ask.must_be("use_sliding_window", False)
    ask.must_be("partial_rotary_factor", 1.0, None)
    n_embd, n_head = ask.number("hidden_size"), ask.number("num_attention_heads")
    if ask.number("head_dim", n_embd // n_head) * n_head != n_embd:
        raise ask.wrong("head_dim", f"hidden_size / num_attention_heads = {n_embd // n_head}")
    activation = str(ask.config.get("hidden_act", "silu" if family.gated else None))
    known = {"silu": "swiglu", "swish": "swiglu"} if family.gated else OURS
    if activation not in known:
        raise ask.wrong("hidden_act", f"one of {', '.join(known)}")
    mlp = known[activation]
    eps = ask.real("rms_norm_eps", 1e-6)
    if family.qk_norm and eps != EPS:
        raise ask.wrong("rms_norm_eps", f"{EPS}, that of minilm's norms of queries and keys")
    heads = ask.number("num_key_value_heads", 8 if family is MISTRAL else n_head)
    window = ask.config.get("sliding_window", 4096) if family is MISTRAL else None
    shape = {
        "block_size": ask.number("max_position_embeddings"),
        "n_layer": ask.number("num_hidden_layers"),
        "n_head": n_head,
        "n_kv_head": _unless(n_head, heads),
        "n_embd": n_embd,
        "norm": "rmsnorm",
        "norm_eps": _unless(EPS, eps),
        "mlp": mlp,
        "n_inner": ask.number("intermediate_size"),
        "bias": bool(biased_projections(ask, family)),
        "tie_embeddings": ask.flag("tie_word_embeddings", False),
    }
    usual = GPTConfig(vocab_size=1, **shape | {"n_inner": None}).mlp_hidden
    shape["n_inner"] = _unless(usual, shape["n_inner"])
    mask = "Causal" if window is None else "SlidingWindow"
    return sections_of(
        shape,
        {"qk_norm": family.qk_norm, "dropout": ask.real("attention_dropout", 0.0)},
        mask={"_target_": f"minilm.attention.masks.{mask}"} | ({} if window is None else {"window": window}),
        position=our_rope(ask, family),
    )


def _unless(usual: Any, value: Any) -> Any:
    return None if value == usual else value


def biased_projections(ask: Asked, family: Family) -> tuple[str, ...]:
    if family is QWEN2:
        return tuple(f"self_attn.{x}_proj" for x in "qkv")
    attention, mlp = ask.flag("attention_bias", False), ask.flag("mlp_bias", False)
    has = {"self_attn": attention, "mlp": mlp}
    return tuple(name for name in all_projections(family) if has[name.partition(".")[0]])


def our_rope(ask: Asked, family: Family) -> dict[str, Any]:
    """The section position. transformers 5 keeps all of it in rope_parameters, 4 in rope_scaling and rope_theta."""
    key = next((key for key in ("rope_parameters", "rope_scaling") if ask.config.get(key) is not None), None)
    given = ask.config[key] if key else {}
    kind = given.get("rope_type", given.get("type", "default")) if isinstance(given, dict) else None
    if kind not in ("default", "llama3"):
        raise ask.wrong(str(key), "rotary positions of rope_type default or llama3")
    inner = Asked(ask.source, {"rope_theta": ask.config.get("rope_theta")} | given)
    plain = {
        "_target_": "minilm.attention.positions.Rotary",
        "base": inner.real("rope_theta", family.rope_base),
    }
    if kind == "default":
        return plain
    return plain | {
        "_target_": "minilm.attention.positions.StretchedRotary",
        "factor": inner.real("factor", 8.0),
        "low_turns": inner.real("low_freq_factor", 1.0),
        "high_turns": inner.real("high_freq_factor", 4.0),
        "original_block_size": inner.number(
            "original_max_position_embeddings", ask.number("max_position_embeddings")
        ),
    }


def reader(
    source: Path, weights: tensors.Folder, parts: list[Part], shapes: dict[str, tuple[int, ...]], tied: bool
) -> Callable[[str], Tensor]:
    """What gives a tensor of ours out of theirs. ConfigError for one that is missing, left over or of another shape."""
    find: dict[str, str] = {}  # their full name -> the name in the file, which may lack the first part
    for part in parts:
        name = part.theirs
        if name is None:
            continue
        found = next((n for n in (name, name.partition(".")[2]) if n in weights), None)
        if found is None:
            raise ConfigError(f"{source}: the tensor {name} is missing; copy the weights again")
        find[name] = found
        shape, expected = weights.shape(found), part.their_shape(shapes)
        if shape != expected:
            raise ConfigError(f"{source}: {found} has the shape {shape}, config.json calls for {expected}")
        if not part.ours and (weights.read(found) != part.constant).any():
            raise ConfigError(
                f"{source}: {found} is not all {part.constant:g}; minilm has no weight in its place"
            )
    spare = {"lm_head.weight"} if tied else set()
    for name in weights.names():
        if name not in find.values() and name not in spare and not BUFFERS.search(name):
            raise ConfigError(f"{source}: the tensor {name} has no counterpart in minilm")
    holder = {name: part for part in parts for name in part.ours}

    def read(name: str) -> Tensor:
        part = holder[name]
        if part.theirs is None:
            return torch.full(shapes[name], part.constant)
        whole = weights.read(find[part.theirs])
        start = sum(shapes[before][0] for before in part.ours[: part.ours.index(name)])
        return (whole.T if part.turned else whole)[start : start + shapes[name][0]]

    return read


def read_tokenizer(source: Path, config: dict[str, Any], vocab_size: int) -> Tokenizer:
    """The tokenizer of a folder: its tokenizer.json, else GPT-2's vocab.json and merges.txt."""
    if (source / "tokenizer.json").is_file():
        definition = tokenizer_files.read(source / "tokenizer.json")
    elif (source / "vocab.json").is_file() and (source / "merges.txt").is_file():
        definition = tokenizer_files.from_vocabulary(source / "vocab.json", source / "merges.txt")
    else:
        raise ConfigError(
            f"{source}: there is no tokenizer.json, which AutoTokenizer.from_pretrained(…).save_pretrained(…) writes"
        )
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int) or not 0 <= end < vocab_size:
        end = None
    return tokenizer_files.from_json(definition, vocab_size, end)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); name a folder with a model in it"
        ) from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: not a JSON object; copy it again")
    return value
