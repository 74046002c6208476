"""Costs are predicted before anything is built; here it is built, run and counted."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from minilm.bench.measure import peak_bytes
from minilm.bench.setting import Setting
from minilm.bench.training import TrainingStep
from minilm.build import build_model
from minilm.layers import MLPS, NORMS

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SMALL = ["model.n_layer=2", "model.n_embd=64", "model.block_size=96", "vocab_size=50", "precision=fp32"]
MODELS = [
    [],
    ["model.n_kv_head=1", "attention.qk_norm=false", "position=none"],
    ["model.mlp=swiglu", "attention.backend=reference", "position=alibi"],
    ["model.mlp=gelu", "model.norm=layernorm", "model.bias=true", "position=learned"],
    [
        "model.norm=layernorm",
        "model.tie_embeddings=true",
        "position=sinusoidal",
        "mask=sliding",
        "mask.window=32",
    ],
    ["mask=sliding", "mask.window=20"],
    ["model.ngrams=[2,3]", "model.ngram_rows=500", "model.mlp=none"],
    ["model.mlp=swiglu", "model.n_inner=40"],
    ["attention=linear", "attention.chunk=40"],
    ["attention=linear", "mask=none", "model.n_kv_head=2"],
]

# torch's counter knows SDPA on CUDA alone
aten = torch.ops.aten
CPU_KERNELS = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def setting(*words: str) -> Setting:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("plan", overrides=["device=cpu", *words])
    return Setting.of(OmegaConf.to_container(config, resolve=True))


def counted_flops(work) -> int:
    with FlopCounterMode(display=False, custom_mapping=CPU_KERNELS) as counter:
        work()
    return counter.get_total_flops()


def within(predicted: float, measured: float, share: float) -> bool:
    return abs(predicted / measured - 1) <= share


@pytest.mark.parametrize("words", MODELS, ids=" ".join)
def test_parameters_flops_and_cache_are_predicted(words):
    it = setting(*SMALL, *words)
    model, cost = it.model(), it.cost
    assert sum(cost.parameters().values()) == sum(p.numel() for p in model.parameters())

    tokens = it.tokens(2, 96)
    forward = counted_flops(lambda: model(tokens))
    assert within(tokens.numel() * cost.flops(96).total, forward, 0.02)

    both = counted_flops(lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward())
    assert within(tokens.numel() * cost.flops(96, training=True).total, both, 0.02)

    for context in (16, 96):
        assert cost.cache_bytes(context, batch=3) == model.new_cache(3, context).nbytes


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("norm", NORMS)
def test_every_part_of_a_block_is_known(mlp, norm):
    it = setting(*SMALL, f"model.mlp={mlp}", f"model.norm={norm}", "model.bias=true")
    counted = dict.fromkeys(it.cost.parameters(), 0)
    for name, parameter in it.model().named_parameters():
        part = next((part for part in ("embedding", "attention", "mlp", "head") if part in name), "norms")
        counted[part] += parameter.numel()
    assert it.cost.parameters() == counted


@pytest.mark.parametrize("name", [path.stem for path in (CONFIGS / "model").glob("*.yaml")])
def test_the_shapes_that_come_along(name):
    it = setting(f"model={name}", "tokenizer=gpt2")
    with torch.device("meta"):
        model = build_model(it.config, it.vocab_size)
    assert sum(it.cost.parameters().values()) == sum(p.numel() for p in model.parameters())


def test_gpt2_has_its_124_million_parameters():
    it = setting("model=gpt2", "tokenizer=gpt2", "position=learned")
    assert sum(it.cost.parameters().values()) == 124_439_808  # Radford et al. 2019, as released


def test_attention_grows_with_the_context_and_the_rest_does_not():
    cost = setting(*SMALL).cost
    once, twice = cost.flops(512), cost.flops(1024)
    assert twice.attention == 2 * once.attention  # a token's: the sequence's is 4 times
    assert twice.rest == once.rest


def test_flops_of_muon():
    step = TrainingStep(setting(*SMALL, "train.batch_size=1", "model.n_kv_head=2", "optim=muon"))
    step()
    for p in step.model.parameters():
        p.grad = torch.zeros_like(p)
    counted = counted_flops(lambda: [optimizer.step() for optimizer in step.optimizers])
    assert within(step.setting.cost.optimizer_flops("Muon"), counted, 0.02)


# Memory of a training step


@pytest.mark.parametrize(
    "words",
    [
        ["model.block_size=256"],
        ["model.block_size=256", "precision=bf16", "optim=adamw"],
        ["attention.backend=reference", "model.block_size=192"],
        ["model.mlp=gelu", "model.norm=layernorm", "position=learned", "optim=adamw", "vocab_size=4000"],
        ["model.tie_embeddings=true", "vocab_size=8000", "train.batch_size=1", "model.block_size=16"],
        [
            "model.mlp=swiglu",
            "model.n_kv_head=1",
            "mask=prefix",
            "train.micro_batch_size=2",
            "model.dropout=0.1",
        ],
        ["mask=sliding", "mask.window=32", "model.block_size=256"],
        [
            "precision=bf16",
            "model.block_size=512",
            "model.n_head=8",
            "train.batch_size=1",
        ],  # weights are most of it
        ["precision=bf16", "model.block_size=512", "position=alibi", "model.n_kv_head=1"],
        ["precision=bf16", "model.block_size=528", "model.n_head=8", "train.batch_size=1"],
        ["precision=bf16", "mask=sliding", "mask.window=64", "model.block_size=256", "model.n_head=8"],
        ["attention=linear", "model.block_size=256"],
        ["attention.backend=reference", "precision=bf16", "model.n_kv_head=1"],
    ],
    ids=" ".join,
)
def test_memory_of_a_step(words):
    it = setting(*SMALL, "model.n_embd=128", "train.batch_size=4", *words)
    step = TrainingStep(it)
    windows = step.config.micro_batch_size or step.config.batch_size
    optimizer = it.config["optim"]["_target_"].rpartition(".")[2]
    predicted = it.cost.memory(
        windows,
        optimizer=optimizer,
        precision=it.precision,
        accumulates=windows < step.config.batch_size,
    )
    step()  # the optimizers make their state
    kept = [
        value
        for optimizer in step.optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ]
    state = sum(value.nbytes for value in kept if torch.is_tensor(value))
    weights = sum(p.nbytes for p in step.model.parameters())
    assert predicted.weights == predicted.gradients == weights
    assert within(predicted.optimizer, state, 0.02)
    assert within(predicted.peak, weights + state + peak_bytes(step, it.device), 0.2)
