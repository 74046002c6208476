"""Laws of the cache: it holds what the formula says, no more, and what it gives back is the past."""

import math
from functools import partial

import pytest
import torch

from minilm.attention.cache import Fixed, Growing, KVCache, Rolling
from minilm.attention.frame import Frame
from minilm.attention.layer import MultiHeadAttention
from minilm.attention.masks import Causal, Full, Prefix, SlidingWindow
from minilm.attention.positions import Alibi, Learned, NoPosition, Rotary
from minilm.errors import ConfigError
from minilm.model import GPT, GPTConfig

F64 = torch.float64


def make_model(*, position=None, mask=None, **shape):
    torch.manual_seed(0)
    shape = {
        "vocab_size": 11,
        "block_size": 24,
        "n_layer": 3,
        "n_head": 4,
        "n_kv_head": 2,
        "n_embd": 16,
        **shape,
    }
    config = GPTConfig(**shape)
    make = partial(MultiHeadAttention, config.n_embd, n_head=config.n_head, n_kv_head=config.n_kv_head)
    return GPT(config, position=position, attention=lambda: make(mask=mask or Causal()))


def make_layer(**options):
    torch.manual_seed(0)
    return MultiHeadAttention(8, n_head=2, **options).to(F64)


def allocated(cache):
    """Bytes of the memory behind a cache's tensors, whatever part of it they show."""
    series = [s for store in cache.stores for s in (store.keys, store.values)]
    return sum(
        {s.data.untyped_storage().data_ptr(): s.data.untyped_storage().nbytes() for s in series}.values()
    )


# Bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64], ids=str)
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 5])
def test_bytes_are_layers_heads_context_width_twice_bytes_batch(batch, n_kv_head, dtype):
    model = make_model(n_kv_head=n_kv_head).to(dtype)
    cache = model.new_cache(batch)
    formula = 3 * n_kv_head * 24 * 4 * 2 * torch.finfo(dtype).bits // 8 * batch
    assert cache.nbytes == allocated(cache) == formula
    with torch.no_grad():
        model(torch.zeros(batch, 24, dtype=torch.int64), cache)
    assert cache.nbytes == allocated(cache) == formula  # full, and nothing was added on the way


def test_a_cache_is_no_larger_than_asked_for_nor_than_the_context():
    model = make_model()
    assert [model.new_cache(1, size).capacity for size in (None, 7, 100)] == [24, 7, 24]
    assert model.new_cache(1, 12).nbytes * 2 == model.new_cache(1).nbytes


@pytest.mark.parametrize("window", [1, 5, 23])
def test_a_windows_cache_stops_growing_at_the_window(window):
    model = make_model(mask=SlidingWindow(window))
    cache = model.new_cache(2)
    assert cache.capacity is None
    formula = 3 * 2 * window * 4 * 2 * 4 * 2
    with torch.no_grad():
        for n in (7, 1, 1, 40, 1, 100):
            model(torch.zeros(2, n, dtype=torch.int64), cache)
            assert cache.nbytes == allocated(cache) == formula
            assert cache._kept.data.shape[-2] == window


def test_learned_positions_do_not_roll_and_a_window_saves_memory_all_the_same():
    model = make_model(mask=SlidingWindow(5), position=Learned(n_embd=16, block_size=24))
    cache = model.new_cache()
    assert cache.capacity == 24
    assert cache.nbytes == 3 * 2 * 5 * 4 * 2 * 4


# Series


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 2, 1], [2, 5], [9], [7, 1]], ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 8, 20])
def test_a_ring_gives_what_the_new_tokens_may_need_once_each(window, pieces):
    ring, line = Rolling(torch.zeros(1, 0, 2), window), Growing(torch.zeros(1, 0, 2), 9)
    seen = 0
    for n in pieces:
        new = torch.arange(seen, seen + n).view(1, n, 1).expand(1, n, 2).float()
        # the first of the n needs window − 1 before it
        needed = range(max(0, seen + 1 - window), seen + n)
        given = sorted(ring.append(new)[0, :, 0].int().tolist())
        assert set(needed) <= set(given)
        assert len(given) == len(set(given)) <= window + n - (n == 1)
        assert line.append(new)[0, :, 0].int().tolist() == list(range(seen + n))
        seen += n


def test_a_cache_of_float32_takes_what_autocast_makes():
    for mask in (Causal(), SlidingWindow(3)):
        model, tokens = make_model(mask=mask), torch.arange(8)[None]
        cache = model.new_cache()
        with torch.no_grad():
            plain = model(tokens)
            with torch.autocast("cpu", torch.bfloat16):
                pieces = [model(piece, cache) for piece in tokens.split([3, 1, 4], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1).float(), plain, rtol=0, atol=2e-2)


# Pieces


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(1), SlidingWindow(4), Prefix(3)], ids=str)
@pytest.mark.parametrize(
    "position", [NoPosition(), Rotary(head_dim=4), Alibi(n_head=2)], ids=lambda p: type(p).__name__
)
def test_a_layer_alone_reads_in_pieces_what_it_reads_at_once(position, mask):
    layer, x = make_layer(mask=mask, n_kv_head=1), torch.randn(2, 12, 8, dtype=F64)
    whole = layer(x, frame=Frame.of(x, position))
    for sizes in ([12], [3] + [1] * 9, [5, 4, 3], [4, 1, 1, 6], [11, 1]):
        cache = KVCache([layer.new_store(2, 12)], capacity=12, reach=layer.reach, lookahead=mask.lookahead)
        with torch.no_grad():
            pieces = [
                layer(piece, frame=cache.advance(piece, position), cache=cache.stores[0])
                for piece in x.split(sizes, dim=1)
            ]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-10)


def test_only_new_tokens_are_projected():
    layer, x = make_layer(), torch.randn(1, 6, 8, dtype=F64)
    cache = KVCache([layer.new_store(1, 6)], capacity=6, reach=None)
    widths = []
    for linear in (layer.query, layer.key, layer.value):
        linear.register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    with torch.no_grad():
        for piece in x.split([3, 1, 1, 1], dim=1):
            layer(piece, frame=cache.advance(piece), cache=cache.stores[0])
    assert widths == [3] * 3 + [1] * 9


def test_rows_of_different_lengths_go_on_from_their_own_ends():
    cache = KVCache([], capacity=10, reach=None)
    x = torch.zeros(2, 4)
    first = cache.advance(x[:, :2], pos=torch.tensor([[-1, -1], [0, 1]]))
    assert first.q_pos.tolist() == [[-1, -1], [0, 1]]
    cache.advance(x, pos=torch.tensor([[-1, 0, 1, 2], [2, 3, 4, 5]]))
    frame = cache.advance(x[:, :1])
    assert frame.q_pos.tolist() == [[3], [6]]
    assert frame.k_pos.tolist() == [[-1, -1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]]
    cache.advance(x[:, :1], pos=torch.tensor([[-1], [7]]))  # the first row rests
    assert cache.advance(x[:, :1]).q_pos.tolist() == [[4], [8]]


def test_the_first_piece_is_a_sequence_that_reads_itself():
    cache = KVCache([], capacity=9, reach=None)
    first, then = cache.advance(torch.zeros(1, 3)), cache.advance(torch.zeros(1, 2))
    assert first.aligned
    assert not then.aligned
    assert (then.q_pos.tolist(), then.k_pos.tolist()) == ([3, 4], [0, 1, 2, 3, 4])


# Refusals


def test_more_tokens_than_it_holds_are_refused_with_the_numbers():
    cache = KVCache([], capacity=5, reach=None)
    cache.advance(torch.zeros(1, 3))
    with pytest.raises(ConfigError, match=r"holds 5 tokens: 3 \+ 3 do not fit"):
        cache.advance(torch.zeros(1, 3))


def test_a_mask_that_reads_the_future_is_not_cached():
    cache = KVCache([], capacity=5, reach=None, lookahead=Full().lookahead)
    with pytest.raises(ConfigError, match=r"reads the future.*mask=causal, or cache=false"):
        cache.advance(torch.zeros(1, 3))
    assert Full().lookahead == math.inf


def test_a_prefix_comes_in_one_piece_or_is_refused():
    with pytest.raises(ConfigError, match=r"mask=prefix .* first 4 tokens .* holds 3: .*at least 4 tokens"):
        KVCache([], capacity=9, reach=None, lookahead=4).advance(torch.zeros(1, 3))
    pos = torch.tensor([[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]])
    with pytest.raises(ConfigError, match=r"holds 3"):  # the shortest row counts
        KVCache([], capacity=9, reach=None, lookahead=4).advance(torch.zeros(2, 5), pos=pos)
    KVCache([], capacity=9, reach=None, lookahead=4).advance(torch.zeros(1, 4))


def test_rows_that_differ_must_say_so_at_once():
    cache = KVCache([], capacity=9, reach=None)
    cache.advance(torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="first piece"):
        cache.advance(torch.zeros(2, 1), pos=torch.tensor([[3], [-1]]))


# A fixed memory


def test_a_fixed_store_holds_the_contexts_keys_and_values():
    layer = make_layer(mask=Full(), context_dim=6, n_kv_head=1)
    store, context = Fixed(), torch.randn(3, 5, 6, dtype=F64)
    assert store.nbytes == 0
    for x in torch.randn(4, 3, 1, 8, dtype=F64):
        kept = layer(x, context=context, cache=store)
        assert torch.equal(kept, layer(x, context=context))
    assert store.nbytes == 2 * 3 * 1 * 5 * 4 * 8
