"""Attention maps to look at: maps.png, an interactive maps.html and maps.npz; what scripts/attention.py does.

Weights are (layer, head, query, key) here: the maps of one text.
"""

import base64
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minilm.attention.diagnostics import attention_layers, attention_maps
from minilm.attention.layer import MultiHeadAttention
from minilm.build import Name, check, restore
from minilm.checkpoint import Checkpoint, run_folder
from minilm.data import normalise_newlines
from minilm.errors import ConfigError
from minilm.files import write_atomic
from minilm.generation import Generator, encode_prompt
from minilm.model import GPT
from minilm.plots import INK, freed, title
from minilm.runtime import inference, resolve_device, set_up_cpu
from minilm.tokenizer import Tokenizer

PAGE = Path(__file__).with_suffix(".html")
OWN_TOKENS = 96  # how many the model writes where no prompt is given
FEW_TOKENS = 40  # of the picture that goes to trackers at each evaluation
MAX_WEIGHTS = 1 << 24  # what a page can hold
GLYPHS = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})
FONT_POINTS, PITCH, MAX_INCHES, DPI = 6, 0.085, 18, 150  # of the picture; PITCH is a label's height in inches


@dataclass(frozen=True)
class MapsConfig:
    """configs/maps.yaml."""

    checkpoint: Name
    prompt: str
    out: Name | None
    device: str
    threads: int | None


@dataclass(frozen=True)
class Maps:
    """What one text's tokens read: weights float32 (layer, head, n, n), tokens as ids (n,) and bytes."""

    weights: np.ndarray
    ids: list[int]
    tokens: list[bytes]
    title: str  # of the run
    caption: str  # the model in a line
    config: dict[str, Any]

    @property
    def labels(self) -> list[str]:
        return [visible(token) for token in self.tokens]


def draw(config: dict[str, Any]) -> list[Path]:
    """Make the maps that the configuration asks for; returns the files. Raises ConfigError before it writes any."""
    options = MapsConfig(**check(MapsConfig, config, ""))
    set_up_cpu(options.threads)
    model, tokenizer, saved = restore(options.checkpoint, resolve_device(options.device))
    maps = look(model, tokenizer, saved, normalise_newlines(options.prompt))
    out = Path(options.out) if options.out else run_folder(saved.path) / "maps"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be made ({error.strerror})") from None
    write_atomic(out / "maps.npz", lambda file: save_arrays(file, maps))
    write_atomic(out / "maps.png", picture(maps).print_png)
    write_atomic(out / "maps.html", page(maps))
    return [out / "maps.html", out / "maps.png", out / "maps.npz"]


def look(model: GPT, tokenizer: Tokenizer, saved: Checkpoint, prompt: str) -> Maps:
    """The maps of a prompt, its newest block_size tokens where it is longer; of the model's own text without one."""
    ids = encode_prompt(tokenizer, prompt)
    if not prompt:
        if model.mask.lookahead:
            raise ConfigError(
                "prompt='': this mask reads the future, so the model writes no text itself; give one"
            )
        ids += [int(chosen[0]) for chosen in Generator(model).tokens([ids], OWN_TOKENS, seed=0)]
    whole = len(ids)
    ids = ids[-model.config.block_size :]
    n_layer, n_head, n = model.config.n_layer, model.config.n_head, len(ids)
    if n_layer * n_head * n * n > MAX_WEIGHTS:
        most = math.isqrt(MAX_WEIGHTS // (n_layer * n_head))
        raise ConfigError(
            f"prompt: {n} tokens make {n_layer} × {n_head} maps of {n}² weights, more than a page can hold; "
            f"give at most {most} tokens"
        )
    weights = weights_of(model, ids)
    kinds = [saved.config[section]["_target_"].rpartition(".")[2] for section in ("mask", "position")]
    scale = saved.config["attention"].get("scale")
    cut = f" · the last {len(ids)} of {whole} tokens" if len(ids) < whole else ""
    return Maps(
        weights,
        ids,
        [tokenizer.decode_bytes([i]) for i in ids],
        title(run_folder(saved.path)),
        f"step {saved.step} · mask {kinds[0]} · position {kinds[1]} · scale {scale}{cut}",
        saved.config,
    )


def weights_of(model: GPT, ids: list[int]) -> np.ndarray:
    """(layer, head, n, n) float32"""
    return attention_maps(model, torch.tensor([ids]))[:, 0].float().cpu().numpy()


def picture_of(
    model: GPT, tokenizer: Tokenizer, config: dict[str, Any]
) -> Callable[[list[int]], np.ndarray] | None:
    """Makes the picture (height, width, 4) uint8 of the maps over a text's first tokens, for trackers.

    None for a model whose layers form no weights.
    """
    if not all(isinstance(layer, MultiHeadAttention) for layer in attention_layers(model)):
        return None

    @freed()
    def draw_ids(ids: list[int]) -> np.ndarray:
        ids = ids[: min(FEW_TOKENS, model.config.block_size)]
        with inference(model):
            weights = weights_of(model, ids)
        tokens = [tokenizer.decode_bytes([i]) for i in ids]
        canvas = picture(Maps(weights, ids, tokens, "attention", "", config))
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())

    return draw_ids


def visible(token: bytes) -> str:
    """A token's text with white space as signs; what is no character or shows none by its number."""
    try:
        text = token.decode().translate(GLYPHS)
    except UnicodeDecodeError:
        return f"⟨{token.hex(' ').upper()}⟩"
    return "".join(c if c.isprintable() else f"⟨U+{ord(c):04X}⟩" for c in text)


def save_arrays(file: Any, maps: Maps) -> None:
    """weights; token_ids; tokens as shown; config, the checkpoint's, as JSON. Needs no pickle to load."""
    np.savez_compressed(
        file,
        weights=maps.weights,
        token_ids=np.array(maps.ids),
        tokens=np.array(maps.labels),
        config=np.array(json.dumps(maps.config)),
    )


# ---- the page ----


def page(maps: Maps) -> str:
    """One file that needs nothing else: maps.html with the tokens and every weight in it.

    Weights are rounded to 1/65535, but never to 0: on the page too, 0 is what was exactly 0.
    """
    rounded = np.maximum(np.rint(maps.weights * 65535), maps.weights > 0).astype("<u2")
    data = {
        "title": maps.title,
        "caption": maps.caption,
        "tokens": maps.labels,
        "n_layer": maps.weights.shape[0],
        "n_head": maps.weights.shape[1],
        "weights": base64.b64encode(zlib.compress(rounded.tobytes(), 9)).decode(),
    }
    # as JSON inside a script element, where only "<" could end it
    return PAGE.read_text(encoding="utf-8").replace("{{data}}", json.dumps(data).replace("<", "\\u003c"))


# ---- the picture ----


def picture(maps: Maps) -> Any:
    """A canvas with one heat map for each layer and head, all on one scale of colours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    n_layer, n_head, n, _ = maps.weights.shape
    panel = min(max(n * PITCH, 1.3), MAX_INCHES / max(n_layer, n_head))
    every = math.ceil(n * PITCH / panel)  # labels that do not fit are left out
    places = range(0, n, every)
    labels = drawable(maps.labels)
    labels = [labels[i] if every == 1 else f"{labels[i]} {i}" for i in places]
    letters = max(map(len, labels)) == 1  # these need not be turned
    large = max(1, panel / 2.5)  # headings grow with the picture

    # inches; matplotlib's automatic layout takes minutes over a hundred panels
    longest = max(map(len, labels))
    left = 0.3 * large + 0.065 * longest
    bottom = 0.3 * large + 0.065 * (2 if letters else longest)
    top, right, gap, line = 0.5 * large, 1.1 * large, 0.08 * large, 0.25 * large
    heading = drawable([f"{maps.title}   {maps.caption}"], longest=200)[0]
    width = max(left + n_head * (panel + gap) - gap + right, 0.065 * large * len(heading))
    height = top + n_layer * (panel + line) - line + bottom
    figure = Figure(figsize=(width, height), dpi=DPI)
    canvas = FigureCanvasAgg(figure)

    def place(x: float, y: float, w: float, h: float) -> Any:
        """Axes of w × h inches, their upper left corner x, y inches from that of the figure."""
        return figure.add_axes((x / width, 1 - (y + h) / height, w / width, h / height))

    norm = PowerNorm(0.5, vmin=0, vmax=1)  # the square root brings out what is faint
    for layer, head in np.ndindex(n_layer, n_head):
        axes = place(left + head * (panel + gap), top + layer * (panel + line), panel, panel)
        weights = np.ma.masked_equal(maps.weights[layer, head], 0)
        image = axes.imshow(weights, norm=norm, cmap="Blues", interpolation="nearest")
        axes.set_facecolor("#ececea")
        axes.set_title(f"layer {layer} · head {head}", fontsize=7 * large, color=INK, pad=3 * large)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.tick_params(length=0, pad=2)
        axes.spines[:].set_color("#d1d5db")
        style = {"fontsize": FONT_POINTS, "parse_math": False}
        if head == 0:
            axes.set_yticks(places, labels, **style)
        if layer == n_layer - 1:
            axes.set_xticks(places, labels, rotation=0 if letters else 90, **style)
    words = {"fontsize": 8 * large, "color": INK}
    figure.text(0.05 * large / width, 0.5, "token that reads", rotation=90, va="center", **words)
    figure.text(0.5, 0.05 * large / height, "token that is read", ha="center", **words)
    figure.text(0.3 * large / width, 1 - 0.05 * large / height, heading, va="top", parse_math=False, **words)
    bar = figure.colorbar(
        image,
        cax=place(
            left + n_head * (panel + gap) + 0.1 * large,
            top,
            0.15 * large,
            min(4 * large, height - top - bottom),
        ),
        ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1],
    )
    bar.set_label("weight; grey is exactly 0", **words)
    bar.ax.tick_params(labelsize=7 * large)
    bar.outline.set_visible(False)
    return canvas


def drawable(labels: list[str], longest: int = 12) -> list[str]:
    """The labels as the picture's font can write them: a character that it lacks by its number."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    short = [label if len(label) <= longest else label[: longest - 1] + "…" for label in labels]
    return ["".join(c if ord(c) in known else f"U+{ord(c):04X}" for c in label) for label in short]
