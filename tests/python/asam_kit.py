"""Adaptive sparse attention in float64, from its definition: the public package's formulae, and Heddle's over tiles."""

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def config(**options):
    """A small one, without dropout."""
    from heddle import nn

    small = {"dim": 32, "num_heads": 4, "dim_head": 8, "dropout": 0.0, "block_size": 16, "window_size": 16, "stride": 3}
    return nn.ASAMConfig(**{**small, "num_clusters": 3, "num_random": 16, "scales": (2, 3, 4), **options})


def layer(**options):
    """In eval mode: the gate drops some of its features else."""
    from heddle import nn

    torch.manual_seed(0)
    made = nn.ASAMLayer(config(**options)).eval()
    if made.adaptive_attn is not None:
        with torch.no_grad():  # heads and sequences that differ, on both sides of a half
            made.adaptive_attn.gate.sparse_threshold.copy_(torch.linspace(-0.3, 0.3, made.config.num_heads))
            made.adaptive_attn.gate.gate_temp.fill_(0.2)
    return made


def attention(q, k, v, kept, scale, log_weight=None):
    """[B, H, T, D] of float64 operands: softmax over the kept pairs, 0 in rows that have none."""
    scores = q @ k.transpose(-1, -2) * scale
    if log_weight is not None:
        scores = scores + log_weight
    return torch.nan_to_num(scores.masked_fill(~kept, -torch.inf).softmax(-1), nan=0.0) @ v


def public_gate(state, x, pools=4):
    """gate [B, H], confidence [B, H] and pattern logits [B, 4] of the whole of x [B, T, dim], by the public formulae."""
    state = {name: value.double() for name, value in state.items()}

    def linear(name, y):
        return y @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    x = x.double().transpose(1, 2)
    bins = torch.cat([F.adaptive_avg_pool1d(x, max(1, x.shape[1] // 2**i)) for i in range(pools)], -1).transpose(1, 2)
    weights = (bins @ x).mean(-1, keepdim=True).softmax(1)
    features = linear("feature_proj.0", (bins * weights).sum(2))
    features = F.layer_norm(features, features.shape[-1:], state["feature_proj.1.weight"], state["feature_proj.1.bias"])
    features = F.gelu(features)

    def network(name):
        return linear(f"{name}.2", linear(f"{name}.0", features).relu())

    confidence = network("confidence_predictor").sigmoid()
    logits = (state["sparse_threshold"] - network("complexity_estimator")) * confidence / state["gate_temp"].abs()
    return logits.sigmoid(), confidence, network("pattern_selector")


def parts(state, config, x):
    """Of a layer's state: normed x [B, T, dim], q, k, v [B, H, T, D] in float64, and what makes y of the heads' results."""
    state = {name: value.double() for name, value in state.items()}
    x = x.double()

    def norm(name, y):
        return F.layer_norm(y, y.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    prefix = "adaptive_attn." if config.use_adaptive_gate else ""
    normed = norm("norm", x)
    qkv = normed @ state[f"{prefix}to_qkv.weight"].T
    q, k, v = qkv.unflatten(-1, (3, config.num_heads, config.dim_head)).permute(2, 0, 3, 1, 4)

    def finish(o):
        y = x + o.transpose(1, 2).flatten(2) @ state[f"{prefix}to_out.0.weight"].T + state[f"{prefix}to_out.0.bias"]
        hidden = F.gelu(norm("ffn_norm", y) @ state["ffn.0.weight"].T + state["ffn.0.bias"])
        return y + hidden @ state["ffn.3.weight"].T + state["ffn.3.bias"]

    return normed, q, k, v, finish


def gate_state(state):
    return {k.removeprefix("adaptive_attn.gate."): v for k, v in state.items() if k.startswith("adaptive_attn.gate.")}


def tile_kept(name, config, n, c, across):
    """Whether tile (n, c) is of a pattern that no data changes."""
    block = config.block_size
    if name == "local":
        return (
            any(
                abs(i - j) <= config.window_size // 2
                for i in (n * block, n * block + block - 1)
                for j in (c * block, c * block + block - 1)
            )
            or n == c
        )
    if name == "strided":
        return c % config.stride == 0 or abs(n - c) <= 1
    raise ValueError(name)


def tiles(layer, name, q, k):
    """bool [B, H, N, N] of a pattern over q, k [B, H, T, D] in float64, without causality; random is the library's own draw."""
    from heddle.nn.asam import patterns

    config, length = layer.config, q.shape[2]
    across = -(-length // config.block_size)
    shape = (*q.shape[:2], across, across)
    if name == "random":
        left = torch.ones(1, 1, across, across, dtype=torch.bool)
        return patterns.static("random", config, left.tril() if config.causal else left).expand(shape)
    if name == "clustered":
        blocks = [slice(n * config.block_size, (n + 1) * config.block_size) for n in range(across)]

        def cluster(vectors):
            centroids = layer.selection.centroids.detach().double()
            return torch.stack(
                [(F.cosine_similarity(y[:, :, None], centroids, dim=-1)).argmax(-1) for y in vectors], -1
            )

        of_rows = cluster([q[:, :, b.start] if config.causal else q[:, :, b].mean(2) for b in blocks])
        of_keys = cluster([k[:, :, b].mean(2) for b in blocks])
        return (of_rows[..., None] == of_keys[..., None, :]) | torch.eye(across, dtype=torch.bool)
    if name == "hierarchical":
        weights = layer.selection.scale_weights.detach().double().softmax(0)
        kept = torch.zeros(shape, dtype=torch.bool)
        for n in range(across):
            for c in range(across):
                has = [c % s == 0 or abs(n - c) <= s // 4 for s in config.scales]
                kept[:, :, n, c] = sum(w * h for w, h in zip(weights, has)) > 0.5
        return kept
    kept = [[tile_kept(name, config, n, c, across) for c in range(across)] for n in range(across)]
    return torch.tensor(kept).expand(shape)


def expected(layer, x):
    """y of a layer without compat, in float64, and the share of pairs that it depends on."""
    config, state = layer.config, layer.state_dict()
    normed, q, k, v, finish = parts(state, config, x)
    length, block = x.shape[1], config.block_size
    across, heads = -(-length // block), config.num_heads
    at = torch.arange(length)
    left = (at[:, None] >= at) if config.causal else torch.ones(length, length, dtype=torch.bool)
    gate = choice = None
    if config.use_adaptive_gate:
        # For each row the gate of its prefix.
        ends = [n * block + 1 for n in range(across)] if config.causal else [length]
        of_prefixes = [public_gate(gate_state(state), normed[:, :end]) for end in ends]
        gate, choice = (torch.stack([p[i] for p in of_prefixes], -1) for i in (0, 2))  # [B, H, R], [B, 4, R]
        row = (at // block) if config.causal else torch.zeros_like(at)
        gate = gate[..., row]
        if config.pattern_type == "adaptive":
            logits = choice[:, None] + layer.selection.head_bias.detach().double()[..., None]
            choice = logits.argmax(2)[..., row]  # [B, H, T]
    names = layer.selection.names
    kept = torch.zeros(x.shape[0], heads, length, length, dtype=torch.bool)
    for number, name in enumerate(names):
        of_pattern = tiles(layer, name, q, k).repeat_interleave(block, 2).repeat_interleave(block, 3)
        of_pattern = of_pattern[..., :length, :length]
        kept |= of_pattern if len(names) == 1 else of_pattern & (choice == number)[..., None]
    kept &= left
    log_weight = None
    if gate is not None:
        if config.gate == "hard":
            kept = torch.where((gate <= 0.5)[..., None], left, kept)
        else:
            log_weight = torch.where(kept, 0.0, torch.log1p(-gate)[..., None])
            kept = left.expand(kept.shape)
    share = kept.double().mean() / left.double().mean()
    return finish(attention(q, k, v, kept, config.scale, log_weight)), share.item()
