"""To Hugging Face and back: transformers itself, with small models that it or we make, says whether it is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, TEXT
from test_build import choice

from minilm import checkpoint
from minilm.build import build_model, restore
from minilm.errors import ConfigError
from minilm.generation import Generator, encode_prompt
from minilm.interop import export, import_model
from minilm.sampling import Sampler
from minilm.tokenizer import BPE, Byte, Char

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
CORPUS = TEXT * 4
SHAPE = {"n_layer": 2, "n_head": 4, "n_kv_head": None, "n_embd": 32, "block_size": 256}
TOKENIZERS = {
    "char": lambda: Char.fit(CORPUS),
    "byte": lambda: Byte(),
    "bpe": lambda: BPE.fit(CORPUS, 300),
    "gaps": lambda: BPE(
        BPE.fit(CORPUS, 300).pattern, BPE.fit(CORPUS, 300).ranks, {"<|endoftext|>": 310, "<|a|>": 305}
    ),
}
CLASSIC = {"norm": "layernorm", "mlp": "gelu", "bias": True, "tie_embeddings": True}

# what the export becomes, and the settings it is made of: model's, attention's, mask, position
EXPORTS = {
    "classic": ("GPT2LMHeadModel", CLASSIC, {"qk_norm": False}, "causal", "learned"),
    "classic without biases": (
        *("GPT2LMHeadModel", CLASSIC | {"bias": False, "tie_embeddings": False}),
        *({"qk_norm": False}, "causal", "learned"),
    ),
    "classic, odd": (
        *("GPT2LMHeadModel", CLASSIC | {"mlp": "relu2", "n_inner": 40, "norm_eps": 1e-3}),
        *({"qk_norm": False, "scale": "none"}, "causal", "learned"),
    ),
    "gelu_tanh": ("GPT2LMHeadModel", CLASSIC | {"mlp": "gelu_tanh"}, {"qk_norm": False}, "causal", "learned"),
    "default": ("ApertusForCausalLM", {}, {}, "causal", "rope"),
    "default, grouped and tied": ("ApertusForCausalLM", {"n_kv_head": 2, "tie_embeddings": True}, {}, "causal", "rope"),
    "without qk_norm": ("ArceeForCausalLM", {"n_kv_head": 1, "bias": True}, {"qk_norm": False}, "causal", "rope"),
    "llama": ("LlamaForCausalLM", {"mlp": "swiglu", "n_kv_head": 2}, {"qk_norm": False}, "causal", "rope"),
    "llama, odd": (
        "LlamaForCausalLM",
        {"mlp": "swiglu", "bias": True, "tie_embeddings": True, "norm_eps": 1e-2, "n_inner": 9},
        *({"qk_norm": False}, "causal", "rope"),
    ),
    "stretched": (
        *("LlamaForCausalLM", {"mlp": "swiglu", "block_size": 64}, {"qk_norm": False}, "causal", "rope_stretched"),
    ),
    "swiglu with qk_norm": ("Qwen3ForCausalLM", {"mlp": "swiglu", "n_kv_head": 2}, {}, "causal", "rope"),
    "sliding": ("MistralForCausalLM", {"mlp": "swiglu"}, {"qk_norm": False}, "sliding", "rope"),
}  # fmt: skip


def save(folder, tokenizer, model=(), attention=(), mask="causal", position="rope", noise=0.1):
    """A checkpoint of random weights, far from their initial size, so that every part of the model counts."""
    config = {
        "model": choice("model", "micro") | SHAPE | {"ngrams": []} | dict(model),
        "attention": choice("attention", "mha") | dict(attention),
        "mask": choice("mask", mask) | ({"window": 5} if mask == "sliding" else {}),
        "position": choice("position", position)
        | ({"original_block_size": 24} if "stre" in position else {}),
        "tokenizer": {"_target_": "minilm.tokenizer.Char"},
    }
    torch.manual_seed(0)
    built = build_model(config, tokenizer.vocab_size)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3 if "norm" in name or "bias" in name else noise)
    checkpoint.save(
        folder, 7, weights=built.state_dict(), state={}, config=config, tokenizer=tokenizer.to_dict()
    )
    return folder


def open_in_transformers(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def assert_same_logits(ours, theirs, n=60):
    tokens = torch.randint(ours.config.vocab_size, (3, n))
    with torch.no_grad():
        mine, told = ours(tokens), theirs(tokens).logits
    assert mine.std() > 0.1
    torch.testing.assert_close(mine, told, atol=1e-5, rtol=1e-5)


# ---- to Hugging Face, and back ----


@pytest.mark.parametrize("name", EXPORTS)
def test_transformers_computes_the_same_from_the_export_and_it_comes_back_unchanged(name, tmp_path):
    architecture, *settings = EXPORTS[name]
    run = save(tmp_path / "run", TOKENIZERS["char"](), *settings)
    assert export(run, tmp_path / "hf") == architecture
    ours, tokenizer, saved = restore(run, CPU)
    theirs, _ = open_in_transformers(tmp_path / "hf")
    assert type(theirs).__name__ == architecture
    assert_same_logits(ours, theirs)

    assert import_model(tmp_path / "hf", tmp_path / "back") == architecture
    back = checkpoint.load(tmp_path / "back", state=False)
    assert back.weights.keys() == saved.weights.keys()
    assert all(torch.equal(back.weights[key], saved.weights[key]) for key in saved.weights)
    again, same_tokenizer, _ = restore(tmp_path / "back", CPU)
    assert again.config == ours.config
    assert (again.mask, type(again.position)) == (ours.mask, type(ours.position))
    assert same_tokenizer.to_dict() == tokenizer.to_dict()


@pytest.mark.parametrize("style", ["classic", "default", "llama"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_greedy_text_from_the_export_equals_ours(style, kind, tmp_path):
    run = save(tmp_path / "run", TOKENIZERS[kind](), *EXPORTS[style][1:], noise=0.2)
    export(run, tmp_path / "hf")
    model, tokenizer, _ = restore(run, CPU)
    theirs, their_tokenizer = open_in_transformers(tmp_path / "hf")
    seen = set()
    for prompt in ("The ", "An assignment\nof the", "(see section, the target list)"):
        ids = encode_prompt(tokenizer, prompt)
        encoded = their_tokenizer(prompt, return_tensors="pt")
        assert encoded.input_ids.tolist() == [ids]
        new = [int(t[0]) for t in Generator(model, Sampler(temperature=0)).tokens([ids], 200)]
        told = theirs.generate(
            **encoded, max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert told[0].tolist() == ids + new
        assert their_tokenizer.decode(told[0]) == tokenizer.decode(ids + new)
        seen |= set(new)
    assert len(seen) > 10


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_transformers_tokenizer_gives_the_same_ids_and_text(kind, tmp_path):
    run = save(tmp_path / "run", TOKENIZERS[kind]())
    export(run, tmp_path / "hf")
    ours, theirs = TOKENIZERS[kind](), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    texts = [TEXT, "", " a  b\n\n\n c"]
    texts += [] if kind == "char" else ["<|endoftext|> é日🙂 \r\n12345'll", "\u0301" * 3]
    for text in texts:
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.end_token
    if kind != "char":
        assert theirs.decode([0xC3, 0x28, 0xE2, 0x82]) == ours.decode([0xC3, 0x28, 0xE2, 0x82])


REFUSED = {
    "to=hf: position=alibi has no counterpart": ({}, {}, "causal", "alibi"),
    "to=hf: position=learned has no counterpart .* position=rope": ({}, {}, "causal", "learned"),
    "position=rope has no counterpart .* position=learned": ({"norm": "layernorm"}, {}, "causal", "rope"),
    "model.mlp=none has no counterpart": ({"mlp": "none"}, {}, "causal", "rope"),
    "mask=prefix has no counterpart": ({}, {}, "prefix", "rope"),
    "mask=none has no counterpart": ({}, {}, "none", "rope"),
    "mask=sliding has no counterpart": ({}, {}, "sliding", "rope"),
    "attention.scale=none has no counterpart": ({}, {"scale": "none"}, "causal", "rope"),
    "attention.scale=0.5 has no counterpart": ({}, {"scale": 0.5}, "causal", "rope"),
    "model.bias=True has no counterpart": ({"bias": True}, {}, "causal", "rope"),
    "model.norm_eps=0.001 has no counterpart": ({"norm_eps": 1e-3}, {}, "causal", "rope"),
    "model.n_kv_head=2 has no counterpart": (CLASSIC | {"n_kv_head": 2}, {}, "causal", "learned"),
    "attention.qk_norm=True has no counterpart": (CLASSIC, {}, "causal", "learned"),
    "model.mlp=swiglu has no counterpart": (CLASSIC | {"mlp": "swiglu"}, {}, "causal", "learned"),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_counterpart_is_refused_by_its_key(message, tmp_path):
    run = save(tmp_path / "run", Byte(), *REFUSED[message])
    with pytest.raises(ConfigError, match=message):
        export(run, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_linear_attention_has_no_counterpart(tmp_path):
    run = save(tmp_path / "run", Byte())
    folder = checkpoint.find(run)
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {
        "attention": choice("attention", "linear")
    }
    weights = checkpoint.load(run, state=False).weights
    checkpoint.save(tmp_path / "l", 1, weights=weights, state={}, config=config, tokenizer=Byte().to_dict())
    with pytest.raises(ConfigError, match=r"attention=linear has no counterpart .* attention=mha"):
        export(tmp_path / "l", tmp_path / "hf")


def test_vectors_of_histories_have_no_counterpart(tmp_path):
    tokenizer, config = Byte(), checkpoint.load(save(tmp_path / "run", Byte()), state=False).config
    config |= {"model": config["model"] | {"ngrams": [2]}}
    weights = build_model(config, 256).state_dict()
    checkpoint.save(
        tmp_path / "n", 1, weights=weights, state={}, config=config, tokenizer=tokenizer.to_dict()
    )
    with pytest.raises(
        ConfigError, match=r"model\.ngrams=\[2\] has no counterpart .* model\.ngrams=\[\] has"
    ):
        export(tmp_path / "n", tmp_path / "hf")


# ---- from Hugging Face ----


def gpt2(**changes):
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape | changes))


def llama(kind="Llama", **changes):
    shape = {
        **{"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 320},
    }
    config = getattr(transformers, f"{kind}Config")(**shape | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


IMPORTS = {
    "gpt2": lambda: gpt2(),
    "gpt2, odd": lambda: gpt2(
        tie_word_embeddings=False, n_inner=48, activation_function="gelu", layer_norm_epsilon=1e-3,
        scale_attn_weights=False,
    ),
    "llama": lambda: llama(),
    "llama, odd": lambda: llama(
        tie_word_embeddings=True, rms_norm_eps=1e-2, attention_bias=True, num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "llama 3": lambda: llama(
        rope_parameters={
            **{"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 24},
        }
    ),
    "mistral": lambda: llama("Mistral", sliding_window=7),
    "mistral without a window": lambda: llama("Mistral", sliding_window=None),
    "qwen2": lambda: llama("Qwen2", use_sliding_window=False),
}  # fmt: skip


def make_theirs(folder, make, **how):
    """A model of theirs with weights far from the initial ones, and a tokenizer that lacks some of the model's ids."""
    torch.manual_seed(1)
    model = make().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3 if "norm" in name or "bias" in name else 0.1)
    model.save_pretrained(folder, **how)
    export(save(folder / "run", TOKENIZERS["bpe"](), model={"n_layer": 1}), folder / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).rename(folder / name)
    return model


@pytest.mark.parametrize("name", IMPORTS)
def test_an_import_computes_what_transformers_does(name, tmp_path):
    theirs = make_theirs(tmp_path / "hf", IMPORTS[name])
    import_model(tmp_path / "hf", tmp_path / "ours")
    ours, tokenizer, _ = restore(tmp_path / "ours", CPU)
    assert_same_logits(ours, theirs)
    assert tokenizer.encode(TEXT) == TOKENIZERS["bpe"]().encode(TEXT)
    assert tokenizer.vocab_size == 320
    assert tokenizer.decode([5, 319]) == tokenizer.decode([5])


def test_shards_and_half_precision_are_read_in_float32(tmp_path):
    make_theirs(tmp_path / "hf", lambda: llama().to(torch.bfloat16), max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    import_model(tmp_path / "hf", tmp_path / "ours")
    ours, _, saved = restore(tmp_path / "ours", CPU)
    assert {weight.dtype for weight in saved.weights.values()} == {torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert_same_logits(ours, theirs)


def test_old_gpt2_files_lack_a_prefix_and_hold_the_mask(tmp_path):
    from safetensors.torch import load_file, save_file

    theirs = make_theirs(tmp_path / "hf", gpt2)
    file = tmp_path / "hf" / "model.safetensors"
    weights = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(weights | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, file, {"format": "pt"})
    import_model(tmp_path / "hf", tmp_path / "ours")
    assert_same_logits(restore(tmp_path / "ours", CPU)[0], theirs)


def change(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def lose(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / index["weight_map"]["model.norm.weight"]).unlink()


BAD = {
    "model_type=bert is not known; expected one of gpt2": lambda f: change(f, model_type="bert"),
    'hidden_act="gelu": expected one of silu': lambda f: change(f, hidden_act="gelu"),
    'rope_parameters=.*"yarn".*: expected rotary': lambda f: change(f, rope_parameters={"rope_type": "yarn"}),
    "head_dim=16: expected hidden_size / num_attention_heads = 8": lambda f: change(f, head_dim=16),
    "hidden_size=null: expected a positive whole number": lambda f: change(f, hidden_size=None),
    "has the shape .* config.json calls for": lambda f: change(f, intermediate_size=80),
    "model.layers.2.input_layernorm.weight is missing": lambda f: change(f, num_hidden_layers=3),
    "model.layers.1.* has no counterpart": lambda f: change(f, num_hidden_layers=1),
    "ids up to 299, but the model knows 200": lambda f: change(f, vocab_size=200),
    "there is no tokenizer.json": lambda f: (f / "tokenizer.json").unlink(),
    "config.json: cannot be read": lambda f: (f / "config.json").unlink(),
    "config.json: not a JSON object": lambda f: (f / "config.json").write_text("[1]"),
    "model-0.*safetensors: there is no such file": lose,
    "quantization_config=": lambda f: change(f, quantization_config={"bits": 4}),
}


@pytest.mark.parametrize("message", BAD)
def test_a_folder_that_cannot_be_right_is_refused_and_nothing_is_left(message, tmp_path):
    make_theirs(tmp_path / "hf", llama, max_shard_size="20KB")
    BAD[message](tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        import_model(tmp_path / "hf", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_norms_with_weights_on_queries_are_refused(tmp_path):
    make_theirs(tmp_path / "hf", lambda: llama("Qwen3", rms_norm_eps=2**-23, head_dim=8))
    with pytest.raises(ConfigError, match=r"q_norm.weight is not all 1; minilm has no weight in its place"):
        import_model(tmp_path / "hf", tmp_path / "ours")


def test_nothing_is_written_over(tmp_path):
    run = save(tmp_path / "run", Byte())
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is there already: name a new folder"):
        export(run, tmp_path / "hf")
    assert Path(tmp_path / "hf" / "thesis.txt").read_text() == "mine"


# ---- memory ----

CHILD = """
import os, re, sys, torch
from safetensors.torch import load_file
from minilm import interop
os.fsync = lambda descriptor: None
_, kind, source, out = sys.argv
interop.import_model({small!r}, {small!r} + "-" + kind)  # what a first import loads
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) >> 10  # MiB, since it began
before = peak()
if kind == "stream":
    interop.import_model(source, out)
else:
    whole = [load_file(os.path.join(source, name)) for name in os.listdir(source) if name.endswith(".safetensors")]
    copies = [tensor.clone() for part in whole for tensor in part.values()]
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak of memory")
def test_an_import_holds_a_tensor_at_a_time(tmp_path):
    """Against reading everything: this must take what the folder does, the import a part of it."""
    make_theirs(tmp_path / "small", llama)
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24, "num_key_value_heads": 4}
    make_theirs(tmp_path / "big", lambda: llama(**shape), max_shard_size="40MB")
    size = sum(file.stat().st_size for file in (tmp_path / "big").glob("*.safetensors")) >> 20
    assert size > 90
    code = CHILD.replace("{small!r}", repr(str(tmp_path / "small")))

    def grown(kind):
        command = [sys.executable, "-c", code, kind, str(tmp_path / "big"), str(tmp_path / kind)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert grown("all") > size
    assert grown("stream") < size / 2
