"""Decoding over a cache that is spread over processes. decode_ranks.py runs them; here stands what came of each case, and what needs no
process."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import decode_ranks  # noqa: E402
import distributed_ranks  # noqa: E402
import heddle  # noqa: E402
import heddle.distributed as hd  # noqa: E402

_CASES = [(world, name) for world, (_, checks) in decode_ranks.worlds().items() for name in checks]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return distributed_ranks.results_of(decode_ranks.__file__, tmp_path_factory.mktemp("ranks") / "results.json")


@pytest.mark.parametrize(("world", "name"), _CASES)
def test_ranks_are_one_process(results, world, name):
    distributed_ranks.check_world(results, world, name)


def test_one_process_needs_no_group():
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    sink = torch.randn(4)
    out, lse = hd.decode(
        q, k, v, q_offset=6, key_offset=0, causal="top_left", window=(5, 0), sink=sink, return_lse=True
    )
    one = heddle.attention(q, k, v, causal="bottom_right", window=(5, 0), sink=sink, return_lse=True)
    assert torch.allclose(out, one[0], atol=1e-6) and torch.allclose(lse, one[1], atol=1e-6)
    for empty in (hd.decode(q[:0], k[:0], v[:0]), hd.decode(q[:, :0], k, v)):
        assert empty.numel() == 0


_q = torch.zeros(2, 1, 4, 8)
_k = torch.zeros(2, 5, 2, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: hd.decode(_q[0], _k, _k), ValueError, "[distributed.decode] q is [1, 4, 8]: q must be [B, Sq, H, D], and caches"),
        (lambda: hd.decode(_q.double(), _k, _k), ValueError, "[distributed.decode] q is torch.float64: it must be float32, float16"),
        (
            lambda: hd.decode(_q, _k.to("meta"), _k),
            ValueError,
            "[distributed.decode] k_cache is on meta: over several processes it must be on the CPU or a CUDA GPU",
        ),
        (
            lambda: hd.decode(_q[:, :, :3], _k, _k),
            ValueError,
            "[distributed.decode] q is [2, 1, 3, 8], k_cache [2, 5, 2, 8] and v_cache [2, 5, 2, 8]: they must be",
        ),
        (
            lambda: hd.decode(_q, _k, _k, causal="top_left"),
            ValueError,
            "[distributed.decode] causal 'top_left' is given without q_offset and key_offset: a part of the keys does not know where",
        ),
        (
            lambda: hd.decode(_q, _k, _k, window=(3, 0), q_offset=4),
            ValueError,
            "[distributed.decode] window (3, 0) is given without q_offset and key_offset",
        ),
        (
            lambda: hd.decode(_q, _k, _k, alibi_slopes=torch.zeros(4)),
            ValueError,
            "[distributed.decode] alibi_slopes is given without q_offset and key_offset",
        ),
        (
            lambda: hd.decode(_q, _k, _k, causal="bottom_right", q_offset=4, key_offset=0),
            ValueError,
            "causal is bottom_right",
        ),
        (
            lambda: hd.decode(_q, _k, _k, page_table=torch.zeros(2, 1, dtype=torch.int32)),
            ValueError,
            "[distributed.decode] page_table is given without seqused_k",
        ),
        (
            lambda: hd.decode(_q, _k, _k, sink=torch.zeros(2, 4)),
            ValueError,
            "[distributed.decode] sink is torch.float32 [2, 4] on cpu: it must be float32 [H], [4], on cpu",
        ),
        (
            lambda: hd.decode(_q, _k.clone().requires_grad_(), _k),
            ValueError,
            "[distributed.decode] k_cache requires a gradient, and there is no backward: call it under torch.no_grad(), or detach it",
        ),
        (lambda: hd.decode(_q, _k, _k, timeout=-1.0), ValueError, "[distributed.decode] timeout is -1.0: it must be above 0"),
        (lambda: hd.decode(_q, _k, _k, dropout_p=0.1), TypeError, "unexpected keyword argument 'dropout_p'"),
    ],
)  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
