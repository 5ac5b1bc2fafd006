"""What attention over lists of key blocks refuses, in words."""

import re

import heddle
import pytest
import torch
from sparse_kit import OPS, Call, H, sample


def refusals():
    """name: (what differs from a call that is served, the error, its words)."""
    kinds = "for each of 2 key/value heads or for each of 4 query heads"
    return {
        "64 bits": (lambda x: dict(blocks=x.blocks.long()), ValueError, "_forward] blocks is int64: it must be int32"),
        "wide counts": (lambda x: dict(counts=x.counts.long()), ValueError, "_forward] counts is int64: it must be int32"),
        "no array": (lambda x: dict(blocks=[[1]]), (TypeError, ValueError), "blocks is a list: it must be a"),
        "few lists": (
            lambda x: dict(blocks=x.blocks[:, 1:], counts=None), ValueError,
            "_forward] blocks is [2, 69, 2, 2]: it must be [2, 70, L, n], a list for each row of q",
        ),
        "shared lists": (
            lambda x: dict(query_rows=16), ValueError,
            "_forward] blocks is [2, 70, 2, 2]: it must be [2, 5, L, n], a list for each 16 rows of q",
        ),
        "heads": (
            lambda x: dict(blocks=x.blocks.repeat(1, 1, 2, 1)[:, :, :3], counts=None), ValueError,
            f"_forward] blocks is [2, 70, 3, 2]: it has lists for 3 heads and must have them for 1, {kinds}",
        ),
        "counts": (
            lambda x: dict(counts=x.counts[..., :1]), ValueError,
            "_forward] counts is [2, 70, 1]: it must be a number for each list of blocks, [2, 70, 2, 2]",
        ),
        "block size": (lambda x: dict(block_size=48), ValueError, "_forward] block_size is 48: it must be 16, 32, 64 or 128"),
        "block size in words": (
            lambda x: dict(block_size="64"), TypeError, "_forward] block_size is '64': it must be an integer of 64 bits"
        ),
        "half a row": (
            lambda x: dict(query_rows=1.5), TypeError, "_forward] query_rows is 1.5: it must be an integer of 64 bits"
        ),
        "no rows": (lambda x: dict(query_rows=0), ValueError, "_forward] query_rows is 0: it must be from 1 to 1048576"),
        "masks alone": (
            lambda x: dict(masks=torch.zeros(1, 1, 1).int()), ValueError,
            "_forward] masks is given and mask_ids is missing, which says whose they are",
        ),
        "ids alone": (
            lambda x: dict(mask_ids=x.blocks), ValueError, "_forward] mask_ids is given and masks is missing"
        ),
        "masks of other rows": (
            lambda x: dict(masks=torch.zeros(1, 2, 1).int(), mask_ids=x.blocks), ValueError,
            "_forward] masks is [1, 2, 1]: it must be [M, 1, 1], 1 word of 32 keys for each row of a list",
        ),
        "masks in 64 bits": (
            lambda x: dict(masks=torch.zeros(1, 1, 1).long(), mask_ids=x.blocks), ValueError,
            "_forward] masks is int64: it must be int32",
        ),
        "masks apart": (
            lambda x: dict(masks=torch.zeros(2, 1, 1).int()[::2].expand(3, 1, 1), mask_ids=x.blocks), ValueError,
            "_forward] masks must be contiguous",
        ),
        "ids of other lists": (
            lambda x: dict(masks=torch.zeros(1, 1, 1).int(), mask_ids=x.blocks[:, 1:]), ValueError,
            "_forward] mask_ids is [2, 69, 2, 2]: it must be a number for each entry of blocks, [2, 70, 2, 2]",
        ),
        "strided ids": (
            lambda x: dict(masks=torch.zeros(1, 1, 1).int(), mask_ids=x.blocks.repeat(1, 1, 1, 2)[..., ::2]), ValueError,
            "_forward] mask_ids must have contiguous entries: the last stride is 2",
        ),
        "mask ids that are none": (lambda x: dict(masks=[1]), (TypeError, ValueError), "masks is a list: it must be a"),
        "scale": (lambda x: dict(scale="1"), TypeError, "_forward] scale is '1': it must be a number"),
        "method": (
            lambda x: dict(method="flash"), ValueError,
            "_forward] method is 'flash': attention over lists has one; leave it empty, or name a candidate as force",
        ),
        "precision": (
            lambda x: dict(precision="tf32"), ValueError,
            "_forward] precision is not f32: attention over lists has no other",
        ),
        "key step": (
            lambda x: dict(key_step=16), ValueError,
            "_forward] key_step is 16: it must be 1, as lists name blocks of single keys",
        ),
        "half a step": (
            lambda x: dict(q_step=1.5), TypeError, "_forward] q_step is 1.5: it must be an integer of 64 bits"
        ),
        "mask": (
            lambda x: dict(mask=(x.blocks[0, :, 0, :1] > 9)), ValueError,
            "_forward] no candidate can serve this call; cpu: it takes no bias and no mask beside lists; "
            "reference: it runs only when it is asked for",
        ),
        "a flag": (lambda x: dict(return_lse="no"), TypeError, "] return_lse is 'no': it must be True or False"),
        "an option that is none": (lambda x: dict(colour=1), TypeError, "[attention] there is no option colour"),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["torch", "numpy", "with gradient"])
@pytest.mark.parametrize("name", refusals())
def test_refusals(name, kind):
    change, error, words = refusals()[name]
    call = Call("counts", requires_grad=kind == "with gradient")
    given = {"blocks": call.blocks, "counts": call.counts, **call.lists, **change(call)}
    operands = call.q, call.k, call.v
    if kind == "numpy":
        given = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        operands = [x.numpy() for x in operands]
    with pytest.raises(error, match=re.escape(words)):
        heddle.sparse_attention(*operands, **given)


def test_lists_must_be_given():
    q, k, v = (getattr(Call("plain"), name) for name in "qkv")
    with pytest.raises(TypeError, match=r"^\[sparse_attention\] blocks is None: it must be a torch tensor$"):
        heddle.sparse_attention(q, k, v, None)
    with pytest.raises(ValueError, match=r"^\[sparse_attention_forward\] blocks is missing$"):
        heddle.sparse_attention(q.numpy(), k.numpy(), v.numpy(), None)


def test_refusals_of_results_and_gradients():
    call = Call("counts")

    def refused(words, error=ValueError, **given):
        with pytest.raises(error, match=re.escape(words)):
            call(**given)

    out, lse = (torch.empty_like(x) for x in call(return_lse=True))
    refused("[sparse_attention_forward] out is [2, 70, 4, 19]: its last extent must be 20", out=out[..., :19])
    refused("[sparse_attention_forward] lse_out is float16: it must be float32", lse_out=lse.half(), return_lse=True)
    refused("[sparse_attention] lse_out is given and return_lse is False: lse is written where it", lse_out=lse)
    refused("[sparse_attention] out is a ndarray: it must be a torch tensor", TypeError, out=out.numpy())
    held = torch.zeros(2 * 70 * 4 * 20, dtype=torch.int32)
    words = "[sparse_attention_forward] out shares memory with masks, which is read while it is written"
    given = dict(masks=held[:1].view(1, 1, 1), mask_ids=call.blocks)
    refused(words, out=held.view(torch.float32).reshape(2, 70, 4, 20), **given)
    call.blocks = held[: call.blocks.numel()].reshape(call.blocks.shape)
    words = "[sparse_attention_forward] out shares memory with blocks, which is read while it is written"
    refused(words, out=held.view(torch.float32).reshape(2, 70, 4, 20))
    refused(
        "[sparse_attention] sink requires a gradient: a call that writes to out has no backward; make it under "
        "torch.no_grad(), or detach sink",
        out=out,
        sink=torch.zeros(H, requires_grad=True),
    )
    refused("[sparse_attention] out requires a gradient: a call that", out=out.clone().requires_grad_())
    operands, options = sample(Call("counts", requires_grad=True))
    with pytest.raises(ValueError, match=r"^\[sparse_attention_out\] q requires a gradient: this call has no backward"):
        OPS.sparse_attention_out(*operands, out, lse, *options)
    with pytest.raises(ValueError, match=r"\[sparse_attention\] out is given inside a transform of torch.func"):
        torch.func.vmap(lambda q: heddle.sparse_attention(q, call.k, call.v, call.blocks, out=out))(call.q[None])
    refused(
        "[sparse_attention] alibi_slopes requires a gradient: it has none",
        alibi_slopes=torch.ones(H, requires_grad=True),
    )
    q = call.q.requires_grad_()
    words = (
        "[sparse_attention_backward] no candidate can serve this call; cpu: it has no gradients with ALiBi or softcap; "
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        call(softcap=2.0).sum().backward()
    torch.autograd.grad(call(softcap=2.0, force="reference").sum(), q)
    (dq,) = torch.autograd.grad(call().square().sum(), q, create_graph=True)
    words = "heddle::sparse_attention_backward has no derivative: second derivatives are not supported"
    with pytest.raises(RuntimeError, match=words):
        dq.sum().backward()
