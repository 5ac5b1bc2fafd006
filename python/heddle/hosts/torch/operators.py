"""The torch operators ``heddle::*`` of attention: schemas, kernels, shapes for tracing, and gradients; and what the other
operators are made of."""

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
    DTYPE_CODES,
    FLOAT32_OUT,
    OPTIONS,
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
    {getattr(torch, name): code for name, code in DTYPE_CODES.items()},
    _device_memory,
)

_OPTIONS = schema()
_OPERANDS = 3  # q, k and v, in front of them

_LIBRARY.define(f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
# Outputs that the caller has: only what autograd does not watch.
_LIBRARY.define(
    f"attention_forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse_out, {_OPTIONS}) -> ()"
)
# wanted: which of dq, dk, dv, dbias, dsink to compute; the others come back with no elements.
_LIBRARY.define(
    "attention_backward(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool[5] wanted, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

# What the caller has of the gradients is written, or with accumulate added to.
_LIBRARY.define(
    "attention_backward_out(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor(a!)? dq, "
    f"Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dbias, Tensor(e!)? dsink, bool accumulate, bool merged, {_OPTIONS}) -> ()"
)


def native_items(options):
    """The native module's options tuple: the seed, a tensor here, is a number there."""
    seed = options[DROPOUT_SEED]
    return options if seed is None else replaced(options, DROPOUT_SEED, int(seed))


_FLOAT8 = torch.float8_e4m3fn


def out_dtype(q, options):
    if options[FLOAT32_OUT]:
        return torch.float32
    dtype = q.dtype
    return torch.bfloat16 if dtype is _FLOAT8 else dtype


def empty_out(q, v, options):
    dtype = out_dtype(q, options)
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
    return empty_out(q, v, options), empty_lse(q, packed)


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
    if gpu != _current_gpu():  # type: ignore[misc]  # there where _raw_stream is
        with torch.cuda.device(gpu):
            return native(function, q, *arguments)
    stream = _raw_stream(gpu)
    if _validates:
        _heddle.raise_bad_index(stream)
    return function(q, *arguments, stream)


def seed_tensor(seed):
    """int64 of one element, from an int, such a tensor, or torch's default generator."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")
    if isinstance(seed, torch.Tensor):
        return seed
    try:
        seed = operator.index(seed) & 0xFFFFFFFFFFFFFFFF
    except TypeError:
        shown = repr(seed) if isinstance(seed, (str, float)) else f"a {type(seed).__name__}"
        raise TypeError(
            f"[attention] dropout_seed is {shown}: it must be an int or an int64 tensor of one element"
        ) from None
    return torch.tensor(seed - (1 << 64) if seed >> 63 else seed, dtype=torch.int64, device="cpu")


def _forward(q, k, v, *options):
    out, lse = _forward_fake(q, k, v, *options)
    native(_heddle.attention_forward, q, k, v, out, lse, native_items(options), False)
    return out, lse


def changed(*tensors):
    """Has autograd notice that these were written."""
    for x in tensors:
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _forward_out(q, k, v, out, lse_out, *options):
    native(_heddle.attention_forward, q, k, v, out, lse_out, native_items(options), False)
    changed(out, lse_out)


def returns_nothing(*arguments):
    """The fake kernel of what only writes."""


def gradient_buffers(q, k, v, wanted, options):
    """For dq, dk, dv, dbias and dsink; those that are not wanted have no elements."""
    tensors = (q, k, v, *(options[i] for i in WITH_GRADIENT))
    return tuple(torch.empty_like(x) if want else q.new_empty(0) for x, want in zip(tensors, wanted))


def _backward_fake(d_o, d_lse, q, k, v, o, lse, wanted, *options):
    return gradient_buffers(q, k, v, wanted, options)


def _backward_gradients(d_o, d_lse, q, k, v, o, lse, wanted, *options):
    gradients = gradient_buffers(q, k, v, wanted, options)
    written = (x if want else None for x, want in zip(gradients, wanted))
    native(
        _heddle.attention_backward, q, k, v, o, lse, d_o, d_lse, *written, native_items(options), False, False, False
    )
    return gradients


def _backward_out(d_o, d_lse, q, k, v, o, lse, dq, dk, dv, dbias, dsink, accumulate, merged, *options):
    written, flags = (dq, dk, dv, dbias, dsink), (False, accumulate, merged)
    native(_heddle.attention_backward, q, k, v, o, lse, d_o, d_lse, *written, native_items(options), *flags)
    changed(*written)


def save_for_backward(operation, ctx, tensors, options):
    """tensors: those that are no options."""
    for i in WITHOUT_GRADIENT:
        if options[i] is not None and options[i].requires_grad:
            instead = "give the whole term as bias" if i == ALIBI_SLOPES else "detach it"
            raise ValueError(f"[{operation}] {ARRAY_NAMES[i]} requires a gradient: it has none; {instead}")
    ctx.save_for_backward(*tensors, *options[:ARRAYS], options[DROPOUT_SEED])
    ctx.numbers = options[ARRAYS:DROPOUT_SEED], options[DROPOUT_SEED + 1 :]
    ctx.set_materialize_grads(False)


def saved(ctx):
    """The tensors and the options of save_for_backward()."""
    tensors = ctx.saved_tensors
    first = len(tensors) - ARRAYS - 1
    before, after = ctx.numbers
    return tensors[:first], (*tensors[first:-1], *before, tensors[-1], *after)


def wanted_gradients(needs):
    """Of q, k, v, bias and sink, from what autograd needs of an operator's arguments, whose last are the options."""
    options = needs[len(needs) - len(OPTIONS) :]
    return [*needs[:_OPERANDS], *(options[i] for i in WITH_GRADIENT)]


def gradients_of_arguments(gradients, wanted, arguments):
    """Gradients of all arguments of an operator, whose last are the options."""
    found = [x if want else None for x, want in zip(gradients, wanted)]
    result = found[:_OPERANDS] + [None] * (arguments - _OPERANDS)
    for i, gradient in zip(WITH_GRADIENT, found[_OPERANDS:]):
        result[arguments - len(OPTIONS) + i] = gradient
    return tuple(result)


def _save_for_backward(ctx, inputs, output):
    save_for_backward("attention", ctx, (*inputs[:_OPERANDS], *output), inputs[_OPERANDS:])


def _backward(ctx, d_o, d_lse):
    (q, k, v, out, lse), options = saved(ctx)
    refuse_tangents("attention_backward", ("d_o", "d_lse", "q", "k", "v", "o", "lse"), (d_o, d_lse, q, k, v, out, lse))
    wanted = wanted_gradients(ctx.needs_input_grad)
    if d_o is None:
        d_o = torch.zeros_like(out)
    gradients = backward_operator()(d_o, d_lse, q, k, v, out, lse, wanted, *options)
    return gradients_of_arguments(gradients, wanted, len(ctx.needs_input_grad))


_no_second_derivative = no_second_derivative("attention_backward")
AttentionForTransforms = for_transforms("attention_forward", _save_for_backward, _backward)
_AttentionBackwardForTransforms = for_transforms("attention_backward", save_nothing, _no_second_derivative)


def backward_operator():
    return _AttentionBackwardForTransforms.apply if transformed() else torch.ops.heddle.attention_backward


def asking(name, kernel, fake, without_backward=False):
    """kernel and fake of an operator that refuse tensors on several devices, and gradients that would be dropped: autograd
    calls an operator that it does not know all the same. (heddle's own functions have asked, and turn gradients off.)"""
    names = [argument.name for argument in getattr(torch.ops.heddle, name).default._schema.arguments]
    if name.startswith("attention_with_kv_cache"):  # as the native module calls them there
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


def register(library, name, kernel, fake, without_backward=False):
    """The kernels of heddle::<name>, asking()."""
    kernel, fake = asking(name, kernel, fake, without_backward)
    for device in ("CPU", "CUDA"):  # what does not run there is refused by the native module, by name
        library.impl(name, kernel, device)
    torch.library.register_fake(f"heddle::{name}", fake, lib=library)


register(_LIBRARY, "attention_forward", _forward, _forward_fake)
register(_LIBRARY, "attention_forward_out", _forward_out, returns_nothing, without_backward=True)
register(_LIBRARY, "attention_backward", _backward_gradients, _backward_fake)
register(_LIBRARY, "attention_backward_out", _backward_out, returns_nothing, without_backward=True)
torch.library.register_autograd("heddle::attention_forward", _backward, setup_context=_save_for_backward, lib=_LIBRARY)
torch.library.register_autograd("heddle::attention_backward", _no_second_derivative, lib=_LIBRARY)
