"""scripts/evaluate.py: what it prints of a text, against the run's own figures and a count by hand."""

import math

import pytest
import torch
from conftest import TEXT

from minilm import checkpoint
from minilm.build import restore
from minilm.data import read_text
from minilm.errors import ConfigError
from minilm.score import score


@pytest.fixture
def settings(tiny_run, text_file):
    """settings(key=value, …): the configuration of the small run and its own text."""

    def make(path=text_file, **said):
        options = {"checkpoint": str(tiny_run[0]), "batch_size": 7, "stride": None, "device": "cpu"}
        return options | {"precision": "fp32", "threads": 1, "data": {"path": str(path)}} | said

    return make


def number(rows, name):
    return float(dict(rows)[name])


def test_the_figures_belong_together(settings, tiny_run, text_file):
    rows = score(settings())
    nats = number(rows, "nats per token")
    assert number(rows, "perplexity") == pytest.approx(math.exp(nats), rel=1e-3)
    assert number(rows, "bits per byte") == pytest.approx(
        nats / math.log(2) * len(TEXT) / len(TEXT.encode()), abs=1e-3
    )
    model, tokenizer, _ = restore(tiny_run[0], torch.device("cpu"))
    ids, size, total = tokenizer.encode(read_text(text_file, "")), model.config.block_size, 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, size):
            window = torch.tensor(ids[start : start + size + 1])
            logs = model(window[None, :-1])[0].double().log_softmax(-1)
            total -= float(logs.gather(1, window[1:, None]).sum())
    assert nats == pytest.approx(total / (len(ids) - 1), abs=1e-4)


def test_more_context_for_each_token_is_another_figure(settings):
    assert score(settings(stride=4)) != score(settings())
    assert score(settings(stride=16))[3:] == score(settings())[3:]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"stride": 17}, "stride=17: a whole number from 1 to the model's block_size=16"),
        ({"batch_size": 0}, "batch_size=0: a positive whole number"),
        ({"data": {"path": "nowhere.txt"}}, r"data\.path=nowhere\.txt: cannot be read"),
        ({"data": {"path": 3}}, r"data\.path=3: expected text"),
        ({"checkpoint": "nowhere"}, "no checkpoint at nowhere"),
    ],
    ids=str,
)
def test_what_cannot_be_right_is_refused(settings, said, message):
    with pytest.raises(ConfigError, match=message):
        score(settings(**said))


def test_a_text_of_one_token_has_no_figure(settings, tmp_path):
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(ConfigError, match="1 token, and the first one is not predicted"):
        score(settings(tmp_path / "one.txt"))


def test_a_text_within_the_prefix_has_no_figure_and_one_token_more_has(settings, tiny_run, tmp_path):
    saved = checkpoint.load(tiny_run[0])
    config = saved.config | {"mask": {"_target_": "minilm.attention.masks.Prefix", "length": 16}}
    checkpoint.save(
        tmp_path / "prefix", 1, weights=saved.weights, state={}, config=config, tokenizer=saved.tokenizer
    )
    text = tmp_path / "text.txt"
    for n in (2, 16):
        text.write_text(TEXT[:n])
        with pytest.raises(ConfigError, match=rf"text\.txt: {n} tokens, and the first 16, .* not predicted"):
            score(settings(text, checkpoint=str(tmp_path / "prefix")))
    text.write_text(TEXT[:17])
    rows = score(settings(text, checkpoint=str(tmp_path / "prefix")))
    assert 0 < number(rows, "nats per token") < math.inf


def test_the_script_prints_them(call, settings, tiny_run, text_file):
    result = call(
        "evaluate", f"checkpoint={tiny_run[0]}", f"data.path={text_file}", "threads=1", "batch_size=7"
    )
    assert result.status == 0, result.err
    assert result.out.splitlines() == [f"{name:<14}  {value}" for name, value in score(settings())]
