"""The law above all others: with a cache, without one, alone, in a batch, in pieces, past the context: same numbers.

Each draw is a whole model from the product of

    norm 2 × mlp 4 × n-grams 3 × bias 2 × tied embeddings 2 × layers 2 × (query heads, key heads) 8 × head width 3
    × qk-norm 2 × mask 9 × position 5 × (mha: backend 3 × scale 4, or linear: chunk 3)

which is 6,220,800 models, each with a batch of one to three prompts, mostly of unequal lengths, cut into pieces, and
a context that generation runs past. About half keep their caches by channels, as long ones do. A model is drawn though
it be illegal, and is then to be refused by the name of what is wrong. A legal one is built as a configuration is, in
float64, and compared to 1e-10 with a plain model of the same weights, which reads one row at a time, all of it, by the
reference kernel or by the sum that linear attention stands for.

600 draws are made, always the same. MINILM_DRAWS=5000 makes so many others. A failure names its number: check(number).
"""

import itertools
import math
import os
import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from minilm.attention import cache, linear
from minilm.attention.frame import Frame
from minilm.attention.kernels import Reference
from minilm.attention.layer import MultiHeadAttention
from minilm.build import build_model
from minilm.decoding import CompiledStep
from minilm.errors import ConfigError
from minilm.generation import Generator
from minilm.sampling import Sampler

DRAWS = int(os.environ.get("MINILM_DRAWS", 600))
SIZE, VOCAB, NEW = 8, 13, 7  # the context, the vocabulary, tokens to generate

BLOCK = {
    "norm": ["rmsnorm", "layernorm"],
    "mlp": ["gelu", "relu2", "swiglu", "none"],
    "ngrams": [[], [2], [3, 2]],
    "bias": [False, True],
    "tie_embeddings": [False, True],
    "n_layer": [1, 2],
    "heads": [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)],
    "head_dim": [2, 3, 4],
    "qk_norm": [False, True],
}
MASKS = [
    {"_target_": "Causal"},
    {"_target_": "Full"},
    *({"_target_": "SlidingWindow", "window": w} for w in (1, 2, 3, SIZE, SIZE + 3)),
    *({"_target_": "Prefix", "length": p} for p in (2, 4)),
]
POSITIONS = ["NoPosition", "Sinusoidal", "Learned", "Rotary", "Alibi"]
KINDS = {
    "mha": {"backend": ["reference", "fused", "flex"], "scale": ["sqrt", "none", "inverse", 0.3]},
    "linear": {"chunk": [1, 3, 64]},
}
# What is used most, and has the most ways through it, comes most often; uncompiled flex is slow.
WEIGHTS = {"backend": [3, 6, 1], "mask": [5, 1, 1, 1, 1, 1, 1, 1, 1]}
TARGETS = {"mha": "layer.MultiHeadAttention", "linear": "linear.LinearAttention"}


def size_of(options):
    return math.prod(map(len, options.values()))


def test_the_size_of_the_space_is_as_stated():
    models = size_of(BLOCK) * len(MASKS) * len(POSITIONS) * sum(map(size_of, KINDS.values()))
    assert f"{models:,} models" in __doc__
    assert "600 draws" in __doc__


def configuration(rng):
    def choose(options):
        return {name: rng.choices(values, WEIGHTS.get(name))[0] for name, values in options.items()}

    kind = rng.choice(["mha", "mha", "linear"])
    block, own = choose(BLOCK), choose(KINDS[kind])
    (n_head, n_kv_head), head_dim, qk_norm = (block.pop(key) for key in ("heads", "head_dim", "qk_norm"))
    mask, position = rng.choices(MASKS, WEIGHTS["mask"])[0], rng.choice(POSITIONS)
    if kind == "linear" and rng.random() < 0.8:  # else most of them would be refused
        mask = rng.choice(MASKS[:2])
    shape = {
        "n_head": n_head,
        "n_kv_head": n_kv_head,
        "n_embd": n_head * head_dim,
        "block_size": SIZE,
        "ngram_rows": 40,
    }
    return {
        "model": block | shape,
        "attention": {"_target_": f"minilm.attention.{TARGETS[kind]}", "qk_norm": qk_norm, **own},
        "mask": mask | {"_target_": f"minilm.attention.masks.{mask['_target_']}"},
        "position": {"_target_": f"minilm.attention.positions.{position}"},
    }


def text(rng):
    """Prompts, and where to cut the padded batch of them."""
    lengths = [rng.randint(1, SIZE) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        lengths = lengths[:1] * len(lengths)  # alike: the batch needs no positions
    width = max(lengths)
    cuts = rng.sample(range(1, width), rng.randint(0, min(3, width - 1)))
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths], [0, *sorted(cuts), width]


def named(config, section):
    return config[section]["_target_"].rpartition(".")[2]


def refusal(config):
    """What a message must name where the model may not be built; None where it may."""
    model, mask, position = config["model"], named(config, "mask"), named(config, "position")
    if position == "Sinusoidal" and model["n_embd"] % 2:
        return r"model\.n_embd="
    if position == "Rotary" and (model["n_embd"] // model["n_head"]) % 2:
        return "head_dim=3"
    if named(config, "attention") == "LinearAttention":
        if mask not in ("Causal", "Full"):
            return f"mask={mask}"
        if position == "Alibi":
            return "position=alibi"
    return None


def lookahead(config):
    """How many tokens must come in a cache's first piece: none of them, some, or all that will ever be."""
    return {"Full": math.inf, "Prefix": config["mask"].get("length")}.get(named(config, "mask"), 0)


def rolls(config):
    """Whether generation goes on past the context by forgetting, rather than by starting again."""
    if named(config, "position") in ("Sinusoidal", "Learned"):
        return False
    forgets = named(config, "attention") == "LinearAttention" and named(config, "mask") == "Causal"
    return forgets or config["mask"].get("window", math.inf) <= SIZE


def build(config):
    torch.manual_seed(0)
    model = build_model(config, VOCAB).double().eval().requires_grad_(False)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight), alpha=0.3)  # far from uniform attention
    return model


class Plain:
    """The same weights, one row at a time, by the reference."""

    def __init__(self, model):
        self.model = model

    def __call__(self, row):
        """Logits (T, V) of a list of tokens."""
        layers = [block.attention for block in self.model.blocks]
        kept = [getattr(layer, "kernel", None) for layer in layers], linear.read_past, linear.read_all
        try:
            linear.read_past = linear.read_all = summed
            for layer in layers:
                if isinstance(layer, MultiHeadAttention):
                    layer.kernel = Reference()
            return self.model(torch.tensor([row]))[0]
        finally:
            kernels, linear.read_past, linear.read_all = kept
            for layer, kernel in zip(layers, kernels, strict=True):
                if kernel is not None:
                    layer.kernel = kernel


def summed(q, k, v, rotation, *causal):
    """Linear attention by its definition, the whole matrix at once."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    turned = linear.rotate(q, rotation) @ linear.rotate(k, rotation).mT
    plain = q @ k.mT
    if causal:
        turned, plain = turned.tril(), plain.tril()
    return turned @ v / plain.sum(dim=-1, keepdim=True)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def padded(prompts):
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    pos = torch.tensor([[-1] * (width - len(row)) + list(range(len(row))) for row in prompts])
    return tokens, None if len(set(map(len, prompts))) == 1 else pos


def check_prompts(config, model, prompts, cuts):
    """Batched and cached logits at every position, against each row alone."""
    plain, (tokens, pos) = Plain(model), padded(prompts)
    told = [plain(row) for row in prompts]

    def check(logits):
        for row, one in zip(logits, told, strict=True):
            close(row[len(row) - len(one) :], one)

    check(model(tokens) if pos is None else model(tokens, pos=pos))
    kept, pieces = model.new_cache(len(prompts)), []
    first = min(len(row) - (len(tokens[0]) - cuts[1]) for row in prompts)
    if max(first, 0) < lookahead(config):
        with pytest.raises(ConfigError, match="mask"):
            model(tokens[:, : cuts[1]], kept, pos=None if pos is None else pos[:, : cuts[1]])
        return
    for start, end in itertools.pairwise(cuts):
        pieces.append(model(tokens[:, start:end], kept, pos=None if pos is None else pos[:, start:end]))
    check(torch.cat(pieces, dim=1))


def generate(model, prompts, *, cache, step=None):
    """Greedy tokens (steps, B), the logits they came from (steps, B, V), and the refusal that ended it, if any."""
    logits, tokens, refused = [], [], None
    hook = model.register_forward_hook(lambda module, args, out: logits.append(out[:, -1]))

    def watched(latest, kept):
        logits.append((out := step(latest, kept))[:, -1])
        return out

    options = {"cache": cache, "step": watched if step else None}
    try:
        tokens.extend(Generator(model, Sampler(temperature=0), **options).tokens(prompts, NEW))
    except ConfigError as error:
        refused = str(error)
    finally:
        hook.remove()
    return tokens, logits, refused


def contexts(config, prompts, tokens):
    """What the model is to have read before each step: the rows of tokens; and which have just been cut down."""
    rows = [list(row) for row in prompts]
    for chosen in tokens:
        cut = [not rolls(config) and len(row) > SIZE for row in rows]
        rows = [row[-SIZE // 2 :] if short else row for row, short in zip(rows, cut, strict=True)]
        yield rows, cut
        rows = [[*row, int(token)] for row, token in zip(rows, chosen, strict=True)]


def check_generation(config, model, prompts):
    """Greedy generation past the context, with and without a cache, against each row alone."""
    tokens, logits, refused = generate(model, prompts, cache=False)
    assert refused is None
    assert len(tokens) == NEW
    read, plain, ahead = list(contexts(config, prompts, tokens)), Plain(model), lookahead(config)
    for b in range(len(prompts)):
        # between two cuts a row only grows, and is read once, in its last form, unless a mask sees what came later
        cuts = [step for step in range(1, NEW) if ahead or read[step][1][b]]
        for start, end in itertools.pairwise([0, *cuts, NEW]):
            told = plain(read[end - 1][0][b])
            for step in range(start, end):
                one = told[len(read[step][0][b]) - 1]
                close(logits[step][b], one)
                assert tokens[step][b] == one.float().argmax()

    for step in (None, CompiledStep(model, False)):  # what is compiled of a step, without the compiler
        check_cached(config, model, prompts, step, (read, tokens, logits))


def check_cached(config, model, prompts, step, uncached):
    """Generation with a cache, against that without."""
    (read, tokens, logits), ahead = uncached, lookahead(config)
    cached, cached_logits, refused = generate(model, prompts, cache=True, step=step)
    anew = [step for step, (_, cut) in enumerate(read) if step == 0 or any(cut)]
    stop = next((step for step in anew if min(map(len, read[step][0])) < ahead), None)
    assert (refused is None) == (stop is None)
    assert refused is None or "mask" in refused
    assert len(cached) == (NEW if stop is None else stop)
    for ours, plainly in zip(cached, tokens, strict=False):
        assert torch.equal(ours, plainly)
    for ours, plainly in zip(cached_logits, logits, strict=False):
        close(ours, plainly)


seen: Counter = Counter()


def check(number):
    """Build and compare draw `number`."""
    rng = random.Random(number)
    config, (prompts, cuts) = configuration(rng), text(rng)
    note(f"{config}\nprompts {prompts}, cut at {cuts}")
    if wrong := refusal(config):
        seen["refused"] += 1
        with pytest.raises(ConfigError, match=wrong):
            build(config)
        return
    parts = {named(config, section): 1 for section in ("attention", "mask", "position")}
    seen.update({"legal": 1, str(config): 1, **parts})
    model = build(config)
    assert model.rolls == rolls(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "LONG", rng.choice([1, cache.LONG]))  # from that length on they lie by channels
        check_prompts(config, model, prompts, cuts)
        check_generation(config, model, prompts)


@given(number=st.integers(0, 2**24 - 1))  # a range in which hypothesis draws evenly
@settings(
    max_examples=DRAWS,
    derandomize="MINILM_DRAWS" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_cached_uncached_and_plain_agree(number):
    check(number)


def test_the_draws_reached_every_corner():
    """Runs after the draws: most were legal, and none of the choices went without."""
    if not seen:
        pytest.skip("nothing was drawn")
    assert seen["legal"] > DRAWS / 2
    assert seen["refused"] > DRAWS / 20
    assert sum(name.startswith("{") for name in seen) > 0.95 * seen["legal"]  # hardly a model twice
    for name in (
        "Causal",
        "Full",
        "SlidingWindow",
        "Prefix",
        *POSITIONS,
        "MultiHeadAttention",
        "LinearAttention",
    ):
        assert seen[name] >= DRAWS / 30, name


def test_frames_are_all_that_a_row_needs():
    """A check of the checker: a wrong position of one token is seen."""
    config = {
        "model": {"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 8, "block_size": SIZE},
        "attention": {"_target_": "minilm.attention.layer.MultiHeadAttention"},
        "mask": {"_target_": "minilm.attention.masks.Causal"},
        "position": {"_target_": "minilm.attention.positions.Rotary"},
    }
    model, row = build(config), [1, 2, 3, 4, 5]
    off = model(torch.tensor([row]), pos=torch.tensor([[0, 1, 2, 3, 5]]))[0]
    told = Plain(model)(row)
    close(off[:4], told[:4])
    assert (off[4] - told[4]).abs().max() > 1e-3
    assert Frame.of(torch.tensor([row])).aligned
