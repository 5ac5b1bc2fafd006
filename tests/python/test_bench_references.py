"""What the GPU benchmark holds lists of key blocks and native sparse attention to: the library's results in float32 on the CPU pass,
and a planted fault does not."""

import pytest
from bench_kit import gpu_block_sparse_rows, gpu_branches, gpu_nsa_reference, gpu_reference, heddle, torch

LENGTH, HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS, WINDOW = 768, 4, 2, 32, 16, 8, 48
LIMIT = 2e-5  # of a row's norm in float32
make = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=make)


@pytest.fixture(autouse=True)
def seeded():
    make.manual_seed(0)


def operands(batch=2):
    q, k, v = (draw(batch, LENGTH, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [q, k, v, *torch.sigmoid(draw(3, batch, LENGTH, HEADS))]


def chosen(x, stride=1):
    q, k = x[:2]
    return heddle.nsa.select_blocks(
        q[:, ::stride], heddle.nsa.pool_keys(k, BLOCK), BLOCKS, block_size=BLOCK, q_step=stride
    )


def called(x, lists=None, weight=None, **options):
    """(o,), or the gradients of sum(o * weight)."""
    x = [y if weight is None else y.clone().requires_grad_() for y in x]
    o = heddle.nsa.parallel_nsa(*x, lists, BLOCKS, BLOCK, WINDOW, **options)
    return (o,) if weight is None else torch.autograd.grad(o, x, weight)


def whole(x, preset):
    sharing = heddle.nsa.presets(HEADS // KV_HEADS)[preset] if preset else {}
    lists = chosen(x, sharing.get("query_stride", 1))
    return sharing, gpu_nsa_reference.Whole(x, lists, BLOCK, WINDOW, sharing)


def distances(expected, outputs):
    return [each.worst(output) for each, output in zip(expected, outputs, strict=True)]


PRESETS = pytest.mark.parametrize("preset", [None, "seed", "seed_4_3", "fast"])


@PRESETS
def test_native_sparse_attention_passes(preset):
    x = operands()
    weight = draw(*x[0].shape)
    # Of "fast" every anchor's rows lie in one block of the lists.
    sharing, reference = whole(x, preset) if preset != "fast" else fast(x)
    assert max(distances(reference.expected(), called(x, **sharing))) < LIMIT
    found = distances(reference.expected(weight), called(x, weight=weight, **sharing))
    assert len(found) == 6 and max(found) < LIMIT, found


def fast(x):
    sharing = {**heddle.nsa.presets(HEADS // KV_HEADS)["fast"], "query_stride": 4}
    return sharing, gpu_nsa_reference.Whole(x, chosen(x, 4), BLOCK, WINDOW, sharing)


@PRESETS
def test_a_dropped_block_does_not_pass(preset):
    x = operands()
    sharing, reference = whole(x, preset) if preset != "fast" else fast(x)
    dropped = chosen(x).clone()
    dropped[..., -1] = -1
    assert distances(reference.expected(), called(x, dropped, **sharing))[0] > 16 * LIMIT


@pytest.mark.parametrize("which", range(6), ids=["dq", "dk", "dv", "dg_cmp", "dg_slc", "dg_swa"])
def test_a_gradient_that_is_off_does_not_pass(which):
    """By 16 limits, in one row of those that are looked at."""
    x = operands()
    weight = draw(*x[0].shape)
    expected = whole(x, None)[1].expected(weight)
    outputs = list(called(x, weight=weight))
    assert distances(expected, outputs)[which] < LIMIT
    # Indices tell where the rows come from.
    numbers = torch.arange(outputs[which].numel()).reshape(outputs[which].shape)
    row = expected[which].part(numbers)[-1].flatten()
    outputs[which].view(-1)[row] *= 1 + 16 * LIMIT
    assert distances(expected, outputs)[which] > 15 * LIMIT


def test_a_branchs_contribution_to_a_gradient_that_is_missing_does_not_pass():
    x = operands()
    weight = draw(*x[0].shape)
    expected = whole(x, None)[1].expected(weight)
    for gate in (3, 4, 5):
        without = [*x]
        without[gate] = torch.zeros_like(x[gate])
        found = distances(expected, called(without, chosen(x), weight=weight))
        assert min(found[:3]) > 16 * LIMIT, (gate, found)


def test_lists_that_are_not_the_best_do_not_pass():
    x = operands()
    lists = chosen(x)
    choice = gpu_nsa_reference.Choice(*x[:2], BLOCK)
    assert choice.worst(lists) <= gpu_nsa_reference.CHOSEN_LIMIT
    b, t, h = next(spot for spot in choice.spots if spot[1] > LENGTH // 2)
    left_out = next(c for c in range(t // BLOCK) if c not in lists[b, t, h])
    for slot, block in (
        (BLOCKS - 1, left_out),
        (3, -1),
        (3, int(lists[b, t, h, 4])),
        (0, left_out),
        (3, LENGTH // BLOCK - 1),
    ):
        wrong = lists.clone()
        wrong[b, t, h, slot] = block
        assert not choice.worst(wrong) <= 10 * gpu_nsa_reference.CHOSEN_LIMIT, (slot, block)
        with pytest.raises(ValueError, match="not of the best blocks"):
            gpu_nsa_reference.Whole(x, wrong, BLOCK, WINDOW)


def branch(name, k, v, lists):
    pooled = [heddle.nsa.pool_keys(y, BLOCK) for y in (k, v)]
    return {
        "compressed": (*pooled, lambda b, h: gpu_branches.Pooled(*(y[b, :, h] for y in pooled), BLOCK, pooled=True)),
        "selected": (k, v, lambda b, h: gpu_branches.Listed(k[b, :, h], v[b, :, h], lists[b, :, h], BLOCK)),
        "window": (k, v, lambda b, h: gpu_branches.Window(k[b, :, h], v[b, :, h], WINDOW)),
        "dense": (k, v, lambda b, h: gpu_branches.Dense(k[b, :, h], v[b, :, h])),
    }[name]


CALLS = {
    "compressed": lambda q, k, v, lists: heddle.attention(
        q, k, v, causal="top_left", key_offset=BLOCK - 1, key_step=BLOCK
    ),
    "selected": lambda q, k, v, lists: heddle.sparse_attention(q, k, v, lists, block_size=BLOCK, causal="bottom_right"),
    "window": lambda q, k, v, lists: heddle.attention(q, k, v, causal="bottom_right", window=(WINDOW - 1, None)),
    "dense": lambda q, k, v, lists: heddle.attention(q, k, v, causal="bottom_right"),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_branch_passes_and_one_with_a_key_less_does_not(name, monkeypatch):
    q, k, v = operands()[:3]
    lists = chosen([q, k])
    k, v, make_branch = branch(name, k, v, lists)
    weight = draw(*q.shape)
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    o = CALLS[name](*x, lists)
    outputs = o.detach(), *torch.autograd.grad(o, x, weight)
    keys = torch.arange(k.shape[1]) if name == "compressed" else gpu_nsa_reference.sampled_keys(LENGTH, BLOCK, "cpu")

    def found():
        first = gpu_nsa_reference.first_of(LENGTH, BLOCK)
        of_rows = gpu_nsa_reference.of_branch(q, k, v, make_branch)
        return distances((*of_rows, *gpu_nsa_reference.of_branch(q, k, v, make_branch, weight, keys, first)), outputs)

    assert max(found()) < LIMIT, found()
    monkeypatch.setattr(gpu_branches, "CHUNK", 1 << 16)  # a few rows at a time
    assert max(found()) < LIMIT, found()
    right = gpu_branches.attend

    def without_a_key(q, k, v, keep):
        keep = keep.clone()
        keep[:, keep.shape[1] // 5] = False
        return right(q, k, v, keep)

    for module in (gpu_branches, gpu_nsa_reference):
        monkeypatch.setattr(module, "attend", without_a_key)
    assert min(found()) > 16 * LIMIT, found()


def test_dense_attentions_last_keys():
    q, k, v = operands()[:3]
    weight = draw(*q.shape)
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    o = heddle.attention(*x, causal="bottom_right")
    assert distances(gpu_nsa_reference.dense(q, k, v), (o.detach(),))[0] < LIMIT
    found = torch.autograd.grad(o, x, weight)
    assert max(distances(gpu_nsa_reference.dense(q, k, v, weight), found)) < LIMIT
    without = torch.autograd.grad(heddle.attention(*x, causal="bottom_right", window=(LENGTH // 2, None)), x, weight)
    assert min(distances(gpu_nsa_reference.dense(q, k, v, weight), without)) > 16 * LIMIT


@pytest.mark.parametrize("backward", [False, True])
def test_blocks_that_tiles_of_rows_share(backward, monkeypatch):
    monkeypatch.setattr(gpu_block_sparse_rows, "weight_of", lambda shape, dtype: weight)
    q, k, v = (draw(1, LENGTH, 2, SIZE) for _ in range(3))
    weight = draw(*q.shape)
    rows, block = gpu_block_sparse_rows.ROWS, 64
    lists = torch.rand(1, LENGTH // rows, 2, LENGTH // block, generator=make).topk(8, -1).indices.sort(-1).values.int()
    lists[:, :, -1, 0] = 0  # so that some tile has each block that is looked at
    lists[:, -1, -1] = torch.tensor([0, 1, 2, 3, 4, 6, 8, 11])

    def outputs(lists):
        x = [y.clone().requires_grad_(backward) for y in (q, k, v)]
        o = (
            heddle.attention(*x)
            if lists is None
            else heddle.sparse_attention(*x, lists, block_size=block, query_rows=rows)
        )
        return torch.autograd.grad(o, x, weight) if backward else (o,)

    for named in (lists, None):
        expected = gpu_block_sparse_rows.expected((q, k, v), named, block, backward)
        assert len(expected) == (3 if backward else 1)
        assert max(distances(expected, outputs(named))) < LIMIT
    dropped = lists.clone()
    dropped[..., 3] = -1
    expected = gpu_block_sparse_rows.expected((q, k, v), lists, block, backward)
    assert min(distances(expected, outputs(dropped))) > 16 * LIMIT


def test_a_row_of_zeros_must_be_zeros():
    expected = gpu_reference.Expected(lambda x: x, torch.zeros(2, 3))
    assert expected.worst(torch.zeros(2, 3)) == 0
    for bad in (1e-9, float("nan")):
        assert not expected.worst(torch.tensor([[0.0, 0, 0], [0, 0, bad]])) <= 1


def test_a_step_of_decoding():
    batch = 2
    q, k, v = draw(batch, 1, HEADS, SIZE), draw(batch, LENGTH, KV_HEADS, SIZE), draw(batch, LENGTH, KV_HEADS, SIZE)
    gates = torch.sigmoid(draw(3, batch, 1, HEADS))
    cache = heddle.nsa.Cache(batch, LENGTH, KV_HEADS, SIZE, block=BLOCK)
    cache.append(k[:, :-1], v[:, :-1])
    (expected,) = gpu_nsa_reference.decoded(q, k, v, gates, BLOCK, BLOCKS, WINDOW)
    for blocks, right in ((BLOCKS, True), (BLOCKS - 1, False)):
        cache.lengths.fill_(LENGTH - 1)
        o = heddle.nsa.nsa_with_cache(q, k[:, -1:], v[:, -1:], cache, *gates, blocks, BLOCK, WINDOW)
        assert (expected.worst(o) < LIMIT) is right, expected.worst(o)
