"""Native sparse attention over a cache, and the layer, against what one call of parallel_nsa gives."""

import pytest
from nsa_kit import nsa, one_thread, operands, relative, torch  # noqa: F401  one_thread is a fixture

SIZE = 16  # the smallest block that kernels take


@pytest.mark.parametrize("form", [{}, {"block": 32, "stride": 16}])
@pytest.mark.parametrize("chunks", [[1] * 70, [50, 1, 1, 30, 1], [7, 64, 2]], ids=["steps", "chunks", "few"])
def test_a_cache_gives_what_the_whole_gives(chunks, form):
    total, size = sum(chunks), 32
    q, k, v, *gates = operands(total, batch=2, group=3, size=8, v_size=12, dtype=torch.float32)
    compression = {"compression_" + name: value for name, value in form.items()}
    whole = nsa.parallel_nsa(q, k, v, *gates, block_counts=3, block_size=size, window_size=9, **compression)
    cache = nsa.Cache(2, total + 3, 2, 8, 12, **{"block": size, **form})
    begin = 0
    for n in chunks:
        rows = slice(begin, begin + n)
        o = nsa.nsa_with_cache(q[:, rows], k[:, rows], v[:, rows], cache, *(g[:, rows] for g in gates), 3, size, 9)
        assert relative(o, whole[:, rows]) < 2e-6, begin
        begin += n
    assert cache.lengths.tolist() == [total, total]
    assert torch.equal(cache.k_pooled[:, : int(cache.complete(cache.lengths)[0])],
                       nsa.pool_keys(k, cache.block, cache.stride))  # fmt: skip
    with pytest.raises(ValueError):
        nsa.nsa_with_cache(q[:, :4], k[:, :4], v[:, :4], cache, *(g[:, :4] for g in gates), 3, size, 9)
    assert cache.lengths.tolist() == [total, total]


def test_what_a_cache_forgot_is_pooled_again():
    k, v = torch.randn(2, 60, 2, 8), torch.randn(2, 60, 2, 12)
    cache = nsa.Cache(2, 60, 2, 8, 12, block=16, stride=8)
    cache.append(k, v)
    cache.lengths.copy_(torch.tensor([33, 20]))
    others = torch.randn(2, 27, 2, 8), torch.randn(2, 27, 2, 12)
    cache.append(*others)
    assert cache.lengths.tolist() == [60, 47]
    for b, kept in enumerate((33, 20)):
        for x, other, pooled in ((k, others[0], cache.k_pooled), (v, others[1], cache.v_pooled)):
            now = torch.cat([x[b : b + 1, :kept], other[b : b + 1]], 1)
            expected = nsa.pool_keys(now, 16, 8)[0]
            assert torch.equal(pooled[b, : len(expected)], expected)


def test_a_cache_of_a_dtype_that_is_not_pooled_keeps_its_lengths():
    cache = nsa.Cache(1, 64, 2, 16, block=16, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"\[extend_pooled_keys\] x is float8_e4m3fn"):
        cache.append(torch.zeros(1, 20, 2, 16, dtype=torch.bfloat16), torch.zeros(1, 20, 2, 16, dtype=torch.bfloat16))
    assert cache.lengths.tolist() == [0]


def test_sequences_of_a_cache_have_lengths_of_their_own():
    q, k, v, *gates = operands(60, batch=2, size=8, v_size=8, dtype=torch.float32)
    cache = nsa.Cache(2, 80, 2, 8, block=SIZE)
    nsa.nsa_with_cache(*(x[:, :40] for x in (q, k, v)), cache, *(g[:, :40] for g in gates), 3, SIZE, 9)
    cache.lengths[1] = 21  # the second forgets what came after
    for step in range(20):
        rows = [torch.stack([x[0, 40 + step], x[1, 21 + step]])[:, None] for x in (q, k, v, *gates)]
        o = nsa.nsa_with_cache(*rows[:3], cache, *rows[3:], 3, SIZE, 9)
        for b, t in enumerate((40 + step, 21 + step)):
            whole = [x[b : b + 1, : t + 1] for x in (q, k, v, *gates)]
            assert relative(o[b], nsa.parallel_nsa(*whole, None, 3, SIZE, 9)[0, t:]) < 2e-6, (b, t)


def layer(**options):
    from heddle import nn

    torch.manual_seed(0)
    return nn.NativeSparseAttention(48, 6, 2, block_size=SIZE, block_counts=3, window_size=9, **options)


def test_the_layer_decodes_what_it_computes_at_once():
    sharings = [{"sharing": sharing} for sharing in nsa.presets(3).values()]
    for options in ({}, {"rope_theta": None}, {"compression_block": 32, "compression_stride": 16}, *sharings):
        model = layer(**options)
        x = torch.randn(2, 70, 48)
        whole = model(x)
        cache = model.cache(2, 70)
        with torch.no_grad():
            parts = [model(part, cache=cache) for part in x.split([33, 1, 1, 35], 1)]
        assert relative(torch.cat(parts, 1), whole) < 2e-6


def test_the_layer_keeps_documents_apart():
    from heddle import nsa

    for sharing in (None, nsa.presets(3)["seed"], nsa.presets(3)["fast"]):
        model = layer(sharing=sharing)
        x = torch.randn(1, 100, 48)
        packed = model(x, cu_seqlens=torch.tensor([0, 15, 15, 100]))
        assert relative(packed[:, :15], model(x[:, :15])) < 2e-6
        assert relative(packed[:, 15:], model(x[:, 15:])) < 2e-6


def test_the_layer_trains():
    model = layer()
    x, y = torch.randn(2, 64, 48), torch.randn(2, 64, 48)
    steps = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = (model(x) - y).square().mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert losses[-1] < 0.98 * losses[0]


def test_the_layer_refuses():
    from heddle import nn, nsa

    model = layer(sharing=nsa.presets(3)["seed"])
    with pytest.raises(ValueError, match="cache shares otherwise than the layer"):
        model(torch.randn(1, 4, 48), cache=layer().cache(1, 10))
    with pytest.raises(ValueError, match="cu_seqlens is given beside cache"):
        model(torch.randn(1, 4, 48), cache=model.cache(1, 10), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="kv_heads must divide heads"):
        nn.NativeSparseAttention(48, 6, 4)


def test_a_refused_step_leaves_the_cache_as_it_was():
    x = operands(96, size=8, v_size=8, dtype=torch.float32)
    cache = nsa.Cache(1, 100, 2, 8, block=48, stride=16)
    with pytest.raises(ValueError, match="block_size is 48"):
        nsa.nsa_with_cache(*x[:3], cache, *x[3:], 3, 48, 5)
    assert cache.lengths.tolist() == [0]
    o = nsa.nsa_with_cache(*x[:3], cache, *x[3:], 3, SIZE, 5)
    whole = nsa.parallel_nsa(*x, None, 3, SIZE, 5, compression_block=48, compression_stride=16)
    assert relative(o, whole) < 2e-6


def test_the_layer_decodes_under_autocast():
    model = layer()
    x = torch.randn(1, 70, 48)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole, cache = model(x), model.cache(1, 70)
        parts = [model(part, cache=cache) for part in x.split([69, 1], 1)]
    assert relative(torch.cat(parts, 1), whole) < 2e-2
    with pytest.raises(TypeError, match="cu_seqlens is a list: it must be a torch tensor"):
        model(x, cu_seqlens=[0, 70])
    with torch.no_grad():
        step = torch.compile(lambda row: model(row, cache=cache), fullgraph=True, backend="aot_eager")
        cache.lengths.fill_(60)
        expected = model(x[:, 60:61], cache=cache)
        cache.lengths.fill_(60)
        assert relative(step(x[:, 60:61]), expected) < 1e-6


def test_the_layer_compiles():
    model = layer()
    x = torch.randn(1, 64, 48)
    assert relative(torch.compile(model, fullgraph=True)(x), model(x)) < 1e-6
