"""What a type checker says of calls: tests/python/test_typing.py runs mypy over this file, and nothing runs it. A line that ends
in `# error: TEXT` is to be an error with that text, and no other line is to be one."""

import heddle
import heddle.nsa
import numpy as np
import torch
from typing_extensions import assert_type

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
