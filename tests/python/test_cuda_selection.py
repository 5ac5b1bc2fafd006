"""Selection by input on a GPU: the lists of the CPU, without waiting for the device."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
import heddle  # noqa: E402
from heddle import selection  # noqa: E402

CALLS = {
    "pooled": lambda q, k, **options: selection.pooled(q, k, top_k=5, causal=True, **options),
    "pooled_strict": lambda q, k, **options: selection.pooled(q, k, top_k=5, causal=True, strict=True, **options),
    "antidiagonal": lambda q, k, **options: selection.antidiagonal(q, k, top_k=5, causal=True, **options),
    "antidiagonal_whole": lambda q, k, **options: selection.antidiagonal(q, k, top_k=5, per_group=True, **options),
    "vertical_slash": lambda q, k, **options: selection.vertical_slash(q, k, columns=2, diagonals=2, **options),
}


@contextlib.contextmanager
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CALLS)
def test_lists_are_those_of_the_cpu(name):
    generator = torch.Generator().manual_seed(0)
    q, k = (3 * torch.randn(1, 1000, n, 64, generator=generator) for n in (4, 2))
    there_q, there_k = q.cuda(), k.cuda()
    with torch.no_grad(), waiting_is_an_error():
        found, again = (CALLS[name](there_q, there_k) for _ in range(2))
        csr = CALLS[name](there_q, there_k, offsets=True)
        want = CALLS[name](q, k)
    # Float32 sums in another order may exchange blocks of nearly the same share: a few in a hundred lists, if any.
    assert (found["blocks"].cpu() != want["blocks"]).sum() <= want["blocks"].numel() // 50
    assert torch.equal(again["blocks"], found["blocks"])
    assert torch.equal(csr["offsets"].diff(dim=-1), found["counts"].transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_over_the_lists_is_that_of_the_cpu(dtype):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(777, n, 64, generator=generator).to(dtype) for n in (4, 2, 2))
    starts = torch.tensor([0, 300, 300, 777], dtype=torch.int32)
    there = [x.cuda() for x in (q, k, v, starts)]
    with waiting_is_an_error():
        lists = selection.antidiagonal(*there[:2], top_p=0.8, causal=True, cu_seqlens_q=there[3], max_seqlen_q=477)
        out = heddle.sparse_attention(*there[:3], **lists)
    on_the_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in lists.items()}
    torch.testing.assert_close(out.cpu(), heddle.sparse_attention(q, k, v, **on_the_cpu), atol=2e-2, rtol=2e-2)


def test_a_planted_block_is_found_and_none_of_its_values_read():
    q, k = (torch.randn(1, 8192, 2, 64, device="cuda", dtype=torch.bfloat16) / 8 for _ in range(2))
    direction = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    q[:, 100 * 64 : 101 * 64] += direction
    k[:, 37 * 64 : 38 * 64] += direction
    with waiting_is_an_error():
        lists = selection.antidiagonal(q, k, top_k=3, causal=True)
    assert lists["blocks"][0, 100].tolist() == [[0, 37, 100]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_listed_and_moves_nothing_else(dtype, bad):
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 512, n, 64, generator=generator).to(dtype).cuda() for n in (4, 2))
    for measure in (selection.pooled, selection.antidiagonal):
        clean = measure(q, k, top_k=4, causal=True)["blocks"]
        broken_q, broken_k = q.clone(), k.clone()
        broken_q[:, 200, 1, 3], broken_k[:, 130, 0, 3] = bad, bad
        of_keys = measure(q, broken_k, top_k=4, causal=True)["blocks"]
        assert (of_keys[:, 2:, :2] == 2).any(-1).all() and torch.equal(of_keys[:, :, 2:], clean[:, :, 2:])
        of_rows = measure(broken_q, k, top_k=4, causal=True)["blocks"]
        others = torch.ones(8, 4, dtype=torch.bool, device="cuda")
        others[3, 1] = False
        assert torch.equal(of_rows[:, others], clean[:, others])
