"""Native sparse attention's reference functions against a loop over rows and heads that is written from the formulae of
docs/nsa.md, their gradients against finite differences, what is shared under a query stride, and what is refused."""

import pytest
from nsa_kit import FORCED, MODES, Loop, check_whole, nsa, one_thread, operands, same, spans, torch  # noqa: F401  one_thread is a fixture

# ---------------------------------------------------------------- plain


@pytest.mark.parametrize("group", [1, 3, 4, 5])
@pytest.mark.parametrize("rows, window", [(41, 5), (64, 0), (7, 100)])
def test_the_whole_is_the_loop(group, rows, window):
    check_whole(operands(rows, batch=2, group=group, heads=1 if group == 5 else 2), 3, 8, window)


@pytest.mark.parametrize(
    "starts",
    [
        [0, 49, 128],
        [0, 15],
        [0, 1, 14, 37, 53],
        [0, 3, 5, 12],  # shorter than a block
        [0, 0, 9, 9, 9, 34, 35, 35],  # empty ones
    ],
    ids=str,
)
def test_packed_sequences_are_calls_of_their_own(starts):
    x = operands(starts[-1], group=2)
    check_whole(x, 3, 8, 4, (starts, starts))
    lists, o = nsa.naive_nsa_compression_varlen(*x[:4], 3, 8, cu_seqlens=torch.tensor(starts, dtype=torch.int32))
    for rows, _ in spans(starts, starts):
        alone = nsa.naive_nsa_compression(*(y[:, rows] for y in x[:4]), 3, 8)
        assert torch.equal(lists[:, rows], alone[0])
        assert torch.equal(o[:, rows], alone[1])


def test_rows_are_the_last_positions():
    x = operands(50)
    whole = nsa.naive_nsa_with_compression(*x, 3, 8, 6)
    q, k, v, *gates = x
    for first in (0, 1, 17, 49, 50):
        last = (q[:, first:], k, v, *(g[:, first:] for g in gates))
        check_whole(last, 3, 8, 6)
        same(nsa.naive_nsa_with_compression(*last, 3, 8, 6), whole[:, first:])
    check_whole((q[:, :12], k, v, *(g[:, :12] for g in gates)), 3, 8, 6, ([0, 5, 5, 12], [0, 11, 20, 50]))


def test_gates_scale_dtypes():
    x = operands(40)
    check_whole(x, 3, 8, 5, scale=0.3)
    expected = nsa.naive_nsa_with_compression(*x, 40, 8, 5)  # every block: nothing hangs on a rounding
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        found = nsa.naive_nsa_with_compression(*(y.to(dtype) for y in x), 40, 8, 5)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        wide = nsa.naive_nsa_with_compression(*(y.to(dtype).float() for y in x), 40, 8, 5)
        assert torch.equal(found, wide.to(dtype))  # rounded once
    mixed = nsa.naive_nsa_with_compression(
        *(y.to(torch.bfloat16) for y in x[:3]), *(g.float() for g in x[3:]), 40, 8, 5
    )
    assert mixed.dtype == torch.bfloat16
    x = [y.float() for y in x]
    with torch.autocast("cpu", torch.bfloat16):
        cast = nsa.naive_nsa_with_compression(*x, 40, 8, 5)
    assert torch.equal(cast, nsa.naive_nsa_with_compression(*x, 40, 8, 5))


def test_every_block_and_window_is_dense_attention():
    q, k, v, *gates = operands(37, group=3)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    lists = torch.arange(5).expand(1, 37, 2, 5)
    same(nsa.naive_nsa(q, k, v, *gates[1:], lists, block_size=8), gates[1][..., None] * dense)
    same(
        nsa.naive_nsa(q, k, v, *gates[1:], lists, 0, block_size=8, window_size=37), gates[2][..., None] * dense
    )  # no slot


def test_nothing_without_keys():
    q, k, v, *gates = operands(0)
    assert nsa.naive_nsa_with_compression(q, k, v, *gates, 3, 8).shape == (1, 0, 4, 3)
    q, k, v, *gates = operands(6, batch=0)
    assert nsa.naive_nsa_compression(q, k, v, gates[0], 3, 8)[0].shape == (0, 6, 2, 3)


# ---------------------------------------------------------------- lists


def test_lists_are_sets_and_what_is_no_block_is_not_in_them():
    q, k, v, _, g_slc, g_swa = operands(45, heads=3)
    make = torch.Generator().manual_seed(5)
    lists = torch.randint(-2, 9, (1, 45, 3, 6), generator=make)  # C = 6: duplicates, -1, -2, future blocks, C and above
    lists[0, 3] = 45
    lists[0, 4] = -1
    lists[0, 5] = torch.tensor([5, 4, 3, 2, 1, 0])
    lists[0, 6] = 0
    lists[0, 7, 0] = torch.tensor([2**62, -(2**63), 2**31, 2**60 + 1, 0, 0])
    counts = torch.randint(-1, 9, (1, 45, 3), generator=make)
    for given in (None, 0, 1, 4, 6, 100, counts, counts.int()):

        def list_of(t, h, given=given):
            n = 6 if given is None else given if isinstance(given, int) else max(0, int(given[0, t, h]))
            return [c for c in lists[0, t, h].tolist()[:n] if 0 <= c < 6]

        found = nsa.naive_nsa(q, k, v, g_slc, g_swa, lists, given, 8, 3)
        loop = Loop(q[0], k[0], v[0], 8, window=3)
        same(found[0], loop.result([None, g_slc[0], g_swa[0]], list_of=list_of))
    short = lists.clamp(-1, 50).int()
    assert torch.equal(nsa.naive_nsa(q, k, v, g_slc, g_swa, short, counts, 8, 3),
                       nsa.naive_nsa(q, k, v, g_slc, g_swa, short.long(), counts, 8, 3))  # fmt: skip


def test_an_empty_list_gives_zero_and_no_gradient():
    q, k, v, _, g_slc, _ = (x.requires_grad_() for x in operands(20))
    for lists in (torch.full((1, 20, 2, 3), -1), torch.zeros(1, 20, 2, 0, dtype=torch.int64)):
        o = nsa.naive_nsa(q, k, v, g_slc, None, lists, block_size=8)
        assert torch.equal(o, torch.zeros_like(o))
        with torch.autograd.set_detect_anomaly(True):
            gradients = torch.autograd.grad(o.sum(), (q, k, v, g_slc))
        for gradient in gradients:
            assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("forced", [FORCED, (), ("current",), ("first", "previous")])
@pytest.mark.parametrize("group", [1, 4])
def test_chosen_blocks(forced, group):
    q, k, v, g_cmp, *_ = operands(70, group=group)
    loop = Loop(q[0], k[0], v[0], 8, count=99, forced=forced)
    whole = {(t, h): loop.list(t, h) for t in range(70) for h in range(2)}
    for count in (1, 2, 3, 5, 20):
        lists, o = nsa.naive_nsa_compression(q, k, v, g_cmp, count, 8, forced=forced)
        assert lists.dtype == torch.int32
        assert lists.shape == (1, 70, 2, count)
        for (t, h), blocks in whole.items():
            expected = blocks[:count]
            assert lists[0, t, h].tolist() == expected + [-1] * (count - len(expected))
            if "current" in forced:
                assert len(expected) == min(count, t // 8 + 1)
    same(o[0], loop.result([g_cmp[0], None, None]))
    assert torch.equal(o[0, :7], torch.zeros_like(o[0, :7]))  # no block is complete yet


def test_lower_number_wins():
    q, _, v, g_cmp, *_ = operands(64)
    lists, _ = nsa.naive_nsa_compression(q, torch.zeros(1, 64, 2, 4).double(), v, g_cmp, 5, 8)
    assert lists[0, 63, 0].tolist() == [0, 6, 7, 1, 2]
    assert lists[0, 20, 1].tolist() == [0, 1, 2, -1, -1]
    lists, _ = nsa.naive_nsa_compression(q, torch.zeros(1, 64, 2, 4).double(), v, g_cmp, 2, 8)
    assert lists[0, 63, 0].tolist() == [0, 6]  # forced blocks are equal among each other, too
    many = torch.zeros(1, 2000, 2, 4).double()
    lists, _ = nsa.naive_nsa_compression(q[:, :1], many, many, g_cmp[:, :1], 300, 2, forced=())
    assert lists[0, 0, 0].tolist() == list(range(300))


def test_counts_by_row_and_head():
    x = operands(40, batch=2)
    counts = torch.randint(0, 5, (2, 40, 2), generator=torch.Generator().manual_seed(2))
    check_whole(x, counts, 8, 3)
    lists, _ = nsa.naive_nsa_compression(*x[:4], counts, 8)
    longer, _ = nsa.naive_nsa_compression(*x[:4], 4, 8)
    assert torch.equal(
        lists, longer.where(torch.arange(4) < counts[..., None], -1).int()
    )  # the first n are the list of n
    lists, _ = nsa.naive_nsa_compression(*x[:4], torch.zeros_like(counts), 8)
    assert lists.shape == (2, 40, 2, 0)
    check_whole(x, 0, 8, 3)


# ---------------------------------------------------------------- the paper's form


@pytest.mark.parametrize("block, stride", [(8, 4), (4, 2), (16, 4), (4, 4), (8, 8)])
def test_compressed_blocks_that_overlap(block, stride):
    x = operands(53, group=3)
    for count in (3, 20):
        lists, o = nsa.naive_nsa_compression(*x[:4], count, 8, compression_block=block, compression_stride=stride)
        loop = Loop(*(y[0] for y in x[:3]), 8, count=count, block=block, stride=stride)
        for t in range(53):
            for h in range(2):
                expected = loop.list(t, h)
                assert lists[0, t, h].tolist() == expected + [-1] * (count - len(expected))
        same(o[0], loop.result([x[3][0], None, None]))


def test_weights_of_equation_9():
    from heddle.nsa.branches import block_scores

    for i in range(3, 9):  # l = 32, d = 16, l' = 64: block 1 touches i = 3 to 7
        one = torch.zeros(1, 1, 15)
        one[..., i] = 1
        score = block_scores(one, 4, 64, 32, 16)[0, 0, 1]
        assert score == {3: 1, 4: 2, 5: 2, 6: 2, 7: 1, 8: 0}[i]


def test_learned_compression_is_called_and_has_gradients():
    x = operands(41)
    mean = lambda k, v: (k.mean(1), v.mean(1))
    expected = nsa.naive_nsa_with_compression(*x, 3, 8, 4)
    assert torch.equal(nsa.naive_nsa_with_compression(*x, 3, 8, 4, compress=mean), expected)

    weights = torch.full((8,), 1 / 8, dtype=torch.float64, requires_grad=True)
    place = torch.zeros(8, 1, 4, dtype=torch.float64, requires_grad=True)
    shapes = []

    def learned(k, v):
        shapes.append((k.shape, v.shape))
        return torch.einsum("nlhd,l->nhd", k + place, weights), torch.einsum("nlhd,l->nhd", v, weights)

    starts = torch.tensor([0, 17, 20, 41])
    found = nsa.naive_nsa_with_compression(*x, 3, 8, 4, cu_seqlens=starts, compress=learned)
    same(found, nsa.naive_nsa_with_compression(*x, 3, 8, 4, cu_seqlens=starts))
    assert shapes == [((2, 8, 2, 4), (2, 8, 2, 3))] * 2  # no block of the second sequence is complete

    def of_parameters(weights, place):
        pooled = lambda k, v: (torch.einsum("nlhd,l->nhd", (k + place).tanh(), weights), v.mean(1))
        return nsa.naive_nsa_compression(*x[:4], 3, 8, compress=pooled)[1]

    assert torch.autograd.gradcheck(of_parameters, (weights, place))
    assert torch.autograd.grad(of_parameters(weights, place).square().sum(), place)[0].abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"\[compress\] its v is \[5, 8, 2, 3\] for blocks .* it must be \[5, 2, 3\]"):
        nsa.naive_nsa_compression(*x[:4], 3, 8, compress=lambda k, v: (k.mean(1), v))


def test_branches_with_keys_of_their_own():
    x = operands(41)
    k_cmp, v_cmp, k_swa, v_swa = (*operands(41, seed=1)[1:3], *operands(41, seed=2)[1:3])
    found = nsa.naive_nsa_with_compression(*x, 3, 8, 4, k_cmp=k_cmp, v_cmp=v_cmp, k_swa=k_swa, v_swa=v_swa)
    own = dict(k_cmp=k_cmp[0], v_cmp=v_cmp[0], k_swa=k_swa[0], v_swa=v_swa[0])
    loop = Loop(*(y[0] for y in x[:3]), 8, window=4, count=3, **own)
    same(found[0], loop.result([g[0] for g in x[3:]]))
    lists, o_cmp = nsa.naive_nsa_compression(x[0], k_cmp, v_cmp, x[3], 3, 8)
    same(nsa.naive_nsa(*x[:3], *x[4:], lists, 3, 8, 4, k_swa=k_swa, v_swa=v_swa) + o_cmp, found)


# ---------------------------------------------------------------- query stride


@pytest.mark.parametrize("stride", [2, 3, 5])
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_the_loop(mode, stride):
    sharing = dict(query_stride=stride, **MODES[mode])
    check_whole(operands(23), 3, 4, 3, sharing=sharing)
    starts = [0, 9, 9, 10, 23, 29]  # that begin at odd places
    check_whole(operands(29), 2, 4, 3, (starts, starts), sharing)
    rows = [0, 5, 5, 12]
    check_whole(
        operands(12, 12 + 4 * stride), 2, 4, 3, (rows, [0, 5 + 3 * stride, 5 + 3 * stride, 12 + 4 * stride]), sharing
    )


def test_strides_beyond_a_block_and_a_sequence():
    for mode in ("B", "C", "D"):
        check_whole(operands(30), 2, 4, 3, sharing=dict(query_stride=6, **MODES[mode]))
        check_whole(operands(30), 2, 4, 3, sharing=dict(query_stride=40, **MODES[mode]))


@pytest.mark.parametrize("mode", MODES)
def test_a_stride_of_one_is_plain_to_the_bit(mode):
    for dtype in (torch.float64, torch.float32):
        x = [y.requires_grad_() for y in operands(70, dtype=dtype)]
        plain = nsa.naive_nsa_with_compression(*x, 3, 8, 5)
        one = nsa.naive_nsa_with_compression(*x, 3, 8, 5, query_stride=1, **MODES[mode])
        assert torch.equal(plain, one)
        for a, b in zip(torch.autograd.grad(plain.sum(), x), torch.autograd.grad(one.sum(), x)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("gate", ["own", "anchor"])
def test_gradients_stop_at_rows_that_are_no_anchors(gate, stride):
    q, k, v, *gates = (y.requires_grad_() for y in operands(19))
    rest = torch.arange(19) % stride != 0
    sharing = dict(query_stride=stride, share="output", gate=gate, share_branches=("slc", "swa", "cmp"))
    o = nsa.naive_nsa_with_compression(q, k, v, *gates, 2, 4, 3, **sharing)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=o.dtype)
    dq, *d_gates = torch.autograd.grad((o * weights).sum(), (q, *gates), retain_graph=True)
    assert torch.equal(dq[:, rest], torch.zeros_like(dq[:, rest]))
    assert (dq[:, ~rest].abs().amax((0, 2, 3))[1:] > 1e-4).all()  # row 0 has one key: nothing hangs on q
    for dg in d_gates:
        assert torch.equal(dg[:, rest], torch.zeros_like(dg[:, rest])) == (gate == "anchor")
    # Keys that are read by rows that are no anchors alone: the last one, behind the last anchor.
    if stride == 3:
        behind = torch.autograd.grad((o[:, :18] * weights[:, :18]).sum(), (k, v))  # anchors 0 to 15
        for dx in behind:
            assert torch.equal(dx[:, 16:], torch.zeros_like(dx[:, 16:]))


@pytest.mark.parametrize("mode", MODES)
def test_no_row_sees_another_document_or_the_future(mode):
    starts = torch.tensor([0, 9, 20, 31])
    sharing = dict(cu_seqlens=starts, query_stride=2, **MODES[mode])
    x = operands(31)
    whole = nsa.naive_nsa_with_compression(*x, 2, 4, 3, **sharing)
    other = tuple(torch.cat([z[:, :9], y[:, 9:20], z[:, 20:]], 1) for y, z in zip(x, operands(31, seed=7)))
    assert torch.equal(nsa.naive_nsa_with_compression(*other, 2, 4, 3, **sharing)[:, 9:20], whole[:, 9:20])
    for t in (9, 12, 15, 18):
        later = tuple(torch.cat([y[:, : t + 1], z[:, t + 1 :]], 1) for y, z in zip(x, operands(31, seed=8)))
        found = nsa.naive_nsa_with_compression(*later, 2, 4, 3, **sharing)
        same(found[:, : t + 1], whole[:, : t + 1])


def test_lists_are_the_anchors():
    x = operands(29)
    counts = torch.randint(0, 4, (1, 29, 2), generator=torch.Generator().manual_seed(2))
    plain, o = nsa.naive_nsa_compression(*x[:4], counts, 4)
    shared, same_o = nsa.naive_nsa_compression(*x[:4], counts, 4, query_stride=3, share="selection")
    assert torch.equal(shared, plain[:, torch.arange(29) // 3 * 3])
    assert torch.equal(same_o, o)
    own, _ = nsa.naive_nsa_compression(*x[:4], counts, 4, query_stride=3, share="output", share_branches=("swa",))
    assert torch.equal(own, plain)


def test_presets():
    table = nsa.presets(4)
    assert list(table) == ["seed", "seed_4_3", "fast"]
    assert table["seed"] == dict(query_stride=2, share="output", share_branches=("slc", "swa"), gate="anchor")
    assert table["seed_4_3"] == {**table["seed"], "share_branches": ("cmp", "slc", "swa")}
    assert {group: nsa.presets(group)["fast"]["query_stride"] for group in (1, 4, 5, 16, 64, 100)} == {
        1: 64, 4: 16, 5: 12, 16: 4, 64: 1, 100: 1,
    }  # fmt: skip
    x = operands(25, group=4)
    for sharing in table.values():
        check_whole(x, 2, 8, 3, sharing=sharing)
    both = {name: nsa.naive_nsa_compression(*x[:4], 2, 8, **table[name]) for name in ("seed", "seed_4_3")}
    assert torch.equal(both["seed"][0], both["seed_4_3"][0])
    odd = torch.arange(1, 25, 2)
    assert torch.equal(both["seed_4_3"][1][:, odd], both["seed_4_3"][1][:, odd - 1])
    assert torch.equal(both["seed"][1], nsa.naive_nsa_compression(*x[:4], 2, 8)[1])
    with pytest.raises(ValueError, match=r"\[presets\] group is 0: it must be at least 1"):
        nsa.presets(0)


# ---------------------------------------------------------------- gradients


def finite_differences(sharing, cu=None, **options):
    x = [y.requires_grad_() for y in operands(7, heads=1, size=2, v_size=2, seed=4)]
    starts = None if cu is None else torch.tensor(cu)

    def call(*x):
        return nsa.naive_nsa_with_compression(*x, 2, 2, 3, cu_seqlens=starts, **sharing, **options)

    assert torch.autograd.gradcheck(call, x)


def test_gradients_are_finite_differences():
    finite_differences({})
    finite_differences({}, cu=[0, 4, 7])
    finite_differences({}, compression_block=4, compression_stride=2)


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_under_a_stride_are_finite_differences(mode, stride):
    finite_differences(dict(query_stride=stride, **MODES[mode]))


def test_gradients_over_given_lists():
    q, k, v, _, g_slc, g_swa = (y.requires_grad_() for y in operands(5, 7, heads=1, size=2, v_size=2))
    lists = torch.tensor([[0, 0, 9], [-1, -1, 1], [2, 1, 0], [-1, -1, -1], [3, 0, 3]])[None, :, None]
    call = lambda *x: nsa.naive_nsa(*x, lists, 2, 2, 2)
    assert torch.autograd.gradcheck(call, (q, k, v, g_slc, g_swa))
