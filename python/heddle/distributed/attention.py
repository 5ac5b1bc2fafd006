"""Attention over the ranks of a group, with its gradients."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .._options import flag
from ..gradients import attention_backward
from .copies import KeysByCopies, copied, room_of
from .heads import HeadsForRows
from .keys import KeysToRows
from .peers import peers_of, reach_each_other
from .pieces import RowGradients, layout_of
from .plan import Plan, SchemeName
from .ranks import Ranks, name_of, on_device_of
from .ring import KeysInARing

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "distributed.attention"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SCHEMES = ("auto", "gather", "ring", "needed", "ulysses", "2d")
DEVICES = ("cpu", "cuda")
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
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    chunked: bool = False,
    timeout: float | None = None,
    **others: Any,
) -> Any:
    """This rank's share of attention over all ranks of a group: exact, with gradients, which every rank must ask for alike.

    Every rank calls this at the same place of its program, with its own rows (``shard``). The first call with a plan, shapes and
    options compares them over all ranks. On the CPU, and on GPUs, where exchanges are put on a stream of the group's.

    Args:
      q, k, v: this rank's rows in the plan's order, [B, rows, H, D], [B, rows, Hkv, D], [B, rows, Hkv, Dv], or packed [rows, H, D] and
        so on; float32, float16 or bfloat16. Keys are sent as they are, not repeated for each query head.
      plan: of ``heddle.distributed.plan``: it has causality, window and documents.
      group: of torch.distributed, with as many ranks as the plan; None: the default one. A plan for one rank needs none. It must carry
        tensors of q's device: gloo those on the CPU, NCCL those on GPUs.
      scheme: how keys get to rows. "gather": all keys to every rank, then one call, or one for each of a rank's runs in a document.
        "ring": keys go from rank to rank while the ones before are computed with. "needed": to every rank those keys that some row of
        its own attends. "ulysses": every rank gets all rows of some heads, and computes them. "2d": that among the plan's ``ulysses``
        ranks, and its ``across`` between such groups. "auto": what the plan predicts to be the fastest.
      scale, softcap: as of ``heddle.attention``.
      alibi_slopes: float32 [H]; distances are in the document. With order "striped" in "ulysses" alone.
      bias: [B or 1, H or 1, rows, S], float32 or q's dtype: of this rank's rows, in the plan's order, and all S keys, in the whole's; added
        to the scores, and -inf removes a pair. By "gather", "ring" and "needed", with one document, and not with order "striped". It has a
        gradient on the CPU.
      sink: float32 [H], the same on every rank. Its gradient is that of all ranks' rows, on every rank.
      return_lse: also return the log-sum-exp of each row's scores, which has a gradient too.
      deterministic: on a GPU, sum each row's gradient in one order. False is faster; last bits of q's gradient then change from call to
        call, as those of ``heddle.attention`` do. Elsewhere sums have an order anyway.
      chunked: of "gather", "ring" and "needed", and between the groups of "2d": up to 8 parts of the key heads go one after the other,
        and only a part's keys of other ranks, and their gradients, are in memory. False: only where that costs next to nothing, of very
        long sequences.
      timeout: seconds that an exchange may take; None: the group's own. On a GPU the host waits for each exchange if it is given, and
        for what was put on the stream before it, which counts; and never if not: a rank that waits longer than the group's own is then
        ended by NCCL's watchdog, or by an error of its GPU (docs/distributed.md). Ranks give one or give none. A plan whose calls lie
        in a CUDA graph is kept as long as that.

    Returns:
      out [B, rows, H, Dv] (packed: [rows, H, Dv]) of q's dtype; with return_lse a pair with lse, float32 [B, H, rows] (packed: [H, rows]).
      Gradients of keys are summed in float32 in a fixed order: bits repeat for the same plan and scheme, if it is deterministic.

    Raises:
      ValueError: a bad argument, before anything is sent; the message names it, its value and the rule. Also, on every rank, ranks
        that do not agree.
      RuntimeError: a rank is lost or took longer than the timeout; the message names the exchange, the rank and the plan. The group
        is of no use then.

    Sources: Liu, Zaharia and Abbeel, arXiv 2310.01889; Dubey et al., arXiv 2407.21783; Jacobs et al., arXiv 2309.14509; Fang and
    Zhao, arXiv 2405.07719.
    """
    _refuse_others(others)
    return_lse = flag(_NAME, "return_lse", return_lse)
    deterministic = flag(_NAME, "deterministic", deterministic)
    chunked = flag(_NAME, "chunked", chunked)
    if not isinstance(plan, Plan):
        raise TypeError(f"[{_NAME}] plan is a {type(plan).__name__}: it must be of heddle.distributed.plan")
    if scheme not in _SCHEMES:
        raise ValueError(f"[{_NAME}] scheme is {scheme!r}: it must be one of {', '.join(_SCHEMES)}")
    packed = _check(q, k, v)
    if packed:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    _check_heads(alibi_slopes, "alibi_slopes", q)
    _check_heads(sink, "sink", q)
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError(f"[{_NAME}] alibi_slopes requires a gradient: there is none for it")
    grads = torch.is_grad_enabled()
    _check_bias(bias, q, plan)
    wanted = grads and any(x is not None and x.requires_grad for x in (q, k, v, bias, sink))
    wants_bias, wants_sink = (grads and x is not None and x.requires_grad for x in (bias, sink))
    scale = None if scale is None else float(scale)
    how = (scheme, scale, float(softcap), deterministic, chunked, timeout, wanted, wants_bias, wants_sink)
    if torch.compiler.is_compiling():
        of_call = (plan.handle, name_of(group), *how)
        out, lse = torch.ops.heddle.distributed_attention(q, k, v, sink, alibi_slopes, bias, *of_call)
    else:
        with on_device_of(q):
            call = begun(q, k, v, sink, alibi_slopes, bias, plan, group, *how, packed)
            out, lse = _Attention.apply(q, k, v, sink, bias, call)
    if packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


def begun(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    plan: Plan,
    group: dist.ProcessGroup | None,
    scheme: str,
    scale: float | None,
    softcap: float,
    deterministic: bool,
    chunked: bool,
    timeout: float | None,
    wanted: bool,
    wants_bias: bool,
    wants_sink: bool,
    packed: bool = False,
) -> KeysToRows | HeadsForRows:
    """The call of these rows, [B, rows, heads, D], which all ranks are found to make alike."""
    ranks = Ranks(_NAME, plan, group, timeout)
    _check_rows(q, k, v, plan, ranks.rank, packed)
    chosen, ulysses, across = _scheme(plan, scheme, bias)
    if alibi_slopes is not None and plan.order == "striped" and ulysses < plan.ranks:
        raise ValueError(
            f"[{_NAME}] alibi_slopes are given and the plan's order is 'striped': its rows stand for several positions each, which "
            "ALiBi is not about"
        )
    if q.is_cuda and wants_bias:
        raise ValueError(f"[{_NAME}] bias requires a gradient: pieces of a call have none of it on GPUs")
    narrow = sum(math.inf if side < 0 else side for side in (plan._window[0], 0 if plan.is_causal else plan._window[1]))
    if q.is_cuda and wanted and deterministic and plan.order == "striped" and ulysses < plan.ranks > narrow + 1:
        raise ValueError(
            f"[{_NAME}] deterministic is True, the plan's order is 'striped' and its window {plan._window}: rows of a rank stand "
            f"{plan.ranks} positions apart, and gradients of a window that is narrower have no order on GPUs; set it to False"
        )

    def room_by_copies() -> int:
        layout = layout_of(plan, ranks.rank, chosen, q.device)
        return room_of(layout, ranks.size, q, k, v, chunked, wanted) if copied(layout, q.shape[0]) else 0

    reached = chosen in ("gather", "needed") and timeout is None and reach_each_other(ranks, q.device)
    room = ranks.agree(
        {
            "plan": _signed(plan._native.digest),
            "scheme": _SCHEMES.index(chosen),
            "ulysses": ulysses,
            "scheme across groups": _SCHEMES.index(across),
            "whether keys come in two exchanges": int(
                plan._splits_keys(across if chosen in ("ulysses", "2d") else chosen, ulysses)
            ),
            "batch": q.shape[0],
            "heads": q.shape[2],
            "kv_heads": k.shape[2],
            "head_size": q.shape[3],
            "head_size_v": v.shape[3],
            "dtype": _DTYPES.index(q.dtype),
            "scale": _bits(_scale(q, scale)),
            "softcap": _bits(softcap),
            "alibi_slopes": int(alibi_slopes is not None),
            "bias": int(bias is not None),
            "sink": int(sink is not None),
            "whether gradients are wanted": int(wanted),
            "whether a gradient of the sink is": int(wants_sink),
            "chunked": int(chunked),
            "whether a timeout is given": int(timeout is not None),
        },
        _SHOWN,
        q.device,
        room_by_copies if reached else None,
    )
    scores = {"scale": _scale(q, scale), "softcap": softcap, "alibi_slopes": alibi_slopes, "bias": bias}
    options = scores | {"deterministic": deterministic}
    if chosen in ("ulysses", "2d"):
        return HeadsForRows(ranks, plan, ulysses, across, options, chunked, q.device)
    layout = layout_of(plan, ranks.rank, chosen, q.device)
    if bias is not None:
        layout = plan._keep(("unpacked", chosen, ranks.rank, q.device), layout.unpacked)
    if room:
        return KeysByCopies(ranks, layout, chosen, options, chunked, peers_of(ranks, q.device, room))
    kind = KeysInARing if chosen == "ring" else KeysToRows
    return kind(ranks, layout, chosen, options, chunked)


def _scheme(plan: Plan, scheme: str, bias: torch.Tensor | None) -> tuple[str, int, str]:
    """The scheme itself where it is "auto", how many ranks exchange heads for rows, and how keys go between such groups."""
    chosen = plan.scheme if scheme == "auto" else scheme
    if bias is not None and chosen in ("ulysses", "2d"):
        if scheme != "auto":
            raise ValueError(
                f'[{_NAME}] bias is given and scheme is {scheme!r}: it must be "gather", "ring" or "needed"'
            )
        chosen = plan._fastest_for_keys()
    ulysses = {"ulysses": plan.ranks, "2d": plan.ulysses}.get(chosen, 1)
    return chosen, ulysses, plan.across if chosen == "2d" else "gather"


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return float(q.shape[3] ** -0.5) if scale is None else scale


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
            raise ValueError(
                f"[{_NAME}] {name} is given: served are scale, softcap, alibi_slopes, bias, sink, return_lse, deterministic and chunked"
            )


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operation: str = _NAME, devices: tuple[str, ...] = DEVICES
) -> bool:
    """Whether rows are packed."""
    packed = q.dim() == 3
    check_device(operation, devices, q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _DTYPES or x.dtype != q.dtype:
            raise ValueError(
                f"[{operation}] {name} is {x.dtype}: q, k and v must have one dtype, float32, float16 or bfloat16"
            )
        if x.dim() != (3 if packed else 4):
            raise ValueError(
                f"[{operation}] {name} is {list(x.shape)}: q, k and v must be [B, rows, heads, head size], or all packed "
                "[rows, heads, head size]"
            )
    if (
        not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]
        or v.shape[-2] != k.shape[-2]
        or k.shape[-1] != q.shape[-1]
        or k.shape[-2] == 0
        or q.shape[-2] % k.shape[-2] != 0
    ):
        raise ValueError(
            f"[{operation}] q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}: they must be [B, rows, H, D], "
            "[B, rows, Hkv, D] and [B, rows, Hkv, Dv] with H a multiple of Hkv"
        )
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[-1] <= 256:
            raise ValueError(f"[{operation}] {name} has head size {x.shape[-1]}: it must be from 1 to 256")
    return packed


def check_device(operation: str, devices: tuple[str, ...], **tensors: torch.Tensor) -> None:
    first = next(iter(tensors.values()))
    for name, x in tensors.items():
        if x.device.type not in devices:
            where = "on the CPU" if len(devices) == 1 else "on the CPU or a CUDA GPU"
            raise ValueError(f"[{operation}] {name} is on {x.device}: over several processes it must be {where}")
        if x.device != first.device:
            raise ValueError(
                f"[{operation}] {name} is on {x.device} and {next(iter(tensors))} on {first.device}: they must be on one device"
            )


def _check_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, rank: int, packed: bool, operation: str = _NAME
) -> None:
    rows = plan.rows_of(rank)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[1] != rows:
            shown = list(x.shape[1:] if packed else x.shape)
            raise ValueError(f"[{operation}] {name} is {shown}: rank {rank} of the plan has {rows} rows")


def _check_heads(x: torch.Tensor | None, name: str, q: torch.Tensor, operation: str = _NAME) -> None:
    if x is not None and (x.dtype != torch.float32 or tuple(x.shape) != (q.shape[2],) or x.device != q.device):
        raise ValueError(
            f"[{operation}] {name} is {x.dtype} {list(x.shape)} on {x.device}: it must be float32 [H], [{q.shape[2]}], on {q.device}"
        )


def _check_bias(x: torch.Tensor | None, q: torch.Tensor, plan: Plan) -> None:
    if x is None:
        return
    batch, rows, heads, _ = q.shape
    fits = x.dim() == 4 and x.shape[0] in (1, batch) and x.shape[1] in (1, heads) and x.shape[2:] == (rows, plan.rows)
    if not fits or x.dtype not in (torch.float32, q.dtype) or x.device != q.device:
        raise ValueError(
            f"[{_NAME}] bias is {x.dtype} {list(x.shape)} on {x.device}: it must be [B or 1, H or 1, rows, S], "
            f"[{batch} or 1, {heads} or 1, {rows}, {plan.rows}], float32 or {q.dtype}, on {q.device}"
        )
    if plan._documents != 1 or plan.order == "striped":
        of = "order 'striped'" if plan.order == "striped" else "areas" if plan._documents is None else "documents"
        raise ValueError(f"[{_NAME}] bias is given and the plan has {of}: it must have one document, in runs of rows")


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
    "scheme across groups": _SCHEMES.__getitem__,
    "dtype": _DTYPES.__getitem__,
    "scale": _number,
    "softcap": _number,
}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sink: Any, bias: Any, call: KeysToRows | HeadsForRows) -> Any:
        ctx.set_materialize_grads(False)
        out, lse = call.forward(q, k, v, sink)
        ctx.save_for_backward(q, k, v, sink, bias, out, lse)
        call.options["bias"] = None  # kept by torch alone
        ctx.call = call
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Any, d_lse: Any) -> Any:
        q, k, v, sink, bias, out, lse = ctx.saved_tensors
        asked = dict(wants_bias=ctx.needs_input_grad[4], wants_sink=ctx.needs_input_grad[3])
        with on_device_of(q):
            found = gradients(ctx.call, q, k, v, sink, bias, out, lse, d_o, d_lse, **asked)
        return (*(x if needed else None for x, needed in zip(found, ctx.needs_input_grad)), None)


def gradients(
    call: KeysToRows | HeadsForRows,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_o: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    *,
    wants_bias: bool,
    wants_sink: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """dq, dk and dv in the operands' dtype, dsink, and dbias."""
    d_o = torch.zeros_like(out) if d_o is None else d_o
    dbias = torch.zeros(bias.shape, device=q.device) if wants_bias and bias is not None else None
    rows = RowGradients(q, out, lse, d_o, d_lse, call.room_for_dq(q), dbias)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    # In float32 where its gradient is summed over pieces and heads: a piece's has the bias's dtype.
    call.options["bias"] = bias if bias is None or dbias is None else bias.float()
    call.backward(rows, k, v, sink, dk, dv)
    call.options["bias"] = None
    dsink = None
    if wants_sink:
        assert sink is not None
        dsink = torch.zeros_like(sink)
        if q.shape[0] * q.shape[1] > 0:  # of the rows as a whole, whichever keys
            of_rows = (q, k[:, :0], v[:, :0], out, lse, rows.d_o, d_lse)
            attention_backward(*of_rows, dsink=dsink, merged=True, sink=sink, **call.options)
        dsink = call.ranks.all_reduce(dsink, "gradient of the sink summed")
    return rows.dq.to(q.dtype), dk, dv, dsink, None if bias is None or dbias is None else dbias.to(bias.dtype)
