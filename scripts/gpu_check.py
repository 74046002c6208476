"""What can be checked on a CUDA device alone, in under six minutes: python scripts/gpu_check.py

Which kernel runs, that the backends agree there, FlexAttention compiled, what memory attention takes, that a whole
model decodes with a cache as it does without, and how fast, and how much of the device training of GPT-2's shape
uses; and that a model trains over NCCL, whole on each device and in parts, as it does alone. Where there is no such
device it says so, and is content.
"""

import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
import torch.multiprocessing
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor

from minilm.attention import Alibi, Causal, Frame, Full, NoPosition, Position, Prefix, Rotary, SlidingWindow
from minilm.attention.kernels import BACKENDS, attend, resolve_scale
from minilm.attention.masks import Mask
from minilm.attention.positions import rotate
from minilm.bench.measure import Product, free_bytes, median_seconds, peak_bytes
from minilm.bench.setting import Setting
from minilm.bench.step import model_flops
from minilm.bench.training import TrainingStep
from minilm.decoding import CompiledStep
from minilm.generation import Generator, Speed
from minilm.model import GPT, GPTConfig
from minilm.optim import AdamW
from minilm.parallel import ALONE, DDP, FSDP, Parallel, Processes, World, whole
from minilm.sampling import Sampler
from minilm.update import gradients, step
from minilm.words import CONFIGS

SECONDS = 270.0  # after which no further case of FlexAttention is compiled
HEADS, WIDTH = 4, 64
MASKS: list[Mask] = [Causal(), Full(), SlidingWindow(24), SlidingWindow(80), Prefix(40)]
SCALES: list[str | float] = ["sqrt", "none", "inverse", 0.3]
POSITIONS: list[Position] = [NoPosition(), Rotary(head_dim=WIDTH), Alibi(n_head=HEADS)]
GROUPS = [HEADS, 2, 1]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
KERNELS = {
    "scaled_dot_product_flash": "FlashAttention",
    "scaled_dot_product_cudnn": "cuDNN's FlashAttention",
    "scaled_dot_product_efficient": "memory-efficient attention",
    "scaled_dot_product_fused_attention_overrideable": "an override",
}

#: the usual race: GPT-2's classic block, its vocabulary rounded up to a multiple of 64, AdamW in one kernel
GPT2 = [
    *("model=gpt2", "tokenizer=gpt2", "vocab_size=50304", "position=learned", "attention.qk_norm=false"),
    *("optim=adamw", "precision=bf16", "compile=strict", "device=cuda"),
]
BATCHES = (64, 32, 16, 8, 4, 2, 1)  # windows a step, the most that fit
WIDTHS = (4096, 8192)  # of the square products that the device's speed is measured by
BUSY = 0.5

Case = tuple[Mask, str | float, Position, int]  # mask, scale, position, key heads

failures: list[str] = []


def check(name: str, holds: bool, found: str) -> None:
    print(f"{'ok  ' if holds else 'FAIL'}  {name}: {found}", flush=True)
    if not holds:
        failures.append(name)


def draw(
    device: torch.device, dtype: torch.dtype, *, n: int, m: int, groups: int, batch: int = 2
) -> list[Tensor]:
    """Queries, keys and values, with gradients; scores of unit variance under the default scale."""
    shapes = ((batch, HEADS, n, WIDTH), (batch, groups, m, WIDTH), (batch, groups, m, WIDTH))
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def kernel_that_runs(work: Callable[[], object]) -> str:
    """The name of SDPA's kernel, as the profiler sees it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler's own lines off standard error
    with torch.profiler.profile() as record:
        work()
    names = " ".join(event.key for event in record.key_averages())
    return next((name for part, name in KERNELS.items() if part in names), "plain matrix products")


def frames(device: torch.device, position: Position) -> Iterator[tuple[int, int, Frame]]:
    """(n, m, frame): a whole sequence, and its second part behind a cache of the first."""
    pos = torch.arange(160, device=device)
    yield 160, 160, Frame(pos, position=position, aligned=True)
    yield 96, 160, Frame(pos[64:], pos, position)


def disagreement(backend: str, case: Case, dtype: torch.dtype) -> float:
    """The largest relative error of outputs and gradients, as tensors, against the reference."""
    mask, scale, position, groups = case
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    worst = 0.0
    for n, m, frame in frames(device, position):
        inputs = draw(device, dtype, n=n, m=m, groups=groups)
        grad = torch.randn(2, HEADS, n, WIDTH, device=device, dtype=dtype)
        rotation = frame.rotation(WIDTH, dtype)
        found = []
        for name in (backend, "reference"):
            q, k, v = inputs
            if rotation is not None:  # of the queries' positions; a cache has turned its keys already
                q, k = rotate(q, rotation), rotate(k, rotation) if n == m else k
            out = BACKENDS[name]()(q, k, v, frame, mask=mask, scale=resolve_scale(scale, WIDTH))
            found.append([out, *torch.autograd.grad(out, inputs, grad)])
        for ours, told in zip(*found, strict=True):
            off = (ours.detach() - told.detach()).norm() / told.detach().norm()
            worst = max(worst, float(off.nan_to_num(nan=torch.inf)))
    return worst


def agree(backend: str, cases: list[Case], dtype: torch.dtype, deadline: float = float("inf")) -> None:
    worst: float = 0.0
    at: Case | None = None
    done = 0
    for case in cases:
        if time.monotonic() > deadline:
            break
        if backend == "flex":
            torch.compiler.reset()  # each case compiles anew, and there is a limit to the variants of one function
        worst, at = max((worst, at), (disagreement(backend, case, dtype), case), key=lambda pair: pair[0])
        done += 1
    holds = worst <= TOLERANCE[dtype]
    found = f"{done} of {len(cases)} cases, off by {worst:.1e}" + ("" if holds else f", at {at}")
    check(f"{backend} agrees with the reference, {str(dtype).removeprefix('torch.')}", holds, found)


def decodes_alike(device: torch.device) -> None:
    config = GPTConfig(vocab_size=64, block_size=64, n_layer=2, n_head=4, n_embd=64)
    torch.manual_seed(0)
    model = GPT(config).to(device).eval()
    tokens = torch.randint(64, (2, 40), device=device)
    cache = model.new_cache(2)
    with torch.no_grad():
        steps = [model(piece, cache) for piece in tokens.split([24, *[1] * 16], dim=1)]
        off = float((torch.cat(steps, dim=1) - model(tokens)).abs().max())
    check("cached and whole logits agree, float32", off < 1e-5, f"off by {off:.1e}")


def setting(*words: str) -> Setting:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("bench", overrides=list(words))
    return Setting.of(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]


def uses_the_device(*words: str, widths: tuple[int, ...] = WIDTHS) -> None:
    """Training steps of a model: their model FLOPs against the rate of the best bf16 product of the same run."""
    for batch in BATCHES:
        it = setting(*words, f"train.batch_size={batch}")
        planned = it.cost.memory(batch, optimizer="AdamW", precision=it.precision).peak
        if 1.5 * planned < free_bytes(it.device):
            break
    step = TrainingStep(it)
    step()  # compiles
    kernel = kernel_that_runs(step)
    cases: dict[str, Callable[[], object]] = {"step": step}
    products = {f"{n}³": Product(n, n, n, it.device) for n in widths}
    seconds = median_seconds(cases | products, it.device, repeats=10, budget=30)
    rates = {name: product.flops / seconds[name] for name, product in products.items()}
    best = max(rates, key=lambda name: rates[name])
    flops = model_flops(it)
    share = flops / seconds["step"] / rates[best]
    tokens = batch * it.cost.model.block_size
    print(
        f"      {batch} windows of {it.cost.model.block_size} tokens: {1000 * seconds['step']:,.1f} ms a step, "
        f"{tokens / seconds['step']:,.0f} tokens/s, {flops / seconds['step'] / 1e12:,.3g} TFLOP/s; "
        f"products of {best}: {rates[best] / 1e12:,.3g} TFLOP/s"
    )
    check(
        "training uses at least half of the best product's rate", share >= BUSY, f"{share:.0%}, by {kernel}"
    )


def decodes_fast(device: torch.device) -> None:
    """Tokens a second of GPT-2's shape in bf16, one step a captured graph, at one text and at 64."""
    config = GPTConfig(
        vocab_size=50257,
        block_size=1024,
        n_layer=12,
        n_head=12,
        n_embd=768,
        norm="layernorm",
        mlp="gelu",
        bias=True,
    )
    torch.manual_seed(0)
    model = GPT(config).to(device, torch.bfloat16).eval()
    for rows in (1, 64):
        prompts = torch.randint(config.vocab_size, (rows, 32)).tolist()
        rates, texts = [], []
        for compiled in (None, CompiledStep(model, "strict")):
            generator = Generator(model, Sampler(temperature=0), step=compiled)
            list(generator.tokens(prompts, 128))  # compiles, and captures the graph
            speed = Speed()
            texts.append(torch.stack(list(generator.tokens(prompts, 128, speed=speed))))
            rates.append(speed.decode_tokens / speed.decode_seconds)
        alike = float((texts[0] == texts[1]).float().mean())
        found = f"{rates[1]:,.0f} tokens/s, plain {rates[0]:,.0f}; {alike:.0%} of the tokens alike"
        check(f"decoding {rows} texts by a captured graph is faster", rates[1] > rates[0], found)


def trained(how: Parallel | None, world: World, device: torch.device, precision: str) -> list[Tensor]:
    """The weights, on the CPU, after five updates of a small model, over two micro-batches in each process."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, block_size=32, n_layer=2, n_head=2, n_embd=64))
    forward, hold = how.wrap(model, model.blocks, device) if how else (model.to(device), nullcontext)
    optimizers = AdamW(lr=0.01).build(model)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    for number in range(5):
        draws = torch.Generator().manual_seed(number)
        tokens = torch.randint(64, (8 * torch.distributed.get_world_size(), 33), generator=draws)
        x = tokens.chunk(world.size)[world.rank].to(device)
        options = {
            "windows": len(x) // 2,
            "precision": precision,
            "scaler": scaler,
            "world": world,
            "hold": hold,
        }
        gradients(forward, x[:, :-1], x[:, 1:], **options)  # type: ignore[arg-type]
        step(optimizers, model.parameters(), scaler, 1.0)
    return [whole(p.detach()).cpu() for p in model.parameters()]


def train_together(rank: int, size: int, port: int, kind: str = "cuda") -> None:
    """A process of several, each with a device: what they make together, against what one makes alone."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    world = Processes()
    device = world.device(kind)
    for precision, near in (("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 2e-2))[: 3 if kind == "cuda" else 2]:
        alone = trained(None, ALONE, device, precision)
        for how in (DDP(), FSDP()):
            together = trained(how, world, device, precision)
            off = max(float((a - b).abs().max()) for a, b in zip(together, alone, strict=True))
            if world.main:
                name = f"{type(how).__name__} over {size} {kind} device(s) trains as one does, {precision}"
                check(name, off < near, f"off by {off:.1e}")
    torch.distributed.destroy_process_group()
    sys.exit(bool(failures))


def trains_together(size: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        torch.multiprocessing.spawn(train_together, (size, port), nprocs=size)
    except Exception as error:
        check(f"{size} device(s) train together", False, str(error).strip().splitlines()[-1])


def main() -> int:
    if words := sys.argv[1:]:
        if words[0] in ("--help", "-h"):
            print(__doc__)
            return 0
        print(f"gpu_check: {words[0]}: it takes no words; --help says what it checks", file=sys.stderr)
        sys.exit(2)
    if not torch.cuda.is_available():
        print(
            "gpu_check: no CUDA device here; skipped which SDPA kernel runs, the backends' agreement, "
            "FlexAttention compiled, peak memory, decoding, the speed of training, and DDP and FSDP over NCCL there"
        )
        return 0
    started = time.monotonic()
    device = torch.device("cuda")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")

    flash = torch.cuda.get_device_capability(device) >= (8, 0)
    for dtype, wanted in ((torch.bfloat16, "Flash" if flash else ""), (torch.float32, "attention")):
        q, k, v = draw(device, dtype, n=1024, m=1024, groups=HEADS)
        for mask in (Causal(), Full()):
            name = kernel_that_runs(partial(attend, q, k, v, mask=mask))
            check(f"kernel for {dtype}, {type(mask).__name__}", wanted.lower() in name.lower(), name)

    q, k, v = (t.detach() for t in draw(device, torch.bfloat16, n=8192, m=8192, groups=HEADS, batch=1))
    peaks = [
        peak_bytes(lambda b=backend: attend(q, k, v, mask=Causal(), backend=b), device)  # type: ignore[misc]
        for backend in ("reference", "fused")
    ]
    found = f"reference {peaks[0] / 2**20:,.0f} MiB, fused {peaks[1] / 2**20:,.1f} MiB"
    check("fused needs under a twentieth of the memory at n = 8192", 20 * peaks[1] < peaks[0], found)

    decodes_alike(device)
    uses_the_device(*GPT2)
    decodes_fast(device)
    trains_together(torch.cuda.device_count())
    everything = list(itertools.product(MASKS, SCALES, POSITIONS, GROUPS))
    for dtype in TOLERANCE:
        agree("fused", everything, dtype)
    none, _, alibi = POSITIONS
    some: list[Case] = [
        (Causal(), "sqrt", none, 2),
        (SlidingWindow(80), "sqrt", alibi, 2),
        (Prefix(40), 0.3, none, 4),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        agree("flex", some, dtype, deadline=started + SECONDS)

    print(f"{len(failures)} failed, {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
