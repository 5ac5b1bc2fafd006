"""torch's own attention over ranks, torch.distributed.tensor.experimental.context_parallel, for gpu_ranks_rows.py.

It is a ring over torch's kernels that deals rows out as zigzag does. It has no grouped heads: keys are repeated in the call, as its
users have to. Whatever it raises is the row's to keep: it is experimental, and differs between versions of torch.
"""

from __future__ import annotations

import contextlib
import functools

import gpu_peers as peers
import torch
import torch.nn.functional as functional

BACKENDS = ("cudnn", "fa2")  # the second where the first does not run
ROTATIONS = {"allgather": "keys gathered", "alltoall": "keys passed round"}


@functools.cache
def _mesh(kind: str, ranks: int):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, (ranks,))


class ContextParallel:
    """This rank's share, entered for as long as it is called: torch's attention is another meanwhile, in this whole process.

    q, k, v: the whole's, [1, S, H, D] and [1, S, Hkv, D], whose rows it deals out itself.
    """

    def __init__(self, world, q, k, v, gradients: bool, others=()) -> None:
        """others: of the same rows, such as the gradient of the output, [1, S, H, D]; dealt out alike."""
        from torch.distributed.tensor.experimental import context_parallel

        self.heads = q.shape[2]
        self.mesh = _mesh(world.device.type, world.size)
        buffers = [x.detach().transpose(1, 2).contiguous() for x in (q, k, v, *others)]
        self._entered = contextlib.ExitStack()
        entered = context_parallel(
            self.mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers), no_restore_buffers=set(buffers)
        )
        self._entered.enter_context(entered)
        *self.operands, self.others = *buffers[:3], buffers[3:]
        if gradients:
            self.operands = [x.requires_grad_() for x in self.operands]

    def close(self) -> None:
        self._entered.close()
        for name in peers.BACKENDS.values():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)

    def forward(self):
        """[1, H, rows of this rank, D]."""
        q, *keys = self.operands
        group = self.heads // keys[0].shape[1]
        if group > 1:
            keys = [x.repeat_interleave(group, dim=1) for x in keys]
        return functional.scaled_dot_product_attention(q, *keys, is_causal=True)

    def whole(self, *tensors):
        """Of tensors as forward() has them, all ranks' rows in their order, [1, S, H, D]."""
        try:
            from torch.distributed.tensor.experimental._attention import context_parallel_unshard
        except ImportError:
            from torch.distributed.tensor.experimental._context_parallel._attention import context_parallel_unshard

        tensors = [x.detach() for x in tensors]
        return [x.transpose(1, 2) for x in context_parallel_unshard(self.mesh, tensors, [2] * len(tensors))]


def prepared(backend: str, rotation: str):
    """What is called before its calls are."""

    def prepare() -> None:
        try:
            from torch.distributed.tensor.experimental._attention import set_rotate_method
        except ImportError:
            from torch.distributed.tensor.experimental._context_parallel._attention import set_rotate_method

        set_rotate_method(rotation)
        peers.Chosen(backend, lambda: None).prepare()

    return prepare
