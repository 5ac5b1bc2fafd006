"""Attention over the ranks of a group, with its gradients."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .._options import flag
from ..gradients import attention_backward
from .pieces import Layout, Piece, RowGradients, Sum, forward_whole, layout_of
from .plan import Plan, SchemeName
from .ranks import Ranks, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME = "distributed.attention"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SCHEMES = ("auto", "gather", "ring")
_OF_PLAN = ("causal", "window", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, plan: Plan, return_lse: Literal[False] = False, **options: Any
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, plan: Plan, return_lse: Literal[True], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    scheme: SchemeName = "auto",
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    timeout: float | None = None,
    **others: Any,
) -> Any:
    """This rank's share of attention over all ranks of a group: exact, with gradients, which every rank must ask for alike.

    Every rank calls this at the same place of its program, with its own rows (``shard``). The first call with a plan, shapes and
    options compares them over all ranks. On the CPU.

    Args:
      q, k, v: this rank's rows in the plan's order, [B, rows, H, D], [B, rows, Hkv, D], [B, rows, Hkv, Dv], or packed [rows, H, D] and
        so on; float32, float16 or bfloat16. Keys are sent as they are, not repeated for each query head.
      plan: of ``heddle.distributed.plan``: it has causality, window and documents.
      group: of torch.distributed, with as many ranks as the plan; None: the default one. A plan for one rank needs none.
      scheme: how keys get to rows. "gather": all keys to every rank, then one call, or one for each of a rank's runs in a document.
        "ring": keys go from rank to rank while the ones before are computed with. "auto": what the plan predicts to be faster.
      scale, softcap: as of ``heddle.attention``.
      alibi_slopes: float32 [H]; distances are in the document. Not with order "striped".
      sink: float32 [H], the same on every rank. Its gradient is that of all ranks' rows, on every rank.
      return_lse: also return the log-sum-exp of each row's scores, which has a gradient too.
      timeout: seconds that an exchange may take; None: the group's own.

    Returns:
      out [B, rows, H, Dv] (packed: [rows, H, Dv]) of q's dtype; with return_lse a pair with lse, float32 [B, H, rows] (packed: [H, rows]).
      Gradients of keys are summed in float32 in a fixed order: bits repeat for the same plan and scheme.

    Raises:
      ValueError: a bad argument, before anything is sent; the message names it, its value and the rule. Also, on every rank, ranks
        that do not agree.
      RuntimeError: a rank is lost or took longer than the timeout; the message names the exchange, the rank and the plan. The group
        is of no use then.

    Sources: Liu, Zaharia and Abbeel, arXiv 2310.01889; Dubey et al., arXiv 2407.21783.
    """
    _refuse_others(others)
    return_lse = flag(_NAME, "return_lse", return_lse)
    if not isinstance(plan, Plan):
        raise TypeError(f"[{_NAME}] plan is a {type(plan).__name__}: it must be of heddle.distributed.plan")
    if scheme not in _SCHEMES:
        raise ValueError(f"[{_NAME}] scheme is {scheme!r}: it must be one of {', '.join(_SCHEMES)}")
    ranks = Ranks(_NAME, plan, group, timeout)
    packed = _check(q, k, v, plan, ranks.rank)
    if packed:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    _check_heads(alibi_slopes, "alibi_slopes", q)
    _check_heads(sink, "sink", q)
    if alibi_slopes is not None and plan.order == "striped" and plan.ranks > 1:
        raise ValueError(
            f"[{_NAME}] alibi_slopes are given and the plan's order is 'striped': its rows stand for several positions each, which "
            "ALiBi is not about"
        )
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError(f"[{_NAME}] alibi_slopes requires a gradient: there is none for it")
    chosen = plan.scheme if scheme == "auto" else scheme
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sink))
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    ranks.agree(
        {
            "plan": _signed(plan._native.digest),
            "scheme": _SCHEMES.index(chosen),
            "batch": q.shape[0],
            "heads": q.shape[2],
            "kv_heads": k.shape[2],
            "head_size": q.shape[3],
            "head_size_v": v.shape[3],
            "dtype": _DTYPES.index(q.dtype),
            "scale": _bits(scale),
            "softcap": _bits(softcap),
            "alibi_slopes": int(alibi_slopes is not None),
            "sink": int(sink is not None),
            "whether gradients are wanted": int(wanted),
            "whether a gradient of the sink is": int(wanted and sink is not None and sink.requires_grad),
        },
        _SHOWN,
    )
    layout = layout_of(plan, ranks.rank, chosen)
    call = _Call(ranks, layout, chosen, {"scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes}, v.shape[3])
    out, lse = _Attention.apply(q, k, v, sink, call)
    if packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


def _refuse_others(others: dict[str, Any]) -> None:
    from .._types import AttentionOptions

    for name, value in others.items():
        if name in _OF_PLAN:
            raise ValueError(
                f"[{_NAME}] {name} is given: the plan has causality, window and documents; say it to plan()"
            )
        if name not in AttentionOptions.__annotations__:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ValueError(f"[{_NAME}] {name} is given: served are scale, softcap, alibi_slopes, sink and return_lse")


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, rank: int) -> bool:
    """Whether rows are packed."""
    packed = q.dim() == 3
    rows = plan.rows_of(rank)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.device.type != "cpu":
            raise ValueError(
                f"[{_NAME}] {name} is on {x.device}: attention over several processes is on the CPU so far"
            )
        if x.dtype not in _DTYPES or x.dtype != q.dtype:
            raise ValueError(
                f"[{_NAME}] {name} is {x.dtype}: q, k and v must have one dtype, float32, float16 or bfloat16"
            )
        if x.dim() != (3 if packed else 4):
            raise ValueError(
                f"[{_NAME}] {name} is {list(x.shape)}: q, k and v must be [B, rows, heads, head size], or all packed "
                "[rows, heads, head size]"
            )
        if x.shape[-3] != rows:
            raise ValueError(f"[{_NAME}] {name} is {list(x.shape)}: rank {rank} of the plan has {rows} rows")
    if (
        k.shape[:-2] != q.shape[:-2]
        or v.shape[:-1] != k.shape[:-1]
        or k.shape[-1] != q.shape[-1]
        or k.shape[-2] == 0
        or q.shape[-2] % k.shape[-2] != 0
    ):
        raise ValueError(
            f"[{_NAME}] q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}: they must be [B, rows, H, D], "
            "[B, rows, Hkv, D] and [B, rows, Hkv, Dv] with H a multiple of Hkv"
        )
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[-1] <= 256:
            raise ValueError(f"[{_NAME}] {name} has head size {x.shape[-1]}: it must be from 1 to 256")
    return packed


def _check_heads(x: torch.Tensor | None, name: str, q: torch.Tensor) -> None:
    if x is not None and (x.dtype != torch.float32 or tuple(x.shape) != (q.shape[2],) or x.device != q.device):
        raise ValueError(
            f"[{_NAME}] {name} is {x.dtype} {list(x.shape)} on {x.device}: it must be float32 [H], [{q.shape[2]}], on the CPU"
        )


def _signed(digest: int) -> int:
    return digest - 2**64 if digest >= 2**63 else digest


def _bits(x: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", x))
    return int(bits)


def _number(bits: int) -> float:
    (x,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(x)


_SHOWN: dict[str, Callable[[int], object]] = {
    "plan": lambda digest: f"{digest % 2**64:016x}",
    "scheme": _SCHEMES.__getitem__,
    "dtype": _DTYPES.__getitem__,
    "scale": _number,
    "softcap": _number,
}


class _Block(NamedTuple):
    """How keys and values of some rows lie in one message: k [B, rows, Hkv, D], then v [B, rows, Hkv, Dv]."""

    batch: int
    heads: int
    head_size: int
    head_size_v: int

    def length(self, rows: int) -> int:
        return self.batch * rows * self.heads * (self.head_size + self.head_size_v)

    def joined(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat((k.flatten(), v.flatten()))

    def parts(self, flat: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        behind = self.batch * rows * self.heads * self.head_size
        return (
            flat[:behind].view(self.batch, rows, self.heads, self.head_size),
            flat[behind:].view(self.batch, rows, self.heads, self.head_size_v),
        )


class _Call:
    """One call, forward and backward, over its ranks."""

    def __init__(self, ranks: Ranks, layout: Layout, scheme: str, options: dict[str, Any], head_size_v: int) -> None:
        self.ranks, self.layout, self.scheme, self.options = ranks, layout, scheme, options
        self.head_size_v = head_size_v

    def before(self, steps: int) -> int:
        return (self.ranks.rank - steps) % self.ranks.size

    def block(self, k: torch.Tensor) -> _Block:
        return _Block(k.shape[0], k.shape[2], k.shape[3], self.head_size_v)

    def gathered(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, in the whole's order."""
        block, layout = self.block(k), self.layout
        parts = self.ranks.all_gather(block.joined(k, v), [block.length(n) for n in layout.lengths], "keys gathered")
        all_k = k.new_empty(k.shape[0], sum(layout.lengths), *k.shape[2:])
        all_v = v.new_empty(v.shape[0], sum(layout.lengths), *v.shape[2:])
        for part, length, rows in zip(parts, layout.lengths, layout.rows):
            k_part, v_part = block.parts(part, length)
            all_k.index_copy_(1, rows, k_part)
            all_v.index_copy_(1, rows, v_part)
        return all_k, all_v

    def passed_round(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[int, list[Piece], torch.Tensor, torch.Tensor]]:
        """Of each step its number, its pieces, and the keys and values that they are about, while the next ones are on their way."""
        block, lengths = self.block(k), self.layout.lengths
        here = block.joined(k, v)
        hops = len(self.layout.steps) - 1
        for step, pieces in enumerate(self.layout.steps):
            transfer, there = None, here
            if step < hops:
                there = here.new_empty(block.length(lengths[self.before(step + 1)]))
                move = (here, self.before(-1), there, self.before(1))
                transfer = self.ranks.start([move], f"keys passed on, step {step + 1} of {hops}")
            yield step, pieces, *block.parts(here, lengths[self.before(step)])
            if transfer is not None:
                transfer.wait()
            here = there

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.layout.whole:
            return forward_whole(self.layout.steps[0], q, *self.gathered(k, v), self.options | {"sink": sink})
        total = Sum(q, self.head_size_v)
        if self.scheme == "gather":
            total.add(self.layout.steps[0], q, *self.gathered(k, v), self.options)
        else:
            for _, pieces, k_part, v_part in self.passed_round(k, v):
                total.add(pieces, q, k_part, v_part, self.options)
        return total.finished(q.dtype, sink)

    def backward(
        self, rows: RowGradients, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of this rank's keys, float32; rows.dq is added to."""
        merged = not self.layout.whole
        options = self.options | ({} if merged else {"sink": sink})
        block = self.block(k)

        def added(pieces: list[Piece], k_part: torch.Tensor, v_part: torch.Tensor) -> torch.Tensor:
            """What these rows add to the gradients of a buffer of keys."""
            share = torch.zeros(block.length(k_part.shape[1]))
            rows.add(pieces, k_part, v_part, *block.parts(share, k_part.shape[1]), merged, options)
            return share

        if self.scheme == "gather":
            dk, dv = block.parts(added(self.layout.steps[0], *self.gathered(k, v)), sum(self.layout.lengths))
            parts = [block.joined(*(x.index_select(1, rows) for x in (dk, dv))) for rows in self.layout.rows]
            return block.parts(self.ranks.reduce_scatter(parts, "gradients of keys summed"), k.shape[1])
        return block.parts(self._ring_backward(k, v, block, added), k.shape[1])

    def _ring_backward(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        block: _Block,
        added: Callable[[list[Piece], torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """A rank keeps what it adds to its own keys' gradients. What others add goes on from the next rank to the last, and home."""
        hops = len(self.layout.steps) - 1
        own = torch.empty(0)
        transfer: Transfer | None = None
        came = torch.empty(0)  # the sum of the ranks before this one
        for step, pieces, k_part, v_part in self.passed_round(k, v):
            share = added(pieces, k_part, v_part)
            if step == 0:
                own = share
                continue
            if transfer is not None:
                transfer.wait()
                share = came + share
            last = step == hops
            to, source = (self.before(hops), self.before(-hops)) if last else (self.before(-1), self.before(1))
            came = torch.empty(block.length(self.layout.lengths[self.before(0 if last else step + 1)]))
            transfer = self.ranks.start(
                [(share, to, came, source)], f"gradients of keys passed on, step {step} of {hops}"
            )
        if transfer is None:
            return own
        transfer.wait()
        return own + came


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sink: Any, call: _Call) -> Any:
        ctx.set_materialize_grads(False)
        out, lse = call.forward(q, k, v, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Any, d_lse: Any) -> Any:
        q, k, v, sink, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        rows = RowGradients(q, out, lse, torch.zeros_like(out) if d_o is None else d_o, d_lse, torch.zeros(q.shape))
        dk, dv = call.backward(rows, k, v, sink)
        dsink = None
        if ctx.needs_input_grad[3]:
            dsink = torch.zeros_like(sink)
            if q.shape[0] * q.shape[1] > 0:  # of the rows as a whole, whichever keys
                gradients = (q, k[:, :0], v[:, :0], out, lse, rows.d_o, d_lse)
                attention_backward(*gradients, dsink=dsink, merged=True, sink=sink, **call.options)
            dsink = call.ranks.all_reduce(dsink, "gradient of the sink summed")
        found = (rows.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink)
        return (*(x if needed else None for x, needed in zip(found, ctx.needs_input_grad)), None)
