"""heddle.lowbit.pack: what it says it changed of the weights, and exact, which refuses that."""

import heddle.nn
import numpy as np
import pytest
import torch
from heddle import lowbit

FORMATS_OF = {
    "fragments16": lowbit.FORMATS,
    "fragments8": ("nvfp4", "mxfp4", "e2m1_row"),
    "matrix": lowbit.FORMATS,
    "matrix8": ("fp8_row",),
}


def quantized(format, kind=torch.from_numpy):
    weights = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    return lowbit.quantize(kind(weights), format)


def far_apart():
    """mxfp4 with 32 weights of 1 under a scale of 2^-12 of the row's, one of them 0.5, and 32 under 2^-30."""
    q = quantized("mxfp4")
    q.codes.fill_(0x22)
    q.scales.fill_(127)
    q.scales[3, 1], q.codes[3, 16] = 127 - 12, 0x21
    q.scales[5, 2] = 127 - 30
    return q


@pytest.mark.parametrize(("format", "order"), [(f, o) for o, formats in FORMATS_OF.items() for f in formats])
def test_most_weights_keep_their_values(format, order):
    p = lowbit.pack(quantized(format), device="meta", order=order)
    assert p.error is not None and (p.error.changed > 0) == (format == "nvfp4" and order == "fragments8")


@pytest.mark.parametrize("kind", (np.asarray, torch.from_numpy))
@pytest.mark.parametrize("format", lowbit.FORMATS)
def test_cpus_hold_all_weights(format, kind):
    p = lowbit.pack(quantized(format, kind), exact=True)
    assert p.error == lowbit.PackingError(0, 0.0, (0, 0)) and "changed" not in repr(p)


def test_what_changed_is_said():
    q = far_apart()
    p = lowbit.pack(q, device="meta", fp8_x=True)
    assert p.error == lowbit.PackingError(33, 1.0, (3, 32)) and repr(p).endswith("bytes, 33 weights changed)")
    p = lowbit.pack(q, device="meta")
    assert p.error == lowbit.PackingError(32, 1.0, (5, 64))


def test_exact_refuses_it():
    with pytest.raises(ValueError, match=r"\[pack_weights\] matrix\[3, 32\] is 0.00012207: order fragments8 would change it "
                       "by 1 of itself, and 33 of 8192 weights in all: with exact set it may change none"):  # fmt: skip
        lowbit.pack(far_apart(), device="meta", fp8_x=True, exact=True)


def test_layers_tell_it():
    layer = heddle.nn.Linear.from_quantized(far_apart())
    assert layer.packing_error.changed == 0 and "changed" not in repr(layer)
    layer.to("meta")
    assert layer.packing_error is None


def test_the_order_follows_what_the_calls_will_be():
    q = quantized("nvfp4")

    def order(matrix=q, **options):
        return lowbit.pack(matrix, device="meta", **options).order  # a GPU's, without one

    rows = lowbit.quantize(torch.ones(10, 64), "nvfp4")
    assert lowbit.pack(q).order == lowbit.pack(quantized("nvfp4", lambda x: x)).order == "rows16"
    assert order() == "fragments16" and order(rows) == "matrix" and order(fp8_x=True) == "fragments8"
    assert (
        order(gated=True) == "fragments16" and order(lowbit.quantize(torch.ones(24, 64), "nf4"), gated=True) == "matrix"
    )
    assert order(quantized("fp8_row"), fp8_x=True) == "matrix8" and order(order="matrix") == "matrix"
    for matrix, options, words in [
        (quantized("nf4"), {"fp8_x": True}, "fp8_x is set and the format is nf4: it is for nvfp4, mxfp4, e2m1_row and"),
        (q, {"order": "rows16"}, "order is 'rows16' and device is 'meta': rows16 is for CPUs"),
    ]:
        with pytest.raises(ValueError, match=rf"\[pack_weights\] {words}"):
            order(matrix, **options)
    with pytest.raises(ValueError, match="fp8_x is set and device is 'cpu'"):
        lowbit.pack(q, fp8_x=True)
