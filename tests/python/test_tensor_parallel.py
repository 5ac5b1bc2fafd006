"""Layers and blocks that processes share. tensor_ranks.py runs them; here stands what came of each case, and what needs no process."""

import copy

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import distributed_ranks  # noqa: E402
import heddle.nn  # noqa: E402
import tensor_ranks  # noqa: E402
from heddle.nn import ColumnParallelLinear, Linear, RowParallelLinear, TensorParallelBlock, TransformerBlock  # noqa: E402

_CASES = [(world, name) for world, (_, checks) in tensor_ranks.worlds().items() for name in checks]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return distributed_ranks.results_of(tensor_ranks.__file__, tmp_path_factory.mktemp("ranks") / "results.json")


@pytest.mark.parametrize(("world", "name"), _CASES)
def test_ranks_are_one_process(results, world, name):
    distributed_ranks.check_world(results, world, name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_process_needs_no_group(sequence_parallel):
    block = TransformerBlock(32, 4, 48, kv_heads=2, causal="top_left")
    share = TensorParallelBlock(block, sequence_parallel=sequence_parallel)
    x = torch.randn(2, 9, 32)
    assert torch.allclose(share(x), block(x), atol=1e-6)
    assert share.state_dict().keys() == block.state_dict().keys()
    block.qkv.weight.data.zero_()
    assert share.qkv.weight.abs().max() > 0  # a copy
    assert "rank 0 of 1" in repr(share)
    again = copy.deepcopy(share)
    with pytest.raises(
        ValueError, match="layer 'down' is a RowParallelLinear, a rank's share: quantise the whole before"
    ):
        heddle.nn.quantize_model(again, {"down": "int8_row"})
    again.down.quantize("int8_row")
    assert again.down.format == "int8_row" and share.down.format is None
    assert (again(x) - share(x)).abs().max() < 0.05


def test_what_is_frozen_stays_so():
    block = TransformerBlock(32, 4, 48).requires_grad_(False)
    block.norm1.weight.requires_grad_(True)
    share = TensorParallelBlock(block.eval())
    assert [name for name, p in share.named_parameters() if p.requires_grad] == ["norm1.weight"]
    assert not share.training and not share.qkv.training


def _reordered():
    matrix = heddle.lowbit.quantize(torch.randn(4, 32), "mxfp4")
    return Linear.from_quantized(matrix, column_order=torch.arange(32).flip(0))


_x = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: ColumnParallelLinear(torch.nn.Conv1d(1, 1, 1)),
            TypeError,
            "[ColumnParallelLinear] layer is a Conv1d: it must be a heddle.nn.Linear or torch.nn.Linear",
        ),
        (
            lambda: RowParallelLinear(Linear(8, 4, activation="relu")),
            ValueError,
            "[RowParallelLinear] the layer's activation is 'relu': it is of sums over all ranks, and here is a part of each",
        ),
        (
            lambda: RowParallelLinear(_reordered()),
            ValueError,
            "[RowParallelLinear] the layer's columns are reordered: a range of inputs is no range of its groups",
        ),
        (
            lambda: RowParallelLinear(Linear(64, 4).quantize("mxfp4"), inputs=(0, 48)),
            ValueError,
            "[RowParallelLinear] inputs are 0 to 48: mxfp4 stores 32 columns together, which must not be cut",
        ),
        (
            lambda: RowParallelLinear(Linear(64, 4).quantize("mxfp4").drop_plain()),
            ValueError,
            "[Linear.quantized] plain storage was dropped",
        ),
        (
            lambda: RowParallelLinear(Linear(8, 4))(_x, norm=torch.nn.LayerNorm(8)),
            ValueError,
            "[RowParallelLinear] norm is given: it is over all columns of x, and here are this rank's",
        ),
        (
            lambda: ColumnParallelLinear(Linear(8, 4))(_x.to("meta")),
            ValueError,
            "[nn.ColumnParallelLinear] x is torch.float32 [3, 8] on meta: it must be of floats, [..., rows, columns], on the CPU or a CUDA GPU",
        ),
        (
            lambda: ColumnParallelLinear(Linear(8, 4), timeout=0),
            ValueError,
            "[nn.ColumnParallelLinear] timeout is 0: it must be above 0 seconds",
        ),
        (
            lambda: TensorParallelBlock(TransformerBlock(32, 4, 48, dropout=0.1)),
            ValueError,
            "[TensorParallelBlock] the block's dropout is 0.1: it must be 0, as ranks do not draw alike",
        ),
        (
            lambda: TensorParallelBlock(TransformerBlock(8, 4, 8))(_x[None], mask=torch.ones(1, 2, 3, 3, dtype=torch.bool)),
            ValueError,
            "[TensorParallelBlock] mask is [1, 2, 3, 3]: it must be of the whole block's 4 heads, or of 1",
        ),
    ],
)  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
