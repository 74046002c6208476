"""Embeddings: what a token is before attention, worked out in plain Python."""

import itertools
import re

import pytest
import torch
from torch import nn

from minilm.embedding import NGramEmbedding, TokenEmbedding
from minilm.errors import ConfigError
from minilm.model import GPT, GPTConfig

V, C = 5, 4
TEXT = [3, 1, 4, 1, 0, 2, 1, 4, 1, 0]


def ngrams(**options):
    torch.manual_seed(0)
    embedding = NGramEmbedding(V, C, **{"orders": [2, 3]} | options)
    for parameter in embedding.parameters():
        nn.init.normal_(parameter)
    return embedding


def embedded(embedding, text, past=()):
    """Vectors (T, C) of a text, read behind `past`."""
    before = [-1] * embedding.past + list(past)
    return embedding(torch.tensor([before[len(before) - embedding.past :] + list(text)]))[0]


def test_a_token_has_its_vector():
    embedding = TokenEmbedding(V, C)
    assert torch.equal(embedded(embedding, TEXT), embedding.weight[TEXT])


def test_each_history_adds_a_vector_of_its_own():
    embedding = ngrams(rows=1000)  # room for all: 6² and 6³ histories
    for i, vector in enumerate(embedded(embedding, TEXT)):
        expected = embedding.weight[TEXT[i]].clone()
        for order, table in zip(embedding.orders, embedding.tables, strict=True):
            history = [0] * order + [token + 1 for token in TEXT[: i + 1]]  # 0 stands for no token
            expected += table[sum(6**k * token for k, token in enumerate(reversed(history[-order:])))]
        torch.testing.assert_close(vector, expected)


def test_every_history_has_one_row_and_the_rows_are_shared_out_evenly():
    embedding = ngrams(orders=[4], rows=100)
    histories = torch.tensor(list(itertools.product(range(V), repeat=4)))  # 625 for 100 rows
    rows = embedding._rows(histories, 4, 100).squeeze(1)
    assert torch.equal(rows, embedding._rows(histories, 4, 100).squeeze(1))
    counts = torch.bincount(rows, minlength=100)
    assert len(counts) == 100
    # a fair throw has mean 6.25 and standard deviation 2.5
    assert counts.max() <= 6.25 + 5 * 2.5
    assert (counts == 0).sum() <= 3


def test_numbers_beyond_64_bits_still_make_rows():
    embedding = NGramEmbedding(100_000, 2, orders=[2, 8], rows=64)
    tokens = torch.randint(100_000, (2, 500))
    rows = embedding._rows(tokens, 8, 64)
    assert rows.min() >= 0
    assert rows.max() < 64
    assert rows.unique().numel() == 64


def test_all_that_histories_add_starts_at_zero():
    embedding = NGramEmbedding(V, C, orders=[2, 3, 4])
    assert torch.equal(embedded(embedding, TEXT), embedding.weight[TEXT])
    model = GPT(
        GPTConfig(vocab_size=V, n_embd=C, n_head=1, n_layer=1, block_size=16, ngrams=(2, 3), ngram_rows=9)
    )
    assert [len(table) for table in model.embedding.tables] == [9, 9]
    assert all((table == 0).all() for table in model.embedding.tables)
    assert (model.embedding.weight != 0).any()


def test_dropout_takes_a_history_as_a_whole_and_only_while_training():
    embedding = ngrams(orders=[2], dropout=0.5)
    plain = embedded(embedding.eval(), TEXT * 20)
    added = plain - embedding.weight[TEXT * 20]
    shares = (embedded(embedding.train(), TEXT * 20) - embedding.weight[TEXT * 20]) / added
    kept = shares.mean(dim=1)
    torch.testing.assert_close(shares, kept[:, None].expand_as(shares), atol=1e-4, rtol=0)
    assert {round(share, 3) for share in kept.tolist()} == {0.0, 2.0}
    assert 60 <= (kept > 1).sum() <= 140  # of 200, by halves: 100 ± 5.7 standard deviations


@pytest.mark.parametrize(
    ("key", "value"),
    [("ngrams", (1,)), ("ngrams", (2, 2)), ("ngram_rows", 0), ("ngram_dropout", 1.0)],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(key, value):
    shown = str(list(value)) if isinstance(value, tuple) else str(value)
    with pytest.raises(ConfigError, match=re.escape(f"model.{key}={shown}: ")):
        GPTConfig(vocab_size=V, **{key: value})


@pytest.mark.parametrize("vocab_size", [63, 1023, 4095])
def test_every_token_of_a_history_counts_though_the_number_wraps_around(vocab_size):
    embedding = NGramEmbedding(vocab_size, 2, orders=[12], rows=1 << 20)
    tokens = torch.zeros(12, 12, dtype=torch.int64)
    tokens.fill_diagonal_(1)  # histories that differ in one token, each in another one
    assert embedding._rows(tokens, 12, 1 << 20).unique().numel() == 12


def test_behind_a_cache_and_in_rows_of_different_lengths_histories_are_the_same():
    config = GPTConfig(
        vocab_size=V, n_embd=C, n_head=1, n_layer=1, block_size=16, ngrams=(2, 4), ngram_rows=50
    )
    model = GPT(config).eval()
    for table in model.embedding.tables:
        nn.init.normal_(table)
    seen = []
    model.embedding.register_forward_hook(lambda module, args, out: seen.append(out))
    rows = [TEXT, TEXT[:3]]
    width = len(TEXT)
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    pos = torch.tensor([[-1] * (width - len(row)) + list(range(len(row))) for row in rows])
    cache = model.new_cache(2)
    for start, end in ((0, 2), (2, 8), (8, 9), (9, 10)):
        model(tokens[:, start:end], cache, pos=pos[:, start:end])
    found = torch.cat(seen, dim=1)
    for row, vectors in zip(rows, found, strict=True):
        torch.testing.assert_close(vectors[width - len(row) :], embedded(model.embedding, row))


def test_a_history_ends_where_the_document_began():
    embedding = ngrams(rows=1000)
    pos = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])
    tokens = torch.tensor([[-1] * embedding.past + TEXT])
    apart = torch.cat([embedded(embedding, TEXT[a:b]) for a, b in ((0, 4), (4, 7), (7, 10))])
    torch.testing.assert_close(embedding(tokens, pos)[0], apart)
