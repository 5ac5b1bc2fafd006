"""A causal language model over bytes, with the attention as an argument."""

from __future__ import annotations

import dataclasses
import functools

import heddle
import heddle.nsa
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

BYTES = 256


def with_heddle(q, k, v):
    return heddle.attention(q, k, v, causal="bottom_right")


def with_torch(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def with_torch_math(q, k, v):
    """torch's unfused computation: how far two programs of the same thing drift apart."""
    with sdpa_kernel(SDPBackend.MATH):
        return with_torch(q, k, v)


SPARSE = {"block_counts": 16, "block_size": 64, "window_size": 512}


def with_nsa(q, k, v, *gates, preset=None):
    """Native sparse attention; gates: of its three branches, [B, S, heads] each. preset: which rows share (docs/nsa.md)."""
    sharing = {} if preset is None else heddle.nsa.presets(q.shape[2] // k.shape[2])[preset]
    return heddle.nsa.parallel_nsa(q, k, v, *gates, **SPARSE, **sharing)


DENSE = {"heddle": with_heddle, "torch": with_torch, "math": with_torch_math}
GATED = {
    "nsa": with_nsa,
    "nsa_fast": functools.partial(with_nsa, preset="fast"),
    "nsa_seed": functools.partial(with_nsa, preset="seed"),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int = 6
    heads: int = 8
    head_size: int = 64
    context: int = 2048
    kv_heads: int | None = None  # None: as many as heads

    @property
    def width(self):
        return self.heads * self.head_size

    @property
    def kv_width(self):
        return (self.kv_heads or self.heads) * self.head_size


class Block(nn.Module):
    def __init__(self, shape, attention):
        super().__init__()
        self.shape, self.attention = shape, DENSE.get(attention) or GATED[attention]
        self.before_attention, self.before_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, shape.width + 2 * shape.kv_width, bias=False)
        self.gates = nn.Linear(shape.width, 3 * shape.heads, bias=False) if attention in GATED else None
        self.project = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x):
        normed = self.before_attention(x)
        widths = [self.shape.width, self.shape.kv_width, self.shape.kv_width]
        q, k, v = (part.unflatten(2, (-1, self.shape.head_size)) for part in self.qkv(normed).split(widths, dim=2))
        gates = () if self.gates is None else torch.sigmoid(self.gates(normed)).chunk(3, dim=2)
        x = x + self.project(self.attention(q, k, v, *gates).flatten(2))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    """Bytes [B, S] to the logits of the next one, [B, S, 256]."""

    def __init__(self, shape, attention="heddle", checkpointing=False):
        super().__init__()
        self.checkpointing = checkpointing
        self.bytes = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if into_residual else 0.02)

    def forward(self, text, positions=None):
        """positions: where each byte stands in its sequence, int64 [S]; None: one after the other, from 0 on."""
        if positions is None:
            positions = torch.arange(text.shape[1], device=text.device)
        x = self.bytes(text) + self.positions(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return functional.linear(self.last(x), self.bytes.weight)
