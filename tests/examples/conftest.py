"""What the tests of the examples share."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Matrices so small take longer in several, where others use the processors too."""
    import heddle
    import torch

    threads, ours = torch.get_num_threads(), heddle.num_threads()
    torch.set_num_threads(1)
    heddle.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    heddle.set_num_threads(ours)
