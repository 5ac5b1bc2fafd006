"""Writes tests/data/golden_asam.safetensors: what heddle.nn's layers of adaptive sparse attention compute, for their C++ twin.

The file has x, one set of weights by the names of the state dict, and of each case in CASES what the layer returns; its metadata has each
case's configuration as JSON. Choices that hang by a thread would be another processor's luck, so a seed is taken that has none.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from heddle import nn
from safetensors.torch import save_file

GOLDEN = Path(__file__).resolve().parents[1] / "tests/data/golden_asam.safetensors"
BATCH, LENGTH = 2, 65  # four whole tiles, and one of one row
COMMON = {
    "dim": 16,
    "num_heads": 2,
    "dim_head": 12,
    "window_size": 32,
    "stride": 3,
    "num_clusters": 3,
    "gate_hidden_dim": 6,
    "block_size": 16,
    "num_random": 32,
    "seed": 7,
    "scales": [2, 3, 4],
}
NO_GATE: dict[str, Any] = {"use_adaptive_gate": False}
SOFT: dict[str, Any] = {"gate": "soft"}
CAUSAL: dict[str, Any] = {"causal": True}
#: Beside fields of the configuration: "length", of the rows of x that are taken, "lengths", and "layers" of an encoder of equal layers.
CASES: dict[str, dict[str, Any]] = {
    "local": {"pattern_type": "local", **NO_GATE},
    "local_causal_hard": {"pattern_type": "local", **CAUSAL},
    "strided_causal": {"pattern_type": "strided", **NO_GATE, **CAUSAL},
    "strided_hard_lengths": {"pattern_type": "strided", "lengths": [65, 37]},
    "random": {"pattern_type": "random", **NO_GATE},
    "random_causal_soft": {"pattern_type": "random", **SOFT, **CAUSAL},
    "clustered_lengths": {"pattern_type": "clustered", **NO_GATE, "lengths": [50, 65]},
    "clustered_causal_hard": {"pattern_type": "clustered", **CAUSAL},
    "hierarchical_causal": {"pattern_type": "hierarchical", **NO_GATE, **CAUSAL},
    "hierarchical_soft_lengths": {"pattern_type": "hierarchical", **SOFT, "lengths": [20, 64]},
    "adaptive_hard": {},
    "adaptive_causal_hard_lengths": {**CAUSAL, "lengths": [65, 33]},
    "adaptive_soft_lengths": {**SOFT, "lengths": [1, 60]},
    "adaptive_causal_soft": {**SOFT, **CAUSAL},
    "one_row": {**CAUSAL, "length": 1},
    "encoder": {**CAUSAL, "layers": 2},
}


def layer_of(case: dict[str, Any]) -> nn.ASAMLayer:
    options = {**COMMON, **{key: value for key, value in case.items() if key not in ("length", "lengths", "layers")}}
    return nn.ASAMLayer(nn.ASAMConfig(**options)).eval()


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    """Of layers of every configuration together, such that heads, tiles and sequences differ in their choices."""
    torch.manual_seed(seed)
    state = {}
    for case in ({}, {"pattern_type": "hierarchical"}):
        state.update(layer_of(case).state_dict())
    gate = "adaptive_attn.gate."
    for name, value in state.items():
        if value.dim() == 1 and not name.startswith(gate):
            value += 0.2 * torch.randn_like(value)  # norms and biases that show
    for network in ("complexity_estimator", "pattern_selector"):
        state[f"{gate}{network}.2.weight"] *= 4
    state[f"{gate}sparse_threshold"].copy_(torch.tensor([-0.2, 0.3]))
    state[f"{gate}gate_temp"].fill_(0.2)
    state["selection.centroids"].normal_()
    state["selection.scale_weights"].normal_()
    state["selection.head_bias"].normal_(std=0.4)
    return state


def inputs_of(seed: int) -> torch.Tensor:
    torch.manual_seed(seed + 1000)
    return torch.randn(BATCH, LENGTH, COMMON["dim"]) + torch.randn(BATCH, 1, COMMON["dim"])


def load(module: torch.nn.Module, weights: dict[str, torch.Tensor], prefix: str = "") -> None:
    module.load_state_dict({name: weights[name.removeprefix(prefix)] for name in module.state_dict()})


def run(case: dict[str, Any], weights: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the layer, or the encoder, returns."""
    x = x[:, : case.get("length", LENGTH)]
    lengths = torch.tensor(case["lengths"], dtype=torch.int32) if "lengths" in case else None
    layer = layer_of(case)
    load(layer, weights)
    with torch.no_grad():
        if "layers" not in case:
            y, info = layer(x, return_info=True, lengths=lengths)
            assert info is not None
        else:
            encoder = nn.ASAMEncoder(layer.config, num_layers=case["layers"]).eval()
            for one in encoder.layers:
                load(one, weights)
            encoder.norm.load_state_dict({name: weights[f"norm.{name}"] for name in ("weight", "bias")})
            y, info = encoder(x, lengths=lengths), {}
    if "patterns" in info:
        info["patterns"] = info["patterns"].int()
    if info:
        info["sparse_ratio"] = info["sparse_ratio"][None]
    return {"y": y, **info}


def nearness(case: dict[str, Any], weights: dict[str, torch.Tensor], x: torch.Tensor) -> float:
    """How near the nearest of a layer's choices is to another one."""
    x = x[:, : case.get("length", LENGTH)]
    layer = layer_of(case)
    load(layer, weights)
    config, block = layer.config, layer.config.block_size
    found = [1.0]
    with torch.no_grad():
        normed = layer.norm(x)
        part = layer if layer.adaptive_attn is None else layer.adaptive_attn
        lengths = torch.tensor(case.get("lengths", [x.shape[1]] * BATCH), dtype=torch.int32)
        if layer.adaptive_attn is not None:
            scores = layer.adaptive_attn.gate.scores(normed, lengths)
            if config.gate == "hard":
                found.append(scores.logits.abs().min().item())
            if config.pattern_type == "adaptive":
                top = (scores.patterns[:, None] + layer.selection.head_bias[:, None]).topk(2, -1).values
                found.append((top[..., 0] - top[..., 1]).min().item())
        if "clustered" in layer.selection.names:
            centroids = torch.nn.functional.normalize(layer.selection.centroids, dim=-1)
            q, k, _ = part.to_qkv(normed).unflatten(-1, (3, config.num_heads, config.dim_head)).unbind(2)
            for b in range(BATCH):
                for first in range(0, int(lengths[b]), block):
                    end = min(first + block, int(lengths[b]))
                    rows = q[b, first] if config.causal else q[b, first:end].mean(0)
                    for mean in (rows, k[b, first:end].mean(0)):
                        like = torch.einsum("hd,hcd->hc", torch.nn.functional.normalize(mean, dim=-1), centroids)
                        top = like.topk(2, -1).values
                        found.append((top[:, 0] - top[:, 1]).min().item())
        if config.pattern_type == "hierarchical":
            shares = layer.selection.scale_weights.softmax(0)
            codes = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * len(config.scales))
            found.append((codes @ shares - 0.5).abs().min().item())
    return min(found)


def varied(results: dict[str, dict[str, torch.Tensor]]) -> bool:
    """Whether hard gates fall on both sides, and all four patterns are chosen."""
    chosen: set[int] = set()
    for name, result in results.items():
        if "hard" in name:
            gates = result["gate_values"] > 0.5
            if bool(gates.all()) or not bool(gates.any()):
                return False
        if "patterns" in result:
            chosen |= set(result["patterns"].flatten().tolist())
    return chosen == {0, 1, 2, 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=GOLDEN)
    out = parser.parse_args().out
    for seed in range(2000):
        weights, x = weights_of(seed), inputs_of(seed)
        if min(nearness(case, weights, x) for case in CASES.values()) < 1e-3:
            continue
        results = {name: run(case, weights, x) for name, case in CASES.items()}
        if varied(results):
            break
    else:
        raise SystemExit("no seed has choices that are clear and varied")
    held = {"x": x, **{f"weights/{name}": value for name, value in weights.items()}}
    for name, result in results.items():
        held.update({f"{name}/{part}": value for part, value in result.items()})
    metadata = {name: json.dumps({**COMMON, **case}) for name, case in CASES.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in held.items()}, out, metadata=metadata)
    print(f"{out}: seed {seed}, {len(CASES)} cases, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
