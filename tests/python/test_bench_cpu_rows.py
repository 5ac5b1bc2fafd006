"""Rows of the benchmarks of a CPU: what they are compared with, and what becomes of one that is wrong. No time is looked at."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
heddle = pytest.importorskip("heddle")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import sources  # noqa: E402


class TestCpuRows:
    @pytest.fixture
    def row(self, monkeypatch):
        import attention_bench
        import contenders

        monkeypatch.setattr(attention_bench, "SHORTEST_SAMPLE", 1e-6)
        group = {"name": "forward", "kind": "dense", "pass": "forward", "causal": True, "goal": 1.0}
        return attention_bench, contenders.make_row(group, [1, 2, 32, 64], "f32", 2)

    def test_a_row_has_its_difference_and_its_sources(self, row):
        bench, row = row
        found = bench.run_row(row, 0.0)
        assert 0 <= found["difference"] <= found["limit"] == 1e-4 and sources.current(found)

    def test_a_row_that_computes_something_else_has_no_time(self, row):
        bench, row = row
        calls, to_common = row.calls()
        row.calls = lambda: (calls | {"heddle": lambda: calls["torch"]() * 1.001}, to_common)
        with pytest.raises(bench.Wrong, match="heddle and torch differ by 0.00"):
            bench.run_row(row, 0.0)

    @pytest.mark.parametrize("name, least, most", [("adaptive_none", 0.0, 0.05), ("adaptive_most", 0.65, 0.85)])
    def test_rows_with_a_tolerance_replace_what_they_say(self, monkeypatch, name, least, most):
        import attention_bench
        import contenders

        monkeypatch.setattr(attention_bench, "SHORTEST_SAMPLE", 1e-6)
        groups = json.loads((Path(attention_bench.__file__).parent / "shapes.json").read_text(encoding="utf-8"))[
            "groups"
        ]
        group = next(group for group in groups if group["name"] == name)
        assert sorted(group["shapes"]) == [[T, 8, D] for T in (2048, 8192) for D in (64, 128)] and group["dtypes"] == [
            "f32",
            "bf16",
        ]
        row = contenders.make_row(group, [512, 2, 64], "f32", 2)
        found = attention_bench.run_row(row, 0.0)
        assert least <= found["replaced"] <= most and 0 < found["tol"] < 2
        assert found["difference"] <= found["limit"] and found["rival"] == "heddle dense" and sources.current(found)
        operands = contenders.tolerated((512, 2, 64), "f32", group["replaced"])
        row.calls = lambda: (
            {"heddle": lambda: heddle.attention(2 * operands.q, operands.k, 9 * operands.v).transpose(1, 2),
             "heddle dense": lambda: heddle.attention(operands.q, operands.k, operands.v).transpose(1, 2)}, {}
        )  # fmt: skip
        with pytest.raises(attention_bench.Wrong, match="heddle and heddle dense differ by"):
            attention_bench.run_row(row, 0.0)

    def test_what_is_raced_against_sgemm_is_compared_with_torch(self):
        import attention_bench
        import contenders

        row = contenders.make_row(
            {"name": "sgemm", "kind": "sgemm", "pass": "forward", "goal": 0.9}, [1, 2, 32, 64], "f32", 2
        )
        right = row.reference()
        worst, limit = attention_bench.difference(row, {"heddle": right}, {})
        assert worst == 0.0 and limit == 1e-4
        with pytest.raises(attention_bench.Wrong):
            attention_bench.difference(row, {"heddle": lambda: -right()}, {})

    @pytest.mark.parametrize("scale, wrong", [(1.0, None), (1.1, "heddle float32 differs by 0.1")])
    def test_linear_rows_are_compared_with_the_dequantised_weights(self, monkeypatch, scale, wrong):
        import linear_bench

        monkeypatch.setattr(linear_bench, "EXTENT", 256)
        monkeypatch.setattr(linear_bench, "WAKING", 0.0)
        weights = torch.randn(256, 256)
        quantized = heddle.lowbit.quantize(weights, "nvfp4")
        packed = [heddle.lowbit.pack(heddle.lowbit.quantize(weights * scale, "nvfp4"))]
        plain = {dtype: [weights.to(dtype)] for dtype in (torch.float32, torch.bfloat16)}
        row = linear_bench.measure("nvfp4", 4, quantized, packed, plain, 0.0)
        if wrong is None:
            assert (
                "wrong" not in row
                and sources.current(row)
                and set(row["differences"]) == {"heddle float32", "heddle bfloat16", "heddle bfloat16, int8_x"}
            )
        else:
            assert wrong in row["wrong"] and "milliseconds" not in row
