"""heddle.lowbit.smooth and calibrate: scales of columns, by their definition and by what they win."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from heddle import lowbit
from kit import normal


def outlying(rows, columns, generator):
    """x whose columns differ in size, a few by 50, as behind the norms of trained models."""
    size = torch.exp(0.5 * torch.randn(columns, generator=generator))
    size[::37] *= 50
    return torch.randn(rows, columns, generator=generator) * size


def test_smooth_is_exact_in_floats_and_helps_8_bits():
    generator = torch.Generator().manual_seed(1)
    x, weight = outlying(64, 256, generator), torch.randn(256, generator=generator)
    w = torch.randn(96, 256, generator=generator) / 16
    rows = torch.nn.functional.rms_norm(x, (256,), weight)
    s = lowbit.smooth(w, rows.abs().amax(0))
    assert s.dtype == torch.float32 and bool((torch.frexp(s)[0] == 0.5).all())
    smoothed = torch.nn.functional.rms_norm(x, (256,), weight / s)
    assert torch.equal(smoothed * s, rows) and torch.equal((smoothed * s)[:, None] * w, rows[:, None] * w)
    products = (smoothed[:, None] * (w * s)[None], rows[:, None] * w[None])
    assert torch.equal(*products)

    exact = rows.double() @ w.double().T
    errors = {}
    for name, matrix, parameter in (("plain", w, weight), ("smooth", w * s, weight / s)):
        p = lowbit.pack(lowbit.quantize(matrix, "int8_row"))
        y = lowbit.linear(x, p, norm="rms_norm", norm_weight=parameter, eps=torch.finfo(torch.float32).eps, int8_x=True)
        errors[name] = ((y - exact).norm() / exact.norm()).item()
    assert errors["smooth"] < 0.4 * errors["plain"], errors


def test_smooth_by_its_definition():
    w = [normal(5, 8), 3 * normal(7, 8)]
    largest = np.abs(np.concatenate(w)).max(0)
    x_absmax = np.exp(normal(8))
    w[0][:, 3] = w[1][:, 3] = 0
    x_absmax[5] = 0
    for alpha in (0, 0.3, 0.5, 1):
        s = lowbit.smooth(w, x_absmax, alpha)
        assert s.dtype == np.float32 and s[3] == s[5] == 1
        used, w_absmax, factors = (np.delete(a.astype(np.float64), [3, 5]) for a in (x_absmax, largest, s))
        ratio = factors / (used**alpha / w_absmax ** (1 - alpha))
        assert (ratio >= 2**-0.5001).all() and (ratio <= 2**0.5001).all()
    for match, call in [
        ("alpha is 1.5", lambda: lowbit.smooth(w, x_absmax, 1.5)),
        (r"weights are \[5, 7\]: they must be \[N, 8\]", lambda: lowbit.smooth(w[0][:, :7], x_absmax)),
        (r"x_absmax is \[8, 1\]", lambda: lowbit.smooth(w, x_absmax[:, None])),
        ("x_absmax has a negative number", lambda: lowbit.smooth(w, x_absmax - 9)),
        ("weights has a NaN", lambda: lowbit.smooth(w[0] * np.nan, x_absmax)),
    ]:
        with pytest.raises(ValueError, match=match):
            call()


def calibrated_error(w, x, c, format, rule):
    """What quantising as the calibration says gives, computed here in double."""
    q = lowbit.quantize(w * c.scales, format, rule=rule, importance=c.importance).dequantize().double()
    x, w = x.double(), w.double()
    return ((x / c.scales) @ q.T - x @ w.T).norm().item() / (x @ w.T).norm().item()


# Of inputs with a few columns 50 times as large; where it was measured, by how much less the output errs.
@pytest.mark.parametrize(
    ("format", "factor"), [("nvfp4", 0.4), ("nf4", 0.45), ("int4_g128", 0.55), ("int4_g32_zp", 0.3), ("e2m1_row", 0.75),
                           ("int8_row", 0.75)]
)  # fmt: skip
def test_calibrate_lowers_the_output_s_error(format, factor):
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(96, 256, generator=generator) / 16
    x = outlying(512, 256, generator)
    rule = "plain" if format == "int8_row" else "mse"
    c = lowbit.calibrate(w, x, format=format)
    exact = x.double() @ w.double().T
    plain = x.double() @ lowbit.quantize(w, format, rule=rule).dequantize().double().T
    plain_error = ((plain - exact).norm() / exact.norm()).item()
    error = calibrated_error(w, x, c, format, rule)
    assert abs(c.plain_error / plain_error - 1) < 1e-3 and abs(c.error / error - 1) < 1e-3
    assert error < factor * plain_error, (error, plain_error)
    assert 0 < c.alpha <= 1 and c.scales.dtype == torch.float32 and c.errors == (c.error,)
    mean = x.abs().double().mean(0)
    expected = mean**c.alpha / (mean.max() * mean.min()) ** (c.alpha / 2)
    assert (c.scales / expected - 1).abs().max() < 1e-5
    # The grid's own choice: neighbours of alpha are no better.
    for alpha in (c.alpha - 0.05, c.alpha + 0.05):
        s = (mean**alpha / (mean.max() * mean.min()) ** (alpha / 2)).float()
        weighed = None if rule == "plain" else (x**2).mean(0) / s**2
        other = dataclasses.replace(c, scales=s, importance=weighed)
        assert calibrated_error(w, x, other, format, rule) > 0.999 * error


def test_calibrate_of_moments_and_several_matrices():
    generator = torch.Generator().manual_seed(2)
    w = [torch.randn(n, 64, generator=generator).numpy() for n in (24, 16)]
    x = outlying(40, 64, generator).numpy()  # fewer rows than columns, and below more
    for rows in (x, np.concatenate([x] * 3)):
        c = lowbit.calibrate(w, rows.reshape(2, -1, 64), format="int4_g32")
        of_moments = lowbit.calibrate(
            w, format="int4_g32", absmean=np.abs(rows).mean(0), moment=rows.T @ rows / len(rows)
        )
        assert isinstance(c.scales, np.ndarray) and len(c.errors) == len(c.plain_errors) == 2
        assert c.alpha == of_moments.alpha and abs(c.error / of_moments.error - 1) < 1e-3
        assert c.error < c.plain_error
    # Columns that the sample does not use, and a sample of one row, have scales too.
    x[:, 7] = 0
    assert np.isfinite(lowbit.calibrate(w, x[:1], format="int4_g32").scales).all()
    none = lowbit.calibrate(w, x, format="int4_g32", steps=0)
    assert none.alpha == 0 and (none.scales == 1).all() and none.error <= none.plain_error
    # Weights that the format holds leave nothing to win.
    exact = lowbit.calibrate(np.zeros((8, 64), np.float32), x, format="int4_g32")
    assert exact.error == exact.plain_error == 0 and exact.alpha == 0 and exact.importance is None


@pytest.mark.parametrize("option", ["int8_x", "fp8_x"])
def test_calibrate_rounds_x_as_products_do(option):
    random = np.random.default_rng(2)
    w, x = (random.standard_normal(shape).astype(np.float32) for shape in ((48, 64), (200, 64)))
    x[:, ::7] *= 30
    x[3], x[4, 1] = 0, 1e-6
    format = "int8_row" if option == "int8_x" else "fp8_row"
    c = lowbit.calibrate(w, x, format=format, **{option: True})
    of_torch = lowbit.calibrate(torch.from_numpy(w), torch.from_numpy(x), format=format, **{option: True})
    assert c.method == of_torch.method and c.alpha == of_torch.alpha > 0 and np.allclose(c.scales, of_torch.scales)
    assert math.isclose(c.error, of_torch.error, rel_tol=1e-4)
    assert c.error < (0.8 if option == "int8_x" else 0.95) * c.plain_error  # floats hold outliers better
    if option == "int8_x":
        exact = x.astype(np.float64) @ w.T
        for scales, error in ((np.ones(64, np.float32), c.plain_error), (c.scales, c.error)):
            y = lowbit.linear(x / scales, lowbit.pack(lowbit.quantize(w * scales, format)), int8_x=True)
            assert math.isclose(np.linalg.norm(y - exact) / np.linalg.norm(exact), error, rel_tol=1e-2)


def test_calibrate_refuses():
    w, x = normal(5, 64), normal(9, 64)
    for match, call in [
        (r"one of x and moment must be given$", lambda: lowbit.calibrate(w)),
        ("given, not both", lambda: lowbit.calibrate(w, x, moment=x.T @ x)),
        ("absmean must be given where moment is", lambda: lowbit.calibrate(w, moment=x.T @ x)),
        (r"x is \[9, 63\]: it must be \[..., 64\]", lambda: lowbit.calibrate(w, x[:, :63])),
        (r"weights are \[5, 32\]: they must be \[N, 64\]", lambda: lowbit.calibrate([w, w[:, :32]], x)),
        ("weights is an empty list", lambda: lowbit.calibrate([], x)),
        ("x has no rows", lambda: lowbit.calibrate(w, x[:0])),
        ("x has a NaN", lambda: lowbit.calibrate(w, x * np.nan)),
        ("weights has a NaN", lambda: lowbit.calibrate(w * np.float32(np.nan), x)),
        ("x is zero everywhere", lambda: lowbit.calibrate(w, 0 * x)),
        ("steps is -1", lambda: lowbit.calibrate(w, x, steps=-1)),
        (r"absmean is \[3\]: it must be \[64\]", lambda: lowbit.calibrate(w, x, absmean=x[0, :3])),
        ("absmean has a negative number", lambda: lowbit.calibrate(w, x, absmean=x[0])),
        (r"moment is \[9, 64\]", lambda: lowbit.calibrate(w, absmean=abs(x[0]), moment=x)),
        ("moment has a negative number", lambda: lowbit.calibrate(w, absmean=abs(x[0]), moment=-(x.T @ x))),
        ("multiple of its group", lambda: lowbit.calibrate(w, x, format="int4_g128")),
        ("rule", lambda: lowbit.calibrate(w, x, format="nvfp4", rule="even")),
        ("int8_x and fp8_x are set", lambda: lowbit.calibrate(w, x, int8_x=True, fp8_x=True)),
        (
            "x must be given where it is rounded",
            lambda: lowbit.calibrate(w, absmean=abs(x[0]), moment=x.T @ x, int8_x=True),
        ),
        (
            "absmax must be given where moment is",
            lambda: lowbit.calibrate(w, absmean=abs(x[0]), moment=x.T @ x, methods=["smoothquant"]),
        ),
        (r"absmax is \[3\]: it must be \[64\]", lambda: lowbit.calibrate(w, x, absmax=x[0, :3], int8_x=True)),
        ("absmax has a negative number", lambda: lowbit.calibrate(w, x, absmax=x[0], int8_x=True)),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="x is a list"):
        lowbit.calibrate(w, x.tolist())
