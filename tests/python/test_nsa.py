"""parallel_nsa, which runs kernels, against the naive functions in float64."""

import pytest
from heddle.nsa import parallel
from nsa_kit import MODES, nsa, one_thread, operands, relative, torch  # noqa: F401  one_thread is a fixture

SIZE = 16  # the smallest block that kernels take


def wide(x):
    return tuple(y.double().detach().requires_grad_(y.requires_grad) for y in x)


def check(x, count=3, window=20, tolerance=2e-6, gradients=True, naive_options=None, **options):
    """Result and gradients, as norms: what is chosen is the same, but for scores that rounding tells apart."""
    x = [y.detach().requires_grad_(gradients) for y in x]
    doubles = wide(x)
    given = {"block_size": SIZE, "window_size": window, **options}
    o = nsa.parallel_nsa(*x, block_counts=count, **given)
    expected = nsa.naive_nsa_with_compression(*doubles, count, **given)
    assert o.dtype == x[0].dtype and o.shape == expected.shape
    assert relative(o, expected) < tolerance
    if gradients:
        d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        found = torch.autograd.grad(o, x, d_o.to(o.dtype))
        for name, f, e in zip(
            ("q", "k", "v", "g_cmp", "g_slc", "g_swa"), found, torch.autograd.grad(expected, doubles, d_o)
        ):
            assert relative(f, e) < 3 * tolerance, name


@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("rows", [150, 64, 15])
def test_the_whole_is_the_naive_whole(rows, group):
    check(operands(rows, batch=2, group=group, size=24, v_size=40, dtype=torch.float32))


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_16_bits(dtype, tolerance):
    # Every block is listed: what rounding would choose differently is no matter.
    check(operands(90, size=32, v_size=32, dtype=dtype), count=6, tolerance=tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", [1, 2, 3, 16, 100])
def test_sharing(mode, stride):
    check(operands(150, size=8, v_size=8, dtype=torch.float32), query_stride=stride, **MODES[mode])


@pytest.mark.parametrize("mode", ["A", "C", "D", "all branches"])
@pytest.mark.parametrize("stride", [1, 2, 3, 16])
@pytest.mark.parametrize("starts", [[0, 49, 128], [0, 15, 205], [0, 1, 14, 37, 53], [0, 0, 9, 9, 90, 91, 91]], ids=str)
def test_packed(starts, stride, mode):
    check(
        operands(starts[-1], size=8, v_size=8, dtype=torch.float32),
        cu_seqlens=torch.tensor(starts),
        query_stride=stride,
        **MODES[mode],
    )


def test_no_row_comes_from_another_document():
    starts = [0, 15, 205, 300]
    x = operands(starts[-1], size=8, v_size=8, dtype=torch.float32)
    for share in (
        dict(share="output", share_branches=("cmp", "slc", "swa")),
        dict(share="selection"),
        dict(share="delta"),
    ):
        whole = nsa.parallel_nsa(*x, None, 3, SIZE, 20, cu_seqlens=torch.tensor(starts), query_stride=4, **share)
        for begin, end in zip(starts, starts[1:]):
            own = [y[:, begin:end] for y in x]
            assert (
                relative(whole[:, begin:end], nsa.parallel_nsa(*own, None, 3, SIZE, 20, query_stride=4, **share)) < 1e-6
            )


@pytest.mark.parametrize("mode", ["plain", *MODES])
def test_no_row_depends_on_a_later_position(mode):
    options = {} if mode == "plain" else {"query_stride": 3, **MODES[mode]}
    x = operands(130, heads=2, group=2, size=8, dtype=torch.float32)
    before = nsa.parallel_nsa(*x, block_counts=3, block_size=SIZE, window_size=20, **options)
    for position in (1, 2, 16, 47, 64, 129):
        later = tuple(y.clone() for y in x)
        for y in later:
            y[:, position:] = torch.rand_like(y[:, position:])
        after = nsa.parallel_nsa(*later, block_counts=3, block_size=SIZE, window_size=20, **options)
        assert torch.equal(before[:, :position], after[:, :position]), position


def test_rows_are_the_last_positions():
    x = operands(40, keys=200, size=8, v_size=8, dtype=torch.float32)
    check(x)
    check(x, query_stride=4, share="output")
    check(x, cu_seqlens=(torch.tensor([0, 10, 10, 40]), torch.tensor([0, 75, 80, 200])))


def test_paper_form():
    x = operands(160, size=8, v_size=8, dtype=torch.float32)
    check(x, block_size=64, compression_block=32, compression_stride=16)
    check(x, block_size=32, compression_block=64, compression_stride=32)
    check(x, block_size=64, compression_block=32, compression_stride=16, cu_seqlens=torch.tensor([0, 7, 100, 160]))
    check(x, forced=())
    check(x, forced=("current",))
    others = operands(160, size=8, v_size=8, seed=1, dtype=torch.float32)[1:3]
    more = operands(160, size=8, v_size=8, seed=2, dtype=torch.float32)[1:3]
    names = ("k_cmp", "v_cmp", "k_swa", "v_swa")
    given = dict(zip(names, (*others, *more)))
    found = nsa.parallel_nsa(*x, None, 3, SIZE, 20, **given)
    expected = nsa.naive_nsa_with_compression(*wide(x), 3, SIZE, 20, **{name: y.double() for name, y in given.items()})
    assert relative(found, expected) < 2e-6


@pytest.mark.parametrize("starts", [None, [0, 7, 100, 160]])
def test_learned_compression(starts):
    class Compress(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(torch.linspace(0, 1, 32))

        def forward(self, k, v):
            w = torch.softmax(self.weights.to(k.dtype), 0)[:, None, None]
            return (k * w).sum(1), (v * w).sum(1)

    x = operands(160, size=8, v_size=8, dtype=torch.float32)
    given = dict(
        compression_block=32, compression_stride=16, cu_seqlens=None if starts is None else torch.tensor(starts)
    )
    learned = [Compress() for _ in range(2)]
    found = nsa.parallel_nsa(*x, None, 3, 32, 20, compress=learned[0], **given)
    expected = nsa.naive_nsa_with_compression(*wide(x), 3, 32, 20, compress=learned[1], **given)
    assert relative(found, expected) < 2e-6
    found.sum().backward(), expected.sum().backward()
    assert relative(learned[0].weights.grad, learned[1].weights.grad) < 1e-4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [False, True])
def test_heads_in_parts_have_the_same_bits(monkeypatch, packed, mode):
    """As long calls without gradients go through them."""
    x = operands(120, heads=6, size=8, v_size=24, dtype=torch.float32)
    options = dict(query_stride=3, **MODES[mode], cu_seqlens=torch.tensor([0, 47, 120]) if packed else None)
    lists = torch.randint(0, 8, (1, 120, 6, 4), generator=torch.Generator().manual_seed(1))
    counts = torch.randint(0, 4, (1, 120, 6), generator=torch.Generator().manual_seed(2))

    def calls():
        yield nsa.parallel_nsa(*x, None, 3, SIZE, 20, **options)
        yield nsa.parallel_nsa(*x, lists, counts, SIZE, 20, **options)
        yield nsa.parallel_nsa(*x[:3], None, x[4], None, None, 3, SIZE, **options) if mode == "A" else x[0]

    seen = []
    of_parts = parallel._heads
    monkeypatch.setattr(
        parallel, "_heads", lambda x, axis, part, parts: seen.append(parts) or of_parts(x, axis, part, parts)
    )
    whole = list(calls())
    assert not seen
    for parts, most in ((2, 120 * 12 * 24 * 4 // 2), (3, 120 * 12 * 24 * 4 // 3), (6, 1)):
        monkeypatch.setattr(parallel, "_BRANCH_BYTES", most)
        assert all(torch.equal(a, b) for a, b in zip(calls(), whole))
        assert set(seen) == {parts}
        seen.clear()
    x[0].requires_grad_()
    nsa.parallel_nsa(*x, None, 3, SIZE, 20, **options)
    assert not seen


def test_lists_from_outside():
    q, k, v, g_cmp, g_slc, g_swa = operands(90, size=8, v_size=8, dtype=torch.float32)
    make = torch.Generator().manual_seed(3)
    lists = torch.randint(-2, 9, (1, 90, 2, 5), generator=make)
    lists[0, 5] = 2**40
    counts = torch.randint(0, 6, (1, 90, 2), generator=make)
    for block_counts in (5, 2, counts):
        for sharing in ({}, {"query_stride": 3, "share": "selection"}, {"query_stride": 16, "share": "selection"}):
            given = dict(block_size=SIZE, window_size=10, **sharing)
            found = nsa.parallel_nsa(q, k, v, None, g_slc, g_swa, lists, block_counts, **given)
            expected = nsa.naive_nsa(*wide((q, k, v, g_slc, g_swa)), lists, block_counts, **given)
            assert relative(found, expected) < 2e-6
    both = nsa.parallel_nsa(q, k, v, g_cmp, g_slc, g_swa, lists, 5, SIZE, 10)
    compressed = nsa.naive_nsa_compression(*wide((q, k, v, g_cmp)), 5, SIZE)[1]
    assert relative(both, nsa.naive_nsa(*wide((q, k, v, g_slc, g_swa)), lists, 5, SIZE, 10) + compressed) < 2e-6


@pytest.mark.parametrize("sharing", [{}, *({"query_stride": 3, **mode} for mode in MODES.values())], ids=str)
def test_without_gates(sharing):
    """As flash-linear-attention is called: what is not named has no gate, or is not there."""
    q, k, v, g_cmp, _, g_swa = x = operands(90, size=8, v_size=8, dtype=torch.float32)
    ones, make = torch.ones_like(g_cmp), torch.Generator().manual_seed(3)
    lists, counts = torch.randint(-2, 9, (1, 90, 2, 5), generator=make), torch.randint(0, 6, (1, 90, 2), generator=make)
    window = 10 if sharing.get("share") == "delta" else 0
    given = dict(block_indices=lists, block_counts=counts, block_size=SIZE, window_size=window, g_swa=g_swa, **sharing)
    found = nsa.parallel_nsa(q, k, v, **given)
    for same in (
        nsa.naive_nsa(*wide((q, k, v)), **given),
        nsa.naive_nsa(*wide((q, k, v)), g_slc=ones.double(), **given),
    ):
        assert relative(found, same) < 2e-6
    given = dict(block_size=SIZE, window_size=10, **sharing)
    leaves = [y.requires_grad_() for y in (q, k, v, g_cmp, g_swa)]
    found = nsa.parallel_nsa(q, k, v, g_cmp, g_swa=g_swa, block_counts=3, **given)
    expected = nsa.parallel_nsa(q, k, v, g_cmp, ones, g_swa, block_counts=3, **given)
    assert relative(found, expected) < 1e-6
    assert relative(found, nsa.naive_nsa_with_compression(*wide(x[:4]), None, wide(x)[5], 3, **given)) < 2e-6
    for a, b in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)):
        assert relative(a, b) < 1e-6


def test_gates_alone_are_refused():
    q, k, v, *gates = operands(20, size=8, v_size=8, dtype=torch.float32)
    with pytest.raises(TypeError, match="g_swa is None"):
        nsa.parallel_nsa(q, k, v, window_size=4, block_counts=3)
    with pytest.raises(TypeError, match="g_slc is None"):
        nsa.nsa_with_cache(q, k, v, nsa.Cache(1, 40, 2, 8, block=SIZE), gates[0], None, gates[2], 3, SIZE)


def test_counts_for_each_row():
    counts = torch.randint(0, 6, (1, 90, 2), generator=torch.Generator().manual_seed(3))
    x = operands(90, size=8, v_size=8, dtype=torch.float32)
    check(x, counts)
    check(x, counts, query_stride=3, share="selection")
    check(x, counts, query_stride=3, share="output")


def test_without_a_compressed_branch_blocks_are_chosen_all_the_same():
    q, k, v, g_cmp, g_slc, g_swa = operands(120, size=8, v_size=8, dtype=torch.float32)
    whole = nsa.parallel_nsa(q, k, v, torch.zeros_like(g_cmp), g_slc, g_swa, None, 3, SIZE, 20)
    assert relative(nsa.parallel_nsa(q, k, v, None, g_slc, g_swa, None, 3, SIZE, 20), whole) < 1e-6


def test_no_rows():
    x = [y.requires_grad_() for y in operands(0, keys=20, size=8, v_size=4, dtype=torch.float32)]
    o = nsa.parallel_nsa(*x, None, 3, SIZE, 5)
    assert o.shape == (1, 0, 4, 4)
    o.sum().backward()


def test_stride_1_is_plain_to_the_bit():
    x = operands(90, size=8, v_size=8, dtype=torch.float32)
    plain = nsa.parallel_nsa(*x, None, 3, SIZE, 20)
    for options in MODES.values():
        assert torch.equal(nsa.parallel_nsa(*x, None, 3, SIZE, 20, query_stride=1, **options), plain)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(block_size=24), "block_size"),
        (dict(query_stride=2), "share"),
        (dict(window_size=-1), "window_size is -1"),
        (dict(block_counts=True), "block_counts"),
        (dict(head_first=True), "head_first"),
        (dict(query_stride=7, share="output"), "the first row of q stands at position 10"),
    ],
)
def test_refusals(change, message):
    x = operands(20, keys=30, size=8, v_size=8, dtype=torch.float32)
    with pytest.raises((ValueError, TypeError), match=message):
        nsa.parallel_nsa(*x, **{"block_counts": 3, "block_size": SIZE, "window_size": 4, **change})
    with pytest.raises((ValueError, TypeError), match="g_swa"):
        nsa.parallel_nsa(*x[:5], None, window_size=4)
    with pytest.raises(ValueError, match="float64"):
        nsa.parallel_nsa(*wide(x), None, 3, SIZE)
    with pytest.raises(ValueError, match="each row comes with its key"):
        nsa.nsa_with_cache(*x[:3], nsa.Cache(1, 40, 2, 8), *x[3:])
    with pytest.raises(TypeError, match="cache is None"):
        nsa.nsa_with_cache(*x[:3], None, *x[3:])
    with pytest.raises(ValueError, match="block is 64: it must be a multiple of stride, 48"):
        nsa.Cache(1, 40, 2, 8, stride=48)


def test_sharing_report():
    x = operands(200, size=8, v_size=8, batch=2, dtype=torch.float32)
    report = nsa.sharing_report(*x, 3, SIZE, 20, query_stride=4)
    assert report.rows == 2 * 150
    for part in (report.similarity, report.own_mass, report.anchor_mass, *report.errors.values()):
        assert part.shape == (4,) and part.dtype == torch.float64 and part.isfinite().all()
    assert report.overlap.shape == (2,) and ((report.overlap > 0) & (report.overlap <= 1)).all()
    assert (report.own_mass > 0).all() and (report.own_mass <= 1).all()
    for way in ("selection", "output", "output, all branches", "delta"):
        assert way in str(report)
    plain = nsa.parallel_nsa(*x, None, 3, SIZE, 20).double()
    shared = nsa.parallel_nsa(*x, None, 3, SIZE, 20, query_stride=4, share="output").double()
    others = torch.arange(200) % 4 != 0
    expected = (shared - plain)[:, others].square().sum((0, 1, 3)).sqrt() / plain[:, others].square().sum(
        (0, 1, 3)
    ).sqrt()
    torch.testing.assert_close(report.errors["output"], expected)


def test_rows_that_are_their_anchors_lose_nothing():
    """Each row's q is its anchor's: lists differ by what became visible between, at a block's end."""
    q, k, v, *gates = operands(192, size=8, v_size=8, dtype=torch.float32)
    q = q[:, ::4].repeat_interleave(4, 1)
    report = nsa.sharing_report(q, k, v, *gates, 12, SIZE, 0, query_stride=4)
    assert (report.similarity > 1 - 1e-6).all() and (report.overlap == 1).all()
    torch.testing.assert_close(report.own_mass, torch.ones(4, dtype=torch.float64))
    assert (report.errors["selection"] < 1e-6).all()
    starts = torch.tensor([0, 15, 15, 192])
    packed = nsa.sharing_report(q, k, v, *gates, 12, SIZE, 0, cu_seqlens=starts, query_stride=5, rows=40)
    assert packed.rows == 192 - 3 - 36 and (packed.own_mass > 1 - 1e-6).all()
    with pytest.raises(ValueError, match="there is no row that is not an anchor"):
        nsa.sharing_report(
            *(y[:, :2] for y in (q, k, v, *gates)), 3, SIZE, query_stride=2, cu_seqlens=torch.tensor([0, 1, 2])
        )


def test_counts_and_lists_of_any_size_and_layout():
    q, k, v, g_cmp, g_slc, g_swa = operands(90, size=8, v_size=8, dtype=torch.float32)
    lists = torch.randint(-2, 9, (1, 90, 5, 2), generator=torch.Generator().manual_seed(3)).transpose(2, 3)
    expected = nsa.naive_nsa(*wide((q, k, v, g_slc, g_swa)), lists, 5, SIZE, 10)
    for count in (5, 2**63 - 1, torch.full((1, 90, 2), 2**63 - 1)):
        assert relative(nsa.parallel_nsa(q, k, v, None, g_slc, g_swa, lists, count, SIZE, 10), expected) < 2e-6
    everything = nsa.parallel_nsa(q, k, v, g_cmp, g_slc, g_swa, None, 6, SIZE, 10)
    assert torch.equal(nsa.parallel_nsa(q, k, v, g_cmp, g_slc, g_swa, None, 2**40, SIZE, 10), everything)
    with pytest.raises(ValueError, match="block_counts is 1180591620717411303424: it must be below 2"):
        nsa.parallel_nsa(q, k, v, g_cmp, g_slc, g_swa, None, 2**70, SIZE, 10)


def test_a_report_of_rows_without_lists():
    x = operands(96, size=8, v_size=8, dtype=torch.float32)
    report = nsa.sharing_report(*x, 2, SIZE, 0, query_stride=2, forced=())
    assert report.overlap.isfinite().all() and all(e.isfinite().all() for e in report.errors.values())


def test_compiled_with_dynamic_shapes():
    x = operands(70, size=8, v_size=8, dtype=torch.float32)
    call = torch.compile(
        lambda *x: nsa.parallel_nsa(*x, None, 3, SIZE, 9), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    assert relative(call(*x), nsa.parallel_nsa(*x, None, 3, SIZE, 9)) < 1e-6


BOUNDED = {
    "none": {},
    "one number": dict(max_seqlen=128),
    "a pair": dict(max_seqlen=(90, 91)),
    "output": dict(max_seqlen=90, query_stride=3, share="output", share_branches=("cmp", "slc", "swa")),
    "selection": dict(max_seqlen=90, query_stride=16, share="selection"),
}


@pytest.mark.parametrize("options", BOUNDED.values(), ids=BOUNDED)
def test_bounds_of_packed_lengths_change_no_bit_and_nothing_is_read(options):
    x = operands(128, size=8, v_size=8, dtype=torch.float32)
    starts = torch.tensor([0, 0, 90, 97, 128], dtype=torch.int32)
    unbounded = {name: value for name, value in options.items() if name != "max_seqlen"}
    expected = nsa.parallel_nsa(*x, None, 3, SIZE, 9, cu_seqlens=starts, **unbounded)
    assert torch.equal(nsa.parallel_nsa(*x, None, 3, SIZE, 9, cu_seqlens=starts, **options), expected)
    if "max_seqlen" in options:  # which a call that reads them would break
        call = torch.compile(
            lambda starts, *x: nsa.parallel_nsa(*x, None, 3, SIZE, 9, cu_seqlens=starts, **options),
            fullgraph=True,
            backend="aot_eager",
        )
        assert relative(call(starts, *x), expected) < 1e-6


def test_a_bound_of_lists_changes_no_bit_and_nothing_is_read():
    x = operands(90, size=8, v_size=8, dtype=torch.float32)
    counts = torch.randint(0, 6, (1, 90, 2), generator=torch.Generator().manual_seed(3))
    expected = nsa.parallel_nsa(*x, None, counts, SIZE, 9)
    assert torch.equal(nsa.parallel_nsa(*x, None, counts, SIZE, 9, max_block_counts=5), expected)
    fewer = nsa.parallel_nsa(*x, None, counts.clamp(max=2), SIZE, 9)
    assert torch.equal(nsa.parallel_nsa(*x, None, counts, SIZE, 9, max_block_counts=2), fewer)
    call = torch.compile(
        lambda counts, *x: nsa.parallel_nsa(*x, None, counts, SIZE, 9, max_block_counts=5),
        fullgraph=True,
        backend="aot_eager",
    )
    assert relative(call(counts, *x), expected) < 1e-6


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(max_seqlen=0), r"max_seqlen is 0: it must be at least 1"),
        (dict(max_seqlen="9"), r"max_seqlen is '9': it must be an int"),
        (dict(max_seqlen=(20, 20, 20)), r"max_seqlen has 3 elements: it must be an int, or a pair"),
        (dict(max_seqlen=(20, -1)), r"max_seqlen\[1\] is -1: it must be at least 1"),
        (dict(max_seqlen=20, cu_seqlens=torch.zeros(1)), r"cu_seqlens is float32 \[1\]: it must be int32 or int64"),
        (
            dict(max_seqlen=20, cu_seqlens=(torch.tensor([0, 20]), torch.tensor([0, 9, 20]))),
            "1 sequences of q and 2 of k",
        ),
        (dict(max_seqlen=12), "max_seqlen_q is 12"),
        (dict(max_block_counts=-1), "max_block_counts is -1: it must be at least 0"),
    ],
)
def test_refused_bounds(change, message):
    x = operands(20, size=8, v_size=8, dtype=torch.float32)
    with pytest.raises((ValueError, TypeError), match=message):
        nsa.parallel_nsa(*x, None, 3, SIZE, **{"cu_seqlens": torch.tensor([0, 20]), **change})
