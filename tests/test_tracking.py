import json
import os
import struct
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import minilm
from minilm import tracking
from minilm.build import check
from minilm.errors import ConfigError
from minilm.tracking import (
    AppendLog,
    MetricsLog,
    check_packages,
    read_metrics,
    start_trackers,
    start_wandb,
)

# ---- logs ----


def test_each_record_is_one_line_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(3):
            log.write({"step": step, "note": "é\n日"})
            lines = path.read_text(encoding="utf-8").splitlines()
            assert [json.loads(line)["step"] for line in lines] == list(range(step + 1))
    assert "é" in lines[0]
    assert read_metrics(path)[1] == {"step": 1, "note": "é\n日"}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        (np.float32("inf"), None),
        (torch.tensor(float("nan")), None),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([1.0, float("nan")]), [1.0, None]),
        ([1, (float("nan"), {"x": float("inf")})], [1, [None, {"x": None}]]),
        (True, True),
        (None, None),
        (1e-300, 1e-300),
    ],
    ids=repr,
)
def test_every_line_is_valid_json(tmp_path, value, written):
    with MetricsLog(tmp_path / "m") as log:
        log.write({"value": value})

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads((tmp_path / "m").read_text(), parse_constant=refuse) == {"value": written}


def test_resuming_neither_loses_nor_doubles_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(5):
            log.write({"step": step})
        position = log.position()
        assert position == path.stat().st_size
        for step in range(5, 8):
            log.write({"step": step})
    with path.open("a") as file:
        file.write('{"step": 8, "train/lo')
    with MetricsLog(path, resume_at=position) as log:
        assert log.position() == position
        for step in range(5, 10):
            log.write({"step": step})
    assert [record["step"] for record in read_metrics(path)] == list(range(10))


def test_resuming_at_zero_starts_anew_and_none_goes_on(tmp_path):
    path = tmp_path / "samples.txt"
    for resume_at, content in ((None, "a"), (None, "aa"), (0, "a"), (100, "aa")):
        with AppendLog(path, resume_at=resume_at) as log:
            log.write("a")
        assert path.read_text() == content


def test_any_text_can_be_logged(tmp_path):
    with AppendLog(tmp_path / "samples.txt") as log:
        log.write("é\r\n\x1b[0m")
        log.write("\ud800")
        assert log.position() == (tmp_path / "samples.txt").stat().st_size
    assert (tmp_path / "samples.txt").read_bytes() == "é\r\n\x1b[0m\\ud800".encode()


@pytest.mark.parametrize("tail", ["", '{"step": 2', '{"step": 2}', "{", "\xff"])
def test_a_torn_last_line_is_left_out(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n' + tail, encoding="latin-1")
    assert read_metrics(path) == [{"step": 0}, {"step": 1}]


def test_other_faults_of_the_file_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ConfigError, match="no such file"):
        read_metrics(path)
    path.write_text('{"step": 0}\n{"st\n{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 2 is not JSON"):
        read_metrics(path)


# ---- wandb ----


def surroundings(folder, **more):
    """An environment that knows no wandb key, and no home but `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    source = Path(minilm.__file__).parents[1]
    return kept | {"HOME": str(folder), "NETRC": str(folder / "netrc"), "PYTHONPATH": str(source)} | more


def run_python(code, folder, **environment):
    """Run `code` in a fresh process that has nothing to read from."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env=surroundings(folder, **environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_disabled_and_torch_free(tmp_path):
    result = run_python(
        """
        import sys
        from minilm.tracking import start_wandb
        writer = start_wandb("disabled", "p", None, None, {}, "run")
        writer.log({"a": 1}, step=1)
        writer.finish(0)
        assert writer.run_id is None
        assert not {"wandb", "torch", "rich", "matplotlib"} & set(sys.modules)
        """,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert os.listdir(tmp_path) == []


def test_offline_writes_one_run_a_job_into_its_folder_and_resumes_by_id(tmp_path):
    result = run_python(
        """
        import socket
        def refuse(*arguments): raise AssertionError("connects")
        socket.create_connection = socket.getaddrinfo = refuse
        from minilm.tracking import start_wandb
        ids = []
        for job in ("a", "b"):
            writer = start_wandb("offline", "minilm", job, "group", {"seed": {"x": 1}}, job)
            writer.log({"train/loss": 1.0, "val/loss": float("nan")}, step=1)
            writer.finish(exit_code=1)
            ids.append(writer.run_id)
        writer = start_wandb("offline", "minilm", "b", "group", {}, "c", run_id=ids[1])
        writer.finish(0)
        print(*ids, writer.run_id)
        """,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    first, second, resumed = result.stdout.split()
    assert first != second == resumed
    for folder, run_id in zip("abc", (first, second, resumed), strict=True):
        [run] = (tmp_path / folder / "wandb").glob("offline-run-*")
        assert (run / f"run-{run_id}.wandb").stat().st_size > 0


@pytest.mark.parametrize("key", [None, "0123456789" * 4])
def test_online_without_key_or_connection_warns_once_and_goes_on_offline(tmp_path, key):
    environment = {"WANDB_BASE_URL": "http://127.0.0.1:9"} | ({"WANDB_API_KEY": key} if key else {})
    result = run_python(
        """
        from minilm import tracking
        tracking.CONNECT_SECONDS = 1
        writer = tracking.start_wandb("online", "minilm", None, None, {}, "run")
        writer.log({"a": 1.0}, step=1)
        writer.finish(0)
        """,
        tmp_path,
        **environment,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("UserWarning: wandb cannot run online, going on offline: ") == 1
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_online_asks_nothing_even_on_a_terminal(tmp_path):
    import pty

    code = (
        'from minilm.tracking import start_wandb; start_wandb("online", "p", None, None, {}, "run").finish(0)'
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=surroundings(tmp_path),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        assert process.wait(timeout=60) == 0  # a question would wait for ever
        assert b"going on offline" in os.read(ours, 10_000)
    finally:
        process.kill()
        os.close(ours)


def test_a_missing_package_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"wandb\.mode=offline needs the package wandb .*pip install -e '\."
    ):
        start_wandb("offline", "p", None, None, {}, tmp_path)


def test_an_unknown_mode_names_the_choices():
    given = ("name", "group", "config", "run_dir", "run_id")
    with pytest.raises(ConfigError, match=r"wandb\.mode=onlin: expected disabled or offline or online"):
        check(start_wandb, {"mode": "onlin", "project": "minilm"}, "wandb", exclude=given)


class BrokenRun:
    id, calls = "id", 0

    def log(self, record, step):
        self.calls += 1
        raise ConnectionError("lost\nmore")

    finish = log


def test_a_failure_in_the_middle_warns_once_and_the_others_go_on(tmp_path):
    run, kept = BrokenRun(), Kept()
    writer = tracking.Trackers([tracking.Wandb(run), kept])
    assert (writer.run_id, writer.wants_media) == ("id", True)
    with pytest.warns(UserWarning, match=r"wandb failed, training goes on without it: lost$"):
        writer.log({"a": 1}, step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.log({"a": 2}, step=2)
        writer.finish(0)
    assert run.calls == 1
    assert kept.records == [{"a": 1}, {"a": 2}]


class Kept(tracking.Tracker):
    def __init__(self, wants_media=False):
        self.wants_media = wants_media
        self.records, self.pictures = [], []

    def log(self, record, step):
        self.records.append(record)

    def picture(self, name, make, step):
        self.pictures.append((name, make(), step))


def test_a_picture_is_drawn_once_for_all_who_show_it_and_not_for_none():
    drawn = []

    def make():
        drawn.append(np.zeros((2, 2, 4), np.uint8))
        return drawn[-1]

    for nobody in (tracking.Tracker(), tracking.Trackers([]), tracking.Trackers([tracking.Tracker()])):
        nobody.picture("attention", make, 1)
    assert drawn == []
    shown = [Kept(wants_media=True), Kept(wants_media=True)]
    tracking.Trackers(shown).picture("attention", make, 2)
    assert len(drawn) == 1
    assert all(tracker.pictures == [("attention", drawn[0], 2)] for tracker in shown)


def test_nothing_is_drawn_after_the_last_who_showed_it_failed():
    writer = tracking.Trackers([tracking.Wandb(BrokenRun()), Kept()])
    with pytest.warns(UserWarning, match="wandb failed"):
        writer.log({"a": 1}, step=1)
    assert not writer.wants_media
    writer.picture("attention", lambda: pytest.fail("drawn"), 2)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of memory\nmore")], ids=repr)
def test_a_picture_that_cannot_be_drawn_is_a_warning_and_costs_no_tracker(error):
    def make():
        raise error

    writer = tracking.Trackers([kept := Kept(wants_media=True)])
    with pytest.warns(UserWarning, match=r"no picture of attention, .*: (out of memory|MemoryError)$"):
        writer.picture("attention", make, 1)
    writer.log({"a": 1}, step=1)
    assert kept.records == [{"a": 1}]
    assert kept.pictures == []


def test_nothing_asked_for_is_nothing_done(tmp_path):
    wandb = {"mode": "disabled", "project": "p", "name": None, "group": None}
    writer = start_trackers(wandb, False, {}, tmp_path, None, 0)
    assert (writer.wants_media, writer.run_id) == (False, None)
    assert not list(tmp_path.iterdir())


def records_of(file):
    """The records of wandb's offline file: a log as LevelDB's, 7 bytes of header, then blocks of 32 KiB in which each
    fragment has a checksum, its length and whether it is whole, the first, a middle or the last."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, whole = file.read_bytes(), 7, b""
    assert raw[:4] == b":W&B"
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        whole += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_the_offline_file_can_be_read_afterwards_and_holds_numbers_samples_and_pictures(tmp_path):
    result = run_python(
        """
        import numpy as np
        from minilm.tracking import start_wandb
        writer = start_wandb("offline", "minilm", "name", "group", {"seed": 3}, "run")
        writer.log({"step": 5, "val/loss": 1.25}, step=5)
        writer.sample("Once <b>upon</b>\\na time", step=5)
        writer.picture("attention", lambda: np.zeros((8, 9, 4), np.uint8), step=5)
        writer.log({"step": 6, "val/loss": 1.0}, step=6)
        writer.finish(0)
        """,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    [folder] = (tmp_path / "run" / "wandb").glob("offline-run-*")
    [file] = folder.glob("run-*.wandb")
    records = list(records_of(file))
    [run] = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name, run.run_group) == ("minilm", "name", "group")
    assert {item.key: item.value_json for item in run.config.update}["seed"] == "3"
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [line["val/loss"] for line in history if "val/loss" in line] == [1.25, 1.0]
    [sample] = folder.rglob("*.html")
    assert "Once &lt;b&gt;upon&lt;/b&gt;\na time" in sample.read_text()
    [picture] = folder.rglob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---- TensorBoard ----


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = tracking.TensorBoard(tmp_path)
    for step in (1, 2, 3):
        first.log({"step": step, "train/loss": 1.0 / step, "val/loss": float("nan")}, step)
    first.finish()
    second = tracking.TensorBoard(tmp_path, step=2)
    second.log({"step": 3, "train/loss": 5.0}, 3)
    second.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "val/loss"}
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5), (3, 5.0)]


def test_tensorboards_media(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = tracking.TensorBoard(tmp_path)
    writer.sample("# Once\n*upon*", 3)
    writer.picture("attention", lambda: np.full((8, 9, 4), 7, np.uint8), 3)
    writer.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    [text] = events.Tensors("sample/text_summary")
    assert text.tensor_proto.string_val[0] == b"    # Once\n    *upon*"
    [image] = events.Images("attention")
    assert (image.width, image.height) == (9, 8)


@pytest.mark.parametrize(
    ("package", "asked", "message"),
    [
        ("wandb", ("online", False), r"wandb\.mode=online needs the package wandb .*pip install -e '\.'"),
        ("tensorboard", ("disabled", True), r"tensorboard=true needs .*pip install -e '\.\[tensorboard\]'"),
    ],
)
def test_a_tracker_without_its_package_is_refused(monkeypatch, package, asked, message):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=message):
        check_packages(*asked)
    check_packages("disabled", False)
