"""What a type checker says of calls: tests/python/test_typing.py runs mypy over this file, and nothing runs it. A line that ends
in `# error: TEXT` is to be an error with that text, and no other line is to be one."""

import heddle
import numpy as np
import torch
from heddle import flash_attn, flash_attn_3, lowbit, nn
from typing_extensions import assert_type

Pair = tuple[torch.Tensor, torch.Tensor]

x: torch.Tensor = torch.zeros(1, 2, 3, 4)
a: np.ndarray = np.zeros((1, 2, 3, 4), np.float32)
said: bool = bool(x.sum())

assert_type(heddle.attention(x, x, x), torch.Tensor)
assert_type(heddle.attention(a, a, a, causal="top_left"), np.ndarray)
assert_type(heddle.attention(x, x, x, return_lse=True), tuple[torch.Tensor, torch.Tensor])
assert_type(heddle.attention(x, x, x, return_lse=said), torch.Tensor | tuple[torch.Tensor, torch.Tensor])
assert_type(heddle.attention(x, x, x, causal=heddle.Causal.bottom_right, window=(3, None)), torch.Tensor)
assert_type(heddle.attention(x, x, x, precision="int8_qk", method="flash", sink=x, out=x), torch.Tensor)
assert_type(heddle.sparse_attention(x, x, x, x, block_size=32, causal="top_left", q_step=4), torch.Tensor)
assert_type(heddle.sparse_attention(a, a, a, a, a, query_rows=16, return_lse=True), tuple[np.ndarray, np.ndarray])
assert_type(heddle.sparse_attention(x, x, x, x, return_lse=said), torch.Tensor | tuple[torch.Tensor, torch.Tensor])
assert_type(heddle.explain_sparse_attention(x, x, x, x, backward=True), heddle.Explanation)
assert_type(heddle.nsa.pool_keys(x, 32, 16, cu_seqlens=x), torch.Tensor)
assert_type(heddle.nsa.select_blocks(x, x, 16, lse=x, forced=("first",), q_offset=3), torch.Tensor)
assert_type(heddle.nsa.pool_keys(a, 32, seqused=a), np.ndarray)
heddle.nsa.extend_pooled_keys(x, x, 32, seqused=x, appended=1)
assert_type(heddle.nsa.select_blocks(a, a, 16, lse=a, q_offset=a), np.ndarray)
assert_type(heddle.nsa.parallel_nsa(x, x, x, None, x, block_counts=8, **heddle.nsa.presets(4)["fast"]), torch.Tensor)
assert_type(heddle.attention_backward(x, x, x, x, x, x, dq=x, merged=True, causal="top_left"), None)
assert_type(heddle.sdpa(x, x, x, is_causal=True), torch.Tensor)
assert_type(heddle.apply_rotary(a, a, a), np.ndarray)
packed: heddle.lowbit.PackedTensor = heddle.lowbit.pack(heddle.lowbit.quantize(a))
assert_type(heddle.explain_merge_attention([x], [x], x, out_dtype="float32", backward=True), heddle.Explanation)
assert_type(heddle.lowbit.explain(x, packed, backward=True), heddle.Explanation)
assert_type(packed.explain_unpack(torch.float16, gpu="h100"), heddle.Explanation)
assert_type(heddle.Int4Cache.empty(1, 2, 3, 64).explain_attention(x, x).chosen, heddle.Candidate | None)

assert_type(heddle.merge_attention([a, a], [a, a]), tuple[np.ndarray, np.ndarray])
assert_type(heddle.attention_with_kv_cache(x, x, x, x, x, x, causal="bottom_right"), torch.Tensor)
assert_type(heddle.attention_with_kv_cache(a, a, a, a, a, a, return_lse=True), tuple[np.ndarray, np.ndarray])
cache = heddle.Int4Cache.empty(1, 2, 3, 64, dtype=torch.float16, device="cuda")
assert_type(cache.blocks, torch.Tensor)
assert_type(cache.attention(x, x, causal="bottom_right"), torch.Tensor)
assert_type(cache.attention(x, x, return_lse=True), Pair)

assert_type(flash_attn.flash_attn_func(x, x, x, 0.0, None, True), torch.Tensor)
assert_type(
    flash_attn.flash_attn_func(x, x, x, causal=True, return_attn_probs=True),
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
)
assert_type(flash_attn.flash_attn_varlen_func(x, x, x, x, x, 3, 3, 0.0, return_attn_probs=False), torch.Tensor)
assert_type(flash_attn.flash_attn_with_kvcache(x, x, x, return_softmax_lse=True), Pair)
assert_type(flash_attn_3.flash_attn_func(x, x, x, return_attn_probs=said), torch.Tensor | Pair)
assert_type(flash_attn_3.flash_attn_with_kvcache(x, x, x, x, x, page_table=x), torch.Tensor)

encoder = heddle.Encoder("folder", layers={"*": "nvfp4:mse"})
assert_type(encoder.encode([1, 2], [0, 2]), np.ndarray)
assert_type(encoder.encode(a, a, return_hidden_states=True), tuple[np.ndarray, np.ndarray])
on_gpu: heddle.Encoder[torch.Tensor] = heddle.Encoder("folder", dtype="bf16", device="cuda")
assert_type(on_gpu.encode(a, a), torch.Tensor)

q = lowbit.quantize(x, "nf4_b128", rule="mse")
assert_type(q, lowbit.QuantizedTensor[torch.Tensor])
assert_type(q.codes, torch.Tensor)
assert_type(q.dequantize(torch.float16), torch.Tensor)
assert_type(q.error(x).row_max, torch.Tensor)
assert_type(lowbit.pack(q).unpack(), torch.Tensor)
assert_type(lowbit.linear(a, packed, activation="silu", norm="rms_norm", norm_weight=a), np.ndarray)
assert_type(lowbit.load("folder", "name").scales, np.ndarray)
assert_type(lowbit.load("folder", "name", framework="torch").zeros, torch.Tensor | None)
assert_type(lowbit.calibrate([a, a], a, format="mxfp4", methods=["awq"]).scales, np.ndarray)
assert_type(lowbit.smooth([x, x], x), torch.Tensor)
assert_type(lowbit.FP4Codec.encode(x), Pair)

layer = nn.Linear(64, 32, format="nvfp4", activation="gelu_tanh")
assert_type(layer.quantize("int8_row", rule="plain").dequantized(), torch.Tensor)
assert_type(layer.bias, torch.nn.Parameter | None)
assert_type(layer.quantized(), lowbit.QuantizedTensor[torch.Tensor])
assert_type(layer.packing_error, lowbit.PackingError | None)
assert_type(layer.drop_plain(), nn.Linear)
assert_type(nn.TransformerBlock(64, 4, 256, activation="swiglu", causal="top_left").up, nn.Linear)
assert_type(nn.choose_policy(layer, x, error=0.1, formats=("nvfp4+fp8_x", "16bit")).policy, nn.Policy)
rules = {"lm_head": "float32", "*": "nvfp4"}
assert_type(nn.quantize_model(layer, rules), torch.nn.Module)

heddle.attention(x, x, x, causal="bottm_right")  # error: No overload variant
heddle.attention(x, x, x, causal=True)  # error: No overload variant
heddle.attention(x, x, x, precision="bf16")  # error: No overload variant
heddle.attention(x, x, x, method="quick")  # error: No overload variant
heddle.attention(x, x, x, key_step=1.5)  # error: No overload variant
heddle.attention(x, x, x, windows=(3, 0))  # error: No overload variant
heddle.sparse_attention(x, x, x)  # error: No overload variant
heddle.sparse_attention(x, x, x, x, blocksize=64)  # error: No overload variant
heddle.nsa.select_blocks(x, x)  # error: Missing positional argument "n"
heddle.explain_merge_attention([x], [x], backward="yes")  # error: incompatible type "str"; expected "bool"
heddle.attention(x, x, x).half_precision()  # error: "Tensor" has no attribute
heddle.attention(x, x, x, return_lse=True).sum()  # error: "tuple[Tensor, Tensor]" has no attribute

heddle.atention(x, x, x)  # error: Module has no attribute "atention"
heddle.attention(x, x, x, mask=[[True]])  # error: No overload variant
heddle.attention(x, x, x, out_dtype="bfloat16")  # error: No overload variant
heddle.attention_with_kv_cache(x, x, x, x, x, x, seqused_k=x)  # error: No overload variant
heddle.attention_backward(x, x, x, x, x, x, causal="bottom_left")  # error: incompatible type
heddle.explain(x, x, x, gpu="h800")  # error: incompatible type
heddle.explain((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), dtype="float23")  # error: incompatible type
heddle.explain(x, x, x, out=x)  # error: Unexpected keyword argument "out"
flash_attn.flash_attn_func(x, x, x, causal="none")  # error: No overload variant
flash_attn.flash_attn_func(x, x, x, return_attn_probs=True).sum()  # error: has no attribute "sum"
heddle.nsa.parallel_nsa(x, x, x, share="outputs")  # error: incompatible type
heddle.nsa.select_blocks(x, x, 4, forced=("last",))  # error: incompatible type
heddle.nsa.Cache(1, 64, 2, 8, own_keys=("slc",))  # error: incompatible type
nn.NativeSparseAttention(64, 8, 2, compression="learnt")  # error: incompatible type
nn.NativeSparseAttention(64, 8, 2, own_keys=("slc",))  # error: incompatible type
lowbit.quantize(x, "nvfp5")  # error: incompatible type
lowbit.quantize(x, rule="best")  # error: incompatible type
lowbit.linear(x, packed, activation="gelu")  # error: incompatible type
lowbit.load("folder", "name", framework="jax")  # error: No overload variant
lowbit.pack(q, order="rows")  # error: incompatible type
nn.Linear(64, 32, format="nvfp5")  # error: incompatible type
nn.Linear.from_linear(layer, "nvfp4", activation="swish")  # error: incompatible type
nn.TransformerBlock(64, 4, 256, norm="rms")  # error: incompatible type
nn.quantize_model(layer, "nvfp5")  # error: incompatible type
