"""The loop: the gradient is that of the batch, nothing beside the updates changes them, and no step is lost."""

import json
import math
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TEXT

from minilm import checkpoint, training
from minilm.attention import Full, MultiHeadAttention, Prefix
from minilm.data import TokenData
from minilm.errors import ConfigError
from minilm.generation import encode_prompt
from minilm.model import GPT, GPTConfig
from minilm.optim import AdamW, Muon, load_states
from minilm.schedule import Constant, Trapezoid
from minilm.tokenizer import Char
from minilm.tracking import Tracker, Trackers
from minilm.training import TrainConfig, Trainer, sample_prompt

T = 8
CLOCK = {"train_seconds", "tokens_per_second"}
ADAMW = AdamW(lr=0.01)
TOKENIZER = Char.fit(TEXT)
TOKENS = TOKENIZER.encode_array(TEXT)
DATA = TokenData(TOKENS[:4000], TOKENS[4000:4300], val_bytes=300, floor=None, source="text")


@pytest.fixture(autouse=True)
def only_training(monkeypatch):
    """No picture, and no waiting for the disk: both take longer than a run."""
    monkeypatch.setattr(training, "plot_loss", lambda *args, **options: None)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def make(
    run,
    *,
    optim=ADAMW,
    mask=None,
    dropout=0.1,
    dtype=torch.float32,
    data=DATA,
    schedule=None,
    tokenizer=TOKENIZER,
    writer=None,
    picture=None,
    **train,
):
    """A trainer of a small model, as minilm.launch makes one."""
    torch.manual_seed(0)
    config = GPTConfig(tokenizer.vocab_size, block_size=T, n_layer=1, n_head=2, n_embd=16, dropout=dropout)
    attention = (lambda: MultiHeadAttention(16, n_head=2, mask=mask)) if mask else None
    model = GPT(config, attention=attention).to(dtype)
    options = {
        "max_steps": 12,
        "batch_size": 4,
        "log_interval": 1,
        "eval_interval": 5,
        "sample_tokens": 5,
    } | train
    run.mkdir(exist_ok=True)
    return Trainer(
        model,
        forward=model,
        tokenizer=tokenizer,
        data=data,
        optimizers=optim.build(model),
        schedule=schedule or Trapezoid(warmup=2),
        config=TrainConfig(**options),
        run=run,
        settings={"said": "so"},
        seed=3,
        precision="fp32",
        writer=writer or Tracker(),
        picture=picture,
    )


def records(run):
    """metrics.jsonl without what a clock measured."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


def losses(run):
    return [record["train/loss"] for record in records(run)]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(a, b):
    """Bit for bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# ---- the update ----


@pytest.mark.parametrize("ragged", [False, True])
def test_a_batch_in_pieces_is_the_batch(tmp_path, monkeypatch, ragged):
    """Also where pieces differ in size (5 + 5 + 2) and in how many of their targets count."""
    if ragged:
        draws = torch.rand(12, T, generator=torch.Generator().manual_seed(0))
        counts = draws < torch.linspace(0.05, 1, 12)[:, None]
        monkeypatch.setattr(GPT, "hide_leaks", lambda self, targets: targets.masked_fill(~counts, -1))
    data = TokenData(TOKENS, TOKENS[:0], val_bytes=0, floor=None)
    sizes = {"dropout": 0.0, "dtype": torch.float64, "data": data, "batch_size": 12, "max_steps": 3}
    ends = []
    for micro in (None, 12, 4, 5, 1):
        trainer = make(run := tmp_path / str(micro), micro_batch_size=micro, **sizes)
        trainer.fit()
        ends.append((weights(trainer), losses(run)))
    for parameters, logged in ends[1:]:
        torch.testing.assert_close(parameters, ends[0][0], atol=1e-10, rtol=0)
        assert logged == pytest.approx(ends[0][1], abs=1e-6)


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("mask", [None, Prefix(4), Full()], ids=str)
def test_the_logged_loss_is_the_mean_over_the_batchs_targets(tmp_path, mask, micro):
    trainer = make(tmp_path, mask=mask, dropout=0.0, max_steps=2, micro_batch_size=micro)
    for number in range(2):
        batch = torch.from_numpy(trainer.windows.batch(number * 4, 4))
        targets = trainer.model.hide_leaks(batch[:, 1:])
        with torch.no_grad():
            nats = F.cross_entropy(
                trainer.model(batch[:, :-1]).transpose(1, 2), targets, reduction="none", ignore_index=-1
            )
        loss, measured = trainer._update()
        trainer.step, trainer.seen = trainer.step + 1, trainer.seen + 4
        assert loss == pytest.approx((nats.sum() / (targets >= 0).sum()).item(), rel=1e-5)
        assert number or loss == pytest.approx(math.log(TOKENIZER.vocab_size), abs=0.1)
        assert measured["grad_norm"] > 0


def test_the_rate_of_every_group_follows_the_schedule(tmp_path):
    trainer = make(
        tmp_path, optim=Muon(lr=0.01, adam_lr=0.004), schedule=Trapezoid(warmup=1, decay=0.5), max_steps=5
    )
    seen = []
    for _ in range(5):
        _, measured = trainer._update()
        trainer.step += 1
        seen.append([g["lr"] for optimizer in trainer.optimizers for g in optimizer.param_groups])
        assert measured["lr"] == seen[-1][0]
    factors = [0.5, 1, 1, 1, 0.5]
    assert seen == [[pytest.approx(0.01 * f), pytest.approx(0.004 * f)] for f in factors]


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(tmp_path):
    """SGD's step shows the gradient that it was given."""
    for limit in (None, 1e-3):
        trainer = make(tmp_path / str(limit), dropout=0.0, grad_clip=limit, schedule=Constant())
        trainer.optimizers = [torch.optim.SGD(trainer.model.parameters(), lr=1.0)]
        trainer.rates = [[1.0]]
        before = weights(trainer)
        _, measured = trainer._update()
        moved = torch.stack([(p - before[n]).norm() for n, p in trainer.model.named_parameters()]).norm()
        assert moved.item() == pytest.approx(limit or measured["grad_norm"], rel=1e-3)
        assert measured["grad_norm"] > 1e-2  # logged as it was before


# ---- what is done beside the updates ----


def test_evaluating_sampling_and_saving_do_not_change_training(tmp_path):
    ways = [
        {},
        {"eval_interval": 1},
        {"eval_interval": 7, "sample_tokens": 0},
        {"eval_interval": 1000},
        {"eval_interval": 3, "eval_batch_size": 1, "save_interval": 1},
        {"health_interval": 2},
        {"log_interval": 1, "sample_prompt": "The", "sample_tokens": 30},
    ]
    ends = []
    for i, way in enumerate(ways):
        trainer = make(tmp_path / str(i), **way)
        trainer.fit()
        ends.append((losses(tmp_path / str(i)), weights(trainer)))
    assert len(ends[0][0]) == 12
    for end in ends[1:]:
        assert same(end, ends[0])


def test_the_validation_loss_does_not_depend_on_the_batch_size(tmp_path):
    for size in (1, 3, 64):
        make(tmp_path / str(size), eval_batch_size=size).fit()
    measured = [
        [r["val/loss"] for r in records(tmp_path / str(size)) if "val/loss" in r] for size in (1, 3, 64)
    ]
    assert len(measured[0]) == 3
    assert measured[1] == pytest.approx(measured[0], abs=1e-6)
    assert measured[2] == pytest.approx(measured[0], abs=1e-6)


def test_records_hold_what_was_measured_where_it_was(tmp_path):
    make(tmp_path, max_steps=7, log_interval=3, eval_interval=4, health_interval=None).fit()
    assert [(r["step"], "train/loss" in r, "val/loss" in r) for r in records(tmp_path)] == [
        (1, True, False),
        (3, True, False),
        (4, False, True),
        (6, True, False),
        (7, True, True),
    ]
    last = records(tmp_path)[-1]
    assert last["tokens"] == 7 * 4 * T
    assert last["val/perplexity"] == pytest.approx(math.exp(last["val/loss"]))
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / math.log(2))  # a byte a token here


def test_without_a_validation_text_none_is_measured(tmp_path):
    make(tmp_path, data=TokenData(TOKENS, TOKENS[:0], val_bytes=0, floor=None)).fit()
    assert not any("val/loss" in record for record in records(tmp_path))
    assert checkpoint.load(tmp_path).step == 12


@pytest.mark.parametrize(
    ("mask", "shows"), [(Full(), True), (Prefix(T + 1), True), (Prefix(T), False)], ids=str
)
def test_a_mask_that_shows_all_targets_is_told_and_a_full_one_writes_no_samples(
    tmp_path, capsys, mask, shows
):
    make(tmp_path, mask=mask).fit()
    assert ("the loss is no language-modelling loss" in capsys.readouterr().out) == shows
    assert ((tmp_path / "samples.txt").read_text() == "") == isinstance(mask, Full)


def test_samples_begin_with_the_prompt_and_are_kept(tmp_path):
    make(tmp_path, sample_prompt="The ", sample_tokens=9).fit()
    samples = (tmp_path / "samples.txt").read_text()
    assert [line for line in samples.splitlines() if line.startswith("---")] == [
        "--- step 5",
        "--- step 10",
        "--- step 12",
    ]
    assert samples.count("\nThe ") == 3


def test_a_prompt_that_cannot_be_read_is_refused_and_none_has_a_beginning():
    with pytest.raises(ConfigError, match=r"train\.sample_prompt: .*'日' \(U\+65E5\)"):
        sample_prompt("日", TOKENIZER, DATA)
    assert (
        sample_prompt(None, TOKENIZER, DATA) == sample_prompt("", TOKENIZER, DATA) == TOKENIZER.encode("\n\n")
    )
    one_line = Char.fit("abc")
    assert sample_prompt(None, one_line, TokenData(np.array([2]), np.array([]), 0, None)) == [2]


class Begun(Char):
    """As of an imported model whose texts all begin with a token of their own, the last one."""

    def __init__(self, chars):
        super().__init__(chars)
        self._tokens = [*self._tokens, b"<s>"]
        self.prompt_start = [len(chars)]


def test_samples_begin_as_other_texts_of_the_model_do_and_do_not_show_it(tmp_path):
    begun = Begun(TOKENIZER.chars)
    start = begun.vocab_size - 1
    for prompt in ("The ", None, ""):
        assert sample_prompt(prompt, begun, DATA) == encode_prompt(begun, prompt or "\n\n")
        assert sample_prompt(prompt, begun, DATA)[0] == start
    assert sample_prompt(None, Begun("abc"), TokenData(np.array([2]), np.array([]), 0, None)) == [3, 2]
    documents = replace(DATA, end=7)
    assert sample_prompt(None, TOKENIZER, documents) == [7]
    assert sample_prompt("The", TOKENIZER, documents) == TOKENIZER.encode("The")
    trainer = make(tmp_path, tokenizer=begun, sample_prompt="The ", max_steps=1)
    trainer.fit()
    assert (tmp_path / "samples.txt").read_text().startswith("--- step 1\nThe ")


def test_a_picture_that_cannot_be_drawn_does_not_end_training(tmp_path):
    def fails(ids):
        raise MemoryError

    writer = Trackers([shown := Tracker()])
    make(tmp_path / "unseen", writer=writer, picture=fails).fit()  # nobody wants it
    shown.wants_media = True
    with pytest.warns(UserWarning, match="no picture of attention"):
        make(tmp_path / "seen", writer=Trackers([shown]), picture=fails).fit()
    assert checkpoint.load(tmp_path / "seen").step == 12


# ---- checkpoints ----


def test_a_run_shorter_than_every_interval_leaves_a_checkpoint(tmp_path):
    make(tmp_path, max_steps=3, eval_interval=1000, save_interval=1000).fit()
    assert checkpoint.load(tmp_path).step == 3


def test_a_run_of_no_steps_leaves_one_too(tmp_path):
    trainer = make(tmp_path, max_steps=0)
    trainer.fit()
    assert checkpoint.load(tmp_path).step == 0
    assert records(tmp_path) == []


@pytest.mark.parametrize("save_interval", [None, 1000])
def test_best_and_last_are_what_they_say(tmp_path, monkeypatch, save_interval):
    measured = iter([3.0, 2.0, 2.5, 2.0, 4.0])
    monkeypatch.setattr(training, "evaluate", lambda *args, **options: next(measured))
    make(tmp_path, max_steps=10, eval_interval=2, keep=1, save_interval=save_interval).fit()
    best, last = (checkpoint.load(tmp_path / "checkpoints" / name) for name in ("best", "last"))
    assert (best.step, last.step) == (4, 10)
    assert best.state["best"] == last.state["best"] == 2.0
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "best",
        "last",
        "step_00000004",
        "step_00000010",
    }


def test_a_checkpoint_holds_the_configuration_and_the_tokenizer(tmp_path):
    make(tmp_path).fit()
    saved = checkpoint.load(tmp_path)
    assert saved.config == {"said": "so"}
    assert saved.tokenizer == TOKENIZER.to_dict()


def resume(run, **options):
    """A new trainer that goes on from a run's last checkpoint, as minilm.launch makes one."""
    trainer, saved = make(run, **options), checkpoint.load(run)
    torch.manual_seed(99)
    trainer.model.load_state_dict(saved.weights)
    load_states(trainer.optimizers, saved.state["optimizers"])
    trainer.restore(saved)
    return trainer


@pytest.mark.parametrize("optim", [ADAMW, Muon()], ids=["adamw", "muon"])
@pytest.mark.parametrize("at", [5, 8])
def test_a_resumed_run_is_the_unbroken_one(tmp_path, optim, at):
    """In this process; tests/test_train_script.py does it in new ones, with signals."""
    whole = make(tmp_path / "whole", optim=optim)
    whole.fit()

    broken = make(tmp_path / "broken", optim=optim)
    update = broken._update

    def until():
        broken.signalled = signal.SIGTERM if broken.step == at - 1 else None
        return update()

    broken._update = until
    broken.fit()
    saved = checkpoint.load(tmp_path / "broken")
    assert saved.step == at

    resumed = resume(tmp_path / "broken", optim=optim)
    resumed.fit()
    assert same(weights(resumed), weights(whole))
    assert records(tmp_path / "broken") == records(tmp_path / "whole")
    assert (tmp_path / "broken" / "samples.txt").read_text() == (
        tmp_path / "whole" / "samples.txt"
    ).read_text()
    states = [checkpoint.load(tmp_path / name).state for name in ("broken", "whole")]
    assert same(states[0]["optimizers"], states[1]["optimizers"])
    assert states[0]["best"] == states[1]["best"]


def test_a_resumed_run_sees_the_windows_that_follow_whatever_its_batch_size(tmp_path):
    sizes, seen = [(4, 3), (10, 6), (1, 8)], []
    for batch_size, until in sizes:
        options = {"batch_size": batch_size, "max_steps": until, "health_interval": None}
        trainer = (resume if seen else make)(tmp_path, **options)
        batch = trainer.windows.batch
        trainer.windows.batch = lambda first, n, batch=batch: (
            seen.extend(range(first, first + n)) or batch(first, n)
        )
        trainer.fit()
    assert seen == list(range(3 * 4 + 3 * 10 + 2 * 1))
    assert [record["tokens"] for record in records(tmp_path)][-1] == len(seen) * T


def test_a_checkpoint_from_before_windows_were_counted_goes_on_where_it_was(tmp_path):
    make(tmp_path, max_steps=3).fit()
    saved = checkpoint.load(tmp_path)
    del saved.state["seen"]
    trainer = make(tmp_path, max_steps=6, batch_size=2)
    trainer.restore(replace(saved, config={"train": {"batch_size": 4}}))
    assert trainer.seen == 12


def test_what_was_best_before_a_resume_stays_best_after(tmp_path, monkeypatch):
    for measured, options in ((2.0, {"max_steps": 4}), (3.0, {"max_steps": 8})):
        monkeypatch.setattr(training, "evaluate", lambda *args, measured=measured, **options: measured)
        (resume if options["max_steps"] == 8 else make)(tmp_path, eval_interval=4, **options).fit()
    assert checkpoint.load(tmp_path / "checkpoints" / "best").step == 4
    assert checkpoint.load(tmp_path).step == 8


def test_the_id_that_a_tracker_knows_a_run_by_outlives_a_resume_without_it(tmp_path):
    shown, other = Tracker(), Tracker()
    shown.run_id, other.run_id = "abc", "def"
    kept = []
    for writer, goes_on in ((shown, make), (None, resume), (None, resume), (other, resume)):
        goes_on(tmp_path, writer=writer, max_steps=3 * (len(kept) + 1)).fit()
        kept.append(checkpoint.load(tmp_path).state["wandb_run_id"])
    assert kept == ["abc", "abc", "abc", "def"]


def test_a_run_that_had_saved_nothing_starts_its_files_anew(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "samples.txt").write_text("old\n")
    make(tmp_path).fit()
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 13))
    assert "old" not in (tmp_path / "samples.txt").read_text()


# ---- numbers that are none ----


def spoil(trainer, at, how):
    """Makes something infinite in step `at`, counted from 0."""
    forward, (first, *_) = trainer.forward, trainer.model.parameters()

    def spoilt(x):
        logits = forward(x)
        if trainer.step == at and how == "loss":
            return logits * float("nan")
        if trainer.step == at and how == "loss alone":  # its gradient is finite
            return logits.masked_fill(torch.arange(logits.shape[-1]) > 0, -torch.inf)
        if trainer.step == at and how == "gradient":
            first.register_hook(lambda grad: grad * float("inf" if trainer.step == at else 1))
        if trainer.step == at and how == "weights":
            for rates in trainer.rates:
                rates[:] = [float("inf")] * len(rates)
        return logits

    trainer.forward = spoilt


@pytest.mark.parametrize(("how", "step"), [("loss", 7), ("gradient", 7), ("weights", 8)])
def test_a_number_that_is_none_stops_the_run_and_overwrites_nothing(tmp_path, how, step):
    trainer = make(tmp_path, eval_interval=4)
    spoil(trainer, 7, how)
    kept = {}
    save = trainer._save

    def watched(**options):
        save(**options)
        kept.update({p: p.read_bytes() for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()})

    trainer._save = watched
    with pytest.raises(ConfigError) as stopped:
        trainer.fit()
    assert f"step {step}: " in str(stopped.value)
    assert "step_00000004" in str(stopped.value)
    assert "try a lower optim.lr" in str(stopped.value)
    assert {p: p.read_bytes() for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()} == kept
    saved = checkpoint.load(tmp_path)
    assert saved.step == 4
    assert all(w.isfinite().all() for w in saved.weights.values())


@pytest.mark.parametrize("how", ["loss", "loss alone", "gradient"])
def test_updates_that_are_no_number_may_be_left_out_up_to_a_number(tmp_path, capsys, how):
    """They change nothing, are counted also through a resume, and logged; one more than was allowed stops the run."""
    at = {5, 7}

    def spoilt(trainer):
        for number in at:
            spoil(trainer, number, how)
        update = trainer._update

        def watched():
            before = weights(trainer)
            result = update()
            assert same(weights(trainer), before) == (trainer.step in at)
            return result

        trainer._update = watched
        return trainer

    spoilt(make(tmp_path, max_steps=6, skip_nonfinite=2, log_interval=100)).fit()
    at.remove(5)
    spoilt(resume(tmp_path, max_steps=10, skip_nonfinite=2, log_interval=100)).fit()
    skips = {record["step"]: record["skipped"] for record in records(tmp_path) if "skipped" in record}
    assert skips == {6: 1, 8: 2}
    assert "step 7: the loss is" in (said := capsys.readouterr().out)
    assert "left out (2 of 2)" in said
    assert checkpoint.load(tmp_path).state["skipped"] == 2
    at.add(11)
    with pytest.raises(ConfigError, match=r"step 11: .*the last good step is 10, in .*step_00000010"):
        spoilt(resume(tmp_path, max_steps=12, skip_nonfinite=2)).fit()
    assert checkpoint.load(tmp_path).step == 10


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_resumed_run_that_may_leave_out_fewer_updates_stops_at_the_next(tmp_path, limit):
    trainer = make(tmp_path, max_steps=6, skip_nonfinite=2)
    trainer.skipped = 2
    trainer.fit()
    again = resume(tmp_path, max_steps=12, skip_nonfinite=limit)
    spoil(again, 7, "loss")
    with pytest.raises(ConfigError, match="step 7: the loss is nan"):
        again.fit()


def test_without_a_checkpoint_the_message_says_so(tmp_path):
    trainer = make(tmp_path)
    spoil(trainer, 0, "loss")
    with pytest.raises(ConfigError, match=r"step 0: the loss is nan.*no checkpoint was saved yet"):
        trainer.fit()


def test_weights_that_went_astray_in_a_step_that_a_signal_ended_are_not_saved(tmp_path):
    trainer = make(tmp_path, eval_interval=4)
    spoil(trainer, 5, "weights")
    update = trainer._update

    def interrupted():
        trainer.signalled = signal.SIGINT if trainer.step == 5 else None
        return update()

    trainer._update = interrupted
    with pytest.raises(ConfigError, match="step 6: the weights are no longer finite"):
        trainer.fit()
    assert checkpoint.load(tmp_path).step == 4


# ---- signals ----


def test_signal_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    trainer = make(tmp_path)
    trainer.fit()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_in_the_last_step_leaves_a_run_that_is_done(tmp_path, capsys):
    trainer = make(tmp_path)
    update = trainer._update

    def interrupted():
        trainer.signalled = signal.SIGTERM if trainer.step == trainer.config.max_steps - 1 else None
        return update()

    trainer._update = interrupted
    trainer.fit()
    said = capsys.readouterr().out
    assert "trained" in said
    assert "generate.py" in said
    assert "resume=" not in said


# ---- refusals ----


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": -1},
        {"batch_size": 0},
        {"micro_batch_size": 0},
        {"grad_clip": 0.0},
        {"grad_clip": -1.0},
        {"grad_clip": math.nan},
        {"eval_interval": 0},
        {"eval_batch_size": 0},
        {"log_interval": 0},
        {"health_interval": 0},
        {"save_interval": 0},
        {"keep": 0},
        {"sample_tokens": -1},
        {"skip_nonfinite": -1},
    ],
    ids=str,
)
def test_a_number_that_makes_no_sense_is_refused_by_key(options):
    (key,) = options
    with pytest.raises(ConfigError, match=rf"train\.{key}={options[key]}: "):
        TrainConfig(**({"max_steps": 10, "batch_size": 4} | options))
