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
