"""A Transformer encoder of the BERT family, computed by the C++ library on the CPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from . import _heddle


class Encoder:
    """Sentence embeddings of packed token sequences.

    Post-norm Transformer, learned positions, GELU (Devlin et al., arXiv 1810.04805); embeddings are the mean of the last
    layer's rows (Reimers and Gurevych, arXiv 1908.10084).
    """

    def __init__(self, folder: str | os.PathLike[str], *, dtype: str = "float32", method: str | None = None) -> None:
        """Loads ``config.json`` and ``model.safetensors`` of a Hugging Face BERT-family folder.

        Args:
          folder: where the two files lie.
          dtype: of weights and activations, "float32" or "bfloat16".
          method: of attention: None (flash), "flash" or "baseline".

        Raises:
          ValueError: a tensor is missing, has a wrong shape or holds NaN. RuntimeError: a file cannot be read.
        """
        self._native = _heddle.Encoder.load(os.fspath(folder), dtype, method or "")
        self.config: dict[str, Any] = self._native.config
        self.times: dict[str, float] = {}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as held in memory."""
        return self._native.weight_bytes

    def encode(
        self, token_ids: Any, cu_seqlens: Any, *, normalize: bool = True, return_hidden_states: bool = False
    ) -> Any:
        """Embeds sequences packed one after another, without padding.

        Args:
          token_ids: int32 [total]. cu_seqlens: int32 [sequences + 1], from 0 to total.
          normalize: scale each embedding to unit length.
          return_hidden_states: also return the last layer's rows.

        Returns:
          float32 [sequences, hidden]; with return_hidden_states a pair with float32 [total, hidden]. The call's seconds
          by stage are then in ``times``.

        Raises:
          ValueError: an id outside the vocabulary, a sequence longer than the position table, bad cu_seqlens.
        """
        lengths = np.asarray(cu_seqlens)
        ids = np.asarray(token_ids)
        hidden = self.config["hidden"]
        embeddings = np.empty((max(lengths.size - 1, 0), hidden), np.float32)
        states = np.empty((ids.size, hidden), np.float32) if return_hidden_states else None
        longest = int(np.diff(lengths).max(initial=0))
        self.times = self._native.encode(ids, lengths, embeddings, states, normalize, longest)
        return (embeddings, states) if return_hidden_states else embeddings
