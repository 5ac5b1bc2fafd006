"""The torch operator ``heddle::nsa_step``: a step of decoding of native sparse attention in one launch."""

from __future__ import annotations

import torch

from ... import _heddle
from .operators import changed, native, register, returns_nothing

_LIBRARY = torch.library.Library("heddle", "FRAGMENT")

# q [B, 1, HQ, D] and the rest as heddle/nsa.h has them; lengths are read, and the caller's to add 1 to. forced: bits of
# the first, the previous and the current block.
_LIBRARY.define(
    "nsa_step(Tensor q, Tensor k_new, Tensor v_new, Tensor(a!) k, Tensor(b!) v, Tensor(c!) k_pooled, "
    "Tensor(d!) v_pooled, Tensor lengths, Tensor? g_cmp, Tensor g_slc, Tensor? g_swa, Tensor(e!) out, "
    "SymInt block_count, SymInt block_size, SymInt window, int forced, float? scale, "
    "Tensor? page_table=None) -> ()"
)


def _step(
    q, k_new, v_new, k, v, k_pooled, v_pooled, lengths, g_cmp, g_slc, g_swa, out,
    block_count, block_size, window, forced, scale, page_table=None,
):  # fmt: skip
    cache, options = (k, v, k_pooled, v_pooled), (block_count, block_size, window, forced, scale)
    native(_heddle.nsa_step, q, k_new, v_new, (*cache, lengths, page_table), (g_cmp, g_slc, g_swa), out, *options, "")
    changed(*cache, out)


register(_LIBRARY, "nsa_step", _step, returns_nothing, without_backward=True)
