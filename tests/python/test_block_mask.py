"""FlexAttention's BlockMasks as lists of key blocks: the call gives what flex_attention gives."""

import heddle
import heddle.hosts.torch
import pytest
import torch
from flash_kit import bounds, close, draw

flex = pytest.importorskip("torch.nn.attention.flex_attention")

B, H, HKV, D = 2, 4, 2, 16
S = 200  # no multiple of a block
lists_of_block_mask = heddle.hosts.torch.lists_of_block_mask
LENGTHS = (70, 3, 0, 64, 63)
DOCUMENTS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


def causal(b, h, q, k):
    return q >= k


def sliding_blocks(b, h, q, k):
    return (q >= k) & (q // 64 - k // 64 < 2)


def local(b, h, q, k):
    return (q >= k) & (q - k <= 70)


def by_heads(b, h, q, k):
    return (q >= k) & (((q // 32 + k // 32 + h + b) % 2 == 0) | (q // 32 == k // 32))


def everything(b, h, q, k):
    return q >= 0


def documents(b, h, q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


def causal_documents(b, h, q, k):
    return (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k)


def sparse_documents(b, h, q, k):
    """Rows of a document meet its first 32 keys and those of their own 32."""
    begins = torch.tensor([0, *LENGTHS]).cumsum(0)[DOCUMENTS]
    i, j = q - begins[q], k - begins[k]
    return causal_documents(b, h, q, k) & ((j < 32) | (i // 32 == j // 32))


def cut_documents(b, h, q, k):
    """Documents that the blocks of the whole cut."""
    return causal_documents(b, h, q, k) & (q // 64 == k // 64)


def prefix(b, h, q, k):
    return (q >= k) | (k < 40)


def scattered(b, h, q, k):
    """No two blocks the same, some rows without a key."""
    return ((q * 7 + k * 13 + h * 5 + b) % 11 < 3) & (q % 50 != 49)


def soft_prefix_window(b, h, q, k):
    return (k < 40) | ((q >= k) & (q - k < 25))


def _operands(rows=S, keys=S, dtype=torch.float32):
    shapes = (B, rows, H, D), (B, keys, HKV, D), (B, keys, HKV, D)
    return [draw(s, i, dtype=dtype).requires_grad_() for i, s in enumerate(shapes)]


def _flex(operands, block_mask):
    q, k, v = (x.detach().transpose(1, 2) for x in operands)  # it has no gradients on the CPU
    return flex.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True).transpose(1, 2)


def _math(operands, mod):
    q, k, v = (x.transpose(1, 2) for x in operands)
    mask = flex.create_mask(mod, q.shape[0], H, q.shape[2], k.shape[2], device="cpu")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


def _check(out, operands, block_mask):
    close(out, _flex(operands, block_mask).reshape(out.shape), 1e-5)
    exact = _math(operands, block_mask.mask_mod).reshape(out.shape)
    close(out, exact, 1e-5)
    d_o = draw(out.shape, 7)
    for found, wanted in zip(torch.autograd.grad(out, operands, d_o), torch.autograd.grad(exact, operands, d_o)):
        close(found, wanted, 1e-5)


CASES = {
    "causal": (causal, dict(causal="top_left"), (64, 64), {}),
    "causal, large blocks": (causal, dict(causal="top_left"), (128, 256), {}),
    "causal, uneven blocks": (causal, dict(causal="top_left"), (48, 16), {}),
    "sliding blocks": (sliding_blocks, dict(causal="top_left"), (64, 64), {}),
    "sliding blocks, finer": (sliding_blocks, dict(causal="top_left"), (128, 128), dict(block_size=64, query_rows=64)),
    "window": (local, dict(causal="top_left", window=(70, -1)), (32, 32), {}),
    "for each head and sequence": (by_heads, dict(causal="top_left"), (32, 32), {}),
    "everything": (everything, {}, (64, 128), {}),
    "causal, by masks": (causal, {}, (64, 64), {}),
    "window, by masks": (local, dict(causal="top_left"), (32, 32), {}),
    "prefix, by masks": (prefix, {}, (64, 64), {}),
    "documents, by masks": (causal_documents, dict(causal="top_left"), (64, 64), {}),
    "prefix and window, finer": (soft_prefix_window, {}, (128, 128), dict(block_size=32, query_rows=24)),
    "scattered": (scattered, {}, (64, 64), {}),
    "scattered, a list for each row": (scattered, {}, (64, 64), dict(query_rows=1, block_size=16)),
    "a list for each row": (causal, dict(causal="top_left"), (64, 64), dict(query_rows=1, block_size=16)),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", CASES)
def test_gives_what_flex_attention_gives(case):
    mod, applied, sizes, finer = CASES[case]
    own = (B, H) if mod in (by_heads, scattered) else (None, None)
    block_mask = flex.create_block_mask(mod, *own, S, S, device="cpu", BLOCK_SIZE=sizes)
    operands = _operands()
    lists = lists_of_block_mask(block_mask, batch=B, **applied, **finer)
    assert lists["blocks"].dtype == torch.int32 and lists["blocks"].shape[:1] == (B,)
    _check(heddle.sparse_attention(*operands, **lists), operands, block_mask)


def test_lists_name_no_more_blocks_than_are_met():
    block_mask = flex.create_block_mask(sliding_blocks, None, None, S, S, device="cpu", BLOCK_SIZE=64)
    lists = lists_of_block_mask(block_mask, causal="top_left")
    found = lists.pop("blocks")
    assert lists == {"block_size": 64, "query_rows": 64, "causal": "top_left", "window": (-1, -1)}
    assert found[0, :, 0].tolist() == [[0, -1], [0, 1], [1, 2], [2, 3]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rows", [30, 200])
def test_bottom_right(rows):
    block_mask = flex.create_block_mask(
        lambda b, h, q, k: q + 130 - rows >= k, None, None, rows, 130, device="cpu", BLOCK_SIZE=32
    )
    operands = _operands(rows, 130)
    lists = lists_of_block_mask(block_mask, causal="bottom_right", batch=B)
    close(heddle.sparse_attention(*operands, **lists), _flex(operands, block_mask), 1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "mod, applied, finer",
    [
        (documents, {}, dict(query_rows=16)),
        (causal_documents, dict(causal="top_left"), {}),
        (sparse_documents, dict(causal="top_left"), dict(query_rows=32, block_size=32)),
        (sparse_documents, dict(causal="top_left"), dict(query_rows=1, block_size=16)),
        (causal_documents, {}, {}),
        (cut_documents, dict(causal="top_left"), dict(query_rows=40)),
    ],
)
def test_documents(mod, applied, finer):
    block_mask = flex.create_block_mask(mod, None, None, S, S, device="cpu", BLOCK_SIZE=64)
    operands = [x[:1] for x in _operands()]
    lists = lists_of_block_mask(block_mask, cu_seqlens=bounds(LENGTHS), **applied, **finer)
    _check(heddle.sparse_attention(*(x[0] for x in operands), **lists), operands, block_mask)


def test_masks_are_there_once_and_where_they_are_needed():
    block_mask = flex.create_block_mask(causal, B, None, 512, 512, device="cpu", BLOCK_SIZE=64)
    assert "masks" not in lists_of_block_mask(block_mask, causal="top_left")
    lists = lists_of_block_mask(block_mask)
    assert lists["masks"].shape == (1, 64, 2) and lists["mask_ids"].shape == lists["blocks"].shape == (B, 8, 1, 8)
    on_diagonal = lists["blocks"] == torch.arange(8)[:, None, None]
    assert torch.equal(lists["mask_ids"], torch.where(on_diagonal, 0, -1).int())
    one = flex.create_block_mask(local, None, None, 512, 512, device="cpu", BLOCK_SIZE=64)
    lists = lists_of_block_mask(one, causal="top_left", batch=3)
    assert len(lists["masks"]) == 2 and lists["mask_ids"].shape == (3, 8, 1, 3)  # of the two blocks that 70 keys cut


def test_a_partial_block_that_meets_nothing_is_left_out():
    """from_kv_blocks takes any list."""
    counts, indices = torch.tensor([[[2, 2]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    block_mask = flex.BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=32, mask_mod=lambda b, h, q, k: (q >= k) & (k < 32)
    )
    lists = lists_of_block_mask(block_mask, causal="top_left")
    assert lists["blocks"][0, :, 0].tolist() == [[0], [0]]


REFUSED = {
    "full, and cut by the call": (everything, dict(causal="top_left"), r"block \(0, 0\).* is full: block_mask lets row 0 attend key 1"),
    "prefix": (prefix, dict(causal="top_left"), r"block \(0, 0\).* is partial: block_mask lets row 0 attend key 1"),
    "a window that is too narrow": (local, dict(causal="top_left", window=(69, -1)), r"block \(1, 0\) of sequence 0, head 0 is partial: block_mask lets row 70 attend key 0, and a call with causal='top_left' and window=\(69, -1\) does not"),
    "documents that meet": (causal, dict(causal="top_left", cu_seqlens=bounds(LENGTHS)), r"block \(1, 0\).* lets row 70 attend key 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_call_would_not_say_is_refused(case):
    mod, options, words = REFUSED[case]
    block_mask = flex.create_block_mask(mod, None, None, S, S, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(ValueError, match=words):
        lists_of_block_mask(block_mask, **options)


def test_arguments_are_refused_by_name():
    block_mask = flex.create_block_mask(causal, None, None, S, S, device="cpu", BLOCK_SIZE=(64, 72))
    with pytest.raises(TypeError, match=r"\[lists_of_block_mask\] block_mask is a Tensor"):
        lists_of_block_mask(torch.zeros(2))
    with pytest.raises(ValueError, match="block_mask has blocks of 72 keys: give block_size, 16, 32, 64 or 128"):
        lists_of_block_mask(block_mask)
    with pytest.raises(ValueError, match="block_size is 24: it must be 16, 32, 64 or 128"):
        lists_of_block_mask(block_mask, block_size=24)
    with pytest.raises(ValueError, match="query_rows is 0: it must be at least 1"):
        lists_of_block_mask(block_mask, block_size=16, query_rows=0)
    with pytest.raises(
        ValueError, match=r"cu_seqlens goes from \[0\] to \[100\] and block_mask is over 200 rows and 200"
    ):
        lists_of_block_mask(block_mask, block_size=16, cu_seqlens=bounds((100,)))
    two = flex.create_block_mask(causal, 2, None, S, S, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(ValueError, match="batch is 3 and block_mask has 2 sequences"):
        lists_of_block_mask(two, batch=3)
    with pytest.raises(ValueError, match="cu_seqlens is given and block_mask has 2 sequences: it must have one"):
        lists_of_block_mask(two, cu_seqlens=bounds(LENGTHS))
    with pytest.raises(ValueError, match="causal is 'left': it must be 'none', 'top_left' or 'bottom_right'"):
        lists_of_block_mask(two, causal="left")
    one = flex.create_block_mask(causal, None, None, S, S, device="cpu", BLOCK_SIZE=64)
    for words, error, given in [
        ("batch is 0: it must be at least 1", ValueError, dict(batch=0)),
        ("batch is -1: it must be at least 1", ValueError, dict(batch=-1)),
        ("batch is '2': it must be an int", TypeError, dict(batch="2")),
        ("block_size is '64': it must be an int", TypeError, dict(block_size="64")),
        ("block_size is 64.0: it must be an int", TypeError, dict(block_size=64.0)),
        ("query_rows is 1.5: it must be an int", TypeError, dict(query_rows=1.5)),
        ("a side of window is 'a': it must be an int", TypeError, dict(window=("a", 1))),
        ("cu_seqlens is a list: it must be a torch tensor", TypeError, dict(cu_seqlens=[0, S])),
        (r"cu_seqlens is int64 \[2\]: it must be int32", ValueError, dict(cu_seqlens=torch.tensor([0, S]))),
        (r"cu_seqlens\[2\] is 60: it must be at least the one before, 90", ValueError, dict(cu_seqlens=torch.tensor([0, 90, 60, S], dtype=torch.int32))),
    ]:  # fmt: skip
        with pytest.raises(error, match=r"\[lists_of_block_mask\] " + words):
            lists_of_block_mask(one, **{"causal": "top_left", **given})
