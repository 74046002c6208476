"""The machine: what is asked for is there or refused, and randomness is a function of (seed, step, rank)."""

import itertools
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from minilm import runtime
from minilm.errors import ConfigError
from minilm.runtime import (
    autocast,
    check_seed,
    compile_model,
    inference,
    resolve_device,
    resolve_precision,
    seed_step,
    set_up_cpu,
)

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.fixture
def machine(monkeypatch):
    """machine(cuda=2, mps=True): a machine with these devices."""

    def have(*, cuda: int = 0, mps: bool = False, capability=(8, 0), cpu=()):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(cpu, True))

    return have


# ---- devices ----


@pytest.mark.parametrize(
    ("has", "device"),
    [({}, "cpu"), ({"mps": True}, "mps"), ({"cuda": 1}, "cuda"), ({"cuda": 1, "mps": True}, "cuda")],
)
def test_auto_takes_cuda_then_mps_then_the_cpu(machine, has, device):
    machine(**has)
    assert resolve_device("auto").type == device


@pytest.mark.parametrize(
    ("has", "name", "says"),
    [
        ({}, "cuda", "has 0 cuda"),
        ({}, "mps", "has 0 mps"),
        ({}, "cuda:0", "has 0 cuda"),
        ({"cuda": 2}, "cuda:2", "has 2 cuda"),
        ({"cuda": 2}, "cuda:9", "has 2 cuda"),
        ({}, "cpu:1", "has 1 cpu"),
        ({}, "gpu", "expected auto, cpu, cuda, cuda:N or mps"),
        ({}, "", "expected auto, cpu, cuda, cuda:N or mps"),
        ({}, "CPU", "expected auto, cpu, cuda, cuda:N or mps"),
        ({}, "meta", "expected auto, cpu, cuda, cuda:N or mps"),
        ({}, "cuda:-1", "expected auto, cpu, cuda, cuda:N or mps"),
        ({}, "cuda:99999999999", "expected auto, cpu, cuda, cuda:N or mps"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(machine, has, name, says):
    machine(**has)
    with pytest.raises(ConfigError) as refused:
        resolve_device(name)
    assert f"device={name}: " in str(refused.value)
    assert says in str(refused.value)


def test_a_device_that_is_there_is_taken(machine):
    machine(cuda=2, mps=True)
    assert [str(resolve_device(name)) for name in ("cpu", "cuda:1", "mps")] == ["cpu", "cuda:1", "mps"]


# ---- precision ----


@pytest.mark.parametrize(
    ("device", "has", "precision"),
    [
        (CPU, {}, "fp32"),
        (CPU, {"cpu": ["avx2", "avx512_f"]}, "fp32"),
        (CPU, {"cpu": ["avx512_bf16"]}, "bf16"),
        (CPU, {"cpu": ["amx_bf16"]}, "bf16"),
        (CUDA, {"cuda": 1, "capability": (7, 5)}, "fp32"),
        (CUDA, {"cuda": 1, "capability": (9, 0)}, "bf16"),
        (MPS, {"mps": True}, "fp32"),
    ],
)
def test_auto_is_bf16_where_the_hardware_multiplies_it(machine, device, has, precision):
    machine(**has)
    assert resolve_precision("auto", device) == precision
    assert resolve_precision("fp32", device) == "fp32"
    assert resolve_precision("bf16", device) == "bf16"


@pytest.mark.parametrize("device", [CPU, MPS])
def test_fp16_needs_cuda(device):
    with pytest.raises(ConfigError, match="precision=fp16 needs a CUDA device, this is"):
        resolve_precision("fp16", device)
    assert resolve_precision("fp16", CUDA) == "fp16"


def test_an_unknown_precision_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="precision=half: expected one of auto, fp32, bf16, fp16"):
        resolve_precision("half", CPU)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_touches_products_and_not_weights(precision, dtype):
    layer = nn.Linear(4, 4)
    with autocast(CPU, precision):
        assert layer(torch.ones(1, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_threads_are_set_or_left_alone():
    before = torch.get_num_threads()
    set_up_cpu(None)
    assert torch.get_num_threads() == before
    set_up_cpu(1)
    assert torch.get_num_threads() == 1
    for threads in (0, -1):
        with pytest.raises(ConfigError, match=f"threads={threads}: a positive whole number"):
            set_up_cpu(threads)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_is_not_fetched_anew():
    code = """
import resource, torch
from minilm.runtime import set_up_cpu

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        torch.ones(1 << 22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages = (1 << 24) // resource.getpagesize()
print(faults(20) > 10 * pages)  # of 4 KiB, and fewer in larger ones
set_up_cpu(None)
faults(20)  # until the heap is large enough
print(faults(20) < pages)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "True", done.stdout


# ---- randomness ----


def test_each_seed_step_and_rank_draws_numbers_of_its_own():
    drawn = {}
    for place in itertools.product(range(4), range(40), range(3)):
        seed_step(*place)
        drawn[place] = torch.rand(4).tolist()
    assert len({str(numbers) for numbers in drawn.values()}) == len(drawn)
    torch.rand(100)  # whatever was drawn in between
    seed_step(1, 7, 2)
    assert torch.rand(4).tolist() == drawn[1, 7, 2]


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1])
def test_large_seeds_are_seeds(seed):
    check_seed(seed)
    seed_step(seed, 10**9, 10**6)
    first = torch.rand(2).tolist()
    seed_step(seed, 10**9 + 1, 10**6)
    assert torch.rand(2).tolist() != first


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ConfigError, match=f"seed={seed}: a whole number from 0"):
        check_seed(seed)


# ---- compilation ----


def test_without_compilation_the_model_is_itself():
    model = nn.Linear(2, 2)
    assert compile_model(model, False) is model


@pytest.mark.parametrize("mode", ["yes", "", "max-autotune"])
def test_an_unknown_mode_of_compilation_is_refused(mode):
    with pytest.raises(ConfigError, match=f"compile={mode}: expected true, false or strict"):
        compile_model(nn.Linear(2, 2), mode)


def test_compilation_is_announced_on_standard_error(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    for mode in (False, "strict"):
        compile_model(nn.Linear(2, 2), mode)
    told = capsys.readouterr()
    assert told.err == "compile=strict: the first step compiles, which may take a minute\n"
    assert not told.out


def test_where_no_compiler_works_one_warning_says_so_and_the_plain_model_goes_on(monkeypatch):
    def no_compiler():
        raise RuntimeError("InvalidCxxCompiler: no g++\nand a wall of text")

    monkeypatch.setattr(runtime, "_probe_compiler", no_compiler)
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="no g") as warned:
        forward = compile_model(model, True)
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)
    x = torch.ones(1, 2)
    assert torch.equal(forward(x), model(x))


# ---- evaluation mode ----


@pytest.mark.parametrize("training", [True, False])
def test_inference_is_without_dropout_and_gradients_and_ends_as_it_began(training):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9)).train(training)
    with inference(model):
        assert not model[1].training
        assert not model(torch.ones(1, 2)).requires_grad
    assert model.training is training
    with pytest.raises(ZeroDivisionError), inference(model):
        raise ZeroDivisionError
    assert model[1].training is training
    assert torch.is_grad_enabled()


def test_nothing_is_imported_to_say_what_is_so_already():
    """The compiler takes longer to import than a mistake in the model takes to be told."""
    code = (
        "import sys; from minilm.runtime import set_deterministic; set_deterministic(False);"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
