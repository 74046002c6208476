"""The model: transformers as references, the cache against the whole, and what must hold of any weights."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from minilm.attention import (
    Alibi,
    Causal,
    Full,
    Learned,
    MultiHeadAttention,
    NoPosition,
    Prefix,
    Rotary,
    Sinusoidal,
    SlidingWindow,
)
from minilm.errors import ConfigError
from minilm.model import GPT, GPTConfig

V, T, C, H = 61, 32, 32, 4  # vocabulary, context, width, heads
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float64"])


def classic(**changes):
    shape = {"norm": "layernorm", "mlp": "gelu", "bias": True, "tie_embeddings": True} | changes
    config = GPTConfig(vocab_size=V, block_size=T, n_layer=2, n_head=H, n_embd=C, **shape)
    return GPT(config, position=Learned(n_embd=C, block_size=T))


def modern(*, mask=Causal(), position=None, qk_norm=False, scale="sqrt", **changes):  # noqa: B008 (frozen)
    shape = {"n_kv_head": 2, "norm": "rmsnorm", "mlp": "swiglu"} | changes
    config = GPTConfig(vocab_size=V, block_size=T, n_layer=2, n_head=H, n_embd=C, **shape)

    def attention():
        return MultiHeadAttention(
            C, n_head=H, n_kv_head=config.n_kv_head, mask=mask, qk_norm=qk_norm, scale=scale, bias=config.bias
        )

    return GPT(config, position=position or Rotary(head_dim=C // H), attention=attention)


STYLES = pytest.mark.parametrize("style", [classic, modern])


def tokens(batch=2, length=T, seed=0):
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


def shaken(model):
    """Weights that are far from their small beginnings, so that every part of the model shows in the logits."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model.eval()


# ---- transformers as references ----


@DTYPES
def test_the_classic_block_is_gpt2(dtype):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = shaken(classic()).to(dtype)
    reference = GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_positions=T, n_embd=C, n_layer=2, n_head=H, activation_function="gelu")
    )
    weights = {"wte.weight": model.embedding.weight, "wpe.weight": model.position.table.weight}
    for end in ("weight", "bias"):
        weights[f"ln_f.{end}"] = getattr(model.norm, end)
        for i, block in enumerate(model.blocks):
            attention, mlp = block.attention, block.mlp
            pairs = {
                "ln_1": getattr(block.norm_1, end),
                "ln_2": getattr(block.norm_2, end),
                "attn.c_attn": torch.cat(
                    [getattr(m, end) for m in (attention.query, attention.key, attention.value)]
                ),
                "attn.c_proj": getattr(attention.out, end),
                "mlp.c_fc": getattr(mlp.up, end),
                "mlp.c_proj": getattr(mlp.out, end),
            }
            weights |= {
                f"h.{i}.{name}.{end}": w.t() for name, w in pairs.items()
            }  # its matrices lie the other way
    reference.transformer.load_state_dict(weights, strict=False)
    reference.to(dtype).eval()
    assert len(weights) == len(list(reference.parameters()))
    with torch.no_grad():
        assert_close(
            model(tokens()), reference(tokens()).logits, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@DTYPES
def test_the_modern_block_is_llama(dtype, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    model = shaken(modern()).to(dtype)
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=C,
            intermediate_size=model.blocks[0].mlp.up.out_features,
            num_hidden_layers=2,
            num_attention_heads=H,
            num_key_value_heads=2,
            max_position_embeddings=T,
            rms_norm_eps=torch.finfo(dtype).eps,
            tie_word_embeddings=False,
        )
    )
    weights = {"lm_head": model.head, "model.embed_tokens": model.embedding, "model.norm": model.norm}
    for i, block in enumerate(model.blocks):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm": block.norm_1,
            f"{layer}.post_attention_layernorm": block.norm_2,
        }
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
        weights |= {f"{layer}.self_attn.{new}": getattr(block.attention, old) for old, new in names.items()}
        names = {"gate": "gate_proj", "up": "up_proj", "out": "down_proj"}
        weights |= {f"{layer}.mlp.{new}": getattr(block.mlp, old) for old, new in names.items()}
    reference.load_state_dict({f"{name}.weight": module.weight for name, module in weights.items()})
    reference.to(dtype).eval()
    if dtype == torch.float64:  # its norms and angles are float32 whatever the model is
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm_in_float64)
        monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", angles_in_float64)
    with torch.no_grad():
        assert_close(
            model(tokens()), reference(tokens()).logits, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def norm_in_float64(self, x):
    return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


def angles_in_float64(self, x, position_ids):
    pairs = torch.arange(0, C // H, 2, dtype=torch.float64) / (C // H)
    angles = (position_ids[..., None] / 10000.0**pairs).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


# ---- weights ----


def test_tied_weights_stay_one_through_saving_loading_casting_and_copying():
    model = classic()
    assert sum(p is model.embedding.weight for p in model.parameters()) == 1
    other = classic()
    other.load_state_dict(model.state_dict())
    for same in (other, model.to(torch.float64), copy.deepcopy(model)):
        assert same.head.weight is same.embedding.weight
        torch.optim.SGD(same.parameters(), lr=1.0).step()
        assert_close(same.head.weight, same.embedding.weight, rtol=0, atol=0)


def test_untied_weights_are_two():
    model = modern()
    assert model.head.weight is not model.embedding.weight
    assert not torch.equal(model.head.weight, model.embedding.weight)


@STYLES
@pytest.mark.parametrize("tied", [False, True])
def test_an_untrained_model_knows_nothing(style, tied):
    torch.manual_seed(0)
    x = tokens(batch=16, length=T)
    logits = style(tie_embeddings=tied)(x[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    assert abs(loss.item() - math.log(V)) < 0.05


def test_what_joins_the_residual_stream_starts_smaller():
    torch.manual_seed(0)
    model = modern()
    for block in model.blocks:
        for part in (block.attention.out, block.mlp.out):
            assert part.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.1)
        assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)


VARIANTS = {
    "classic": classic,
    "classic without biases": lambda: classic(bias=False),
    "modern": modern,
    "no positions": lambda: modern(position=NoPosition()),
    "alibi": lambda: modern(position=Alibi(n_head=H)),
    "sinusoidal": lambda: modern(position=Sinusoidal(n_embd=C)),
    "relu2, layernorm, biases": lambda: modern(mlp="relu2", norm="layernorm", bias=True),
    "no mask": lambda: modern(mask=Full()),
    "window": lambda: modern(mask=SlidingWindow(4)),
    "prefix": lambda: modern(mask=Prefix(8)),
    "qk-norm, no scale, one key head": lambda: modern(qk_norm=True, scale="none", n_kv_head=1),
    "tied, all heads": lambda: modern(tie_embeddings=True, n_kv_head=None),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_gets_a_gradient(name):
    model = VARIANTS[name]()
    model(tokens()).square().mean().backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # one number added to all scores of a query: a softmax does not see the keys' biases but by rounding
    assert {name for name in silent if not name.endswith("key.bias")} == set()


# ---- the cache, and other ways of asking for the same logits ----


@DTYPES
@STYLES
@pytest.mark.parametrize("pieces", [[1] * 20, [20], [5, 3, 12], [8] + [1] * 12, [1, 18, 1]], ids=str)
def test_cached_equals_full(style, dtype, pieces):
    model = shaken(style()).to(dtype)
    x = tokens(length=20)
    cache = model.new_cache(batch=2)
    with torch.no_grad():
        cached = torch.cat([model(piece, cache) for piece in x.split(pieces, dim=1)], dim=1)
        assert_close(cached, model(x), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@STYLES
@pytest.mark.parametrize("keep", [1, 3, T])
def test_keep_gives_the_last_logits_alone(style, keep):
    model = shaken(style())
    with torch.no_grad():
        assert_close(model(tokens(), keep=keep), model(tokens())[:, -keep:])


@STYLES
def test_a_row_padded_on_the_left_is_the_row_alone(style):
    model = shaken(style()).to(torch.float64)
    x, lengths = tokens(batch=3, length=12), [12, 5, 1]
    pos = torch.stack([(torch.arange(12) - (12 - n)).clamp(min=-1) for n in lengths])
    with torch.no_grad():
        together = model(x, pos=pos)
        for row, n in enumerate(lengths):
            assert_close(together[row, -n:], model(x[row : row + 1, -n:])[0], atol=1e-10, rtol=1e-10)


@STYLES
def test_compiled_equals_plain(style):
    model = shaken(style())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(tokens()), model(tokens()))


# ---- which targets the mask shows ----


@pytest.mark.parametrize("length", [T, 20, 3, 1])
@pytest.mark.parametrize(
    "mask", [Causal(), SlidingWindow(3), Prefix(0), Prefix(1), Prefix(6), Prefix(T)], ids=str
)
def test_a_target_is_hidden_exactly_where_the_model_reads_it(mask, length):
    model = shaken(modern(mask=mask)).to(torch.float64)
    x, targets = tokens(batch=1, length=length), tokens(batch=1, length=length, seed=1)
    hidden = model.hide_leaks(targets)[0] == -1
    for i in range(length - 1):
        other = x.clone()
        other[0, i + 1] = (x[0, i + 1] + 1) % V  # the target of position i
        with torch.no_grad():
            read = not torch.equal(model(other)[0, i], model(x)[0, i])
        assert hidden[i] == read
    assert torch.equal(model.hide_leaks(targets)[0][~hidden], targets[0][~hidden])


def test_no_target_is_hidden_where_all_are_shown():
    assert torch.equal(modern(mask=Full()).hide_leaks(tokens()), tokens())


# ---- refusals ----


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_layer": 0}, "model.n_layer=0"),
        ({"n_head": -1}, "model.n_head=-1"),
        ({"block_size": 0}, "model.block_size=0"),
        ({"n_head": 3, "n_embd": 64}, "model.n_head=3 must divide model.n_embd=64; try model.n_head="),
        ({"n_kv_head": 3}, "model.n_kv_head=3 must divide model.n_head=4; try"),
        ({"n_kv_head": 0}, "model.n_kv_head=0"),
        ({"dropout": 1.0}, "model.dropout=1.0"),
        ({"dropout": float("nan")}, "model.dropout=nan"),
        ({"norm": "batchnorm"}, "model.norm=batchnorm: expected one of layernorm, rmsnorm"),
        ({"mlp": "relu"}, "model.mlp=relu: expected one of gelu, gelu_tanh, relu2, swiglu"),
    ],
)
def test_an_impossible_shape_is_refused_with_its_numbers(changes, says):
    with pytest.raises(ConfigError) as refused:
        GPTConfig(vocab_size=V, **changes)
    assert says in str(refused.value)
