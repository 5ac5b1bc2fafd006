"""The torch operators ``heddle::distributed_*``: what torch.compile has of attention over ranks. They know plans by their handles and
groups by their names, which are strings; exchanges are inside, so that nothing of them is traced."""

from __future__ import annotations

from typing import Any

import torch

from ..hosts.torch.transforms import no_second_derivative
from .attention import begun, gradients
from .decode import decoded
from .plan import plan_of
from .ranks import group_of, on_device_of

_LIBRARY = torch.library.Library("heddle", "FRAGMENT")

_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? alibi_slopes, Tensor? bias"
_ASKED = "str plan, str group, str scheme, float? scale, float softcap, bool deterministic, bool chunked, float? timeout, bool wanted, bool wants_bias, bool wants_sink"
_LIBRARY.define(f"distributed_attention({_OPERANDS}, {_ASKED}) -> (Tensor, Tensor)")
# dsink and dbias have no elements where they are not wanted.
_LIBRARY.define(
    f"distributed_attention_backward({_OPERANDS}, Tensor o, Tensor lse, Tensor? d_o, Tensor? d_lse, {_ASKED}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "distributed_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? seqused_k, Tensor? page_table, Tensor? cache_batch_idx, "
    "Tensor? q_offset, Tensor? key_offset, Tensor? alibi_slopes, Tensor? sink, Tensor? k_scale, Tensor? v_scale, SymInt key_step, "
    "SymInt causal, SymInt left, SymInt right, float? scale, float softcap, str group, float? timeout) -> (Tensor, Tensor)"
)


def _results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), lse


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *asked: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(q, v)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: Any,
    alibi_slopes: Any,
    bias: Any,
    plan: str,
    group: str,
    *asked: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad(), on_device_of(q):
        call = begun(q, k, v, sink, alibi_slopes, bias, plan_of(plan), group_of(group), *asked)
        return call.forward(q, k, v, sink)


def _backward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: Any,
    alibi_slopes: Any,
    bias: Any,
    o: Any,
    lse: Any,
    *others: Any,
) -> tuple[torch.Tensor, ...]:
    wants_bias, wants_sink = others[-2:]
    dsink = q.new_empty(q.shape[2] if wants_sink else 0, dtype=torch.float32)
    dbias = bias.new_empty(bias.shape) if wants_bias else q.new_empty(0)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), dsink, dbias)


def _backward_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: Any,
    alibi_slopes: Any,
    bias: Any,
    o: torch.Tensor,
    lse: torch.Tensor,
    d_o: Any,
    d_lse: Any,
    plan: str,
    group: str,
    scheme: str,
    scale: float | None,
    softcap: float,
    deterministic: bool,
    chunked: bool,
    timeout: float | None,
    wanted: bool,
    wants_bias: bool,
    wants_sink: bool,
) -> tuple[torch.Tensor, ...]:
    with torch.no_grad(), on_device_of(q):
        how = (scheme, scale, softcap, deterministic, chunked, timeout, wanted, wants_bias, wants_sink)
        call = begun(q, k, v, sink, alibi_slopes, bias, plan_of(plan), group_of(group), *how)
        asked = dict(wants_bias=wants_bias, wants_sink=wants_sink)
        dq, dk, dv, dsink, dbias = gradients(call, q, k, v, sink, bias, o, lse, d_o, d_lse, **asked)
        dsink = q.new_empty(0, dtype=torch.float32) if dsink is None else dsink
        return dq, dk, dv, dsink, q.new_empty(0) if dbias is None else dbias


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.asked = inputs[:6], inputs[6:]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_o: Any, d_lse: Any) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    operator = torch.ops.heddle.distributed_attention_backward
    *of_operands, dbias = operator(*ctx.saved_tensors, d_o, d_lse, *ctx.asked)
    found = (*of_operands, None, dbias)  # as the operands lie, of which alibi_slopes has none
    return (*(x if needed else None for x, needed in zip(found, needs)), *[None] * (len(needs) - len(found)))


def _decode_fake(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *others: Any) -> tuple[Any, Any]:
    return _results(q, v_cache)


def _decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *others: Any) -> tuple[Any, Any]:
    given = (*others[:-2], group_of(others[-2]), others[-1])
    with on_device_of(q):
        return decoded(q, k_cache, v_cache, *given)


for _name, _kernel, _of_shapes in (
    ("distributed_attention", _forward, _fake),
    ("distributed_attention_backward", _backward_kernel, _backward_fake),
    ("distributed_decode", _decode, _decode_fake),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _device)
    torch.library.register_fake(f"heddle::{_name}", _of_shapes, lib=_LIBRARY)
torch.library.register_autograd(
    "heddle::distributed_attention", _backward, setup_context=_save_for_backward, lib=_LIBRARY
)
torch.library.register_autograd(
    "heddle::distributed_attention_backward", no_second_derivative("distributed_attention_backward"), lib=_LIBRARY
)
