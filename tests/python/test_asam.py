"""Layers of adaptive sparse attention, against their definition in float64: what they compute, choose, skip and learn."""

import pytest
from asam_kit import config, expected, gate_state, layer, public_gate, relative, torch
from heddle import nn
from heddle.nn.asam import patterns

FORMS = [
    {"pattern_type": name, "use_adaptive_gate": gate is not None, "causal": causal, **({"gate": gate} if gate else {})}
    for name in ("adaptive", "local", "strided", "random", "clustered", "hierarchical")
    for gate in (("hard", "soft") if name == "adaptive" else ("soft", None))
    for causal in (False, True)
]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spread(made):
    """Heads that choose different patterns."""
    with torch.no_grad():
        made.selection.head_bias.copy_(torch.eye(4)[: made.config.num_heads] * 3)
    return made


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_a_layer_is_its_definition(form):
    made = layer(**form)
    if form["pattern_type"] == "adaptive":
        spread(made)
    for length in (1, 16, 75):
        x = torch.randn(2, length, 32)
        y, share = expected(made, x)
        for gradients in (True, False):  # everything is computed, or only what is chosen
            with torch.set_grad_enabled(gradients):
                out, info = made(x, return_info=True)
            assert relative(out, y) < 2e-6, (length, gradients)
            assert info["sparse_ratio"].item() == pytest.approx(share, abs=1e-6)
        if form["use_adaptive_gate"]:
            assert info["gate_values"].shape == (2, 4, length)
            if length > 1 and form.get("gate") == "hard":
                assert len((info["gate_values"] > 0.5).unique()) == 2  # heads of either kind
        if form["pattern_type"] == "adaptive":
            assert info["patterns"].unique().numel() == 4
    assert made.state_dict().keys() == layer(**form).state_dict().keys()  # no length leaves anything behind


@pytest.mark.parametrize("form", [f for f in FORMS if f["causal"]], ids=lambda form: "-".join(map(str, form.values())))
def test_later_tokens_move_no_earlier_bit(form):
    made = layer(**form)
    x = torch.randn(1, 75, 32)
    for at in (37, 64):  # inside a tile, and at its begin
        changed = x.clone()
        changed[:, at:] = 5 * torch.randn(1, 75 - at, 32)
        with torch.no_grad():
            (one, info), (two, other) = made(x, return_info=True), made(changed, return_info=True)
        assert torch.equal(one[:, :at], two[:, :at])
        assert not torch.equal(one[:, at:], two[:, at:])
        if "gate_values" in info:
            assert torch.equal(info["gate_values"][..., :at], other["gate_values"][..., :at])
        x.requires_grad_(True)
        y = made(x)[0]
        y[:, :at].sum().backward()
        assert torch.count_nonzero(x.grad[:, at:]) == 0
        x = x.detach()
        assert torch.equal(made(changed)[0][:, :at], y[:, :at])  # also where everything is computed


def test_the_gate_is_the_public_one_of_each_prefix():
    torch.manual_seed(0)
    whole = nn.AdaptiveGate(20, 3, 16).eval()
    causal = nn.AdaptiveGate(20, 3, 16, causal=True, block_size=16).eval()
    causal.load_state_dict(whole.state_dict())
    x = torch.randn(2, 70, 20) + 1
    for got, want in zip(whole(x), public_gate(whole.state_dict(), x)):
        assert relative(got[..., 0] if got.dim() == 3 else got, want) < 1e-5
    gates, confidence, logits = causal(x)
    assert (gates.shape, confidence.shape, logits.shape) == ((2, 3, 70), (2, 3, 70), (2, 70, 4))
    for row in (0, 15, 16, 69):
        of_prefix = public_gate(whole.state_dict(), x[:, : row // 16 * 16 + 1])
        for got, want in zip((gates[..., row], confidence[..., row], logits[:, row]), of_prefix):
            assert relative(got, want) < 1e-5
    assert whole.get_attention_mode(torch.tensor([[[0.4], [0.6]]])).tolist() == [[False, True]]


def test_a_gate_of_a_long_sequence_keeps_its_digits():
    gate = nn.AdaptiveGate(8, 2, 16, causal=True, block_size=128).eval()
    x = torch.randn(1, 40000, 8) + 3  # a bin has one position of up to 40000
    x[:, -2:] = 0.25
    assert relative(gate(x)[2][:, -1], public_gate(gate.state_dict(), x[:, : 39936 + 1])[2]) < 1e-5


def test_random_tiles_are_drawn():
    every = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    drawn = patterns.random(4, 42, 3, every)
    assert drawn.shape == (1, 3, 40, 40) and (drawn.sum(-1) == 4).all()
    assert len({tuple(row) for row in drawn[0].flatten(0, 1).tolist()}) > 115
    assert drawn.float().mean((0, 1, 2)).max() < 0.3  # no column that all rows have
    assert not torch.equal(drawn, patterns.random(4, 43, 3, every))
    causal = patterns.random(4, 42, 3, every.tril())
    assert causal[0, 0].sum(-1).tolist() == [min(n + 1, 4) for n in range(40)] and not causal.triu(1).any()
    shorter = patterns.random(4, 42, 3, every.tril()[..., :17, :17])
    assert torch.equal(causal[..., :17, :17], shorter)
    padded = every & (torch.arange(40) < 17)
    shorter = patterns.random(4, 42, 3, every[..., :17, :17])
    assert torch.equal(patterns.random(4, 42, 3, padded)[..., :17, :17], shorter)


def test_only_what_is_kept_is_computed(monkeypatch):
    entries = []
    sparse_attention = patterns.sparse_attention

    def counted(q, k, v, blocks, counts, **options):
        entries.append(int(counts.expand(q.shape[0], -1, q.shape[2]).sum()))
        return sparse_attention(q, k, v, blocks, counts, **options)

    monkeypatch.setattr(patterns, "sparse_attention", counted)
    x = torch.randn(1, 160, 32)
    made = layer(pattern_type="local", gate="hard")
    with torch.no_grad():
        made.adaptive_attn.gate.sparse_threshold.copy_(torch.tensor([9.0, 9, 9, -9]))
        _, info = made(x, return_info=True)
    kept = 3 * 10 - 2
    assert entries == [3 * kept + 100]  # tiles of three heads of the pattern and one of all keys
    assert info["sparse_ratio"].item() == pytest.approx((3 * kept + 100) / 400)
    entries.clear()
    made(x)
    assert entries == [4 * kept, 4 * (100 - kept)]  # with gradients the rest, too, and nothing twice
    entries.clear()
    made.requires_grad_(False)(x)
    assert entries == [3 * kept + 100]
    entries.clear()
    made = layer(pattern_type="local", use_adaptive_gate=False)
    made(x)[0].sum().backward()
    assert entries == [4 * kept]


def test_a_head_takes_the_pattern_of_its_largest_logit():
    made = layer(gate="soft")
    x = torch.randn(2, 75, 32)
    for number, name in enumerate(nn.asam.config.CHOICES):
        with torch.no_grad():
            made.selection.head_bias.zero_()[:, number] = 99
        alone = layer(pattern_type=name, gate="soft")
        state = {k: v for k, v in made.state_dict().items() if k in alone.state_dict()}
        alone.load_state_dict(state)
        y, info = made(x, return_info=True)
        assert (info["patterns"] == number).all()
        assert relative(y, alone(x)[0]) < 1e-6


def test_the_choice_has_a_straight_through_gradient():
    """That of the mean of all patterns' results by their shares, at the chosen one's result."""
    from heddle.nn.asam.adaptive import Adaptive

    made = spread(layer(gate="soft"))
    torch.manual_seed(1)
    q, k, v, d_o = torch.randn(4, 2, 75, 4, 8)
    scores = made.adaptive_attn.gate.scores(torch.randn(2, 75, 32))
    call = Adaptive(made.selection, q, k, v, scores, 1.0, None)
    o, _ = call._sparse()
    o.backward(d_o)
    logits = (scores.patterns[:, None] + made.selection.head_bias[:, None]).detach()[:, :, 0].requires_grad_(True)
    results = torch.stack([patterns.attend(q, k, v, f.tiles, made.config, None)[0] for f in call.found]).detach()
    chosen = results.gather(0, logits.argmax(-1)[None, :, None, :, None].expand(1, *o.shape))[0]
    assert torch.equal(o, chosen)
    mixed = torch.einsum("bhp,pbthd->bthd", logits.softmax(-1), results)
    mixed.backward(d_o)
    assert relative(made.selection.head_bias.grad, logits.grad.sum(0)) < 1e-5


def test_the_hard_gate_has_a_straight_through_gradient():
    made = layer(pattern_type="local", gate="hard")
    x = torch.randn(2, 75, 32)
    d_y = torch.randn(2, 75, 32)
    made(x)[0].backward(d_y)
    # The gate's share of the pattern, straight through: d = <d_o, o_pattern - o_all> in each head.
    o = {}
    hook = made.adaptive_attn.to_out.register_forward_pre_hook(lambda _, given: o.update(now=given[0]))
    d_o = {}
    back = made.adaptive_attn.to_out.register_full_backward_hook(lambda _, d_in, __: d_o.update(now=d_in[0]))
    made(x)[0].backward(d_y)
    hook.remove()
    back.remove()
    with torch.no_grad():
        normed = made.norm(x)
        scores = made.adaptive_attn.gate.scores(normed)
        q, k, v = made.adaptive_attn.to_qkv(normed).unflatten(-1, (3, 4, 8)).unbind(2)
        tiles = made.selection.select(
            "local", q, k, patterns.allowed(5, made.config, None, q.device), None, False
        ).tiles
        of_pattern, of_all = (
            patterns.attend(q, k, v, which, made.config, None)[0] for which in (tiles, torch.ones_like(tiles))
        )
        gate = scores.logits.sigmoid()
        d_gate = (d_o["now"].unflatten(-1, (4, 8)) * (of_pattern - of_all)).sum((1, 3))  # [B, H]
        slope = (gate * (1 - gate) * scores.confidence)[..., 0] / made.adaptive_attn.gate.gate_temp.abs()
        want = (d_gate * slope).sum(0)
    assert relative(made.adaptive_attn.gate.sparse_threshold.grad / 2, want) < 1e-4  # two backwards
    assert want.abs().min() > 0  # of heads on both sides of a half


@pytest.mark.parametrize("causal", [False, True])
def test_centroids_learn(causal):
    made = layer(pattern_type="clustered", use_adaptive_gate=False, causal=causal)
    x = torch.randn(1, 75, 32)
    y = made(x)[0]
    with torch.no_grad():
        assert torch.equal(made(x)[0], y)  # weights of exactly 1
    y.square().sum().backward()
    assert made.selection.centroids.grad.abs().amax((1, 2)).min() > 0
    assert made.selection.temperature.grad.abs() > 0


def test_scales_learn():
    made = layer(pattern_type="hierarchical", use_adaptive_gate=False)
    made(torch.randn(1, 160, 32))[0].square().sum().backward()
    assert made.selection.scale_weights.grad.abs().amax(0).min() > 0


@pytest.mark.parametrize("causal", [False, True])
def test_a_soft_gate_has_the_gradient_of_its_function(causal):
    made = layer(pattern_type="strided", gate="soft", causal=causal)
    torch.manual_seed(3)
    x, weight = torch.randn(1, 75, 32), torch.randn(1, 75, 32)
    leaves = [p for p in made.parameters() if p.requires_grad]
    (made(x)[0] * weight).sum().backward()
    for seed in range(3):
        along = [torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) for p in leaves]
        step, values = 2e-3, []
        with torch.no_grad():
            for sign in (1, -2, 1):
                for p, d in zip(leaves, along):
                    p += sign * step * d
                values.append(expected(made, x)[0].mul(weight).sum().item())
        slope = sum((p.grad.double() * d).sum().item() for p, d in zip(leaves, along))
        assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-3, abs=1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_a_padded_sequence_is_as_without_padding(causal):
    made = spread(layer(causal=causal))
    x, lengths = torch.randn(3, 75, 32), torch.tensor([75, 20, 33], dtype=torch.int32)
    y, info = made(x, lengths=lengths, return_info=True)
    mask = torch.arange(75) < lengths[:, None]
    for given in (mask, mask[:, None, None]):
        assert torch.equal(made(x, given)[0], y)
    for b, length in enumerate(lengths.tolist()):
        alone, other = made(x[b : b + 1, :length], return_info=True)
        assert relative(y[b : b + 1, :length], alone) < 2e-6
        assert torch.equal(info["patterns"][b, :, 0] if causal else info["patterns"][b], other["patterns"][0, :, 0] if causal else other["patterns"][0])  # fmt: skip
    encoder = nn.ASAMEncoder(made.config, 2).eval()
    assert encoder(x, lengths=lengths).shape == x.shape


def test_rows_without_keys_are_0():
    made = layer(pattern_type="clustered", use_adaptive_gate=False)
    q, k, v = torch.randn(3, 1, 40, 4, 8, requires_grad=True)
    tiles = torch.zeros(1, 4, 3, 3, dtype=torch.bool)
    tiles[..., 1, 0] = True
    o, lse = patterns.attend(q, k, v, tiles, made.config, None)
    o.sum().backward()
    assert torch.count_nonzero(o[:, :16]) == torch.count_nonzero(o[:, 32:]) == 0 and o[:, 16:32].all()
    assert lse[..., :16].isneginf().all()
    with torch.no_grad():
        made.selection.temperature.zero_()
    made = layer(gate="soft")
    with torch.no_grad():
        made.adaptive_attn.gate.gate_temp.zero_()
    y = made(torch.randn(1, 40, 32))[0]
    y.sum().backward()
    assert y.isfinite().all() and made.adaptive_attn.gate.sparse_threshold.grad.isfinite().all()


@pytest.mark.parametrize("form", [
    {"causal": True, "backend": "eager", "dynamic": True},  # all that is chosen; one graph for two lengths
    {"pattern_type": "local", "backend": "aot_eager", "dynamic": False},  # with a graph of the gradients
], ids=["causal", "local"])  # fmt: skip
def test_the_layer_compiles(form):
    how = {"fullgraph": True, "backend": form.pop("backend"), "dynamic": form.pop("dynamic")}
    made = layer(**form)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(made, **how)
    for length in (75, 40) if how["dynamic"] else (75,):
        x = torch.randn(1, length, 32)
        want = made(x)[0]
        y, info = compiled(x, return_info=True)
        assert relative(y, want) < 1e-6 and info["sparse_ratio"].shape == ()
        got = torch.autograd.grad(y.sum(), made.adaptive_attn.gate.sparse_threshold)[0]
        assert relative(got, torch.autograd.grad(want.sum(), made.adaptive_attn.gate.sparse_threshold)[0]) < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_autocast_and_a_scaler():
    made = nn.ASAMEncoder(config(), 2)
    x = torch.randn(2, 75, 32)
    steps, scaler = torch.optim.SGD(made.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=256.0)
    before = made.layers[0].adaptive_attn.to_qkv.weight.clone()
    with torch.autocast("cpu", torch.bfloat16):
        loss = made(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(steps)
    scaler.update()
    assert scaler.get_scale() == 256 and not torch.equal(before, made.layers[0].adaptive_attn.to_qkv.weight)
    alone = layer(pattern_type="hierarchical", gate="soft")
    with torch.autocast("cpu", torch.bfloat16):
        assert relative(alone(x)[0], alone(x.double().float())[0]) < 1e-6
        y = alone(x)[0]
    assert relative(y, alone(x)[0]) < 2e-2


def test_checkpointing_gives_the_same_gradients():
    one = spread(layer())
    two = spread(layer(use_gradient_checkpointing=True))
    two.load_state_dict(one.state_dict())
    x = torch.randn(1, 75, 32)
    for made in (one.train(), two.train()):
        torch.manual_seed(5)  # of the gate's dropout
        made(x, return_info=True)[0].square().sum().backward()
    grads = [[p.grad for p in made.parameters() if p.requires_grad] for made in (one, two)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    saved = []
    for made in (one, two):
        count = [0]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, c=count: (c.__setitem__(0, c[0] + 1), t)[1], lambda t: t
        ):
            made(x)
        saved.append(count[0])
    assert saved[1] < saved[0] / 4


def test_an_encoder_learns():
    torch.manual_seed(0)
    made = nn.ASAMEncoder(config(causal=True), 2)
    x = torch.randn(4, 40, 32)
    y = torch.roll(x, 1, 1) * 0.5
    steps = torch.optim.AdamW(made.parameters(), 5e-3)
    losses = []
    for _ in range(12):
        loss = (made(x) - y).square().mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    layers, infos = made(x, return_all_layers=True, return_info=True)
    assert len(layers) == 2 and torch.equal(made.norm(layers[-1]), made(x)) and "gate_values" in infos[1]


@pytest.mark.parametrize("format", ["int8_row", "int4_g32", "nvfp4"])
def test_projections_in_few_bits(format):
    made = spread(layer())
    x = torch.randn(2, 75, 32)
    want = made(x)[0]
    gate = {"*.gate.*": "float32"}  # else heads would choose otherwise, which no error bounds
    nn.quantize_model(made, {**gate, "*": format})
    assert type(made.adaptive_attn.to_qkv) is nn.Linear and made.adaptive_attn.to_qkv.format == format
    with torch.no_grad():
        y = made(x)[0]
    assert 0 < relative(y, want) < {"int8_row": 0.01}.get(format, 0.2)
    whole = nn.ASAMEncoder(config(), 1).eval()
    nn.quantize_model(whole, "int8_row")
    with torch.no_grad():
        assert whole(x).isfinite().all()


def test_bad_arguments_are_named():
    x = torch.randn(2, 20, 32)
    made = layer()
    for words, call in {
        "dim_head is 300: it must be from 1 to 256": lambda: config(dim_head=300),
        "pattern_type is 'dense': it must be one of": lambda: config(pattern_type="dense"),
        "block_size is 48: it must be 16, 32, 64 or 128": lambda: config(block_size=48),
        "num_heads is 0: it must be at least 1": lambda: config(num_heads=0),
        "dropout is 1.0: it must be from 0 up": lambda: config(dropout=1.0),
        "gate is 'mixed': it must be one of": lambda: config(gate="mixed"),
        "scales has 0 strides": lambda: config(scales=()),
        "use_adaptive_gate False: the gate's features choose": lambda: config(use_adaptive_gate=False),
        "the public layer is not causal": lambda: config(pattern_type="local", compat="asam", causal=True),
        "compat is 'asm': it must be one of 'asam'": lambda: config(pattern_type="local", compat="asm"),
        "config is a dict: it must be an ASAMConfig": lambda: nn.ASAMLayer({}),
        r"x is \[2, 20, 31\]: it must be \[B, T, 32\]": lambda: made(x[..., 1:]),
        r"x is \[2, 0, 32\]": lambda: made(x[:, :0]),
        "mask is float32: it must be a bool tensor": lambda: made(x, torch.ones(2, 20)),
        r"mask is \[2, 1, 20, 20\]: it must be of keys": lambda: made(x, torch.ones(2, 1, 20, 20, dtype=torch.bool)),
        "sequences must be padded on the right": lambda: made(x, torch.arange(20).expand(2, -1) > 3),
        r"lengths is \[3\]: it must be \[B\], \[2\]": lambda: made(x, lengths=torch.ones(3).int()),
        "mask is given beside lengths": lambda: made(x, torch.ones(2, 20) > 0, lengths=torch.ones(2).int()),
        "lengths is torch.float32": lambda: made(x, lengths=torch.ones(2)),
        "temperature is 0: it must be above 0": lambda: nn.AdaptiveGate(8, temperature=0),
        "dim is 32 and num_heads 5: num_heads must divide": lambda: nn.EfficientASAMLayer(32, 5),
        "mask is given under torch.compile": lambda: torch.compile(made, backend="eager", fullgraph=True)(x, torch.ones(2, 20) > 0),
    }.items():  # fmt: skip
        with pytest.raises((ValueError, TypeError, torch._dynamo.exc.Unsupported), match=words):
            call()


def test_windows_are_windows():
    x = torch.randn(2, 75, 32)
    for causal in (False, True):
        torch.manual_seed(0)
        local = nn.EfficientASAMLayer(32, 4, 16, 0.0, causal=causal).eval()
        at = torch.arange(75)
        window = (at[:, None] - at).abs() <= 8
        if causal:
            window = window & (at[:, None] >= at)
        dense = nn.EfficientASAMLayer(32, 4, 16, 0.0, False).eval()
        dense.load_state_dict(local.state_dict())
        y, info = local(x, return_info=True)
        assert relative(y, dense(x, window)[0]) < 1e-6
        of = torch.ones(75, 75).tril().sum() if causal else 75**2
        assert info["sparse_ratio"].item() == pytest.approx((window.sum() / of).item(), abs=1e-6)
        assert local(x[:, :16], return_info=True)[1]["sparse_ratio"] == 1
        lengths = torch.tensor([75, 40])
        used = (at < lengths[:, None])[:, None, None]
        rows = used[:, 0, 0, :, None]
        assert relative(local(x, lengths=lengths)[0] * rows, local(x, used)[0] * rows) < 1e-6
    trained = nn.EfficientASAMLayer(32, 4, 16, 0.5).train()
    torch.manual_seed(0)
    one = trained(x)[0]
    torch.manual_seed(0)
    assert torch.equal(trained(x)[0], one) and not torch.equal(trained(x)[0], one)


def test_near_and_far_keys_are_joined_once():
    torch.manual_seed(0)
    for causal in (False, True):
        made = nn.HybridASAM(config(causal=causal), 16)
        with torch.no_grad():
            made.combine_gate.weight.normal_()
        x = torch.randn(2, 100, 32)
        y, info = made(x, return_info=True)
        n = torch.arange(100) // 16
        near = (n[:, None] - n).abs() <= 1
        far = (n % 3 == 0) & ~near
        left = torch.ones(100, 100, dtype=torch.bool).tril() if causal else torch.ones(100, 100, dtype=torch.bool)
        g = (x.double() @ made.combine_gate.weight.double().T + made.combine_gate.bias.double()).sigmoid()[:, None]
        from asam_kit import attention

        q, k, v = (x.double() @ made.to_qkv.weight.double().T).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        o = attention(q, k, v, (near | far) & left, 8**-0.5, torch.where(near, g.log(), (1 - g).log()))
        want = o.transpose(1, 2).flatten(2) @ made.to_out.weight.double().T + made.to_out.bias.double()
        assert relative(y, want) < 2e-6
        assert info["sparse_ratio"].item() == pytest.approx((((near | far) & left).sum() / left.sum()).item(), abs=1e-6)
        y.sum().backward()
        assert made.combine_gate.weight.grad.abs().max() > 0


def test_the_gates_state_is_part_of_the_layers():
    made = layer()
    assert gate_state(made.state_dict()).keys() == nn.AdaptiveGate(32, 4).state_dict().keys()
