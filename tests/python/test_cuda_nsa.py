"""Native sparse attention on a GPU: parallel_nsa and its gradients against the naive functions in float64."""

import pytest
import torch
from cuda_nsa_kit import BLOCK, EVERY, WINDOW, Expected, both_dtypes, check_call, check_whole, operands
from heddle import _heddle
from heddle.nsa import parallel
from nsa_kit import MODES, nsa

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

SHARING = {
    **{name: dict(query_stride=4, **mode) for name, mode in MODES.items()},
    "C, stride 16": dict(query_stride=16, share="selection"),
    "C, no part of a block": dict(query_stride=3, share="selection"),
}


def check_lists(x, lists, count, window=WINDOW, **options):
    """The selected branch and the window over lists from outside."""
    q, k, v, _, g_slc, g_swa = x
    given = {"block_size": BLOCK, "window_size": window, **options}
    if window == 0:
        g_swa = g_swa.detach()
    check_call(
        [q, k, v, g_slc, g_swa],
        lambda q, k, v, g_slc, g_swa: nsa.parallel_nsa(q, k, v, None, g_slc, g_swa, lists, count, **given),
        lambda q, k, v, g_slc, g_swa: nsa.naive_nsa(q, k, v, g_slc, g_swa, lists, count, **given),
        ("q", "k", "v", "g_slc", "g_swa"),
    )


def random_lists(x, slots, seed=3):
    """Blocks that are there, are not, come twice, or lie behind the row."""
    batch, rows, heads = x[0].shape[0], x[0].shape[1], x[1].shape[2]
    make = torch.Generator().manual_seed(seed)
    lists = torch.randint(-2, x[1].shape[1] // BLOCK + 3, (batch, rows, heads, slots), generator=make)
    lists[:, 5] = 2**40
    lists[:, 6] = -(2**40)
    lists[:, 7] = 0
    return lists.cuda()


# ---------------------------------------------------------------- the whole


@both_dtypes
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_the_whole_is_the_naive_whole(group, window, dtype):
    check_whole(operands(583, batch=2, group=group, dtype=dtype), window=window)


@pytest.mark.parametrize("window", [0, WINDOW])
def test_heads_in_parts(monkeypatch, window):
    """As long calls without gradients go through them: the same, in less memory."""
    x = operands(2048, heads=4, group=16, size=64, v_size=64)
    found, most = [], []
    for of_branch in (1 << 40, 1 << 20):
        monkeypatch.setattr(parallel, "_BRANCH_BYTES", of_branch)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            found.append(nsa.parallel_nsa(*x, None, 16, BLOCK, window))
        most.append(torch.cuda.max_memory_allocated() - before)
    assert (found[0].float() - found[1].float()).norm() <= 1e-3 * found[0].float().norm()
    assert most[1] < 0.7 * most[0]


@pytest.mark.parametrize("rows", [1, 15, 63, 64, 65, 448])
def test_short_sequences(rows):
    check_whole(operands(rows, batch=2))


@pytest.mark.parametrize("size", [64, 128])
def test_head_sizes(size):
    check_whole(operands(300, size=size, group=16))


@both_dtypes
def test_rows_are_the_last_positions(dtype):
    check_whole(operands(100, keys=700, dtype=dtype))
    check_whole(operands(1, keys=700, batch=3, dtype=dtype))


@pytest.mark.parametrize("mode", ["plain", *SHARING])
def test_no_row_depends_on_a_later_position(mode):
    options = {"block_counts": EVERY, "block_size": BLOCK, "window_size": WINDOW, **SHARING.get(mode, {})}
    x = operands(448, gradients=False)
    before = nsa.parallel_nsa(*x, **options)
    for position in (1, 2, 63, 64, 130, x[0].shape[1] - 1):
        later = [y.clone() for y in x]
        for y in later:
            y[:, position:] = torch.randn_like(y[:, position:]).to(y)
        after = nsa.parallel_nsa(*later, **options)
        assert (before[:, :position] - after[:, :position]).abs().max() < 1e-3, position


@pytest.mark.parametrize("starts", [[0, 70, 333, 640], [0, 0, 640, 640], [0, 1, 64, 128, 640]], ids=str)
def test_packed(starts):
    longest = max(b - a for a, b in zip(starts, starts[1:]))
    cu = torch.tensor(starts, device="cuda")
    x = operands(starts[-1])
    check_whole(x, cu_seqlens=cu, max_seqlen=longest)
    given = dict(block_counts=EVERY, block_size=BLOCK, window_size=WINDOW, cu_seqlens=cu)
    with torch.no_grad():
        assert torch.equal(nsa.parallel_nsa(*x, **given), nsa.parallel_nsa(*x, max_seqlen=longest, **given))


def test_packed_with_fewer_rows_than_keys():
    cu = torch.tensor([0, 40, 40, 100]).cuda(), torch.tensor([0, 300, 320, 640]).cuda()
    check_whole(operands(100, keys=640), cu_seqlens=cu, max_seqlen=(60, 320))


def test_compression_of_the_paper():
    check_whole(operands(500), compression_block=32, compression_stride=16)


@pytest.mark.parametrize("forced", [(), ("current",), ("first", "previous", "current")], ids=str)
def test_forced_blocks(forced):
    check_whole(operands(300), forced=forced)


def test_without_a_compressed_branch():
    x = operands(400)
    zero = torch.zeros_like(x[3])
    given = dict(block_counts=4, block_size=BLOCK, window_size=WINDOW)
    with torch.no_grad():
        whole = nsa.parallel_nsa(x[0], x[1], x[2], zero, *x[4:], **given)
        alone = nsa.parallel_nsa(x[0], x[1], x[2], None, *x[4:], **given)
    # Scores come from other products, so a row may choose another block; few do.
    other = (whole.float() - alone.float()).abs().amax((2, 3)) > 0.05
    assert other.float().mean() < 0.05


# ---------------------------------------------------------------- sharing


@pytest.mark.parametrize("mode", SHARING)
def test_sharing(mode):
    check_whole(operands(300), **SHARING[mode])


@pytest.mark.parametrize("preset", ["seed", "seed_4_3", "fast"])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_presets(group, preset):
    sharing = nsa.presets(group)[preset]
    check_whole(operands(300, group=group), **sharing)
    cu = torch.tensor([0, 70, 75, 300], device="cuda")
    check_whole(operands(300, group=group), cu_seqlens=cu, max_seqlen=225, **sharing)


# ---------------------------------------------------------------- lists


@both_dtypes
@pytest.mark.parametrize("group", [1, 4, 16])
def test_lists_from_outside(group, dtype):
    x = operands(400, group=group, dtype=dtype)
    lists = random_lists(x, 5)
    for count in (5, 2, torch.randint(0, 6, (1, 400, 2), generator=torch.Generator().manual_seed(1)).cuda()):
        check_lists(x, lists, count)
    check_lists(x, lists, 5, window=0)
    check_lists(x, lists, 5, query_stride=4, share="selection")
    check_lists(x, lists, 5, query_stride=2, share="output", gate="anchor", share_branches=("slc", "swa"))


def scores_of(x):
    """p_slc in float64, [B, T, H, blocks]; -inf where nothing is seen."""
    q, k = (y.detach().double() for y in x[:2])
    batch, rows, heads, size = q.shape
    pooled = k[:, : k.shape[1] // BLOCK * BLOCK].unflatten(1, (-1, BLOCK)).mean(2)
    s = torch.einsum("bthgd,bnhd->bthgn", q.unflatten(2, (k.shape[2], -1)), pooled) * size**-0.5
    seen = (torch.arange(1, rows + 1, device="cuda") // BLOCK)[:, None] > torch.arange(pooled.shape[1], device="cuda")
    s = s.masked_fill(~seen[None, :, None, None], -torch.inf)
    p = torch.softmax(s, -1).nan_to_num(0).sum(3)
    return p.masked_fill(~seen[None, :, None], -torch.inf)


@both_dtypes
@pytest.mark.parametrize("group", [1, 4, 16])
def test_chosen_blocks_are_the_best(group, dtype):
    x = operands(2000, group=group, dtype=dtype, gradients=False)
    found = nsa.select_blocks(x[0], nsa.pool_keys(x[1], BLOCK), 8, block_size=BLOCK)
    scores = scores_of(x)
    blocks = scores.shape[-1]
    current = torch.arange(2000, device="cuda")[None, :, None, None] // BLOCK
    forced = ((found == 0) | (found == current) | (found == current - 1)) & (found >= 0)
    distinct = torch.where(current == 0, 1, torch.where(current == 1, 2, 3))
    assert torch.equal(forced.sum(-1, keepdim=True), distinct.expand(*found.shape[:-1], 1))
    assert torch.equal((found >= 0).sum(-1), (current[..., 0] + 1).clamp(max=8).expand(found.shape[:-1]))
    # Each that is chosen by its score has one that is, but for rounding, among the best.
    number = torch.arange(blocks, device="cuda")
    must = (number == 0) | (number == current) | (number == current - 1)
    rest = scores.masked_fill(must, -torch.inf)
    mine = rest.gather(-1, found.long().clamp(0, blocks - 1)).masked_fill((found < 0) | forced, 0).clamp(min=0)
    best = rest.topk(min(8, blocks), -1).values.clamp(min=0)
    best = best.masked_fill(torch.arange(best.shape[-1], device="cuda") >= 8 - distinct, 0)
    lost = (best.sum(-1) - mine.sum(-1)) / group
    # A score s q.k is off by what rounding a pooled key leaves, and so is ln of a probability.
    limit = 0.05 if dtype == torch.bfloat16 else 0.01
    assert lost.max() <= limit * 8, lost.max()
    assert lost.mean() <= limit * 0.1, lost.mean()


def test_the_whole_is_that_over_its_own_lists():
    x = operands(1500, gradients=False)
    q, k, v, *gates = x
    lists = nsa.select_blocks(q, nsa.pool_keys(k, BLOCK), 4, block_size=BLOCK)
    given = dict(block_counts=4, block_size=BLOCK, window_size=WINDOW)
    whole = nsa.parallel_nsa(q, k, v, None, *gates[1:], **given)
    assert torch.equal(whole, nsa.parallel_nsa(q, k, v, None, *gates[1:], lists, **given))
    expected = Expected(lambda *y: nsa.naive_nsa(*y, lists, 4, BLOCK, WINDOW), (q, k, v, *gates[1:]))
    expected.assert_accurate("o", whole, lambda o: o)
