"""What the tests of heddle.nn share."""

import torch


def tensor(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
