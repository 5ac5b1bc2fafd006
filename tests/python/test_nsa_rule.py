"""What GPU tests hold native sparse attention to, tried with the library on the CPU: it passes, and planted faults do not."""

import pytest

torch = pytest.importorskip("torch")
from cuda_nsa_kit import BLOCK, EVERY, NAMES, WINDOW, both_dtypes, check_call, check_whole, operands  # noqa: E402
from heddle import nsa  # noqa: E402


@both_dtypes
@pytest.mark.parametrize(
    "group, sharing",
    [(1, {}), (4, {}), (4, dict(query_stride=4, share="selection")), (4, dict(query_stride=2, share="delta"))],
)
def test_the_library_passes(group, sharing, dtype):
    check_whole(operands(200, batch=2, group=group, size=64, dtype=dtype, device="cpu"), **sharing)


@both_dtypes
def test_few_rows_pass(dtype):
    check_whole(operands(1, keys=300, group=1, dtype=dtype, size=64, device="cpu"))


@both_dtypes
@pytest.mark.parametrize("fault", ["a block", "the gate", "the window", "one gradient"])
def test_faults_do_not_pass(fault, dtype):
    x = operands(300, size=64, dtype=dtype, device="cpu")
    given = dict(block_size=BLOCK, window_size=WINDOW)

    def wrong(q, k, v, g_cmp, g_slc, g_swa):
        if fault == "a block":
            lists = torch.arange(5).expand(1, 300, 2, 5).clone()
            lists[:, -1, :, 1] = -1
            return nsa.parallel_nsa(q, k, v, g_cmp, g_slc, g_swa, lists, EVERY, **given)
        if fault == "the gate":
            g_swa = g_swa * 1.03
        if fault == "one gradient":
            k = Off.apply(k)
        size = WINDOW - 1 if fault == "the window" else WINDOW
        return nsa.parallel_nsa(
            q, k, v, g_cmp, g_slc, g_swa.to(q.dtype), block_counts=EVERY, block_size=BLOCK, window_size=size
        )

    with pytest.raises(
        AssertionError, match="gradient of k: error" if fault == "one gradient" else "error .* is above"
    ):
        check_call(x, wrong, lambda *y: nsa.naive_nsa_with_compression(*y, EVERY, **given), NAMES)


class Off(torch.autograd.Function):
    """x; of its gradient one element is off by a twentieth of the largest."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[0, 77, 1, 5] += gradient.abs().max() / 20
        return gradient
