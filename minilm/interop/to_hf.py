"""Out: a checkpoint as a folder that transformers opens, written a tensor at a time, in float32."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from minilm import checkpoint as checkpoints
from minilm import files, tensors, tokenizer_files
from minilm import tokenizer as tokenizers
from minilm.attention.layer import MultiHeadAttention
from minilm.attention.masks import Causal, SlidingWindow
from minilm.attention.positions import Learned, Rotary, StretchedRotary
from minilm.build import outline
from minilm.data import ROOT
from minilm.errors import ConfigError
from minilm.interop.families import (
    ACTIVATIONS,
    APERTUS,
    ARCEE,
    EPS,
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN3,
    Family,
    Progress,
)
from minilm.model import GPT
from minilm.tokenizer import Tokenizer


def export(checkpoint: str | Path, out: str | Path, progress: Progress = lambda done, total: None) -> str:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer open, from a run or checkpoint folder.

    Returns the architecture's name. Raises ConfigError for a key that has no counterpart, before anything is written.
    """
    saved = checkpoints.load(checkpoint, state=False)  # its weights are mapped, and read when they are used
    tokenizer = tokenizers.from_dict(saved.tokenizer)
    model = outline(saved, tokenizer)
    family = family_of(model, saved.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    parts = {part.theirs: part for part in family.parts(model.config, biased=family.projections())}
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
    """The choice of a group that a class stands for; its path where none of ours does."""
    target = config[section]["_target_"]
    for file in sorted((ROOT / "configs" / section).glob("*.yaml")):
        if f"_target_: {target}\n" in file.read_text(encoding="utf-8"):
            return file.stem
    return target


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


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
