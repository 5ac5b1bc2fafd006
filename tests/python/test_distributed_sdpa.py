"""torch's scaled_dot_product_attention over processes. sdpa_ranks.py runs them; here stands what came of each case, and what is refused."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import distributed_ranks  # noqa: E402
import heddle.distributed as hd  # noqa: E402
import sdpa_ranks  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

_CASES = [(world, name) for world, (_, checks) in sdpa_ranks.worlds().items() for name in checks]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return distributed_ranks.results_of(sdpa_ranks.__file__, tmp_path_factory.mktemp("ranks") / "results.json")


@pytest.mark.parametrize(("world", "name"), _CASES)
def test_ranks_are_one_process(results, world, name):
    distributed_ranks.check_world(results, world, name)


_causal, _full = (hd.plan(4, 1, heads=4, head_size=8, causal=causal) for causal in ("top_left", "none"))
_areas = hd.plan(4, 1, heads=4, head_size=8, areas=[(0, 4, 0, 4, "top_left")])
_x = torch.randn(1, 4, 4, 8)


def test_flags_that_say_nothing_are_taken():
    one_row = hd.plan(1, 1, heads=4, head_size=8, causal="top_left")
    with hd.sdpa(one_row):
        assert torch.equal(F.scaled_dot_product_attention(*[_x[:, :, :1]] * 3), _x[:, :, :1])
    own = F.scaled_dot_product_attention(_x, _x, _x, is_causal=True)
    for is_causal in (False, True):
        with hd.sdpa(_areas):
            assert torch.allclose(F.scaled_dot_product_attention(_x, _x, _x, is_causal=is_causal), own, atol=1e-6)


def _call(*x, plan=_full, **options):
    with hd.sdpa(plan):
        F.scaled_dot_product_attention(*(x or [_x] * 3), **options)


def _no_call():
    with hd.sdpa(_full):
        torch.softmax(_x @ _x.mT, -1) @ _x


def test_what_is_traced_is_refused():
    with (
        FakeTensorMode() as mode,
        pytest.raises(
            RuntimeError, match="torch.export, and torch.compile where it does not see the call, do not trace"
        ),
    ):
        _call(*[mode.from_tensor(_x)] * 3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: hd.sdpa(4), TypeError, "[distributed.sdpa] plan is a int: it must be of heddle.distributed.plan"),
        (
            lambda: _call(is_causal=True),
            ValueError,
            "[distributed.sdpa] is_causal is True and the plan's causal is none: they must say the same",
        ),
        (
            lambda: _call(plan=_causal),
            ValueError,
            "[distributed.sdpa] is_causal is False and the plan's causal is given: they must say the same",
        ),
        (
            lambda: _call(attn_mask=torch.ones(4, 4, dtype=torch.bool)),
            ValueError,
            "[distributed.sdpa] attn_mask is given, [4, 4]: the plan says which rows attend which",
        ),
        (lambda: _call(dropout_p=0.1), ValueError, "[distributed.sdpa] dropout_p is 0.1: attention over several processes has no"),
        (lambda: _call(_x[0], _x, _x), ValueError, "[distributed.sdpa] query is [4, 4, 8]: query, key and value must be [B, H, S, E]"),
        (
            lambda: _call(_x, _x[:, :2], _x[:, :2]),
            ValueError,
            "[distributed.sdpa] query has 4 heads, key 2 and value 2: pass enable_gqa=True to share",
        ),
        (
            lambda: _call(*[torch.zeros(1, 4, 5, 8)] * 3),
            ValueError,
            "[distributed.attention] q is [1, 5, 4, 8]: rank 0 of the plan has 4 rows",
        ),
        (_no_call, RuntimeError, "[distributed.sdpa] nothing called torch.nn.functional.scaled_dot_product_attention: if a model ran"),
    ],
)  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
