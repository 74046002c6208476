"""The picture, the page and the arrays hold the same maps, whatever the text."""

import base64
import json
import re
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from minilm import checkpoint
from minilm.attention.diagnostics import attention_maps
from minilm.build import build_model, restore
from minilm.errors import ConfigError
from minilm.maps import PAGE, Maps, draw, drawable, look, page, picture, visible
from minilm.tokenizer import Byte

ROOT = Path(__file__).parents[1]
HOSTILE = "</script><script>alert(1)</script><!-- {{data}} &amp; \"'\\u003c $x$\r\n\t日"


def save(run, mask="Causal", attention=None, n_layer=2):
    torch.manual_seed(0)
    shape = {"n_layer": n_layer, "n_head": 2, "n_kv_head": None, "n_embd": 16, "block_size": 128}
    config = {
        "model": shape,
        "attention": attention or {"_target_": "minilm.attention.layer.MultiHeadAttention", "scale": "sqrt"},
        "mask": {"_target_": f"minilm.attention.masks.{mask}"},
        "position": {"_target_": "minilm.attention.positions.Rotary"},
    }
    weights = build_model(config, vocab_size=256).state_dict()
    checkpoint.save(run, 7, weights=weights, state={}, config=config, tokenizer=Byte().to_dict())
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"))


def options(run, **changes):
    return {"checkpoint": str(run), "prompt": "Once", "out": None, "device": "cpu", "threads": None} | changes


def maps_of(text, n_layer=2, n_head=2):
    tokens = [bytes([b]) for b in text.encode()]
    n = len(tokens)
    weights = np.tril(np.random.default_rng(0).random((n_layer, n_head, n, n), dtype=np.float32) ** 8)
    weights /= weights.sum(-1, keepdims=True)
    return Maps(weights, list(text.encode()), tokens, text, "caption", {})


def data_of(html):
    """What the page's script will read."""
    embedded = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)[1]
    return json.loads(embedded)


def weights_of(data):
    n = len(data["tokens"])
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(data["weights"])), dtype="<u2")
    return numbers.reshape(data["n_layer"], data["n_head"], n, n)


# The page


def test_a_hostile_text_stays_text():
    maps = maps_of(HOSTILE)
    html = page(maps)
    assert html.count("<script") == html.count("</script") == 2
    assert "<!--" not in html
    assert data_of(html)["tokens"] == maps.labels
    assert data_of(html)["title"] == HOSTILE


def test_the_page_holds_every_weight_and_a_zero_is_a_zero():
    maps = maps_of("Once upon a time")
    maps.weights[0, 0, 5, :2] = 1e-9, 0
    rounded = weights_of(data_of(page(maps)))
    np.testing.assert_allclose(rounded / 65535, maps.weights, rtol=0, atol=1.01 / 65535)
    np.testing.assert_array_equal(rounded == 0, maps.weights == 0)


def test_the_page_needs_nothing_from_outside():
    html = PAGE.read_text(encoding="utf-8")
    assert html.count("{{data}}") == 1
    assert not re.search(r"https?:|src=|href=|url\(|@import|fetch\(|XMLHttp|import\(|//\w+\.", html)
    assert "default-src 'none'" in html


# Labels


@pytest.mark.parametrize(
    ("token", "label"),
    [
        (b"the", "the"),
        (b" the", "·the"),
        (b"\n\n", "↵↵"),
        (b"\t", "→"),
        ("é日".encode(), "é日"),
        (b"\xf0\x9f", "⟨F0 9F⟩"),
        (b"\x00", "⟨U+0000⟩"),
        ("\u202e".encode(), "⟨U+202E⟩"),
    ],
)
def test_every_token_is_visible(token, label):
    assert visible(token) == label


def test_labels_of_the_picture_are_what_its_font_can_write():
    assert drawable(["é↵·→⟨", "日", "x" * 40]) == ["é↵·→⟨", "U+65E5", "x" * 11 + "…"]


# The picture


@pytest.mark.parametrize(
    "text", ["A", HOSTILE, "Once upon a time " * 20], ids=["one token", "hostile", "long"]
)
def test_the_picture_is_drawn_without_complaint(text, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open(tmp_path / "maps.png", "wb") as file:
            picture(maps_of(text, n_layer=1)).print_png(file)
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")


# From a checkpoint


def test_the_script_writes_picture_page_and_arrays(run, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "scripts/attention.py"),
        f"checkpoint={run}",
        "prompt=Once",
        "threads=1",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    out = run / "maps"
    assert done.stdout.split() == [str(out / f"maps.{kind}") for kind in ("html", "png", "npz")]
    assert sorted(path.name for path in out.iterdir()) == ["maps.html", "maps.npz", "maps.png"]
    assert list(tmp_path.iterdir()) == []

    arrays = np.load(out / "maps.npz")
    model, _, saved = restore(run, torch.device("cpu"))
    expected = attention_maps(model, torch.tensor([list(b"Once")]))[:, 0].numpy()
    assert arrays["weights"].dtype == np.float32
    np.testing.assert_allclose(arrays["weights"], expected, rtol=1e-5, atol=1e-7)
    assert arrays["token_ids"].tolist() == list(b"Once")
    assert arrays["tokens"].tolist() == list("Once")
    assert json.loads(str(arrays["config"])) == saved.config
    data = data_of((out / "maps.html").read_text(encoding="utf-8"))
    np.testing.assert_allclose(weights_of(data) / 65535, expected, rtol=0, atol=1.01 / 65535)
    assert data["title"] == run.name
    assert data["caption"] == "step 7 · mask Causal · position Rotary · scale sqrt"


def test_without_a_prompt_the_model_writes_the_text(run):
    first, second = (look(*restore(run, torch.device("cpu")), "") for _ in range(2))
    assert len(first.ids) == 97
    assert first.ids == second.ids


def test_of_a_prompt_beyond_the_context_the_newest_part_is_read(run):
    maps = look(*restore(run, torch.device("cpu")), "x" * 100 + "y" * 50)
    assert maps.labels == list("x" * 78 + "y" * 50)
    assert maps.caption.endswith("the last 128 of 150 tokens")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": "/nowhere"}, "no checkpoint at /nowhere"),
        ({"prompt": 3}, "prompt=3: expected"),
        ({"out": f"{__file__}/maps"}, "cannot be made"),
    ],
)
def test_mistakes_are_refused_by_name(run, changes, message):
    with pytest.raises(ConfigError, match=message):
        draw(options(run, **changes))


def test_a_model_that_has_no_maps_or_no_text_of_its_own_is_refused(tmp_path):
    linear = save(tmp_path / "linear", attention={"_target_": "minilm.attention.linear.LinearAttention"})
    with pytest.raises(ConfigError, match="LinearAttention"):
        draw(options(linear))
    with pytest.raises(ConfigError, match="reads the future"):
        draw(options(save(tmp_path / "full", mask="Full"), prompt=""))
    assert not (linear / "maps").exists()


def test_more_weights_than_a_page_can_hold_are_refused_with_the_number_that_fits(run, monkeypatch):
    monkeypatch.setattr("minilm.maps.MAX_WEIGHTS", 400)
    with pytest.raises(ConfigError, match=r"20 tokens make 2 × 2 maps of 20² weights.*at most 10 tokens"):
        draw(options(run, prompt="x" * 20))
