"""Several processes train as one does, leave one run behind, and end together.

A group is two or three processes over gloo (processes.py), in float64, so that differences show.
"""

import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, script_as_typed
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from processes import REQUEUED, free_port, start_group

from minilm import checkpoint, parallel
from minilm.config import Command
from minilm.errors import ConfigError
from minilm.parallel import ALONE, World
from minilm.words import CONFIGS

CLOCK = {"train_seconds", "tokens_per_second"}
STEPS = ["train.batch_size=12", "train.micro_batch_size=3", "train.eval_interval=10", "train.grad_clip=0.5"]
STEPS += ["train.eval_batch_size=8", "train.sample_tokens=3", "train.health_interval=15"]
#: tied and n-gram weights; and a norm that no gradient reaches, with matrices that no process holds whole
MODELS = {
    "adamw": ["optim=adamw", "model.tie_embeddings=true", "model.mlp=swiglu", "model.n_layer=2"],
    "muon": ["optim=muon", "model.mlp=none", "model.n_kv_head=1", "model.bias=true"],
}


@pytest.fixture(scope="module")
def asked(text_file):
    """asked(*words): what scripts/train.py makes of them."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):

        def command(*words: str, out_dir: str = "run") -> Command:
            words = (*TINY, f"data.path={text_file}", "model.dropout=0", *STEPS, *words, f"out_dir={out_dir}")
            config = OmegaConf.to_container(compose("train", overrides=list(words)), resolve=True)
            return Command(config, [word.partition("=")[0] for word in words], Path(out_dir), False)

        yield command


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """group(size, [(command, disturbance), …]): the folder, exit codes and what each process said of each command."""
    return lambda size, commands, folder=None: start_group(
        size, commands, folder or tmp_path_factory.mktemp("group")
    )


def records(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


def assert_same_run(ours: Path, theirs: Path, apart: float = 1e-10) -> None:
    """Losses, norms, rates, evaluations, weights and moments are those of the other run, or so little apart."""
    close = {"rtol": 0, "atol": apart}
    for a, b in zip(records(ours), records(theirs), strict=True):
        assert a == pytest.approx(b, rel=0, abs=apart)
    a, b = checkpoint.load(ours), checkpoint.load(theirs)
    torch.testing.assert_close(a.weights, b.weights, **close)
    assert all(weight.dtype == torch.float64 for weight in a.weights.values())
    torch.testing.assert_close(a.state["optimizers"], b.state["optimizers"], **close)
    assert (ours / "checkpoints/last").readlink() == (theirs / "checkpoints/last").readlink()
    assert (ours / "samples.txt").read_text() == (theirs / "samples.txt").read_text()


# ---- two and three processes, and one ----


@pytest.fixture(scope="module")
def alone(asked, group):
    """What one process makes of each model; and of one when it is stopped after eleven steps."""
    commands = [(asked(*MODELS[name], out_dir=name), "") for name in MODELS]
    stopped = asked(*MODELS["muon"], out_dir="stopped-muon")
    folder, codes, [said] = group(1, [*commands, (stopped, "SIGTERM")])
    assert codes == [0], (folder / "rank0/err").read_text()
    return folder / "rank0", said


@pytest.fixture(scope="module")
def pair(asked, group, alone, tmp_path_factory):
    """All that two processes are asked to do, in one start. What they are disturbed by comes to the second one."""
    folder = tmp_path_factory.mktemp("pair")
    shutil.copytree(alone[0] / "stopped-muon", folder / "rank0" / "resumed", symlinks=True)
    asks = {
        f"{how}-{name}": (asked(*MODELS[name], f"parallel={how}", out_dir=f"{how}-{name}"), "")
        for how in ("ddp", "fsdp")
        for name in MODELS
    }
    asks["resumed"] = asked(*MODELS["muon"], "parallel=fsdp", "resume=auto", out_dir="resumed"), ""
    for how, name, by in (("ddp", "adamw", "SIGTERM"), ("fsdp", "muon", "SIGINT")):
        asks[f"stopped-{name}"] = asked(*MODELS[name], f"parallel={how}", out_dir=f"stopped-{name}"), by
    asks |= {
        "five windows": (asked("train.batch_size=5", out_dir="refused"), ""),
        "three heads": (asked("model.n_head=3", out_dir="refused"), ""),
        "no such run": (asked("resume=nowhere", out_dir="refused"), ""),
        "not there": (asked("data.path=out", out_dir="refused"), ""),  # empty for the second process
        "lr": (asked("optim.lr=1e9", "optim=adamw", out_dir="diverged"), ""),
    }
    _, codes, said = group(2, list(asks.values()), folder)
    told = [(folder / f"rank{rank}/err").read_text() for rank in range(2)]
    assert codes == [0, 0], told
    return folder, told, [dict(zip(asks, each, strict=True)) for each in said]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_train_as_one(how, name, pair, alone):
    assert_same_run(pair[0] / "rank0" / f"{how}-{name}", alone[0] / name)


def test_three_processes_train_as_one(asked, group, alone):
    """Also where a process's four windows do not fill its micro-batches of three."""
    folder, codes, _ = group(3, [(asked(*MODELS["adamw"], out_dir="run"), "")])
    assert codes == [0, 0, 0], [(folder / f"rank{rank}/err").read_text() for rank in range(3)]
    assert_same_run(folder / "rank0/run", alone[0] / "adamw")


def test_each_process_reads_windows_of_its_own_and_all_are_read(pair, alone):
    _, _, said = pair
    whole = alone[1][0].starts
    assert len(whole) == 20
    for batch, first, second in zip(whole, *(each["ddp-adamw"].starts for each in said), strict=True):
        assert (*first, *second) == batch
        assert len(set(batch)) == 12


def test_randomness_differs_by_rank(pair):
    for rank, each in enumerate(pair[2]):
        assert each["ddp-adamw"].seeds == [(1, step, rank) for step in range(20)]


def test_one_run_is_left_and_one_process_talks(pair):
    folder, told, _ = pair
    assert told[1] == ""
    assert (folder / "rank1/out").read_text() == ""
    assert {path.name for path in (folder / "rank1").iterdir()} == {"in", "out", "err", "root"}
    lines = (folder / "rank0/out").read_text().splitlines()
    assert sum(line.startswith("trained") for line in lines) == 5
    assert not (folder / "rank0/refused").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize(("said", "near"), [("compile=strict", 1e-10), ("precision=bf16", 2e-2)])
def test_compiled_and_in_half_precision_too(how, said, near, asked, group):
    words = (*MODELS["adamw"], "train.max_steps=4", said)
    ends = []
    for processes in (1, 2):
        folder, codes, _ = group(processes, [(asked(*words, f"parallel={how}"), "")])
        assert codes == [0] * processes, (folder / "rank0/err").read_text()
        ends.append([record["train/loss"] for record in records(folder / "rank0/run")])
    assert ends[1] == pytest.approx(ends[0], abs=near)


# ---- stopped, and gone on with in another number ----


@pytest.mark.parametrize(("name", "signal"), [("adamw", signal.SIGTERM), ("muon", signal.SIGINT)])
def test_a_signal_to_one_process_stops_all_after_the_same_step(name, signal, pair):
    for each in pair[2]:
        assert each[f"stopped-{name}"].step == 11
        assert each[f"stopped-{name}"].stopped_by == signal
    assert checkpoint.load(pair[0] / "rank0" / f"stopped-{name}").step == 11


def test_two_go_on_with_the_run_of_one(pair, alone):
    assert_same_run(pair[0] / "rank0" / "resumed", alone[0] / "muon")


def test_one_goes_on_with_the_run_of_two(pair, alone, asked, group, tmp_path):
    for name in MODELS:
        run = tmp_path / "rank0" / f"stopped-{name}"
        shutil.copytree(pair[0] / "rank0" / f"stopped-{name}", run, symlinks=True)
    resumed = [(asked(*MODELS[name], "resume=auto", out_dir=f"stopped-{name}"), "") for name in MODELS]
    _, codes, _ = group(1, resumed, tmp_path)
    assert codes == [0], (tmp_path / "rank0/err").read_text()
    for name in MODELS:
        assert_same_run(tmp_path / "rank0" / f"stopped-{name}", alone[0] / name)


# ---- refused, and lost ----


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        ("five windows", "train.batch_size=5: 2 processes cannot share so many windows equally; say 4 or 6"),
        ("three heads", "model.n_head=3 must divide model.n_embd=16"),
        ("no such run", "no checkpoint at nowhere"),
        ("not there", "rank 1: data.path=out: the file is empty"),
        ("lr", "the loss is"),
    ],
)
def test_a_mistake_is_refused_by_all_and_told_by_one(ask, says, pair):
    first, second = (each[ask] for each in pair[2])
    assert says in first.error
    assert (first.error, first.kind, second.kind) == (second.error, "ConfigError", "Told")


@pytest.mark.parametrize(
    ("disturb", "codes"), [("SIGKILL", [1, -signal.SIGKILL]), ("error", [1, 1])], ids=["killed", "error"]
)
def test_where_one_process_ends_the_others_end_and_say_why(disturb, codes, asked, group):
    folder, found, _ = group(2, [(asked("optim=adamw"), disturb)])
    told = [(folder / f"rank{rank}/err").read_text() for rank in range(2)]
    assert found == codes
    assert "rank 0 ends: another process of the run is gone" in told[0]
    assert told[0].count("\n") == 1
    assert ("ZeroDivisionError: a bug in one process" in told[1]) == (disturb == "error")
    assert checkpoint.load(folder / "rank0/run").step == 10


TIMEOUT = 10.0


def wait(rank: int, port: int, folder: Path, ends: str) -> None:
    """A process of two that wait for one another longer than their timeout, for work in one of them; or, at the end, as
    in training. It writes what it has, or how long after a death or the last answer it ended.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    faulthandler.dump_traceback_later(250, exit=True)
    says = folder / f"{ends} {rank}"

    def work() -> int:
        if rank == 0:
            time.sleep(TIMEOUT * 1.2)
            if ends == "killed":
                (folder / "died").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        return rank

    try:
        with parallel.joined("cpu", TIMEOUT) as world:
            if ends == "silent":
                work()
                world.sum(1)
            else:
                says.write_text(f"{world.together(work)} {world.on_main(work)}")
    except SystemExit as error:
        says.write_text(str(error))
        (folder / f"ended {rank}").write_text(str(time.time()))


@pytest.fixture(scope="module")
def waited(tmp_path_factory):
    """The folder in which pairs of processes have left what became of them."""
    folder, context = tmp_path_factory.mktemp("waited"), multiprocessing.get_context("forkserver")
    processes = []
    for ends in ("well", "killed", "silent"):
        port = free_port()
        processes += [context.Process(target=wait, args=(rank, port, folder, ends)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        process.kill()
    return folder


def test_work_may_take_longer_than_the_timeout(waited):
    assert [(waited / f"well {rank}").read_text() for rank in range(2)] == ["0 0", "1 0"]


def test_one_that_dies_at_such_work_is_noticed_at_once(waited):
    assert "another process of the run is gone" in (waited / "killed 1").read_text()
    died, ended = (float((waited / name).read_text()) for name in ("died", "ended 1"))
    assert ended - died < TIMEOUT / 2


def test_one_that_is_silent_in_training_is_noticed_after_the_timeout(waited):
    assert f"or silent for {TIMEOUT:g} s" in (waited / "silent 1").read_text()


def go_on(asked, group, folder, kills):
    """Two processes, of which one is killed and the other ends; started again each time, and at last left in peace."""
    for kill in [*kills, ""]:
        _, codes, _ = group(2, [(asked(*MODELS["adamw"], "resume=auto", out_dir="run"), kill)], folder)
        told = [(folder / f"rank{rank}/err").read_text() for rank in range(2)]
        # in the last of them the run was over
        assert codes in ([0, 0], [-signal.SIGKILL, 1], [1, -signal.SIGKILL], [-signal.SIGKILL, 0]), told
        assert codes == [0, 0] or kill, told
        seen = [*(folder / "rank0/run/checkpoints").glob("step*")]
        assert [checkpoint.damage(path, checkpoint.FILES) for path in seen] == [None] * len(seen)
        yield codes


def test_two_processes_of_which_one_is_killed_go_on_as_if_unbroken(asked, group, pair, tmp_path):
    folder, _, [said, _] = pair
    in_a_checkpoint = len(said["ddp-adamw"].disk) * 2 // 3
    codes, _ = go_on(asked, group, tmp_path, [in_a_checkpoint])
    assert codes == [-signal.SIGKILL, 1]
    assert_same_run(tmp_path / "rank0/run", folder / "rank0/ddp-adamw", apart=0)


@pytest.mark.slow
def test_two_processes_killed_again_and_again(asked, group, pair, tmp_path, capsys):
    """At one in three of the operations on the disk, at moments that chance chooses, and the second process."""
    folder, _, [said, _] = pair
    at = [[n] for n in range(1, len(said["ddp-adamw"].disk) + 1, 3)]
    tries = [*at, *([random.uniform(0, 4.0) for _ in range(2)] for _ in range(5)), ["SIGKILL"]]
    killed = 0
    for n, kills in enumerate(tries):
        killed += sum(codes != [0, 0] for codes in go_on(asked, group, tmp_path / str(n), kills))
        assert_same_run(tmp_path / str(n) / "rank0/run", folder / "rank0/ddp-adamw", apart=0)
    with capsys.disabled():
        print(f"\none of two processes killed {killed} times")
    assert killed > len(at)


# ---- torchrun ----


def torchrun(*words, cwd, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = str(ROOT / "scripts" / "train.py")
    return subprocess.Popen([*command, script, *words], cwd=cwd, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_torchrun_starts_a_run(tiny, tmp_path):
    words = [*tiny, "model.dropout=0", "train.max_steps=4"]
    started = torchrun(*words, "out_dir=run", cwd=tmp_path, stdout=subprocess.PIPE)
    out, err = started.communicate(timeout=600)
    assert started.returncode == 0, err
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4]
    assert sum(line.startswith("trained") for line in out.splitlines()) == 1
    assert out.splitlines()[-1].split() == ["next", "python", "scripts/generate.py", "checkpoint=run"]


@pytest.mark.slow
def test_torchrun_tells_a_misspelt_key_once(tiny, tmp_path):
    _, err = torchrun(*tiny, "train.max_step=5", cwd=tmp_path).communicate(timeout=600)
    assert err.count("train: train.max_step: no such key; did you mean train.max_steps?") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_saves_the_run(number, tiny, tmp_path):
    words = [*tiny, "train.max_steps=100000", "train.eval_interval=100000", "out_dir=run"]
    started = torchrun(*words, cwd=tmp_path, stdout=subprocess.PIPE)
    assert "step 1/100000" in started.stdout.readline()
    started.send_signal(number)
    started.communicate(timeout=600)
    assert checkpoint.load(tmp_path / "run").step >= 1


# ---- a queue's jobs, on this machine ----

SUBMITIT = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"]


@pytest.mark.slow
def test_the_jobs_of_a_sweep_may_have_several_processes(tiny, tmp_path):
    """Each is the run of one process, but for the rounding of float32."""
    words = [*tiny, "model.dropout=0", "train.max_steps=4"]
    done = script_as_typed("train", *words, *SUBMITIT, "-m", "seed=1,2", "out_dir=sweep", cwd=tmp_path)
    assert done.status == 0, done.err
    alone = script_as_typed("train", *words, "seed=2", "out_dir=alone", cwd=tmp_path)
    assert alone.status == 0, alone.err
    for a, b in zip(records(tmp_path / "sweep/1"), records(tmp_path / "alone"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert checkpoint.load(tmp_path / "sweep/0").step == 4


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds a job's processes in /proc")
def test_a_job_that_its_queue_wants_back_goes_on_when_it_is_started_again(tiny, tmp_path):
    """submitit's runner starts a job again that has asked for it, as SLURM does."""
    words = [*tiny, "train.max_steps=300", "train.eval_interval=1000", "resume=auto", *SUBMITIT]
    script = str(ROOT / "scripts/train.py")
    started = subprocess.Popen(
        [sys.executable, script, *words, "-m", "seed=1", "out_dir=sweep"], cwd=tmp_path
    )
    log, queue = tmp_path / "sweep/0/metrics.jsonl", tmp_path / "sweep/.submitit"
    while not (log.exists() and log.read_text()):
        assert started.poll() is None
        time.sleep(0.05)
    (runner,) = (int(path.name) for path in queue.iterdir() if path.name.isdigit())
    tasks = Path(f"/proc/{runner}/task/{runner}/children").read_text().split()
    os.kill(int(tasks[1]), signal.SIGUSR2)
    os.kill(int(tasks[0]), signal.SIGUSR2)
    assert started.wait(timeout=600) == 0
    steps = [record["step"] for record in records(tmp_path / "sweep/0")]
    assert steps == list(range(1, 301))
    said = "".join(path.read_text() for path in queue.glob("*/*_0_log.out"))
    assert said.count("stopped  ") == 1
    assert "step 300: validation loss" in said


def test_a_job_that_its_queue_wants_back_is_saved_and_then_handed_on(asked, group):
    """submitit's own handler of the signal, which requeues the job, is called once all is saved."""
    for processes in (1, 2):
        folder, codes, _ = group(processes, [(asked(), "SIGUSR2")])
        assert codes == [REQUEUED] * processes
        assert checkpoint.load(folder / "rank0/run").step == 11


# ---- alone ----


def test_a_process_alone_is_a_world_of_its_own():
    world = World()
    tree = {"weights": [torch.ones(2)]}
    assert world.gather(tree) is tree
    assert world.share(tree) is tree
    assert (world.sum(3), world.largest(2), world.main) == (3, 2, True)
    with parallel.joined("cpu", 1) as joined:
        assert joined is ALONE
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("name", "cuda", "says"),
    [
        ("cuda", 1, "device=cuda: this machine has 1 CUDA device(s) for 2 processes; start 1"),
        ("auto", 1, "device=auto: this machine has 1 CUDA device(s) for 2 processes; start 1"),
        ("cuda:1", 2, "device=cuda:1: each process takes the device of its own number; say device=cuda"),
        ("mps", 0, "device=mps is mps, which trains in one process alone: say device=cpu"),
    ],
)
def test_a_device_that_processes_cannot_share_is_refused(name, cuda, says, second_of_two, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: not cuda)
    with pytest.raises(ConfigError) as refused:
        second_of_two.device(name)
    assert says in str(refused.value)


def test_each_process_takes_the_cuda_device_of_its_number(second_of_two, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert [str(second_of_two.device(name)) for name in ("auto", "cuda", "cpu")] == [
        "cuda:1",
        "cuda:1",
        "cpu",
    ]
    assert [str(device) for device in taken] == ["cuda:1", "cuda:1"]


@pytest.fixture
def second_of_two():
    world = object.__new__(parallel.Processes)
    world.rank, world.size, world.local_rank, world.local_size = 1, 2, 1, 2
    return world


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_is_a_number_of_seconds(timeout):
    with pytest.raises(ConfigError, match=f"parallel.timeout={timeout}: a number of seconds, above 0"):
        parallel.DDP(timeout=timeout)
