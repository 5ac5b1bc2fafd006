"""The torch operators ``heddle::*``: schemas, kernels, shapes for tracing, and gradients."""

from __future__ import annotations

import operator

import torch

from ... import _heddle
from ..._options import (
    ALIBI_SLOPES,
    ARRAY_NAMES,
    ARRAYS,
    CU_SEQLENS_Q,
    DROPOUT_SEED,
    K_SCALE,
    OPTIONS,
    V_SCALE,
    WITH_GRADIENT,
    WITHOUT_GRADIENT,
    check_rank,
    lse_shape,
    replaced,
    schema,
)
from .checks import one_device, refuse_gradients, refuse_tangents
from .transforms import for_transforms, no_second_derivative, save_nothing, transformed

_LIBRARY = torch.library.Library("heddle", "DEF")


def _device_memory(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


_heddle.use_torch(
    torch.Tensor,
    {
        torch.float32: 0,
        torch.float16: 1,
        torch.bfloat16: 2,
        torch.int32: 3,
        torch.bool: 4,
        torch.float8_e4m3fn: 5,
        torch.uint8: 6,
        torch.int8: 7,
    },
    _device_memory,
)

_OPTIONS = schema()
_OPERANDS = 3  # q, k and v, in front of them

_LIBRARY.define(f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
# wanted: which of dq, dk, dv, dbias, dsink to compute; the others come back with no elements.
_LIBRARY.define(
    "attention_backward(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool[5] wanted, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("apply_rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, Tensor? offsets) -> Tensor")
_LIBRARY.define(
    "append_kv_cache(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor seqlens, "
    "Tensor? page_table, Tensor? cache_batch_idx, Tensor? cos, Tensor? sin, bool interleaved, "
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()"
)

# Scales for each slot of a cache are written.
_CACHE_OPTIONS = schema({"k_scale": "(c!)", "v_scale": "(d!)"})
_LIBRARY.define(
    "attention_with_kv_cache(Tensor q, Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? cos, "
    f"Tensor? sin, bool interleaved, {_CACHE_OPTIONS}) -> (Tensor, Tensor)"
)


_LIBRARY.define(
    "append_int4_cache(Tensor k_new, Tensor v_new, Tensor(a!) blocks, Tensor(b!) k_tail, Tensor(c!) v_tail, "
    "Tensor? block_table, Tensor? row_idx, Tensor seqlens, Tensor? cos, Tensor? sin, bool interleaved) -> ()"
)
_LIBRARY.define(
    "attention_over_int4_cache(Tensor q, Tensor blocks, Tensor k_tail, Tensor v_tail, Tensor? block_table, "
    f"Tensor? row_idx, {_OPTIONS}) -> (Tensor, Tensor)"
)


def _items(options):
    """The native module's options tuple: the seed, a tensor here, is a number there."""
    seed = options[DROPOUT_SEED]
    return options if seed is None else replaced(options, DROPOUT_SEED, int(seed))


_FLOAT8 = torch.float8_e4m3fn


def out_dtype(q):
    dtype = q.dtype
    return torch.bfloat16 if dtype is _FLOAT8 else dtype


def empty_out(q, v):
    dtype = out_dtype(q)
    if q.size(-1) == v.size(-1):
        if dtype is q.dtype and q.is_contiguous():
            return torch.empty_like(q)
        return torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)


def empty_lse(q, packed):
    return torch.empty(lse_shape(q.shape, packed), dtype=torch.float32, device=q.device)


def _forward_fake(q, k, v, *options):
    packed = options[CU_SEQLENS_Q] is not None
    check_rank(q.shape, packed)
    return empty_out(q, v), empty_lse(q, packed)


# Absent from a torch without CUDA, which has no tensors to ask them about.
_current_gpu = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


# HEDDLE_VALIDATE: whether index data on GPUs is checked there.
_validates = _heddle.validates()


def native(function, q, *arguments):
    """Calls one of the native module's functions on the device and the current stream of q. Raises instead what the checks
    of an earlier call have found on that stream by now, if there are any."""
    if not q.is_cuda or _raw_stream is None:
        return function(q, *arguments, 0)
    gpu = q.get_device()
    if gpu != _current_gpu():
        with torch.cuda.device(gpu):
            return native(function, q, *arguments)
    stream = _raw_stream(gpu)
    if _validates:
        _heddle.raise_bad_index(stream)
    return function(q, *arguments, stream)


def seed_tensor(seed):
    """int64 of one element, from an int, such a tensor, or torch's default generator."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    if isinstance(seed, torch.Tensor):
        return seed
    try:
        seed = operator.index(seed) & 0xFFFFFFFFFFFFFFFF
    except TypeError:
        shown = repr(seed) if isinstance(seed, (str, float)) else f"a {type(seed).__name__}"
        raise TypeError(
            f"[attention] dropout_seed is {shown}: it must be an int or an int64 tensor of one element"
        ) from None
    return torch.tensor(seed - (1 << 64) if seed >> 63 else seed, dtype=torch.int64)


def _forward(q, k, v, *options):
    out, lse = _forward_fake(q, k, v, *options)
    native(_heddle.attention_forward, q, k, v, out, lse, _items(options), False)
    return out, lse


def _gradient_buffers(q, k, v, wanted, options):
    tensors = (q, k, v, *(options[i] for i in WITH_GRADIENT))
    return tuple(torch.empty_like(x) if want else q.new_empty(0) for x, want in zip(tensors, wanted))


def _backward_fake(d_o, d_lse, q, k, v, o, lse, wanted, *options):
    return _gradient_buffers(q, k, v, wanted, options)


def _backward_gradients(d_o, d_lse, q, k, v, o, lse, wanted, *options):
    gradients = _gradient_buffers(q, k, v, wanted, options)
    written = (x if want else None for x, want in zip(gradients, wanted))
    native(_heddle.attention_backward, q, k, v, o, lse, d_o, d_lse, *written, _items(options), False)
    return gradients


def _save_for_backward(ctx, inputs, output):
    q, k, v, *options = inputs
    out, lse = output
    for i in WITHOUT_GRADIENT:
        if options[i] is not None and options[i].requires_grad:
            instead = "give the whole term as bias" if i == ALIBI_SLOPES else "detach it"
            raise ValueError(f"[attention] {ARRAY_NAMES[i]} requires a gradient: it has none; {instead}")
    ctx.save_for_backward(q, k, v, out, lse, *options[:ARRAYS], options[DROPOUT_SEED])
    ctx.numbers = options[ARRAYS:DROPOUT_SEED], options[DROPOUT_SEED + 1 :]
    ctx.set_materialize_grads(False)


def _backward(ctx, d_o, d_lse):
    q, k, v, out, lse, *arrays, seed = ctx.saved_tensors
    refuse_tangents("attention_backward", ("d_o", "d_lse", "q", "k", "v", "o", "lse"), (d_o, d_lse, q, k, v, out, lse))
    before, after = ctx.numbers
    needs = ctx.needs_input_grad
    wanted = [*needs[:_OPERANDS], *(needs[_OPERANDS + i] for i in WITH_GRADIENT)]
    if d_o is None:
        d_o = torch.zeros_like(out)
    gradients = backward_operator()(d_o, d_lse, q, k, v, out, lse, wanted, *arrays, *before, seed, *after)
    found = [x if want else None for x, want in zip(gradients, wanted)]
    result = found[:_OPERANDS] + [None] * len(OPTIONS)
    for i, gradient in zip(WITH_GRADIENT, found[_OPERANDS:]):
        result[_OPERANDS + i] = gradient
    return tuple(result)


_no_second_derivative = no_second_derivative("attention_backward")
AttentionForTransforms = for_transforms("attention_forward", _save_for_backward, _backward)
_AttentionBackwardForTransforms = for_transforms("attention_backward", save_nothing, _no_second_derivative)


def backward_operator():
    return _AttentionBackwardForTransforms.apply if transformed() else torch.ops.heddle.attention_backward


def _rotary_fake(x, cos, sin, interleaved, offsets):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rotary(x, cos, sin, interleaved, offsets):
    out = _rotary_fake(x, cos, sin, interleaved, offsets)
    native(_heddle.apply_rotary, x, out, cos, sin, interleaved, offsets)
    return out


def _rotary_save(ctx, inputs, output):
    _, cos, sin, ctx.interleaved, offsets = inputs
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("[apply_rotary] cos or sin requires a gradient: they have none; detach them")
    ctx.save_for_backward(cos, sin, offsets)


def _rotary_backward(ctx, d_out):
    cos, sin, offsets = ctx.saved_tensors
    refuse_tangents("apply_rotary", ("d_out",), (d_out,))
    # The inverse of a rotation is the rotation by the opposite angle.
    return rotary_operator()(d_out, cos, -sin, ctx.interleaved, offsets), None, None, None, None


_RotaryForTransforms = for_transforms("apply_rotary", _rotary_save, _rotary_backward)


def rotary_operator():
    return _RotaryForTransforms.apply if transformed() else torch.ops.heddle.apply_rotary


def _append(
    k_new,
    v_new,
    k_cache,
    v_cache,
    seqlens,
    page_table,
    cache_batch_idx,
    cos,
    sin,
    interleaved,
    k_scale=None,
    v_scale=None,
):
    native(
        _heddle.append_kv_cache,
        k_new,
        v_new,
        k_cache,
        v_cache,
        seqlens,
        page_table,
        cache_batch_idx,
        cos,
        sin,
        interleaved,
        k_scale,
        v_scale,
    )
    _changed(k_cache, v_cache, k_scale, v_scale)


def _append_fake(*arguments):
    return None


def _changed(*tensors):
    for x in tensors:
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _cached_fake(q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, *options):
    check_rank(q.shape, False)
    return empty_out(q, v_cache), empty_lse(q, False)


def _cached(q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, *options):
    out, lse = _cached_fake(q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, *options)
    native(
        _heddle.attention_with_kv_cache,
        q,
        k_new,
        v_new,
        k_cache,
        v_cache,
        out,
        lse,
        cos,
        sin,
        interleaved,
        _items(options),
    )
    _changed(k_cache, v_cache, options[K_SCALE], options[V_SCALE])
    return out, lse


def _append_int4(k_new, v_new, blocks, k_tail, v_tail, *rest):
    native(_heddle.append_int4_cache, k_new, v_new, blocks, k_tail, v_tail, *rest)
    _changed(blocks, k_tail, v_tail)


def _over_int4_fake(q, blocks, k_tail, v_tail, block_table, row_idx, *options):
    check_rank(q.shape, False)
    return empty_out(q, v_tail), empty_lse(q, False)


def _over_int4(q, blocks, k_tail, v_tail, block_table, row_idx, *options):
    out, lse = _over_int4_fake(q, blocks, k_tail, v_tail, block_table, row_idx, *options)
    native(
        _heddle.attention_over_int4_cache, q, blocks, k_tail, v_tail, block_table, row_idx, out, lse, _items(options)
    )
    return out, lse


def asking(name, kernel, fake, without_backward=False):
    """kernel and fake of an operator that refuse tensors on several devices, and gradients that would be dropped: autograd
    calls an operator that it does not know all the same. (heddle's own functions have asked, and turn gradients off.)"""
    names = [argument.name for argument in getattr(torch.ops.heddle, name).default._schema.arguments]
    if name == "attention_with_kv_cache":  # as the native module calls them there
        names[names.index("seqused_k")] = "seqlens"

    def asking_kernel(*arguments):
        if without_backward and torch.is_grad_enabled():
            refuse_gradients(name, names, arguments)
        try:
            return kernel(*arguments)
        except ValueError:
            one_device(name, names, arguments)  # the native module has refused that, in fewer words
            raise

    def asking_fake(*arguments):
        one_device(name, names, arguments)  # where one tensor of them is on the meta device, this is what runs
        if without_backward and torch.is_grad_enabled():
            refuse_gradients(name, names, arguments)
        return fake(*arguments)

    return asking_kernel, asking_fake


for _name, _kernel, _fake, _without_backward in (
    ("attention_forward", _forward, _forward_fake, False),
    ("attention_backward", _backward_gradients, _backward_fake, False),
    ("apply_rotary", _rotary, _rotary_fake, False),
    ("append_kv_cache", _append, _append_fake, True),
    ("attention_with_kv_cache", _cached, _cached_fake, True),
    ("append_int4_cache", _append_int4, _append_fake, True),
    ("attention_over_int4_cache", _over_int4, _over_int4_fake, True),
):
    _kernel, _fake = asking(_name, _kernel, _fake, _without_backward)
    for _device in ("CPU", "CUDA"):  # what does not run there is refused by the native module, by name
        _LIBRARY.impl(_name, _kernel, _device)
    torch.library.register_fake(f"heddle::{_name}", _fake, lib=_LIBRARY)

torch.library.register_autograd("heddle::attention_forward", _backward, setup_context=_save_for_backward, lib=_LIBRARY)
torch.library.register_autograd("heddle::attention_backward", _no_second_derivative, lib=_LIBRARY)
torch.library.register_autograd("heddle::apply_rotary", _rotary_backward, setup_context=_rotary_save, lib=_LIBRARY)
