"""A Transformer block that ranks of a group share. heddle.nn is its public name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from .block import TransformerBlock
from .exchanges import Shared
from .parallel_linear import ColumnParallelLinear, RowParallelLinear, even_parts, joined, unit_of_columns

if TYPE_CHECKING:
    import torch.distributed as dist


class TensorParallelBlock(TransformerBlock):
    """A rank's share of a ``TransformerBlock``: some of its heads and of its feed-forward's inner values, over the same x.

    ``qkv`` and ``up`` are ``ColumnParallelLinear``, ``out`` and ``down`` ``RowParallelLinear``: two sums over ranks forward, two
    backward. Outputs and gradients are the whole block's within rounding, and bits repeat for the same number of ranks. The gradient of
    what every rank has (norms, the biases of ``out`` and ``down``) is complete on each: such parameters stay alike where optimizers are.

    Args:
      block: the whole, in floats or with quantised layers, the same on every rank: made alike, or with ``load_state_dict`` of the
        whole's state. It is copied, and may go.
      group: of torch.distributed; None: the default one. Without any, this process is the only rank.
      sequence_parallel: x and the result are [B, S / ranks, dim], a range of rows each; norms and residuals are computed for these alone.
      timeout: seconds that an exchange may take; None: the group's own.

    Key/value heads go to ranks with the query heads that share them, and inner values in units that low-bit formats store together; the
    first ranks have one more where the number does not divide.

    Raises:
      ValueError: fewer key/value heads, or units, than ranks; a low-bit ``out`` whose groups a rank's heads would cut; dropout, for which
        ranks would have to draw alike; what the layers refuse.
      RuntimeError: by a call or its backward, a rank that is lost or took longer than the timeout.

    Source: Shoeybi et al., arXiv 1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198.
    """

    def __init__(
        self,
        block: TransformerBlock,
        *,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        timeout: float | None = None,
    ) -> None:
        nn.Module.__init__(self)
        name = "TensorParallelBlock"
        if block.dropout > 0:
            raise ValueError(
                f"[{name}] the block's dropout is {block.dropout}: it must be 0, as ranks do not draw alike"
            )
        self._shared = shared = Shared(f"nn.{name}", group, sequence_parallel, timeout)
        if block.kv_heads < shared.size:
            raise ValueError(
                f"[{name}] the block has {block.kv_heads} key/value heads for {shared.size} ranks: each must have one"
            )
        each, size = block.heads // block.kv_heads, block.head_dim
        begin, end = even_parts(block.kv_heads, shared.size)[shared.rank]
        self._heads = slice(begin * each, end * each)
        self._mask_heads = block.heads
        self.heads, self.kv_heads, self.head_dim = (end - begin) * each, end - begin, size
        self.norm_first, self.checkpointing = block.norm_first, block.checkpointing
        self.causal, self.dropout = block.causal, block.dropout
        q, k = block.heads * size, (block.heads + block.kv_heads) * size
        width = (begin * each * size, end * each * size)
        keys = [(start + begin * size, start + end * size) for start in (q, k)]
        hidden = block.down.in_features
        unit = unit_of_columns(block.down)
        if -(-hidden // unit) < shared.size:
            raise ValueError(
                f"[{name}] the feed-forward's {hidden} inner values, {unit} of which are stored together, are for {shared.size} ranks: "
                "each must have some"
            )
        inner = [min(x * unit, hidden) for x in even_parts(-(-hidden // unit), shared.size)[shared.rank]]
        rows = 2 if block.up.activation == "swiglu" else 1
        over: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel, "timeout": timeout}
        self.norm1 = _NormOfRows(block.norm1, shared)  # type: ignore[assignment] # a norm with the same parameters
        self.norm2 = _NormOfRows(block.norm2, shared)  # type: ignore[assignment]
        self.qkv = ColumnParallelLinear(block.qkv, outputs=joined([width, *keys]), **over)
        self.out = RowParallelLinear(block.out, inputs=width, **over)
        self.up = ColumnParallelLinear(block.up, outputs=(inner[0] * rows, inner[1] * rows), **over)
        self.down = RowParallelLinear(block.down, inputs=(inner[0], inner[1]), **over)
        self.train(block.training)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        """mask: bool, broadcastable to [B, heads, S, S], of all heads and rows of the whole; True = attend."""
        if mask is not None and mask.dim() >= 3 and mask.shape[-3] != 1:
            if mask.shape[-3] != self._mask_heads:
                raise ValueError(
                    f"[TensorParallelBlock] mask is {list(mask.shape)}: it must be of the whole block's {self._mask_heads} heads, or of 1"
                )
            mask = mask[..., self._heads, :, :]
        return super().forward(x, mask=mask)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank {self._shared.rank} of {self._shared.size}"


class _NormOfRows(nn.Module):
    """A LayerNorm or RMSNorm of a rank's rows, with gradients of all ranks' rows."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, shared: Shared) -> None:
        super().__init__()
        self._shared, self._shape, self._eps = shared, list(norm.normalized_shape), norm.eps
        self._is_layer_norm = isinstance(norm, nn.LayerNorm)
        for name in ("weight", "bias"):
            p = getattr(norm, name, None)
            copied = None if p is None else nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            self.register_parameter(name, copied)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._shared.alike(self.weight, self.bias)
        if self._is_layer_norm:
            assert self._eps is not None
            return F.layer_norm(x, self._shape, weight, bias, self._eps)
        return F.rms_norm(x, self._shape, weight, self._eps)
