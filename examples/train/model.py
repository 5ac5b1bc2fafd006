"""A causal language model over bytes, with the attention as an argument."""

from __future__ import annotations

import dataclasses

import heddle
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
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def with_torch_math(q, k, v):
    """torch's unfused computation: how far two programs of the same thing drift apart."""
    with sdpa_kernel(SDPBackend.MATH):
        return with_torch(q, k, v)


ATTENTION = {"heddle": with_heddle, "torch": with_torch, "math": with_torch_math}


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int = 6
    heads: int = 8
    head_size: int = 64
    context: int = 2048

    @property
    def width(self):
        return self.heads * self.head_size


class Block(nn.Module):
    def __init__(self, shape, attention):
        super().__init__()
        self.shape, self.attention = shape, attention
        self.before_attention, self.before_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.project = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.shape.heads, self.shape.head_size)
        x = x + self.project(self.attention(*qkv.unbind(2)).reshape(batch, length, self.shape.width))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    """Bytes [B, S] to the logits of the next one, [B, S, 256]."""

    def __init__(self, shape, attention="heddle", checkpointing=False):
        super().__init__()
        self.checkpointing = checkpointing
        self.bytes = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape, ATTENTION[attention]) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if into_residual else 0.02)

    def forward(self, text):
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return functional.linear(self.last(x), self.bytes.weight)
