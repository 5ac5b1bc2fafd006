"""The public package asam: its state dicts, its formulae in float64, its names."""

import pytest
from asam_kit import F, attention, gate_state, parts, public_gate, relative, torch
from heddle import nn
from heddle.compat.asam import asam_layer, asam_layer_optimized, efficient_attention, flash_asam, quantization
from heddle.compat.asam import sparse_patterns as public

PATTERNS = ("local", "strided", "random", "clustered", "hierarchical")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gate_names(prefix, dim, heads, bins):
    """Of the public gate, 128 wide."""
    names = {"sparse_threshold": (heads,), "gate_temp": (1,), "feature_proj.0.weight": (128, bins), "feature_proj.0.bias": (128,)}  # fmt: skip
    names |= {"feature_proj.1.weight": (128,), "feature_proj.1.bias": (128,)}
    for network, out in (("complexity_estimator", heads), ("confidence_predictor", heads), ("pattern_selector", 4)):
        names |= {f"{network}.0.weight": (64, 128), f"{network}.0.bias": (64,)}
        names |= {f"{network}.2.weight": (out, 64), f"{network}.2.bias": (out,)}
    return {prefix + name: shape for name, shape in names.items()}


def with_norms(dim, *norms):
    names = {"ffn.0.weight": (4 * dim, dim), "ffn.0.bias": (4 * dim,), "ffn.3.weight": (dim, 4 * dim), "ffn.3.bias": (dim,)}  # fmt: skip
    return names | {f"{norm}.{part}": (dim,) for norm in norms for part in ("weight", "bias")}


def projections(prefix, dim, inner):
    shapes = {"to_qkv.weight": (3 * inner, dim), "to_out.0.weight": (dim, inner), "to_out.0.bias": (dim,)}
    return {prefix + name: shape for name, shape in shapes.items()}


LAYER = projections("", 48, 64) | with_norms(48, "norm", "ffn_norm")
GATED = LAYER | projections("adaptive_attn.", 48, 64) | gate_names("adaptive_attn.gate.", 48, 4, 90)
EFFICIENT = {"qkv.weight": (144, 48), "out_proj.weight": (48, 48)} | with_norms(48, "norm")
OPTIMIZED = EFFICIENT | {"qkv.bias": (144,), "out_proj.bias": (48,)}
#: What a public layer adds to its state as it runs at some lengths.
RUN = {
    "local": {"_pattern_modules.local_20._cached_pattern": (20, 20)},
    "clustered": {
        "_pattern_modules.clustered_20.centroids": (4, 5, 16),
        "_pattern_modules.clustered_20.temperature": (1,),
    },
    "hierarchical": {
        "_pattern_modules.hierarchical_20.scale_weights": (3, 4),
        **{f"_pattern_modules.hierarchical_20.patterns.{n}._cached_pattern": (20, 20) for n in range(3)},
    },
}


def asam_config(**options):
    small = {"dim": 48, "num_heads": 4, "dim_head": 16, "dropout": 0.0, "num_clusters": 5}
    return asam_layer.ASAMConfig(**{**small, **options})


def state_of(names):
    return {name: torch.randn(shape) for name, shape in names.items()}


def shapes(module):
    return {
        name: tuple(value.shape) for name, value in module.state_dict().items() if not name.startswith("selection.")
    }


@pytest.mark.parametrize("names, make", [
    (LAYER, lambda: asam_layer.ASAMLayer(asam_config(use_adaptive_gate=False))),
    (GATED, lambda: asam_layer.ASAMLayer(asam_config())),
    (GATED, lambda: asam_layer.ASAMLayer(asam_config(gate_hidden_dim=64))),  # which the public layer leaves
    (GATED, lambda: nn.ASAMLayer(nn.ASAMConfig(dim=48, num_heads=4, dim_head=16))),
    (gate_names("", 48, 8, 90), lambda: nn.AdaptiveGate(48)),
    (EFFICIENT, lambda: nn.EfficientASAMLayer(48, 4)),
    (EFFICIENT, lambda: efficient_attention.FlashASAMLayer(48, 4)),
    (OPTIMIZED, lambda: asam_layer_optimized.OptimizedASAMLayer(48, 4, use_adaptive_gate=False)),
    (OPTIMIZED | gate_names("adaptive_gate.", 48, 8, 90), lambda: asam_layer_optimized.OptimizedASAMLayer(48, 4)),
])  # fmt: skip
def test_state_dicts_load(names, make):
    made, state = make(), state_of(names)
    assert shapes(made) == names
    made.load_state_dict(dict(state))
    assert all(torch.equal(made.state_dict()[name], value) for name, value in state.items())
    with pytest.raises(RuntimeError, match="Missing key"):
        made.load_state_dict({name: value for name, value in state.items() if name != next(iter(state))})


def test_state_dicts_of_layers_that_ran_load():
    encoder = {f"layers.{n}.{name}": shape for n in range(2) for name, shape in (GATED | RUN["clustered"]).items()}
    encoder |= {"norm.weight": (48,), "norm.bias": (48,)}
    for make in (
        lambda: asam_layer.ASAMEncoder(asam_config(pattern_type="clustered"), 2),
        lambda: nn.ASAMEncoder(nn.ASAMConfig(dim=48, num_heads=4, dim_head=16, num_clusters=5), 2),  # chooses, too
    ):
        made, state = make(), state_of(encoder)
        made.load_state_dict(dict(state))
        taken = state["layers.1._pattern_modules.clustered_20.centroids"]
        assert torch.equal(made.layers[1].selection.centroids, taken)
        again = make()
        again.load_state_dict(made.state_dict())
        assert torch.equal(again.layers[1].selection.centroids, taken)
        with pytest.raises(RuntimeError, match="selection"):  # a state of Heddle's own is held to all of it
            again.load_state_dict({k: v for k, v in made.state_dict().items() if not k.endswith("selection.centroids")})
    for pattern, names in RUN.items():
        made = asam_layer.ASAMLayer(asam_config(pattern_type=pattern))
        state = state_of(GATED | names)
        made.load_state_dict(dict(state))
        if pattern == "hierarchical":
            taken = state["_pattern_modules.hierarchical_20.scale_weights"]
            assert torch.equal(made.selection.scale_weights, taken)
        nn.ASAMLayer(nn.ASAMConfig(dim=48, num_heads=4, dim_head=16, num_clusters=5)).load_state_dict(dict(state))
    state = state_of(GATED | RUN["clustered"])
    state["_pattern_modules.clustered_30.centroids"] = torch.randn(4, 5, 16)
    with pytest.raises(RuntimeError, match="this layer has one centroids for all lengths"):
        asam_layer.ASAMLayer(asam_config(pattern_type="clustered")).load_state_dict(state)


def test_a_hybrid_without_its_gate_loads():
    names = {"to_qkv.weight": (192, 48), "to_out.weight": (48, 64), "to_out.bias": (48,)}
    made = flash_asam.HybridASAM(asam_config())
    made.load_state_dict(state_of(names))
    assert shapes(made).keys() == {*names, "combine_gate.weight", "combine_gate.bias"}
    with pytest.raises(RuntimeError, match="combine_gate.bias"):
        made.load_state_dict(state_of(names | {"combine_gate.weight": (1, 48)}))


def public_mask(config, made, q, k):
    """The public masks, pair by pair; of q and k [B, H, T, D]."""
    length = q.shape[2]
    at = torch.arange(length)
    apart = (at[:, None] - at).abs()
    name = config.pattern_type
    if name == "local":
        return apart <= config.window_size // 2
    if name == "strided":
        return (apart <= 16) | (at % config.stride == 0)
    if name == "random":
        mask = torch.zeros(config.num_heads, length, length, dtype=torch.bool)
        with torch.random.fork_rng():
            for h in range(config.num_heads):
                torch.manual_seed(42 + h)
                for i in range(length):
                    mask[h, i, torch.randperm(length)[: config.num_random]] = True
        return mask
    if name == "clustered":
        centroids = F.normalize(made.selection.centroids.detach().double(), dim=-1)
        of = [
            (torch.einsum("bhsd,hcd->bhsc", F.normalize(x, dim=-1), centroids) / made.selection.temperature.detach()).softmax(-1)
            for x in (q, k)
        ]  # fmt: skip
        return torch.einsum("bhqc,bhkc->bhqk", *of) > 0.1
    weights = made.selection.scale_weights.detach().double().softmax(0)
    total = sum(w[:, None, None] * ((apart <= s // 4) | (at % s == 0)) for w, s in zip(weights, (4, 16, 64)))
    return total > 0.5


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_mixture_is_the_public_one(pattern, gated):
    torch.manual_seed(0)
    small = {"window_size": 20, "stride": 7, "num_random": 9, "num_clusters": 20}
    config = asam_config(pattern_type=pattern, use_adaptive_gate=gated, **small)
    made = asam_layer.ASAMLayer(config).eval()
    if pattern == "clustered":
        made.selection.temperature.data.fill_(0.05)
    if pattern == "hierarchical":
        made.selection.scale_weights.data.copy_(torch.randn(3, 4))
    x = torch.randn(2, 70, 48)
    mask = torch.rand(2, 1, 70, 70) > 0.2
    mask |= torch.eye(70, dtype=torch.bool)
    for given in (None, mask):
        normed, q, k, v, finish = parts(made.state_dict(), config, x)
        everything = torch.ones(1, 1, 70, 70, dtype=torch.bool) if given is None else given
        kept = public_mask(config, made, q, k)
        assert 0.02 < kept.double().mean() < 0.9
        o = attention(q, k, v, kept & everything, config.scale)
        if gated:
            gate, confidence, logits = public_gate(gate_state(made.state_dict()), normed)
            o = gate[..., None, None] * o + (1 - gate[..., None, None]) * attention(q, k, v, everything, config.scale)
        y, info = made(x, given, return_info=True)
        assert relative(y, finish(o)) < 2e-6
        if gated:
            assert info["gate_values"].shape == (2, 4, 70) and relative(info["pattern_logits"], logits) < 1e-5
            assert relative(info["confidence"], confidence) < 1e-5
        share = everything.double().mean() if gated else (kept & everything).double().mean()
        assert info["sparse_ratio"].item() == pytest.approx(share.item(), abs=1e-6)
    y.sum().backward()
    assert made.norm.weight.grad.abs().max() > 0


def windowed(made, x, reach, stride=None):
    """What OptimizedASAMLayer and EfficientASAMLayer have in front of their projections, q, k, v in float64."""
    state = {name: value.double() for name, value in made.state_dict().items()}
    normed = F.layer_norm(x.double(), (48,), state["norm.weight"], state["norm.bias"])
    qkv = normed @ state["qkv.weight"].T + state.get("qkv.bias", 0)
    q, k, v = qkv.unflatten(-1, (3, 4, 12)).permute(2, 0, 3, 1, 4)
    at = torch.arange(x.shape[1])
    o = attention(q, k, v, (at[:, None] - at).abs() <= reach, 12**-0.5)
    if stride is not None:
        o = (o + attention(q, k, v, (at % stride == 0).expand(len(at), -1), 12**-0.5)) / 2
    y = x + o.transpose(1, 2).flatten(2) @ state["out_proj.weight"].T + state.get("out_proj.bias", 0)
    hidden = F.gelu(y @ state["ffn.0.weight"].T + state["ffn.0.bias"])
    return y + hidden @ state["ffn.3.weight"].T + state["ffn.3.bias"]


def test_windows_and_dense_layers_are_the_public_ones():
    torch.manual_seed(0)
    x = torch.randn(2, 70, 48)
    local = asam_layer_optimized.OptimizedASAMLayer(48, 4, 20, 0.0).eval()
    assert relative(local(x)[0], windowed(local, x, 10)) < 2e-6
    strided = asam_layer_optimized.OptimizedASAMLayer(48, 4, 20, 0.0, pattern_type="strided").eval()
    y, info = strided(x, return_info=True)
    assert relative(y, windowed(strided, x, 16, 32)) < 2e-6
    at = torch.arange(70)
    either = ((at[:, None] - at).abs() <= 16) | (at % 32 == 0)
    assert info["sparse_ratio"].item() == pytest.approx(either.float().mean().item(), abs=1e-6)
    assert info["gate_values"].shape == (2, 8, 70)
    dense = efficient_attention.FlashASAMLayer(48, 4, 20, 0.0).eval()
    y, info = dense(x, return_info=True)
    assert relative(y, windowed(dense, x, 70)) < 2e-6 and info["sparse_ratio"] == 1
    here = nn.FlashASAMLayer(48, 4, 20, 0.0).eval()
    here.load_state_dict(dense.state_dict())
    assert relative(here(x)[0], windowed(dense, x, 10)) < 2e-6


def test_a_hybrid_is_what_the_public_one_was_to_be():
    torch.manual_seed(0)
    made = flash_asam.HybridASAM(asam_config(), local_window_size=20)
    with torch.no_grad():
        made.combine_gate.weight.normal_()
    x = torch.randn(2, 70, 48)
    y, info = made(x, return_info=True)
    state = {name: value.double() for name, value in made.state_dict().items()}
    q, k, v = (x.double() @ state["to_qkv.weight"].T).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    at = torch.arange(70)
    first = at // 20 * 20
    near = (at >= (first - 10)[:, None]) & (at < (first + 30)[:, None])
    far = (at % 32 == 0).expand(70, -1)
    g = (x.double() @ state["combine_gate.weight"].T + state["combine_gate.bias"]).sigmoid()[:, None]
    o = g * attention(q, k, v, near, 0.25) + (1 - g) * attention(q, k, v, far, 0.25)
    assert relative(y, o.transpose(1, 2).flatten(2) @ state["to_out.weight"].T + state["to_out.bias"]) < 2e-6
    assert info["sparse_ratio"].item() == pytest.approx((near | far).float().mean().item(), abs=1e-6)


def test_patterns_are_masks():
    before = torch.get_rng_state()
    drawn = public.RandomSparsePattern(30, 4, 2)
    mask = drawn.get_pattern("cpu")
    assert torch.equal(torch.get_rng_state(), before) and drawn.get_pattern("cpu") is mask
    config = asam_config(num_heads=2, pattern_type="random", num_random=4)
    assert torch.equal(mask, public_mask(config, None, torch.zeros(1, 2, 30, 1), None))
    assert not public.RandomSparsePattern(30, 4, 2).state_dict()
    public.LocalSparsePattern(8).load_state_dict({"_cached_pattern": torch.ones(8, 8)})
    local = public.LocalSparsePattern(30, 5).get_pattern("cpu")
    assert [row.nonzero()[:, 0].tolist() for row in local[[0, 9, 29]]] == [[0, 1, 2], [7, 8, 9, 10, 11], [27, 28, 29]]
    strided = public.StridedSparsePattern(30, 10, 1).get_pattern("cpu")
    assert strided[15].nonzero()[:, 0].tolist() == [0, 10, 14, 15, 16, 20]
    torch.manual_seed(0)
    clustered = public.ClusteredSparsePattern(30, 9, 2, 4)
    q, k = torch.randn(2, 1, 2, 30, 4)
    assign = clustered.compute_cluster_assignment(q, k)
    scores = clustered.apply_cluster_mask(torch.zeros(1, 2, 30, 30), *assign)
    together = torch.einsum("bhqc,bhkc->bhqk", *assign) > 0.1
    assert torch.equal(scores.isneginf(), ~together) and 0 < together.float().mean() < 1
    assert relative(assign[0].sum(-1), torch.ones(1, 2, 30)) < 1e-6
    tree = public.HierarchicalSparsePattern(30, [2, 4], 2)
    with torch.no_grad():
        tree.scale_weights[0, 0] = 5  # of head 0 the first stride has more than half
    both = tree.combine_patterns("cpu")
    assert torch.equal(both[0], public.StridedSparsePattern(30, 2, 0).build_pattern())
    assert torch.equal(both[1], both[0] & public.StridedSparsePattern(30, 4, 1).build_pattern())
    assert torch.equal(tree.build_pattern(), both[0])
    with pytest.raises(NotImplementedError, match="a pattern must have it"):
        public.SparsePattern(4).build_pattern()


def test_functions_around_attention():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 20, 4, 16)
    heads = [x.double().transpose(1, 2) for x in (q, k, v)]
    lower = torch.ones(20, 20, dtype=torch.bool).tril()
    around = flash_asam.FlashASAMLayer(asam_config())
    for causal in (False, True):
        want = attention(*heads, lower if causal else torch.ones_like(lower), 0.25).transpose(1, 2)
        assert relative(around.flash_attention_forward(q, k, v, causal), want) < 1e-6
    lower[3] = False
    o = flash_asam.SparseFlashAttention(asam_config())(q, k, v, lower)
    assert relative(o, attention(*heads, lower, 0.25).transpose(1, 2)) < 1e-6 and torch.count_nonzero(o[:, 3]) == 0


def test_models_in_8_and_16_bits():
    torch.manual_seed(0)
    x = torch.randn(2, 20, 48)
    made = nn.EfficientASAMLayer(48, 4, dropout=0.0).eval()
    want = made(x)[0].detach()
    with torch.no_grad():
        assert 0 < relative(quantization.quantize_asam_model(made)(x)[0], want) < 0.02
    half = quantization.quantize_asam_model(nn.EfficientASAMLayer(48, 4), torch.float16)
    assert half.qkv.weight.dtype == torch.float16
    with pytest.raises(ValueError, match="dtype is torch.float32: it must be torch.qint8 or torch.float16"):
        quantization.quantize_asam_model(made, torch.float32)


def test_what_the_public_classes_leave_is_refused():
    x = torch.randn(1, 20, 48)
    mask = torch.ones(1, 20, dtype=torch.bool)
    for words, call in {
        "use_local_attention is True beside compat": lambda: efficient_attention.FlashASAMLayer(48, 4, use_local_attention=True),
        "pattern_type is 'hierarchical': it must be one of 'local', 'strided'": lambda: asam_layer_optimized.OptimizedASAMLayer(48, 4, pattern_type="hierarchical"),
        r"\[OptimizedASAMLayer\] mask is given: the public layer leaves it": lambda: asam_layer_optimized.OptimizedASAMLayer(48, 4)(x, mask),
        r"\[HybridASAM\] mask is given beside compat": lambda: flash_asam.HybridASAM(asam_config())(x, mask),
        "lengths is given beside compat='asam'": lambda: asam_layer.ASAMLayer(asam_config())(x, lengths=torch.ones(1).int()),
        r"mask is \[1, 21\]: it must be broadcastable to \[B, H, T, T\]": lambda: asam_layer.ASAMLayer(asam_config())(x, torch.ones(1, 21) > 0),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()


def test_names_are_the_public_ones():
    import inspect

    import heddle

    compat = heddle.compat.asam
    assert compat.ASAMLayer is asam_layer.AdaptiveSparseAttention is nn.ASAMLayer
    fields = "dim num_heads dim_head dropout pattern_type window_size stride num_clusters use_adaptive_gate gate_hidden_dim use_gradient_checkpointing"  # fmt: skip
    for made, defaults in ((asam_layer.ASAMConfig, "hierarchical"), (nn.ASAMConfig, "adaptive")):
        parameters = inspect.signature(made).parameters
        assert list(parameters)[:11] == fields.split()
        assert [p.default for p in parameters.values()][:11] == [
            512,
            8,
            64,
            0.1,
            defaults,
            128,
            32,
            32,
            True,
            128,
            False,
        ]
    assert made().compat is None and asam_layer.ASAMConfig().compat == "asam"
