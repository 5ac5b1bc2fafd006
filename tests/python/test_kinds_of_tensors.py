"""Tensors that are not one block of values in one process: refused in words, by every operation, before anything is computed."""

import heddle
import pytest
import torch
from heddle import lowbit, nsa

Q = torch.randn(2, 5, 4, 32)
TABLE = torch.randn(9, 16)
BLOCKS = torch.zeros(2, 5, 1, 1, dtype=torch.int32)
ONE = torch.ones(2, dtype=torch.int32)
PACKED = lowbit.pack(lowbit.quantize(torch.randn(8, 32), "nvfp4"))

#: name: the call, with the tensor of an odd kind in the place of one that it takes
CALLS = {
    "attention": lambda x: heddle.attention(x, x, x),
    "attention over keys": lambda x: heddle.attention(Q, x, x),
    "attention with a bias": lambda x: heddle.attention(Q, Q, Q, bias=x),
    "attention with an output": lambda x: heddle.attention(Q, Q, Q, out=x),
    "sdpa": lambda x: heddle.sdpa(x, x, x),
    "sparse": lambda x: heddle.sparse_attention(x, x, x, BLOCKS),
    "lists": lambda x: heddle.sparse_attention(Q, Q, Q, x),
    "rotary": lambda x: heddle.apply_rotary(x, TABLE, TABLE),
    "merge": lambda x: heddle.merge_attention([Q, x], [torch.zeros(2, 4, 5)] * 2),
    "append": lambda x: heddle.append_kv_cache(Q, Q, x, x, ONE),
    "cache": lambda x: heddle.attention_with_kv_cache(Q, Q, Q, x, x, ONE),
    "gradients": lambda x: heddle.attention_backward(Q, Q, Q, x, torch.zeros(2, 4, 5), Q, dq=torch.zeros_like(Q)),
    "linear": lambda x: lowbit.linear(x, PACKED),
    "pooling": lambda x: nsa.pool_keys(x, 4, 2),
}


@pytest.fixture(scope="module")
def distributed():
    """A DTensor of one process."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield distribute_tensor(Q.clone(), init_device_mesh("cpu", (1,)), [Replicate()])
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
def test_distributed(distributed, name):
    words = r"\[\w+\] [\w\[\]]+ is a DTensor, which is spread over processes: .*to_local\(\), for attention of whole sequences"
    with pytest.raises(TypeError, match=words):
        CALLS[name](distributed)


@pytest.mark.parametrize("name", CALLS)
def test_jagged(name):
    jagged = torch.nested.nested_tensor([torch.randn(n, 4, 32) for n in (3, 5)], layout=torch.jagged)
    words = r"\[\w+\] [\w\[\]]+ is a NestedTensor of nested sequences: .*give [\w\[\]]+\.values\(\), for attention with"
    with pytest.raises(TypeError, match=words):
        CALLS[name](jagged)


def test_what_the_words_say_for_jagged_is_what_torch_computes():
    parts = [torch.randn(n, 4, 32) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    cu_seqlens = jagged.offsets().int()
    out = heddle.attention(*[jagged.values()] * 3, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    turned = jagged.transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(turned, turned, turned).transpose(1, 2)
    torch.testing.assert_close(out, expected.values())
