"""The paper's form of native sparse attention: learned compression and keys of their own for branches, in one call, over a
cache, and in the layer."""

import copy

import pytest
from heddle import nn
from nsa_kit import nsa, one_thread, operands, torch  # noqa: F401  one_thread is a fixture

SIZE, SLOTS, WINDOW = 16, 3, 9
CHUNKS = [37, 1, 1, 20, 1, 16]


def learned(size=8, v_size=12, block=16, seed=0, dtype=torch.float32):
    """A module whose results are no means any more."""
    torch.manual_seed(seed)
    module = nn.BlockCompression(size, block, v_size, hidden=24, dtype=dtype)
    for part in (module.keys, module.values):
        torch.nn.init.normal_(part.out.weight, std=0.1)
        torch.nn.init.normal_(part.positions)
    return module


def test_a_new_module_gives_means():
    module = nn.BlockCompression(8, 16, 12)
    k, v = torch.randn(5, 16, 2, 8), torch.randn(5, 16, 2, 12)
    for found, x in zip(module(k, v), (k, v)):
        assert torch.allclose(found, x.mean(1), atol=1e-6)
    for found, x in zip(learned()(k, v), (k, v)):
        assert (found - x.mean(1)).abs().max() > 0.05
    with pytest.raises(ValueError, match=r"k_blocks is \[5, 15, 2, 8\]: it must be \[N, 16, Hkv, 8\]"):
        module(k[:, 1:], v)
    with pytest.raises(ValueError, match=r"v_blocks is \[5, 16, 2, 8\]: it must be \[N, 16, Hkv, 12\]"):
        module(k, k)


def test_positions_in_a_block_count():
    module = learned()
    k, v = torch.randn(5, 16, 2, 8), torch.randn(5, 16, 2, 12)
    turned = module(k.flip(1), v.flip(1))
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(module(k, v), turned))


def test_gradients_of_compression():
    x = operands(50, group=2, size=8, v_size=8)
    kernels, double = learned(v_size=8), None
    double = copy.deepcopy(kernels).double()
    options = dict(block_counts=2, block_size=SIZE, window_size=5)
    with torch.no_grad():
        expected_lists = nsa.naive_nsa_compression(*x[:4], 2, SIZE, compress=double)[0]
    nsa.naive_nsa_with_compression(*x, **options, compress=double).square().sum().backward()
    single = [y.float() for y in x]
    nsa.parallel_nsa(*single, block_indices=expected_lists, **options, compress=kernels).square().sum().backward()
    for (name, found), expected in zip(kernels.named_parameters(), double.parameters()):
        assert expected.grad.norm() > 0, name
        assert (found.grad - expected.grad).norm() < 1e-5 * expected.grad.norm(), name


@pytest.mark.parametrize("sharing", [{}, nsa.presets(2)["seed"], nsa.presets(2)["seed_4_3"]], ids=["plain", "seed", "seed_4_3"])  # fmt: skip
@pytest.mark.parametrize("own", [(), ("cmp",), ("swa",), ("cmp", "swa")], ids=["shared", "cmp", "swa", "both"])
@pytest.mark.parametrize("form", [(16, 16), (16, 8), (8, 4), None], ids=["blocks", "overlapping", "small", "means"])
def test_a_cache_gives_what_the_whole_gives(form, own, sharing):
    x = operands(sum(CHUNKS), batch=2, group=2, size=8, v_size=12, dtype=torch.float32)
    more = operands(sum(CHUNKS), batch=2, group=2, size=8, v_size=12, dtype=torch.float32, seed=1)[1:3]
    other = operands(sum(CHUNKS), batch=2, group=2, size=8, v_size=12, dtype=torch.float32, seed=2)[1:3]
    pairs = {"cmp": more, "swa": other}
    extra = {f"{part}_{branch}": pairs[branch][n] for branch in own for n, part in enumerate("kv")}
    block, stride = form or (SIZE, SIZE)
    compress = None if form is None else learned(block=block)
    with torch.no_grad():
        sizes = dict(compression_block=block, compression_stride=stride)
        expected = nsa.parallel_nsa(*x, None, SLOTS, SIZE, WINDOW, compress=compress, **sizes, **extra, **sharing)
    made = {"block": block, "stride": stride, "query_heads": 4, **sharing}
    cache = nsa.Cache(2, sum(CHUNKS) + 3, 2, 8, 12, compress=compress, own_keys=own, **made)
    begin = 0
    for n in CHUNKS:
        some = slice(begin, begin + n)
        part, new = [y[:, some] for y in x], {name: y[:, some] for name, y in extra.items()}
        found = nsa.nsa_with_cache(*part[:3], cache, *part[3:], SLOTS, SIZE, WINDOW, **new)
        assert (found - expected[:, some]).norm() < 2e-6 * expected[:, some].norm(), begin
        begin += n


def test_sequences_of_unequal_length_are_compressed_each_at_its_own_blocks():
    compress = learned(block=8)
    make = torch.Generator().manual_seed(0)
    k, v = torch.randn(3, 40, 2, 8, generator=make), torch.randn(3, 40, 2, 12, generator=make)
    cache = nsa.Cache(3, 40, 2, 8, 12, block=8, stride=4, compress=compress)
    cache.append(k[:, :20], v[:, :20])
    cache.lengths.copy_(torch.tensor([20, 9, 0]))
    cache.append(k[:, 20:], v[:, 20:])
    for b, begin in enumerate((20, 9, 0)):
        rows = [torch.cat([x[b, :begin], x[b, 20:]]) for x in (k, v)]
        blocks = [x.unfold(0, 8, 4).movedim(-1, 1) for x in rows]
        for found, expected in zip((cache.k_pooled, cache.v_pooled), compress(*blocks)):
            assert torch.allclose(found[b, : len(expected)], expected, atol=1e-6), b


@pytest.mark.parametrize("preset", [None, "fast", "seed_4_3"])
def test_the_layer(preset):
    torch.manual_seed(0)
    sharing = None if preset is None else nsa.presets(3)[preset]
    layer = nn.NativeSparseAttention(
        48, 6, 2, block_size=SIZE, block_counts=3, window_size=9, compression="learned", own_keys=("swa", "cmp"), sharing=sharing
    )  # fmt: skip
    assert layer.own_keys == ("cmp", "swa") and layer.qkv.out_features == (6 + 2 * 3 * 2) * 8
    for part in (layer.compress.keys, layer.compress.values):
        torch.nn.init.normal_(part.out.weight, std=0.1)
    x = torch.randn(2, 70, 48)
    y = layer(x)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in layer.parameters())
    cache = layer.cache(2, 70)
    with torch.no_grad():
        found = torch.cat([layer(part, cache=cache) for part in x.split([40, 1, 28, 1], 1)], 1)
    assert (found - y).norm() < 2e-6 * y.norm()
    plain = nn.NativeSparseAttention(48, 6, 2, block_size=SIZE, block_counts=3, window_size=9)
    assert sorted(plain.state_dict()) == ["gates.bias", "gates.weight", "out.weight", "qkv.weight"]
    reloaded = copy.deepcopy(layer)
    reloaded.load_state_dict(layer.state_dict())
    assert torch.equal(reloaded(x), y)


def test_refusals():
    x = operands(20, group=2, size=8, v_size=8, dtype=torch.float32)
    for words, error, given in [
        (r"an element of own_keys is 'slc': it must be one of|own_keys", ValueError, dict(own_keys=("slc",))),
        (r"own_keys is 'cmp': it must be a tuple", TypeError, dict(own_keys="cmp")),
        (r"compress is given beside page_size", ValueError, dict(compress=learned(), page_size=16, pages=3)),
        (r"\[Cache\] compress is 'learned': it must be callable", TypeError, dict(compress="learned")),
        (r"\[Cache\] compress is a type: it must be callable", TypeError, dict(compress=nn.BlockCompression)),
    ]:
        with pytest.raises(error, match=words):
            nsa.Cache(1, 32, 2, 8, block=16, **given)
    with pytest.raises(ValueError, match="compression is 'mlp'"):
        nn.NativeSparseAttention(48, 6, 2, compression="mlp")
    for words, error, given in [
        ("head_size is 0: it must be at least 1", ValueError, (0, 16)),
        ("block is -1: it must be at least 1", ValueError, (8, -1)),
        ("head_size is '8': it must be an int", TypeError, ("8", 16)),
        ("v_head_size is 0: it must be at least 1", ValueError, (8, 16, 0)),
    ]:
        with pytest.raises(error, match=r"\[BlockCompression\] " + words):
            nn.BlockCompression(*given)
    with pytest.raises(ValueError, match="hidden is 0: it must be at least 1"):
        nn.BlockCompression(8, 16, hidden=0)
    with pytest.raises(TypeError, match="k_blocks is None: it must be a torch tensor"):
        learned()(None, None)
    for given, what in [(None, "a NoneType"), (x[1], "a Tensor"), ((x[1],), "a tuple")]:
        with pytest.raises(TypeError, match=rf"\[compress\] it gave {what}: it must give a pair"):
            nsa.parallel_nsa(*x, None, SLOTS, SIZE, compress=lambda k, v, given=given: given)
    cache = nsa.Cache(1, 32, 2, 8, block=SIZE, own_keys=("swa",))
    for words, given in [
        (r"\[nsa_with_cache\] k_swa is None: the cache was made with such keys in own_keys", {}),
        (r"\[nsa_with_cache\] k_cmp is given: the cache was made without", dict(k_swa=x[1], v_swa=x[2], k_cmp=x[1])),
        (r"\[nsa_with_cache\] v_swa is float32 \[1, 19, 2, 8\] and v_new is", dict(k_swa=x[1], v_swa=x[2][:, 1:])),
    ]:
        with pytest.raises(ValueError, match=words):
            nsa.nsa_with_cache(*x[:3], cache, *x[3:], SLOTS, SIZE, WINDOW, **given)
        assert cache.lengths.tolist() == [0]
    with pytest.raises(ValueError, match=r"\[Cache.append\] k_swa is None"):
        cache.append(*x[1:3])


def test_a_layer_refuses_a_cache_that_compresses_otherwise():
    def layer(**options):
        return nn.NativeSparseAttention(48, 6, 2, block_size=16, window_size=0, **options)

    own, other, mean = layer(compression="learned"), layer(compression="learned"), layer()
    apart = layer(compression_block=16, compression_stride=8)
    x = torch.randn(1, 4, 48)
    for one, cache, words in [
        (mean, own.cache(1, 32), "compressed by a BlockCompression of its own, and the layer .* by their means"),
        (own, mean.cache(1, 32), "compressed by their means, and the layer .* by a BlockCompression of its own"),
        (own, other.cache(1, 32), "compressed by a BlockCompression of its own, and the layer .* BlockCompression"),
        (mean, apart.cache(1, 32), "cache has blocks of 16 keys, every 8, .* and the layer of 16, every 16"),
    ]:
        with torch.no_grad(), pytest.raises(ValueError, match=words):
            one(x, cache=cache)
        assert cache.lengths.tolist() == [0]
    with torch.no_grad():
        assert own(x, cache=own.cache(1, 32)).shape == x.shape
