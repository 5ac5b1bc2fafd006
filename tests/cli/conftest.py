"""What the tests of the command share."""

import numpy as np
import pytest


@pytest.fixture
def tensors():
    random = np.random.default_rng(3)

    def make(*shape, dtype=np.float32):
        return random.standard_normal(shape).astype(dtype)

    return make(2, 33, 4, 24), make(2, 33, 2, 24), make(2, 33, 2, 16)
