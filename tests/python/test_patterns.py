"""Patterns of sparse attention: lists against the mask pair by pair, attention through them against SDPA under the mask, the grammar."""

import itertools
import pickle
import re

import heddle
import numpy as np
import pytest
import torch
from heddle import patterns
from heddle.patterns import (
    a_shape,
    attention,
    by_head,
    columns,
    diagonals,
    dilated,
    global_tokens,
    local,
    pack_masks,
    parse,
    random,
    rows,
    sink,
    strided,
    vertical_slash,
)
from kit import plain

H = 3

#: expression: what it says of positions p and j, arrays that broadcast. Of random nothing is known but what is tested below.
MEANINGS = {
    "local(5)": lambda p, j: abs(p - j) <= 5,
    "local(0, 9)": lambda p, j: (j >= p) & (j <= p + 9),
    "local(100)": lambda p, j: abs(p - j) <= 100,
    "strided(3)": lambda p, j: (p - j) % 3 == 0,
    "strided(50)": lambda p, j: (p - j) % 50 == 0,
    "strided(97)": lambda p, j: (p - j) % 97 == 0,
    "dilated(3, 7)": lambda p, j: ((p - j) % 7 == 0) & (abs(p - j) <= 21),
    "dilated(2, 90)": lambda p, j: ((p - j) % 90 == 0) & (abs(p - j) <= 180),
    "sink(0)": lambda p, j: j < 0 * p,
    "sink(5)": lambda p, j: j < 5 + 0 * p,
    "sink(64)": lambda p, j: j < 64 + 0 * p,
    "columns(0, 77, 133)": lambda p, j: np.isin(j, [0, 77, 133]) & (p >= 0),
    "rows(3, 100)": lambda p, j: np.isin(p, [3, 100]) & (j >= 0),
    "diagonals(-5, 0, 3, 77)": lambda p, j: np.isin(p - j, [-5, 0, 3, 77]),
    "local(20) | strided(13) & sink(90) | rows(7)": lambda p, j: (
        (abs(p - j) <= 20) | ((p - j) % 13 == 0) & (j < 90) | (p == 7)
    ),
    "(local(90) | columns(5)) & strided(2)": lambda p, j: ((abs(p - j) <= 90) | (j == 5)) & ((p - j) % 2 == 0),
    "random(2)": None,
    "random(1, size=10, seed=3)": None,
    "random(3, size=48) & local(60)": None,
    "diagonals(-100, 40) | random(1, size=16)": None,
}
LENGTHS = [(1, 1), (70, 70), (129, 129), (33, 150)]
TILES = [(16, 1), (16, 64), (32, 100), (64, 64), (128, 16)]


def bits_of(lists):
    """bool [M, query_rows, block_size]."""
    words = lists["masks"]
    places = np.arange(lists["block_size"])
    return (words[..., places // 32] >> (places % 32) & 1).astype(bool)


def met_by_lists(lists, shape, batch=0):
    """bool [L, rows, keys] of the arguments of a call, of one sequence that is not packed."""
    q_rows, size, (of_rows, of_keys) = lists["query_rows"], lists["block_size"], shape
    heads = lists["offsets"].shape[1] if "offsets" in lists else lists["blocks"].shape[2]
    number = -(-of_rows // q_rows)
    out = np.zeros((heads, number * q_rows, -(-of_keys // size) * size), bool)
    tiles = bits_of(lists) if "masks" in lists else None
    for h, n in itertools.product(range(heads), range(number)):
        if "offsets" in lists:
            which = slice(*lists["offsets"][batch, h, n : n + 2])
            blocks, ids = lists["blocks"][which], lists["mask_ids"][which] if tiles is not None else None
        else:
            which = batch, n, h
            blocks, ids = lists["blocks"][which], lists["mask_ids"][which] if tiles is not None else None
        listed = blocks[blocks >= 0]
        assert (np.diff(listed) > 0).all() and (blocks[len(listed) :] == -1).all()
        for entry, block in enumerate(listed):
            tile = True if ids is None or ids[entry] == -1 else tiles[ids[entry]]
            out[h, n * q_rows : (n + 1) * q_rows, block * size : (block + 1) * size] = tile
    return out[:, :of_rows, :of_keys]


def positions(shape):
    return np.arange(shape[0])[:, None] + shape[1] - shape[0], np.arange(shape[1])


@pytest.mark.parametrize("expression", MEANINGS)
def test_lists_say_what_the_mask_says(expression):
    pattern = parse(expression)
    for shape, causal in itertools.product(LENGTHS, (False, True)):
        mask = pattern.mask(shape, heads=H, causal=causal)
        p, j = positions(shape)
        there = (j <= p) if causal else np.ones(shape, bool)
        if MEANINGS[expression] is not None:
            assert np.array_equal(mask, np.broadcast_to(MEANINGS[expression](p, j) & there, mask.shape))
        for (size, q_rows), offsets in itertools.product(TILES, (False, True)):
            sizes = dict(heads=H, causal=causal, block_size=size, query_rows=q_rows)
            lists = pattern.lists(shape, offsets=offsets, **sizes)
            assert ("offsets" in lists) == offsets and lists["causal"] == ("bottom_right" if causal else "none")
            found = met_by_lists(lists, shape) & there
            assert np.array_equal(np.broadcast_to(found, mask.shape), mask)
            if "masks" in lists:  # each another, and each used
                assert len(np.unique(lists["masks"], axis=0)) == len(lists["masks"])
                assert set(lists["mask_ids"].ravel()) - {-1} == set(range(len(lists["masks"])))
            # As few tiles as can be.
            kept = pattern.kept(shape, **sizes)
            wide = np.zeros((len(found), -(-shape[0] // q_rows) * q_rows, -(-shape[1] // size) * size), bool)
            padded, whole = wide.copy(), wide.copy()
            padded[:, : shape[0], : shape[1]] = found
            whole[:, : shape[0], : shape[1]] = found | ~there

            def tiled(x, q_rows=q_rows, size=size):
                return x.reshape(len(x), -1, q_rows, x.shape[2] // size, size)

            whole[:, shape[0] :], whole[:, :, shape[1] :] = True, True
            needed = tiled(padded).any((2, 4))
            assert kept.whole_tiles + kept.partial_tiles == needed.sum()
            assert kept.whole_tiles == (needed & tiled(whole).all((2, 4))).sum()
            assert kept.pairs == pytest.approx(found.sum() / (len(found) * there.sum()))
            assert kept.tiles == pytest.approx(needed.sum() / max(kept.all_tiles, 1))


def test_packed_sequences_have_their_own_lists():
    lengths = [70, 0, 3, 129]
    starts = np.cumsum([0, *lengths]).tolist()
    for expression, q_rows, causal in itertools.product(
        ("local(9) | sink(3)", "random(1, size=16)", "strided(40)"), (1, 16), (False, True)
    ):
        options = dict(heads=H, causal=causal, block_size=16, query_rows=q_rows)
        lists = parse(expression).lists(cu_seqlens=starts, offsets=False, **options)
        total = sum(lengths)
        number = total if q_rows == 1 else total // q_rows + len(lengths)
        assert lists["blocks"].shape[0] == number and lists["cu_seqlens_q"].tolist() == starts
        assert lists["max_seqlen_q"] == lists["max_seqlen_k"] == 129
        csr = parse(expression).lists(cu_seqlens=starts, offsets=True, **options)
        assert csr["offsets"].shape == (lists["blocks"].shape[1], number + 1)
        seen = np.zeros(number, bool)
        for b, length in enumerate(lengths):
            first = starts[b] if q_rows == 1 else starts[b] // q_rows + b
            many = -(-length // q_rows)
            own = {**lists, "blocks": lists["blocks"][None, first : first + many]}
            if "masks" in lists:
                own["mask_ids"] = lists["mask_ids"][None, first : first + many]
            seen[first : first + many] = True
            there = np.tri(length, dtype=bool) | (not causal)
            mask = parse(expression).mask(length, heads=H, causal=causal)
            assert np.array_equal(np.broadcast_to(met_by_lists(own, (length, length)) & there, mask.shape), mask)
            # The same lists one behind the other.
            begins = csr["offsets"][:, first : first + many + 1]
            for h, n in itertools.product(range(len(begins)), range(many)):
                blocks = lists["blocks"][first + n, h]
                assert np.array_equal(csr["blocks"][begins[h, n] : begins[h, n + 1]], blocks[blocks >= 0])
        assert (lists["blocks"][~seen] == -1).all()


def test_random_blocks():
    """n of them, each once, other ones for other heads, rows and seeds, and the same whatever else there is."""
    size, blocks = 16, 40
    drawn = random(3, size=size).mask(size * blocks, heads=4)[:, ::size, ::size]
    mask = random(3, size=size).mask(size * blocks, heads=4)
    assert np.array_equal(mask, drawn.repeat(size, 1).repeat(size, 2))
    assert (drawn.sum(2) == 3).all()
    assert all((drawn[0] != drawn[h]).any(1).mean() > 0.8 for h in (1, 2, 3))
    assert len(np.unique(drawn[0], axis=0)) > 30
    assert (random(3, size=size, seed=1).mask(size * blocks, heads=1)[0] != mask[0]).any()
    # Every block may be drawn, about as often as any other.
    often = random(1, size=1).mask(64, heads=200).sum((0, 1))
    assert often.min() > 140 and often.max() < 270  # 200 on average, of 12800 draws
    # With causality from the blocks up to its own, and as in a shorter sequence.
    causal = random(3, size=size).mask(size * blocks, heads=2, causal=True)
    at = causal[:, size - 1 :: size, ::size]
    assert np.array_equal(at.sum(2), np.minimum(np.arange(blocks) + 1, 3)[None].repeat(2, 0))
    shorter = random(3, size=size).mask(200, heads=2, causal=True)
    assert np.array_equal(causal[:, :200, :200], shorter)
    assert np.array_equal(random(3, size=size).mask((50, 200), heads=2, causal=True), shorter[:, 150:])
    assert random(100, size=size).mask(100, heads=1).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "expression", ["local(20) | strided(13) | sink(4)", "random(1, size=16) | diagonals(0)", "rows(3) | columns(0, 2)"]
)
@pytest.mark.parametrize("shape", [(100, 100), (37, 130)])
def test_attention_is_sdpa_under_the_mask(expression, causal, shape):
    make = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, n, h, 16, generator=make).requires_grad_()
        for n, h in ((shape[0], 4), (shape[1], 2), (shape[1], 2))
    )
    pattern = parse(expression)
    out = attention(q, k, v, pattern, causal=causal, block_size=16, query_rows=32)
    mask = torch.from_numpy(pattern.mask(shape, heads=4, causal=causal))
    assert bool(mask.any(-1).all())  # SDPA has no word for rows without a key
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)
    d_o = torch.randn(out.shape, generator=make)
    found, wanted = (torch.autograd.grad(x, (q, k, v), d_o.to(x.dtype)) for x in (out, exact))
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_attention_of_packed_rows_and_of_rows_without_a_key():
    make = torch.Generator().manual_seed(2)
    starts = [0, 40, 40, 111]
    q, k, v = (torch.randn(111, h, 16, generator=make) for h in (4, 2, 2))
    pattern = by_head(local(7), strided(5), sink(3) & local(30), columns(50))
    given = dict(causal=True, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32), query_rows=16, return_lse=True)
    out, lse = attention(q, k, v, pattern, **given)
    again, _ = attention(q, k, v, pattern, **{**given, "cu_seqlens_q": starts})
    assert torch.equal(out, again)
    for begin, end in zip(starts, starts[1:]):
        mask = torch.from_numpy(pattern.mask(end - begin, causal=True))[None]
        one = (x[begin:end][None].double() for x in (q, k, v))
        exact, exact_lse = plain(*one, mask=mask)
        torch.testing.assert_close(out[begin:end].double(), exact[0], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse[:, begin:end].double(), exact_lse[0], atol=2e-6, rtol=1e-5)
    assert bool((lse[3, 40:90] == -torch.inf).all()) and bool((out[40:90, 3] == 0).all())


def test_attention_of_other_arrays():
    make = np.random.default_rng(1)
    q, k, v = (make.standard_normal((2, 50, h, 16)).astype(np.float32) for h in (4, 2, 2))
    found = attention(q, k, v, "local(9) | sink(2)", causal=True, block_size=16)
    assert isinstance(found, np.ndarray)
    expected = attention(*map(torch.from_numpy, (q, k, v)), local(9) | sink(2), causal=True, block_size=16)
    assert np.array_equal(found, expected.numpy())


def test_lists_are_made_once():
    lists = [local(77).lists(500, causal=True, device="cpu") for _ in range(2)]
    assert lists[0]["blocks"].data_ptr() == lists[1]["blocks"].data_ptr()
    with torch.inference_mode():
        first = local(78).lists(500, causal=True, device="cpu")["blocks"]
    assert not first.is_inference()
    q = torch.randn(1, 100, 2, 16, requires_grad=True)
    with torch.inference_mode():
        attention(q, q, q, local(79))
    attention(q, q, q, local(79)).sum().backward()
    wide = local(77).lists(500, batch=4)
    assert wide["blocks"].shape[0] == wide["mask_ids"].shape[0] == 4
    csr = local(77).lists(500, batch=4, offsets=True)
    assert csr["offsets"].shape == (4, 1, 9)


def test_lists_of_many_lengths_lie_one_behind_the_other():
    """A row that meets all would make every list as long as its own."""
    assert "offsets" in (local(10) | rows(500)).lists(100_000)
    assert "offsets" not in local(10).lists(100_000)


def test_long_sequences_take_no_square():
    """[S/B, S/B] would be 2^32 entries here."""
    lists = (local(256) | sink(4) | random(2)).lists(1 << 22, heads=1, causal=True)
    assert lists["blocks"].shape == (1, 1 << 16, 1, 8) and len(lists["masks"]) < 4


def test_a_tile_pattern_that_repeats_has_a_handful_of_masks():
    lists = (local(128) | strided(32) | sink(4)).lists(8192, causal=True)
    assert len(lists["masks"]) <= 4
    assert len(strided(97).lists(8192)["masks"]) == 97


@pytest.mark.parametrize(
    "pattern, text",
    [
        (local(128) | strided(32) | sink(4), "local(128) | strided(32) | sink(4)"),
        (local(5, 5), "local(5)"),
        (local(5, 0) & strided(3) | sink(4), "local(5, 0) & strided(3) | sink(4)"),
        ((sink(4) | local(5)) & strided(3), "(sink(4) | local(5)) & strided(3)"),
        (sink(1) | (sink(2) | sink(3)), "sink(1) | sink(2) | sink(3)"),
        (columns(7, 3, 7), "columns(3, 7)"),
        (diagonals(4, -2), "diagonals(-2, 4)"),
        (dilated(4, 8), "dilated(4, 8)"),
        (random(3), "random(3)"),
        (random(3, seed=5), "random(3, seed=5)"),
        (random(3, 128, 5) & local(9), "random(3, size=128, seed=5) & local(9)"),
        (a_shape(4, 100), "sink(4) | local(100, 0)"),
        (vertical_slash([0, 9], [0, 64]), "columns(0, 9) | diagonals(0, 64)"),
        (global_tokens(0, 1), "rows(0, 1) | columns(0, 1)"),
    ],
)
def test_what_is_printed_is_the_pattern(pattern, text):
    assert repr(pattern) == str(pattern) == text and pattern.expressions == (text,)
    again = eval(text, vars(patterns))
    assert again == pattern == parse(text) == parse(f" ( {text.replace(' ', '')} ) ")
    assert hash(again) == hash(pattern) and pickle.loads(pickle.dumps(pattern)) == pattern
    assert pattern != (pattern | sink(9)) and pattern != text


def test_patterns_of_heads():
    pattern = by_head(local(3), sink(2) | local(1))
    assert repr(pattern) == "by_head(local(3), sink(2) | local(1))"
    assert eval(repr(pattern), vars(patterns)) == pattern and pickle.loads(pickle.dumps(pattern)) == pattern
    assert (pattern | strided(9)).expressions == ("local(3) | strided(9)", "sink(2) | local(1) | strided(9)")
    assert np.array_equal(pattern.mask(20), np.concatenate([local(3).mask(20), (sink(2) | local(1)).mask(20)]))
    assert pattern.lists(100, query_rows=16)["blocks"].shape[2] == 2
    for words, error, call in [
        ("patterns of 2 and of 3 heads cannot be joined", ValueError, lambda: pattern | by_head(*[sink(1)] * 3)),
        ("there are 2 patterns and 3 heads", ValueError, lambda: pattern.lists(100, heads=3)),
        ("by_head has by_head(local(3), sink(2) | local(1)): it must be a pattern for one", TypeError, lambda: by_head(pattern)),
    ]:  # fmt: skip
        with pytest.raises(error, match=r"^\[patterns\] " + re.escape(words)):
            call()


def test_packed_masks():
    tiles = np.random.default_rng(1).random((3, 5, 48)) > 0.5
    for made in (pack_masks(tiles), pack_masks(torch.from_numpy(tiles))):
        words = np.asarray(made)
        assert words.dtype == np.int32 and words.shape == (3, 5, 2)
        places = np.arange(48)
        assert np.array_equal(words[..., places // 32] >> (places % 32) & 1, tiles)
    assert pack_masks(torch.ones(1, 1, 32)).tolist() == [[[-1]]]


def test_a_call_of_tiles_and_masks_is_the_call_of_the_whole_mask():
    """By hand, without a pattern: what pack_masks() is for."""
    q = torch.randn(1, 32, 1, 8, generator=torch.Generator().manual_seed(3))
    mask = torch.rand(32, 32, generator=torch.Generator().manual_seed(4)) > 0.4
    tiles = mask.unflatten(1, (2, 16)).unflatten(0, (2, 16)).transpose(1, 2).flatten(0, 1)
    blocks = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32)[None, :, None]
    ids = torch.arange(4, dtype=torch.int32).view(1, 2, 1, 2)
    sizes = dict(block_size=16, query_rows=16)
    out = heddle.sparse_attention(q, q, q, blocks, masks=pack_masks(tiles), mask_ids=ids, **sizes)
    torch.testing.assert_close(out, heddle.attention(q, q, q, mask=mask))
