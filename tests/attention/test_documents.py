"""Documents in one row: each gives the numbers that it gives alone, whatever stands before it, cached or not."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from minilm.attention.diagnostics import attention_maps
from minilm.attention.frame import Frame, in_documents
from minilm.attention.kernels import BACKENDS, Fused, Reference
from minilm.attention.masks import Causal, Predicate, SlidingWindow
from minilm.build import build_model
from minilm.decoding import CompiledStep
from minilm.errors import ConfigError
from minilm.generation import Generator
from minilm.sampling import Sampler

END, VOCAB, SIZE = 12, 13, 16
ROWS = torch.tensor(
    [
        [1, 2, 3, END, 4, 5, 6, 7, END, 8, 9, 1, 2, END, END, 5],
        [END, 4, 4, 3, 2, 1, 0, END, 7, 1, END, 2, 3, 4, 5, 6],
    ]
)
POSITIONS = ["NoPosition", "Sinusoidal", "Learned", "Rotary", "Alibi"]
MASKS = {"Causal": {}, "SlidingWindow": {"window": 3}}


def make(position="Rotary", mask="Causal", backend="fused", ngrams=(2, 3), size=SIZE, document_mask=True):
    shape = {"n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 8, "block_size": size, "ngram_rows": 40}
    config = {
        "model": shape | {"ngrams": list(ngrams)},
        "attention": {"_target_": "minilm.attention.layer.MultiHeadAttention", "backend": backend},
        "mask": {"_target_": f"minilm.attention.masks.{mask}", **MASKS.get(mask, {})},
        "position": {"_target_": f"minilm.attention.positions.{position}"},
        "data": {"document_mask": document_mask},
    }
    torch.manual_seed(0)
    model = build_model(config, VOCAB, END).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def documents(row):
    """A row cut before each end token, which begins what follows it."""
    cuts = [0, *(i for i, token in enumerate(row.tolist()) if token == END and i), len(row)]
    return [row[a:b] for a, b in itertools.pairwise(cuts)]


def alone(model, row):
    """Logits of each document of a row by itself, from a model that knows nothing of documents."""
    end, model.end_token = model.end_token, None
    try:
        return torch.cat([model(document[None])[0] for document in documents(row)])
    finally:
        model.end_token = end


def test_where_tokens_stand():
    pos, doc = in_documents(ROWS[:1], END)
    assert pos.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0, 1]]
    assert doc.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 4, 4]]
    padded = torch.tensor([[-1, -1, 0, 1, 2]])
    pos, doc = in_documents(torch.tensor([[END, END, 3, END, 4]]), END, padded)  # an empty slot ends nothing
    assert (pos.tolist(), doc.tolist()) == ([[-1, -1, 0, 0, 1]], [[0, 0, 0, 1, 1]])
    last = torch.tensor([5]), torch.tensor([2])
    pos, doc = in_documents(torch.tensor([[3, END, 4]]), END, last=last)
    assert (pos.tolist(), doc.tolist()) == ([[6, 0, 1]], [[2, 3, 3]])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_document_among_others_is_as_alone(position, mask, backend):
    model = make(position, mask, backend).requires_grad_(False)
    together = model(ROWS)
    assert_close(together, torch.stack([alone(model, row) for row in ROWS]), rtol=0, atol=1e-10)
    model.end_token = None
    assert (model(ROWS) - together).abs().max() > 1e-3  # a check of the check: without the mask they are seen


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_so_are_the_gradients(position, backend):
    model = make(position, "Causal", backend)
    names, weights = zip(*model.named_parameters(), strict=True)
    target = torch.randn(2, SIZE, VOCAB, dtype=torch.float64)
    ours = torch.autograd.grad((model(ROWS) * target).sum(), weights)
    each = torch.stack([alone(model, row) for row in ROWS])
    theirs = torch.autograd.grad((each * target).sum(), weights)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert_close(a, b, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_cache_knows_its_documents(position, mask):
    model = make(position, mask).requires_grad_(False)
    whole = model(ROWS)
    for size in (1, 3, 5, SIZE):
        cache = model.new_cache(2)
        pieces = [model(piece, cache) for piece in ROWS.split(size, dim=1)]
        assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-10)


def test_rows_of_different_lengths_have_their_own():
    model = make().requires_grad_(False)
    short = ROWS[0, 2:13]
    tokens = torch.stack((torch.cat((torch.full((5,), END), short)), ROWS[1]))
    pos = torch.stack((torch.cat((torch.full((5,), -1), torch.arange(11))), torch.arange(SIZE)))
    told = alone(model, short), alone(model, ROWS[1])
    cache = model.new_cache(2)
    pieces = [
        model(t, cache, pos=p) for t, p in zip(tokens.split(3, dim=1), pos.split(3, dim=1), strict=True)
    ]
    for logits in (model(tokens, pos=pos), torch.cat(pieces, dim=1)):
        assert_close(logits[0, 5:], told[0], rtol=0, atol=1e-10)
        assert_close(logits[1], told[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", ["Learned", "Rotary"])
def test_generation_reads_the_last_document_of_a_prompt_and_no_other(position, mask):
    """Far past the context, where one cache rolls and the other begins anew; the end token is drawn, too."""
    model = make(position, mask, size=8).requires_grad_(False)
    model.head.weight[END] *= 2
    prompts = [[1, 2, END, 3, 4], [5, END, 6], [END, 6]]
    ways = ({"cache": False}, {"cache": True}, {"step": CompiledStep(model, False)})
    told = [
        torch.stack(list(Generator(model, Sampler(temperature=0), **way).tokens(prompts, 30))) for way in ways
    ]
    assert torch.equal(told[0], told[1])
    assert torch.equal(told[0], told[2])
    assert (told[0] == END).any()
    assert torch.equal(told[0][:6, 1], told[0][:6, 2])


def test_a_row_that_sees_nothing_is_zero_and_moves_nothing():
    """Each document's first token under a mask that hides the token itself; and an empty slot."""
    pos, doc = in_documents(
        ROWS, END, torch.where(torch.arange(SIZE) < 2, -1, torch.arange(SIZE)).expand(2, -1)
    )
    frame, strict = Frame(pos, q_doc=doc), Predicate(lambda q, k: k < q, causal=True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, SIZE, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    nothing = (pos <= 0)[:, None, :, None].expand_as(q)
    outputs = []
    for name, kernel in BACKENDS.items():
        with torch.set_grad_enabled(name != "flex"):  # which has no gradients on a CPU
            out = kernel()(q, k, v, frame, mask=strict, scale=0.5)
        assert (out[nothing] == 0).all()
        outputs.append(out)
        if name != "flex":
            gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
            assert all(gradient.isfinite().all() for gradient in gradients)
            assert (gradients[0][nothing] == 0).all()
    for out in outputs[1:]:
        assert_close(out, outputs[0], rtol=0, atol=1e-10)


def test_half_precision_agrees_with_the_reference():
    """The way of its own that training in bf16 takes on a CPU."""
    pos, doc = in_documents(ROWS, END)
    frame = Frame(pos, q_doc=doc)
    q, k, v = (torch.randn(2, 2, SIZE, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for mask in (Causal(), SlidingWindow(3)):
        ours, theirs = (kernel(q, k, v, frame, mask=mask, scale=0.3) for kernel in (Fused(), Reference()))
        assert_close(ours, theirs, rtol=0, atol=2e-2)


def test_maps_show_no_weight_between_documents():
    model = make()
    cache = model.new_cache(2)
    maps = attention_maps(model, ROWS)
    pieces = [attention_maps(model, piece, cache) for piece in ROWS.split(8, dim=1)]
    assert_close(pieces[1], maps[..., 8:, :], rtol=0, atol=1e-10)
    _, doc = in_documents(ROWS, END)
    apart = (doc[:, :, None] != doc[:, None, :])[None, :, None].expand_as(maps)
    assert (maps[apart] == 0).all()
    assert_close(maps.sum(dim=-1), torch.ones_like(maps[..., 0]))


def test_without_the_key_nothing_is_masked():
    assert make(document_mask=False).end_token is None


@pytest.mark.parametrize("mask", ["Full", "Prefix"])
def test_a_mask_that_reads_ahead_is_refused(mask):
    with pytest.raises(ConfigError, match=r"data\.document_mask=true: this mask reads ahead"):
        make(mask=mask)


def test_linear_attention_is_refused():
    config = {
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8},
        "attention": {"_target_": "minilm.attention.linear.LinearAttention"},
        "mask": {"_target_": "minilm.attention.masks.Causal"},
        "position": {"_target_": "minilm.attention.positions.NoPosition"},
        "data": {"document_mask": True},
    }
    with pytest.raises(ConfigError, match="attention=linear carries one state"):
        build_model(config, VOCAB, END)
