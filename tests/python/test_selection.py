"""Selection by input: lists against the measures written out in float64, what must be found, and who may choose for whom."""

import heddle
import pytest
import torch
from heddle import selection
from heddle.selection import measures
from heddle.selection import rows as selection_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

H, HKV, D = 4, 2, 16
MEASURES = {"pooled": selection.pooled, "antidiagonal": selection.antidiagonal}


def make(rows, keys=None, batch=2, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, rows, H, D), (batch, keys or rows, HKV, D)
    return [(2 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


def sets_of(lists, n, unit, batch=0):
    if "offsets" in lists:
        begin, end = lists["offsets"][batch, unit, n : n + 2].tolist()
        return lists["blocks"][begin:end].tolist()
    count = lists["counts"][batch, n, unit]
    blocks = lists["blocks"][batch, n, unit]
    assert (blocks[count:] == -1).all()
    return blocks[:count].tolist()


def shares_of(measure, q, k, n, head, causal, strict, size, rows):
    """Float64 [K], what the rows which choose list n give to each block; of one sequence [S, D], by loops over blocks."""
    offset, number = len(k) - len(q), -(-len(k) // size)
    begin = n * rows - (rows if strict else 0)
    end = min(begin + rows, len(q))
    first = offset + n * rows
    q, k = q.double(), k.double()
    shares = torch.zeros(number, dtype=torch.float64)
    if begin < 0:
        return shares

    def seen(block):
        if strict:
            return (block + 1) * size <= first
        return not causal or block * size < offset + min((n + 1) * rows, len(q))

    if measure == "pooled":
        score = [k[c * size : (c + 1) * size].mean(0) @ q[begin:end].mean(0) * D**-0.5 for c in range(number)]
        for c in filter(seen, range(number)):
            shares[c] = score[c].exp() * len(k[c * size : (c + 1) * size])
        return shares / shares.sum().clamp_min(1e-300)
    stride, tiles = 16, 0
    for r in range(begin, end, stride):
        weights = torch.zeros(number, dtype=torch.float64)
        for j in range(0, len(k), stride):
            if not seen(j // size) or (causal and j > r + offset):
                continue
            pairs = [(r + i, j + stride - 1 - i) for i in range(stride)]
            score = sum(q[a] @ k[b] for a, b in pairs if a < len(q) and b < len(k)) * D**-0.5 / stride
            weights[j // size] += score.exp() if isinstance(score, torch.Tensor) else 1.0
        if weights.sum() > 0:
            shares += weights / weights.sum()
        tiles += 1
    return shares / max(tiles, 1)


def forced_of(n, rows, size, of_q, of_k, causal, sink, local):
    offset, number = of_k - of_q, -(-of_k // size)
    first, last = offset + n * rows, offset + min((n + 1) * rows, of_q) - 1
    own = range(first // size - local + 1, last // size + (1 if causal else local))
    return {c for c in [*range(sink), *own] if 0 <= c < number and (not causal or c * size <= last)}


FORMS = [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("causal, strict", FORMS)
@pytest.mark.parametrize("measure", MEASURES)
def test_lists_are_those_of_the_measure(measure, causal, strict):
    lengths = [(200, 200), (37, 37)] if strict else [(200, 200), (90, 211), (37, 37)]
    for (of_q, of_k), (size, rows), local in zip(lengths, [(32, 32), (16, 64), (64, 16)], (1, 2, 1)):
        q, k = make(of_q, of_k)
        call = dict(causal=causal, strict=strict, block_size=size, query_rows=rows, local_blocks=local)
        by_count = MEASURES[measure](q, k, top_k=8, **call)
        by_share = MEASURES[measure](q, k, top_p=0.7, least=2, **call)
        assert by_count["causal"] == ("bottom_right" if causal else "none")
        for n in range(-(-of_q // rows)):
            forced = forced_of(n, rows, size, of_q, of_k, causal, 1, local)
            last = of_k - of_q + min((n + 1) * rows, of_q) - 1
            reach = [c for c in range(-(-of_k // size)) if not causal or c * size <= last]
            for b, h in ((0, 0), (1, 3)):
                shares = shares_of(measure, q[b, :, h], k[b, :, h // 2], n, h, causal, strict, size, rows)
                ranked = sorted(reach, key=lambda c: (c not in forced, -round(shares[c].item(), 9), c))
                assert sets_of(by_count, n, h, b) == sorted(ranked[:8])
                total, kept = sum(shares[c] for c in reach), []
                for c in ranked:
                    if c in forced or len(kept) < 2 or sum(shares[x] for x in kept) < 0.7 * total:
                        kept.append(c)
                assert sets_of(by_share, n, h, b) == sorted(kept)


@pytest.mark.parametrize("measure", MEASURES)
def test_everything_is_attention(measure):
    q, k = make(203)
    v = k.flip(1)
    for causal in (False, True):
        lists = MEASURES[measure](q, k, top_p=1, causal=causal)
        want = heddle.attention(q, k, v, causal="bottom_right" if causal else "none")
        torch.testing.assert_close(heddle.sparse_attention(q, k, v, **lists), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("measure", MEASURES)
def test_a_planted_block_of_keys_is_found(measure, dtype):
    q, k = make(1000, dtype=torch.float32)
    q, k = q / 8, k / 8
    for h in range(H):  # rows of list 9 of each head look for keys of a block of its own
        direction = torch.randn(D, generator=torch.Generator().manual_seed(h))
        q[:, 9 * 64 : 10 * 64, h] += direction
        k[:, (2 + h) * 64 : (3 + h) * 64, h // 2] += direction
    q, k = q.to(dtype), k.to(dtype)
    for causal in (False, True):
        lists = MEASURES[measure](q, k, top_k=3, causal=causal)
        for h in range(H):
            assert sets_of(lists, 9, h) == [0, 2 + h, 9]
        whole_groups = MEASURES[measure](q, k, top_k=4, causal=causal, per_group=True)
        assert whole_groups["blocks"].shape[2] == HKV
        assert sets_of(whole_groups, 9, 1) == [0, 4, 5, 9]


def test_lists_have_nearly_the_mass_of_the_true_top_blocks():
    """Of exact probabilities, where blocks of rows and of keys have topics."""
    generator = torch.Generator().manual_seed(3)
    topics = 4 * torch.randn(16, D, generator=generator)
    q, k = make(1024, batch=1)
    topic_of_rows = torch.arange(1024) // 64
    topic_of_keys = torch.randint(16, (16,), generator=generator).repeat_interleave(64)
    q, k = q / 2 + topics[topic_of_rows][:, None], k / 2 + topics[topic_of_keys][:, None]
    mass = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)).mul(D**-0.5).softmax(-1)
    mass = mass.unflatten(-1, (16, 64)).sum(-1).unflatten(2, (16, 64)).mean(3)  # [B, H, N, K]
    for measure in MEASURES.values():
        lists = measure(q, k, top_k=5, sink_blocks=0)
        captured = torch.stack([
            mass[0, h, n, sets_of(lists, n, h)].sum() for h in range(H) for n in range(16)
        ])  # fmt: skip
        best = mass.topk(4).values.sum(-1).flatten()  # beside the own block, which is there in any case
        assert (captured >= 0.75 * best).all() and (captured / best).mean() >= 0.98


@pytest.mark.parametrize("measure", MEASURES)
def test_with_strict_later_tokens_change_no_earlier_list(measure):
    q, k = make(300)
    size, rows = 32, 64
    for limits in (dict(top_k=4), dict(top_p=0.6)):
        moved = {False: False, True: False}
        for strict in (True, False):
            call = dict(causal=True, strict=strict, block_size=size, query_rows=rows, **limits)
            before = MEASURES[measure](q, k, **call)
            for at in (64, 127, 193, 250):
                other_q, other_k = q.clone(), k.clone()
                other_q[:, at:], other_k[:, at:] = -3 * q[:, at:].flip(1), 5 * k[:, at:].roll(1, -1)
                other_k[:, -1] = torch.nan
                after = MEASURES[measure](other_q, other_k, **call)
                of_earlier = slice(
                    0, at // rows + 1
                )  # a list may look at what lies before its first row, which is at `at` or before
                same = all(torch.equal(before[x][:, of_earlier], after[x][:, of_earlier]) for x in ("blocks", "counts"))
                assert same or not strict
                moved[strict] |= not same
                assert not torch.equal(before["blocks"], after["blocks"])
        assert not moved[True] and moved[False]  # without it rows of a block choose for each other


@pytest.mark.parametrize("measure", MEASURES)
def test_equal_blocks_are_taken_from_the_first_on(measure):
    q, k = make(512)
    k = torch.ones_like(k)
    assert sets_of(MEASURES[measure](q, k, top_k=4, causal=True), 6, 0) == [0, 1, 2, 6]
    again = [MEASURES[measure](*make(512), top_p=0.5)["blocks"] for _ in range(2)]
    assert torch.equal(*again)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_number_that_is_none_is_listed_and_moves_nothing_else(measure):
    q, k = make(512, batch=1)
    v = k.flip(1)
    call = dict(top_k=4, causal=True)
    clean = MEASURES[measure](q, k, **call)
    broken_k = k.clone()
    broken_k[:, 130, 0, 3] = torch.nan
    lists = MEASURES[measure](q, broken_k, **call)
    for n in range(8):
        for h in (0, 1):  # the heads that read it
            assert (2 in sets_of(lists, n, h)) == (n >= 2)
        for h in (2, 3):
            assert sets_of(lists, n, h) == sets_of(clean, n, h)
    out = heddle.sparse_attention(q, broken_k, v, **lists)
    assert out[:, 192:, :2].isnan().all() and not out[..., 2:, :].isnan().any()
    broken_q = q.clone()
    broken_q[:, 200, 1] = torch.inf
    lists = MEASURES[measure](broken_q, k, **call)
    for n, h in ((3, 0), (2, 1), (4, 1)):
        assert sets_of(lists, n, h) == sets_of(clean, n, h)
    # Of that row's own list the other rows still choose.
    if measure == "pooled":
        without = q[:, 192:256, 1:2][:, [n for n in range(64) if n != 8]]
        shares = k[:, :192, 0].unflatten(1, (3, 64)).mean(2) @ without.mean(1)[0, 0]
        best = shares[0, 1:].argmax().item() + 1
        assert best in sets_of(selection.pooled(broken_q, k, top_k=3, causal=True), 3, 1)


def padded_by_hand(call, q, k, lengths_q, lengths_k):
    """The lists of each document alone."""
    out, at_q, at_k = [], 0, 0
    for of_q, of_k in zip(lengths_q, lengths_k):
        out.append(call(q[None, at_q : at_q + of_q], k[None, at_k : at_k + of_k]) if of_q else None)
        at_q, at_k = at_q + of_q, at_k + of_k
    return out


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("name", ["pooled", "antidiagonal", "vertical_slash"])
def test_packed_documents_have_the_lists_that_they_have_alone(name, rows):
    if name == "antidiagonal" and rows == 1:
        return
    of_q, of_k = [70, 0, 130, 16], [75, 3, 130, 40]
    q = torch.randn(sum(of_q), H, D)
    k, v = torch.randn(2, sum(of_k), HKV, D)
    starts_q, starts_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (of_q, of_k)
    )
    options = dict(block_size=32, query_rows=rows)
    options |= dict(columns=1, diagonals=1, probes=20) if name == "vertical_slash" else dict(top_p=0.5, causal=True)
    with torch.no_grad():
        packed = dict(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
        lists, csr = (getattr(selection, name)(q, k, **options, **packed, offsets=x) for x in (False, True))
        alone = padded_by_hand(lambda a, b: getattr(selection, name)(a, b, **options), q, k, of_q, of_k)
    assert lists["max_seqlen_q"] == lists["max_seqlen_k"] == 130
    for b, found in enumerate(alone):
        first = int(starts_q[b]) if rows == 1 else int(starts_q[b]) // rows + b
        for n in range(0 if found is None else found["counts"].shape[1]):
            for h in range(H):
                want = sets_of(found, n, h)
                assert lists["blocks"][first + n, h][: lists["counts"][first + n, h]].tolist() == want
                assert csr["blocks"][slice(*csr["offsets"][h, first + n : first + n + 2])].tolist() == want
    out = heddle.sparse_attention(q, k, v, **lists)
    assert torch.equal(out, heddle.sparse_attention(q, k, v, **csr))
    at_q, at_k = 0, 0
    for n_q, n_k, found in zip(of_q, of_k, alone):
        if found is not None:
            pieces = (x[None, a : a + n] for x, a, n in ((q, at_q, n_q), (k, at_k, n_k), (v, at_k, n_k)))
            torch.testing.assert_close(out[None, at_q : at_q + n_q], heddle.sparse_attention(*pieces, **found))
        at_q, at_k = at_q + n_q, at_k + n_k


def test_packed_strict_lists_are_those_of_each_document():
    lengths = [70, 130]
    q, k = (x[0] for x in make(200, batch=1))
    starts = torch.tensor([0, 70, 200], dtype=torch.int32)
    for measure in MEASURES.values():
        call = dict(top_k=3, causal=True, strict=True, block_size=16, query_rows=16)
        packed = measure(q, k, cu_seqlens_q=starts, **call)
        for b, found in enumerate(padded_by_hand(lambda a, b: measure(a, b, **call), q, k, lengths, lengths)):  # noqa: B023
            first = int(starts[b]) // 16 + b
            assert torch.equal(packed["blocks"][first : first + found["blocks"].shape[1]], found["blocks"][0])


def test_lists_one_behind_the_other_are_the_same_lists():
    q, k = make(203)
    for measure in MEASURES.values():
        dense, csr = (
            measure(q, k, top_p=0.5, causal=True, block_size=16, query_rows=32, offsets=x) for x in (False, True)
        )
        for b in range(2):
            for n in range(dense["counts"].shape[1]):
                for h in range(H):
                    assert sets_of(dense, n, h, b) == sets_of(csr, n, h, b)
        assert csr["offsets"][-1, -1, -1] == dense["counts"].sum()


def test_last_rows_find_columns_and_diagonals():
    q, k = make(640, batch=1)
    q, k = q / 8, k / 8
    direction = 2 * torch.randn(D, generator=torch.Generator().manual_seed(1))
    q[:, :, :2] += direction
    k[:, 200, 0] += 4 * direction  # one key that all rows of the first group look for
    # Each row of the second group looks for the key 133 positions before it; such keys are there for the last rows alone.
    places = 10 * torch.nn.functional.one_hot(torch.arange(640) % D, D).float()
    q[:, :, 2:] += places[:, None]
    k[:, 600 - 133 : 640 - 133, 1] += places[600:640]
    with torch.no_grad():
        lists = selection.vertical_slash(q, k, columns=1, diagonals=0, probes=32)
        assert [sets_of(lists, n, 0) for n in (2, 3, 9)] == [[0, 2], [0, 3], [0, 3, 9]]
        lists = selection.vertical_slash(q, k, columns=0, diagonals=1, probes=32)
        # 133 is in distance 2: of rows of block n blocks n - 2 and n - 3.
        assert [sets_of(lists, n, h) for n, h in ((9, 2), (4, 3))] == [[0, 6, 7, 9], [0, 1, 2, 4]]


@pytest.mark.parametrize("per_group", [False, True])
def test_probing_is_what_it_says(per_group):
    q, k = make(150, 210)
    size, probes = 32, 40
    of_heads = torch.einsum("bihd,bjhd->bhij", q[:, -probes:].double(), k.double().repeat_interleave(2, 2)) * D**-0.5
    positions, keys = torch.arange(210 - probes, 210)[:, None], torch.arange(210)
    p = of_heads.masked_fill(keys > positions, -torch.inf).softmax(-1)
    if per_group:
        p = p.unflatten(1, (HKV, 2)).mean(2)
    with torch.no_grad():
        lists = selection.vertical_slash(
            q, k, columns=2, diagonals=2, probes=probes, block_size=size, per_group=per_group, query_rows=size
        )
    for b in range(2):
        for unit in range(p.shape[1]):
            columns = torch.zeros(7, dtype=torch.float64).index_add(0, keys // size, p[b, unit].sum(0))
            distances = torch.zeros(7, dtype=torch.float64)
            for i in range(probes):
                for j in range(int(positions[i]) + 1):
                    distances[(int(positions[i]) - j) // size] += p[b, unit, i, j]
            chosen, far = columns.topk(2).indices.tolist(), distances.topk(2).indices.tolist()
            for n in range(5):
                first, last = 60 + n * size, 60 + min(n * size + size, 150) - 1
                want = {0, *chosen, *range(first // size, last // size + 1)}
                want |= {c for d in far for c in range(first // size - d - 1, last // size - d + 1)}
                assert sets_of(lists, n, unit, b) == sorted(c for c in want if 0 <= c <= last // size)


def test_chunks_change_no_bit(monkeypatch):
    q, k = make(420)
    calls = [
        lambda: selection.pooled(q, k, top_p=0.5, causal=True),
        lambda: selection.antidiagonal(q, k, top_k=4, query_rows=32),
        lambda: selection.antidiagonal(q, k, top_k=4, causal=True, strict=True, query_rows=16),
        lambda: selection.vertical_slash(q, k, columns=2, diagonals=2, query_rows=16),
    ]
    with torch.no_grad():
        whole = [call() for call in calls]
        for module in (selection_rows, measures):
            monkeypatch.setattr(module, "CHUNK_BYTES", 20000)
        monkeypatch.setattr(selection_rows, "SMALL_PART_BYTES", 0)
        for call, want in zip(calls, whole):
            assert torch.equal(call()["blocks"], want["blocks"])


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // max(x.element_size(), 1))
        return out


def test_nothing_of_the_size_of_all_pairs_is_made():
    q, k = torch.randn(1, 4096, 1, D), torch.randn(1, 4096, 1, D)
    for call in (
        lambda: selection.pooled(q, k, top_k=8, causal=True),
        lambda: selection.antidiagonal(q, k, top_k=8),
        lambda: selection.vertical_slash(q, k, columns=4, diagonals=4),
    ):
        with torch.no_grad(), Largest() as mode:
            call()
        assert 0 < mode.elements <= 64 * (4096 + 64)  # of 4096 * 4096 pairs


def test_no_value_is_read_on_the_host():
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():  # which refuses to say what is in a tensor
        q, k = torch.empty(1, 300, H, D), torch.empty(1, 300, HKV, D)
        for causal in (False, True):
            assert selection.antidiagonal(q, k, top_p=0.9, causal=causal)["blocks"].shape == (1, 5, H, 5)
            assert selection.pooled(q, k, top_k=3, causal=causal, offsets=True)["offsets"].shape == (1, H, 6)
        assert selection.vertical_slash(q, k, columns=1, diagonals=1)["blocks"].shape == (1, 5, H, 5)
        starts = torch.empty(3, dtype=torch.int32)
        packed = dict(cu_seqlens_q=starts, max_seqlen_q=200)
        assert selection.antidiagonal(q[0], k[0], top_k=3, causal=True, **packed)["blocks"].shape == (6, H, 3)


def test_a_compiled_call_gives_the_same():
    q, k = make(130, batch=1)

    def call(q, k):
        lists = selection.antidiagonal(q, k, top_p=0.6, causal=True, strict=True, block_size=16, query_rows=16)
        return heddle.sparse_attention(q, k, k, **lists)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k), call(q, k))


def test_attention_over_the_lists_has_gradients_and_the_lists_none():
    q, k = (x.requires_grad_() for x in make(200))
    lists = selection.antidiagonal(q, k, top_k=3, causal=True, strict=True)
    assert not lists["blocks"].requires_grad
    heddle.sparse_attention(q, k, k, **lists).sum().backward()
    assert q.grad.isfinite().all() and k.grad.abs().sum() > 0


@pytest.mark.parametrize("length", [0, 1, 15, 63])
def test_short_sequences(length):
    q, k = make(length) if length else (torch.empty(2, 0, H, D), torch.empty(2, 0, HKV, D))
    for measure in MEASURES.values():
        lists = measure(q, k, top_p=0.5, causal=True)
        assert lists["blocks"].shape == (2, -(-length // 64), H, -(-length // 64))
        assert not lists["counts"].numel() or (lists["counts"] == 1).all()
    with torch.no_grad():
        lists = selection.vertical_slash(q, k, columns=2, diagonals=2)
        assert lists["counts"].shape == (2, -(-length // 64), H)
