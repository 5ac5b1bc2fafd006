"""Block-sparse attention on a GPU, lists that whole tiles of rows share: results and gradients against attention under the mask
that says the same, in float64."""

import heddle
import pytest
import torch
from heddle import _heddle

pytestmark = pytest.mark.skipif(
    not (_heddle.cuda_built() and torch.cuda.is_available()), reason="needs a GPU and a build with CUDA"
)


def call(length, heads, kv_heads, size, block, rows, units, seed):
    """q, k, v and lists in which a third of the blocks are named, some twice, each list with its own block."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, length, h, size, generator=generator).to("cuda", torch.bfloat16)
        for h in (heads, kv_heads, kv_heads)
    )
    lists, blocks = -(-length // rows), -(-length // block)
    named = torch.randint(-1, blocks, (2, lists, units, max(2, blocks // 3)), generator=generator)
    named[..., 0] = (torch.arange(lists) * rows // block)[None, :, None]
    return [q, k, v], named.int().cuda()


def expected(x, named, block, rows, causal):
    """In float64, by the formula."""
    q, k, v = (y.detach().double().requires_grad_() for y in x)
    heads, length = q.shape[2], q.shape[1]
    blocks = -(-length // block)
    open_ = torch.zeros(*named.shape[:3], blocks + 1, dtype=torch.bool, device=q.device)
    open_.scatter_(-1, named.long() + 1, True)  # -1 to a place of its own
    mask = open_[..., 1:].permute(0, 2, 1, 3).repeat_interleave(rows, 2).repeat_interleave(block, 3)
    mask = mask[:, :, :length, :length].repeat_interleave(heads // named.shape[2], 1)
    if causal:
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    wide = (y.repeat_interleave(heads // y.shape[2], 2).transpose(1, 2) for y in (q, k, v))
    q_, k_, v_ = wide
    scores = (q_ @ k_.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v_).transpose(1, 2), (q, k, v)


def distance(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1024, 4, 4, 128, 128, 128, 4), (1500, 4, 2, 128, 64, 128, 2), (1000, 8, 2, 64, 128, 256, 1), (900, 4, 2, 128, 64, 64, 4)],
    ids=lambda shape: "-".join(map(str, shape)),
)  # fmt: skip
def test_block_sparse_attention_and_its_gradients(shape, causal, deterministic):
    *_, block, rows, _ = shape
    x, named = call(*shape, seed=1)
    options = dict(block_size=block, query_rows=rows, causal="top_left" if causal else "none")
    leaves = [y.clone().requires_grad_() for y in x]
    out = heddle.sparse_attention(*leaves, named, deterministic=deterministic, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to("cuda", out.dtype)
    exact, wide = expected(x, named, block, rows, causal)
    assert distance(out, exact) < 0.01
    found = torch.autograd.grad(out, leaves, weight, retain_graph=deterministic)
    for gradient, other in zip(found, torch.autograd.grad(exact, wide, weight.double())):
        assert distance(gradient, other) < 0.02
    if deterministic:
        for _ in range(3):
            assert all(map(torch.equal, found, torch.autograd.grad(out, leaves, weight, retain_graph=True)))


def test_in_a_graph():
    x, named = call(2048, 4, 4, 128, 128, 128, 4, seed=3)
    options = dict(block_size=128, query_rows=128)
    first = heddle.sparse_attention(*x, named, **options)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        heddle.sparse_attention(*x, named, **options)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = heddle.sparse_attention(*x, named, **options)
    graph.replay()
    assert torch.equal(out, first)
    named.copy_(named.flip(1))  # lists are looked at when the graph runs
    graph.replay()
    assert torch.equal(out, heddle.sparse_attention(*x, named, **options)) and not torch.equal(out, first)
