"""In: a folder of Hugging Face's as a checkpoint, read a tensor at a time; all of it is checked before the first."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from minilm import checkpoint as checkpoints
from minilm import files, tensors, tokenizer_files
from minilm.build import sketch
from minilm.errors import ConfigError
from minilm.interop.families import ACTIVATIONS, EPS, FAMILIES, GPT2, MISTRAL, Family, Part, Progress
from minilm.model import GPTConfig
from minilm.tokenizer import Tokenizer

OURS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_new": "gelu_tanh"}
BUFFERS = re.compile(
    r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$"
)  # old files hold them; they are no weights


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
    if family.biased is not None:
        return family.biased
    return family.projections(attention=ask.flag("attention_bias", False), mlp=ask.flag("mlp_bias", False))


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
