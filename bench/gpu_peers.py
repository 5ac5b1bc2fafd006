"""Whom Heddle is raced against on a GPU: cuDNN, FlashAttention-2 and the unfused kernels as torch brings them,
FlashAttention-3, bitsandbytes, FlashInfer and block_sparse_attn. Who is not here is left out, and `absent()` says why."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as functional

NAMES = ("cudnn", "fa2", "fa3", "efficient", "math", "cublas", "int4pack", "bitsandbytes")
BACKENDS = {"cudnn": "cudnn", "fa2": "flash", "efficient": "mem_efficient", "math": "math"}


class Chosen:
    """A call of torch's attention with one back end. prepare() chooses it; it is called before the timing, not in it."""

    def __init__(self, backend: str, call: Callable, tf32: bool = False):
        self.backend, self.call, self.tf32 = backend, call, tf32

    def prepare(self):
        for name in BACKENDS.values():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == BACKENDS[self.backend])
        torch.backends.cuda.matmul.allow_tf32 = self.tf32

    def __call__(self, *arguments):
        return self.call(*arguments)


def prepare(call: Callable) -> Callable:
    """What is called before `call` is timed."""
    return getattr(call, "prepare", lambda: None)


def through(forward: Callable, call: Callable) -> Callable:
    """`call`, made of `forward`, with its back end."""
    return Chosen(forward.backend, call, forward.tf32) if isinstance(forward, Chosen) else call


def sdpa(q, k, v, backend: str, tf32: bool = False, **options) -> Chosen:
    """torch's attention over Heddle's layout, [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Chosen(backend, lambda: functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2), tf32)


def fa2_packed(q, k, v, starts, longest, causal, window=(-1, -1)) -> Callable:
    """FlashAttention-2 over packed sequences, [total, H, D]."""
    sides = {f"window_size_{side}": extent for side, extent in zip(("left", "right"), window) if extent >= 0}
    return lambda: torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, causal, False, **sides
    )[0]


@functools.cache
def _imported(module: str):
    """The module, or the error that says why there is none."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever another's package raises where it does not fit torch or the driver
        return error


def _there(module: str) -> bool:
    return not isinstance(_imported(module), Exception)


def absent() -> dict[str, str]:
    """contender -> why it is not in this run."""
    modules = {"fa3": "flash_attn_interface", "bitsandbytes": "bitsandbytes"}
    return {
        name: f"{module} cannot be imported: {str(_imported(module)).splitlines()[0][:200]}"
        for name, module in modules.items()
        if not _there(module)
    }


def contenders() -> list[str]:
    """Those that may be in a run here."""
    return [name for name in NAMES if name not in absent()]


def fa3(call: Callable) -> dict[str, Callable]:
    """{"fa3": a call that gets the module}, or nothing where there is none."""
    if not _there("flash_attn_interface"):
        return {}
    module = _imported("flash_attn_interface")
    return {"fa3": lambda *arguments: call(module, *arguments)}


_FLA = "fla.ops.nsa.parallel"


def fla(call: Callable, window: int = 0) -> dict[str, Callable]:
    """{"fla": a call that gets flash-linear-attention's module of native sparse attention}, or nothing where there is none.

    Its window is a call of flash_attn's function, whose place FlashAttention-3's takes where that is here: it has the same
    arguments, and is the quicker. FlashAttention-3 then computes that branch.
    """
    if why_no_fla(window):
        return {}
    module = _imported(_FLA)
    if window and _there("flash_attn_interface"):
        module.flash_attn_func = _imported("flash_attn_interface").flash_attn_func
    return {"fla": functools.partial(call, module)}


def flashinfer_blocks(q, k, v, lists, rows, block) -> dict[str, Callable]:
    """{"flashinfer": a call over lists [1, N, H, n], planned beforehand}, or nothing where there is none. It has no gradients."""
    if not _there("flashinfer"):
        return {}
    heads, of_keys = q.shape[2], k.shape[1] // block
    named = torch.zeros(heads, lists.shape[1], of_keys, dtype=torch.bool, device=q.device)
    named.scatter_(-1, lists[0].transpose(0, 1).long(), True)
    sizes = [torch.full((heads, n), size, dtype=torch.int32) for n, size in ((lists.shape[1], rows), (of_keys, block))]
    memory = torch.empty(1 << 29, dtype=torch.uint8, device=q.device)
    wrapper = _imported("flashinfer").VariableBlockSparseAttentionWrapper(memory)
    wrapper.plan(named, *sizes, heads, k.shape[2], q.shape[3], q_data_type=q.dtype)
    x = [y[0].detach().transpose(0, 1).contiguous() for y in (q, k, v)]  # [H, S, D]
    return {"flashinfer": lambda: wrapper.run(*x).transpose(0, 1)[None]}


def mit_blocks(q, k, v, lists, rows, block) -> dict[str, Callable]:
    """{"block_sparse_attn": a call over lists [1, N, H, n] of blocks of 128 rows and keys}, or nothing where there is none."""
    if not _there("block_sparse_attn") or (rows, block) != (128, 128):
        return {}
    heads, device = q.shape[2], q.device
    named = torch.zeros(1, heads, lists.shape[1], k.shape[1] // block, dtype=torch.bool, device=device)
    named.scatter_(-1, lists.transpose(1, 2).long(), True)
    starts = [torch.tensor([0, x.shape[1]], dtype=torch.int32, device=device) for x in (q, k)]
    by_mask = torch.ones(heads, dtype=torch.int32, device=device)
    call = _imported("block_sparse_attn").block_sparse_attn_func
    lengths = (q.shape[1], k.shape[1])
    return {
        "block_sparse_attn": lambda: call(
            q[0], k[0], v[0], *starts, by_mask, None, named, *lengths, 0.0, is_causal=False
        )[None]
    }


def why_no_fla(window: int = 0) -> str | None:
    """None: it is here, with its window if it needs one."""
    module = _imported(_FLA)
    if isinstance(module, Exception):
        return f"{_FLA} cannot be imported: {str(module).splitlines()[0][:200]}"
    if window and not _there("flash_attn_interface") and getattr(module, "flash_attn_func", None) is None:
        return "its window needs flash_attn or FlashAttention-3, which are not here"
    return None


def fa3_dense(q, k, v, *, causal=False, window=(-1, -1), deterministic=False, **descales) -> dict[str, Callable]:
    """descales: q_descale, k_descale, v_descale, float32 [B, Hkv], of e4m3 operands."""
    return fa3(lambda module: module.flash_attn_func(
        q, k, v, causal=causal, window_size=window, deterministic=deterministic, **descales))  # fmt: skip


def fa3_packed(q, k, v, starts, longest, causal) -> dict[str, Callable]:
    return fa3(lambda module: module.flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=causal))


def fa3_cached(inputs, lengths, page_table=None) -> dict[str, Callable]:
    """Decoding, call(n) over inputs[n] = (q [B, rows, H, D], k, v caches), which FlashAttention-3 splits as it thinks best."""
    return fa3(lambda module, n=0: module.flash_attn_with_kvcache(
        *inputs[n % len(inputs)], cache_seqlens=lengths, page_table=page_table, causal=True))  # fmt: skip


def int4pack(quantized, copies: int) -> Callable:
    """call(x, n): torch's own 4-bit product over the codes, scales and zero points of an int4_g128 or int4_g128_zp matrix, of
    the n-th copy."""
    n, k = quantized.shape
    codes = quantized.codes.cuda()
    even_high = (codes << 4) | (codes >> 4)  # torch wants column 2j in the high four bits of byte j
    packed = torch.ops.aten._convert_weight_to_int4pack(even_high, 8)  # 8 tiles of 16 columns
    scales = quantized.scales.cuda().to(torch.bfloat16).reshape(n, k // 128)
    # w = (code - 8) * scale + zero; [K / 128, N, 2]
    zeros = torch.zeros_like(scales) if quantized.zeros is None else (8 - quantized.zeros.cuda().float()) * scales
    both = torch.stack((scales, zeros.to(scales.dtype)), dim=-1).transpose(0, 1).contiguous()
    weights = [(packed.clone(), both.clone()) for _ in range(copies)]

    def call(x, i=0):
        codes, scales = weights[i % copies]
        return torch.ops.aten._weight_int4pack_mm(x, codes, 128, scales)

    return call


def bitsandbytes(weights, kind: str, copies: int) -> Callable | None:
    """call(x, n): bitsandbytes' linear layer over weights of its own making, of the n-th copy; None where it is not. kind: "nf4"
    or "fp4"."""
    if not _there("bitsandbytes"):
        return None
    module = _imported("bitsandbytes")
    made = [module.functional.quantize_4bit(weights, blocksize=64, quant_type=kind) for _ in range(copies)]
    return lambda x, i=0: module.matmul_4bit(x, made[i % copies][0].t(), quant_state=made[i % copies][1])
