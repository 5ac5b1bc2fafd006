"""Attention over lists of key blocks, over the ranks of a group: each rank has the lists of its own rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch._compile import _disable_dynamo  # the public one imports all of torch.compile
from torch.autograd.function import once_differentiable

from .. import _heddle
from .._options import flag
from ..hosts.torch.operators import native, native_items
from ..sparse import options_tuple
from ..sparse import sparse_attention as attention_of_lists
from .attention import _bits, _check, _check_heads, _check_rows, _number, _scale, _signed
from .keys import KeysToRows
from .pieces import Layout, shares_of_needs
from .plan import Plan
from .ranks import Ranks, on_device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.distributed as dist
    from typing_extensions import TypedDict, Unpack

    from .plan import Run

    class _Options(TypedDict, total=False):
        offsets: torch.Tensor | None
        masks: torch.Tensor | None
        mask_ids: torch.Tensor | None
        block_size: int
        query_rows: int
        group: dist.ProcessGroup | None
        scale: float | None
        sink: torch.Tensor | None
        timeout: float | None


_NAME = "distributed.sparse_attention"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK_SIZES = (16, 32, 64, 128)
_MOST_ENTRIES = 1024  # of a list, on GPUs


@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    plan: Plan,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...
@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    plan: Plan,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@_disable_dynamo  # its exchanges depend on what the lists say
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    plan: Plan,
    offsets: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
    mask_ids: torch.Tensor | None = None,
    block_size: int = 64,
    query_rows: int = 1,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    timeout: float | None = None,
) -> Any:
    """This rank's share of ``heddle.sparse_attention`` over all ranks of a group: each row attends the keys of the blocks that its list
    names, wherever they lie. With gradients, which every rank must ask for alike.

    Every rank calls this at the same place of its program, with its own rows and their lists. It tells the others which blocks these
    name, and gets the keys of those, and no others; the gradients of keys go back. Of batched sequences, on the CPU and on GPUs, where the
    host waits for what the lists name, so that no graph can be captured of it.

    Args:
      q, k, v: this rank's rows in the plan's order, [B, rows, H, D], [B, rows, Hkv, D], [B, rows, Hkv, Dv]; float32, float16 or bfloat16.
      blocks: int32 [B, N, L, n]: the lists of this rank's rows, entries being blocks of the whole sequence: ``shard`` of the whole's
        lists where query_rows is 1. Else N counts lists of each of the rank's runs, one run after the other.
      counts, offsets, masks, mask_ids: as of ``heddle.sparse_attention``, of this rank's lists.
      plan: of ``heddle.distributed.plan``, of one sequence: it has causality and window, which hold inside of the blocks.
      block_size: keys of a block: 16, 32, 64 or 128. Blocks may lie on several ranks.
      query_rows: how many neighbouring rows share a list, counted from the sequence's first on. Above 1, each run of rows of a rank must
        begin and end where a list does.
      group, timeout: as of ``heddle.distributed.attention``.
      scale, sink, return_lse: as of ``heddle.sparse_attention``; the sink is the same on every rank, and so is its gradient.

    Returns:
      out [B, rows, H, Dv] of q's dtype, the bits of one process; with return_lse a pair with lse, float32 [B, H, rows]. Gradients of keys
      are summed in float32, in the order of ranks; on GPUs what each of a rank's runs of rows adds has been rounded to q's dtype.

    Raises:
      ValueError: a bad argument, before anything is sent; the message names it, its value and the rule. Also, on every rank, ranks that
        do not agree.
      RuntimeError: a rank is lost or took longer than the timeout. The group is of no use then.
    """
    return_lse = flag(_NAME, "return_lse", return_lse)
    if not isinstance(plan, Plan):
        raise TypeError(f"[{_NAME}] plan is a {type(plan).__name__}: it must be of heddle.distributed.plan")
    one_sequence(_NAME, plan)
    ranks = Ranks(_NAME, plan, group, timeout)
    if _check(q, k, v, _NAME):
        raise ValueError(
            f"[{_NAME}] q is {list(q.shape)}: it must be [B, rows, H, D]; lists over ranks are not of packed rows"
        )
    _check_rows(q, k, v, plan, ranks.rank, False, _NAME)
    _check_heads(sink, "sink", q, _NAME)
    lists = Lists(blocks, counts, offsets, masks, mask_ids, block_size, query_rows)
    _check_lists(lists, q, plan, ranks.rank)
    refuse_on_gpu(_NAME, q, v, blocks.shape[-1] if offsets is None else 0, masks)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sink))
    scale = _scale(q, None if scale is None else float(scale))
    ranks.agree(
        {
            **of_operands(q, k, v, plan, scale),
            "block_size": block_size,
            "query_rows": query_rows,
            "sink": int(sink is not None),
            "whether gradients are wanted": int(wanted),
            "whether a gradient of the sink is": int(wanted and sink is not None and sink.requires_grad),
        },
        SHOWN,
        q.device,
    )
    with on_device_of(q):
        out, lse = over_lists(q, k, v, sink, ranks, plan, lists, scale)
    return (out, lse) if return_lse else out


def refuse_on_gpu(
    operation: str, q: torch.Tensor, v: torch.Tensor, entries: int, masks: torch.Tensor | None = None
) -> None:
    """What kernels of GPUs do not take, before anything is sent."""
    if not q.is_cuda:
        return
    if q.dtype == torch.float32:
        raise ValueError(f"[{operation}] q is float32: on GPUs it must be float16 or bfloat16")
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] % 8 != 0 or x.shape[-1] > 128:
            raise ValueError(
                f"[{operation}] {name} has head size {x.shape[-1]}: on GPUs it must be a multiple of 8 to 128"
            )
    if masks is not None:
        raise ValueError(f"[{operation}] masks are given: there are none on GPUs")
    if entries > _MOST_ENTRIES:
        raise ValueError(
            f"[{operation}] lists have {entries} entries: on GPUs there must be no more than {_MOST_ENTRIES}"
        )
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"[{operation}] the call is captured in a graph, and the host reads which blocks lists name")


def over_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    ranks: Ranks,
    plan: Plan,
    lists: Lists,
    scale: float,
    out_dtype: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sparse_attention() of arguments that have been checked, and that ranks agree on."""
    found: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(
        q, k, v, sink, _ListedKeysToRows(ranks, plan, lists, scale, out_dtype)
    )
    return found


def of_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, scale: float) -> dict[str, int]:
    """What ranks compare of a call's operands."""
    return {
        "plan": _signed(plan._native.digest),
        "batch": q.shape[0],
        "heads": q.shape[2],
        "kv_heads": k.shape[2],
        "head_size": q.shape[3],
        "head_size_v": v.shape[3],
        "dtype": _DTYPES.index(q.dtype),
        "scale": _bits(scale),
    }


#: How errors tell what differs, where it is no number as it stands.
SHOWN: dict[str, Callable[[int], object]] = {
    "plan": lambda digest: f"{digest % 2**64:016x}",
    "dtype": _DTYPES.__getitem__,
    "scale": _number,
}


class Lists(NamedTuple):
    """The arguments of ``heddle.sparse_attention`` that say what rows attend."""

    blocks: torch.Tensor
    counts: torch.Tensor | None
    offsets: torch.Tensor | None
    masks: torch.Tensor | None
    mask_ids: torch.Tensor | None
    block_size: int
    query_rows: int

    def of_run(self, begin: int, end: int) -> Lists:
        """Those of lists begin to end - 1."""
        if self.offsets is not None:
            return self._replace(offsets=self.offsets[..., begin : end + 1].contiguous())
        at = slice(begin, end)
        counts = None if self.counts is None else self.counts[:, at]
        ids = None if self.mask_ids is None else self.mask_ids[:, at]
        return self._replace(blocks=self.blocks[:, at], counts=counts, mask_ids=ids)

    def listed(self, keys: int) -> torch.Tensor:
        """uint8 [blocks of so many keys]: 1 where a list of any sequence or head names the block."""
        device = self.blocks.device
        out = torch.zeros(-(-keys // self.block_size), dtype=torch.uint8, device=device)
        there = (self.blocks >= 0) & (self.blocks < len(out))
        if self.counts is not None:
            there &= torch.arange(self.blocks.shape[-1], device=device) < self.counts[..., None]
        out[self.blocks[there].long()] = 1
        return out


def one_sequence(operation: str, plan: Plan) -> None:
    if plan._documents != 1:
        what = "areas" if plan._documents is None else f"{plan._documents} documents"
        raise ValueError(
            f"[{operation}] the plan has {what}: lists of blocks over ranks are of one sequence, with causality and window"
        )


def _check_lists(lists: Lists, q: torch.Tensor, plan: Plan, rank: int) -> None:
    for name, x in zip(Lists._fields, lists[:5]):
        if x is not None and (x.dtype != torch.int32 or x.device != q.device):
            raise ValueError(f"[{_NAME}] {name} is {x.dtype} on {x.device}: it must be int32 on {q.device}")
    if lists.block_size not in BLOCK_SIZES:
        raise ValueError(f"[{_NAME}] block_size is {lists.block_size}: it must be 16, 32, 64 or 128")
    share = lists.query_rows
    if share < 1:
        raise ValueError(f"[{_NAME}] query_rows is {share}: it must be at least 1")
    for r in range(plan.ranks) if share > 1 else ():
        for run in plan.runs(r):
            end = run.begin + run.step * (run.count - 1) + 1
            cut = run.begin if run.begin % share or run.step > 1 else end if end % share and end < plan.rows else None
            if cut is not None:
                first = cut // share * share
                raise ValueError(
                    f"[{_NAME}] query_rows is {share} and rank {r} has rows {run.begin} to {end - 1} by steps of {run.step}, which cuts list "
                    f"{first // share}, of rows {first} to {min(first + share, plan.rows) - 1}: rows that share a list must lie on one rank, "
                    "one behind the other"
                )
    wanted = sum(-(-run.count // share) for run in plan.runs(rank))
    batch = q.shape[0]
    for name, x, shape, rule in (
        ("blocks", lists.blocks, (batch, wanted), f"[{batch}, {wanted}, L, n]"),
        ("counts", lists.counts, (batch, wanted), f"[{batch}, {wanted}, L]"),
        ("mask_ids", lists.mask_ids, tuple(lists.blocks.shape), f"of blocks' shape, {list(lists.blocks.shape)}"),
    ):
        dims = 3 if name == "counts" else len(shape) if name == "mask_ids" else 4
        if x is None or (name == "blocks" and lists.offsets is not None):
            continue
        if x.dim() != dims or tuple(x.shape[: len(shape)]) != shape:
            raise ValueError(f"[{_NAME}] {name} is {list(x.shape)}: rank {rank}'s {wanted} lists must be {rule}")
    if lists.offsets is not None:
        if lists.counts is not None:
            raise ValueError(f"[{_NAME}] counts are given beside offsets, which say where lists end")
        x = lists.offsets
        if x.dim() != 3 or (x.shape[0], x.shape[2]) != (batch, wanted + 1) or lists.blocks.dim() != 1:
            raise ValueError(
                f"[{_NAME}] offsets is {list(x.shape)} and blocks {list(lists.blocks.shape)}: rank {rank}'s {wanted} lists must be "
                f"[{batch}, L, {wanted + 1}] and [entries]"
            )


def layout_of_needs(plan: Plan, rank: int, needs: list[Any], device: torch.device) -> Layout:
    """What the scheme ``needed`` exchanges where rank r needs the keys needs[r], numbers of the whole's rows in ascending order; they
    lie where they lie in the whole, so that blocks and positions are the whole's. What is not needed is 0."""
    lengths = [plan.rows_of(r) for r in range(plan.ranks)]
    return Layout(lengths, [], True, plan.rows, shares_of_needs(plan, rank, needs, in_place=True)).on(device)


class _ListedKeysToRows:
    """One call, forward and backward."""

    def __init__(self, ranks: Ranks, plan: Plan, lists: Lists, scale: float, out_dtype: str | None) -> None:
        self.ranks, self._lists = ranks, lists
        self._runs = plan.runs(ranks.rank)
        own = lists.listed(plan.rows)
        of_ranks = ranks.all_gather(own, [len(own)] * ranks.size, "listed blocks told")
        needs = [np.flatnonzero(np.repeat(x.cpu().numpy(), lists.block_size)[: plan.rows]) for x in of_ranks]
        self._keys = KeysToRows(ranks, layout_of_needs(plan, ranks.rank, needs, own.device), "needed", {})
        causal = "top_left" if plan.is_causal else "none"
        self._options: dict[str, Any] = {
            "causal": causal,
            "window": plan._window,
            "scale": scale,
            "out_dtype": out_dtype,
        }

    def _calls(self) -> Iterator[tuple[slice, Lists, dict[str, Any]]]:
        """Of each run of rows: where they lie, their lists, and options."""
        begin = 0
        for run in self._runs:
            end = begin - (-run.count // self._lists.query_rows)
            yield rows_of(run), self._lists.of_run(begin, end), self._options | position_of(run)
            begin = end

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._keys.at_once(k, v)
        batch, rows, heads, _ = q.shape
        dtype = torch.float32 if self._options["out_dtype"] else q.dtype
        o = q.new_empty(batch, rows, heads, v.shape[3], dtype=dtype)
        lse = torch.empty(batch, heads, rows, device=q.device)
        for at, lists, options in self._calls():
            attention_of_lists(
                q[:, at], k, v, return_lse=True, out=o[:, at], lse_out=lse[..., at], sink=sink, **lists._asdict(), **options
            )  # fmt: skip
        return o, lse

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        o: torch.Tensor,
        lse: torch.Tensor,
        d_o: torch.Tensor,
        d_lse: torch.Tensor | None,
        wants_sink: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Gradients, float32. Kernels of GPUs write them in the operands' dtype."""
        rows = k.shape[1]
        k, v = self._keys.at_once(k, v)
        written = q.dtype if q.is_cuda else torch.float32
        dq = torch.zeros(q.shape, dtype=written, device=q.device)
        dk, dv = (torch.zeros(x.shape, device=x.device) for x in (k, v))
        dsink = torch.zeros_like(sink) if wants_sink and sink is not None else None
        for at, lists, options in self._calls():
            adds = [torch.zeros_like(x, dtype=written) for x in (dk, dv)]
            of_sink = None if dsink is None else torch.zeros_like(dsink)
            items = native_items(options_tuple(q[:, at], options | {"sink": sink}))
            of_lse = None if d_lse is None else d_lse[..., at]
            results = (o[:, at], lse[..., at], d_o[:, at], of_lse, dq[:, at], *adds, None, of_sink)
            native(_heddle.sparse_attention_backward, q[:, at], k, v, *lists, *results, items)
            dk += adds[0]
            dv += adds[1]
            if dsink is not None and of_sink is not None:
                dsink += of_sink
        dk, dv = self._keys.home(dk, dv, rows)
        if dsink is not None:
            dsink = self.ranks.all_reduce(dsink, "gradient of the sink summed")
        return dq, dk, dv, dsink


def rows_of(run: Run) -> slice:
    """Where a run's rows lie in a rank's tensors."""
    return slice(run.local, run.local + run.count)


def position_of(run: Run) -> dict[str, Any]:
    return {"q_offset": run.begin, "q_step": run.step}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sink: Any, call: _ListedKeysToRows) -> Any:
        ctx.set_materialize_grads(False)
        out, lse = call.forward(q, k, v, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Any, d_lse: Any) -> Any:
        q, k, v, sink, out, lse = ctx.saved_tensors
        d_o = torch.zeros_like(out) if d_o is None else d_o
        with on_device_of(q):
            found = ctx.call.backward(q, k, v, sink, out, lse, d_o, d_lse, ctx.needs_input_grad[3])
        needs = ctx.needs_input_grad
        return (*(x.to(y.dtype) if need else None for x, y, need in zip(found, (q, k, v, sink), needs)), None)
