"""A Transformer encoder of the BERT family, computed by the C++ library on the CPU or on a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

import numpy as np

from . import _heddle
from ._files import existing
from ._options import dtype_name
from ._types import Kind
from .hosts import torch_host
from .hosts.gpu import gpu_of
from .lowbit.packed import PackingError

if TYPE_CHECKING:
    import torch

    from ._types import AnyArray, FloatDType, MethodName, Rules


@dataclass(frozen=True)
class EncoderLayer:
    """A linear layer as an ``Encoder`` holds it: format is "float32", "bfloat16", "float16" or a low-bit format's name;
    weight_bytes are those of weights, as packed, and bias; packing_error says what packing changed, which it may on GPUs."""

    name: str
    format: str
    shape: tuple[int, int]
    weight_bytes: int
    packing_error: PackingError | None = None


def _check_out(name: str, dtype: str, found: tuple[int, ...], contiguous: bool, shape: tuple[int, int]) -> None:
    if dtype != "float32" or found != shape or not contiguous:
        strides = "" if contiguous else " and not contiguous"
        raise ValueError(
            f"[encode] {name} is {dtype} {list(found)}{strides}: it must be float32 {list(shape)}, contiguous"
        )


def _numpy_out(name: str, given: Any, shape: tuple[int, int]) -> np.ndarray:
    """A result of an encoder on the CPU that the caller has."""
    if not isinstance(given, np.ndarray):
        raise TypeError(f"[encode] {name} is a {type(given).__name__}: it must be a numpy array")
    _check_out(name, given.dtype.name, given.shape, given.flags.c_contiguous, shape)
    if not given.flags.writeable:
        raise ValueError(f"[encode] {name} is read-only: it is written, so it must be writable")
    return given


@dataclass(frozen=True)
class PrecisionTrial:
    """The error of the embeddings with some layers alone in a format, and the bytes of those layers' weights then."""

    layers: str
    format: str
    weight_bytes: int
    error: float


@dataclass(frozen=True)
class PrecisionChoice:
    """What ``Encoder.choose_precisions`` found.

    Attributes:
      layers: {pattern: format}, to give to ``Encoder``.
      trials: what was measured of each layer and format, alone.
      error: of the embeddings with all of them, measured: at most the one that was allowed.
      weight_bytes: of the whole encoder.
    """

    layers: dict[str, str]
    trials: list[PrecisionTrial]
    error: float
    weight_bytes: int


def _model_folder(operation: str, folder: Any) -> str:
    """folder as text, if the files of a model are in it."""
    text = existing(operation, "folder", folder)
    for name in ("config.json", "model.safetensors"):
        if not os.path.exists(os.path.join(text, name)):
            raise FileNotFoundError(f"[{operation}] folder is {text!r}, which has no {name}")
    return text


class Encoder(Generic[Kind]):
    """Sentence embeddings of packed token sequences.

    Post-norm Transformer, learned positions, GELU (Devlin et al., arXiv 1810.04805); embeddings are the mean of the last
    layer's rows (Reimers and Gurevych, arXiv 1908.10084).
    """

    @overload
    def __init__(
        self: Encoder[np.ndarray],
        folder: str | os.PathLike[str],
        *,
        dtype: FloatDType = "float32",
        device: Literal["cpu"] = "cpu",
        method: MethodName | None = None,
        layers: str | Rules = (),
    ) -> None: ...
    @overload
    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: FloatDType = "float32",
        device: torch.device | str,
        method: MethodName | None = None,
        layers: str | Rules = (),
    ) -> None: ...
    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: FloatDType = "float32",
        device: torch.device | str = "cpu",
        method: MethodName | None = None,
        layers: str | Rules = (),
    ) -> None:
        """Loads ``config.json`` and ``model.safetensors`` of a Hugging Face BERT-family folder.

        Args:
          folder: where the two files lie. Linear layers may be in a layout that ``heddle.lowbit.load`` reads, as
            ``heddle.lowbit.quantize_checkpoint`` writes them: they stay in that format.
          dtype: of weights and activations, "float32" or "bfloat16"; on a GPU "float16" or "bfloat16". Also "fp32",
            "bf16" and "fp16", and torch's dtypes.
          device: "cpu", or a GPU as torch names it ("cuda", "cuda:1"), to which weights are copied once. Needs torch.
          method: of attention: None (flash), "flash" or "baseline".
          layers: {pattern: format}, the precision of linear layers by name ("encoder.layer.0.intermediate.dense"); the first
            pattern that matches decides, "*" stands for any characters, "?" for one, "[0-3]" for one of those. A format
            is "float32", "bfloat16", or one of ``heddle.lowbit.FORMATS``, quantised on load, with a rule for its scales
            if wanted: "nvfp4:mse". A string alone is the format of all. On a GPU layers in floating point are in
            ``dtype``.

        Raises:
          ValueError: a tensor is missing, has a wrong shape, holds NaN or cannot have its format. FileNotFoundError:
            the folder or one of the files is not there; names of a hub are not downloaded. RuntimeError: a file cannot
            be read, or there is no such GPU.
        """
        self.device = str(device)
        self._gpu: Any = None  # a torch.device with its number
        if self.device != "cpu":
            self._gpu = gpu_of("encoder_load", device)
            self.device = str(self._gpu)
        folder = _model_folder("encoder_load", folder)
        pairs: Any = layers.items() if isinstance(layers, Mapping) else layers
        rules = [("*", layers)] if isinstance(layers, str) else list(pairs)
        with self._current():
            self._native = _heddle.Encoder.load(folder, dtype_name(dtype), method or "", rules, self._gpu is not None)
        self.config: dict[str, Any] = self._native.config
        self.times: dict[str, float] = {}

    def _current(self) -> Any:
        """Where the encoder's GPU is the current one."""
        if self._gpu is None:
            return contextlib.nullcontext()
        import torch

        return torch.cuda.device(self._gpu)

    def _torch_out(self, name: str, given: Any, shape: tuple[int, int]) -> Any:
        """A result on the encoder's GPU that the caller has."""
        import torch

        from .hosts.torch.checks import refuse_gradients

        if not isinstance(given, torch.Tensor):
            raise TypeError(f"[encode] {name} is a {type(given).__name__}: it must be a torch tensor")
        refuse_gradients("encode", (name,), (given,), "an encoder has no backward")
        if given.device != self._gpu:
            raise ValueError(f"[encode] {name} is on {given.device}: it must be on {self._gpu}, as the encoder is")
        _check_out(name, str(given.dtype).removeprefix("torch."), tuple(given.shape), given.is_contiguous(), shape)
        return given

    @staticmethod
    def choose_precisions(
        folder: str | os.PathLike[str],
        token_ids: AnyArray | Sequence[int],
        cu_seqlens: AnyArray | Sequence[int],
        *,
        error: float = 0.05,
        formats: Iterable[str] = ("nvfp4:mse", "int4_g32:mse", "int8_row", "bfloat16"),
    ) -> PrecisionChoice:
        """The smallest weights whose embeddings stay within an error of those in float32, on sample text.

        Each format is tried on each layer alone (q, k and v of a layer together); squared errors are taken to add up, and
        what was chosen is measured as a whole and made more exact until it holds.

        Args:
          folder: of a model in floating point. token_ids, cu_seqlens: packed sample text, see ``encode``.
          error: sqrt(sum (e - f)**2 / sum f**2) over embeddings e of unit length and those in float32, f, that is allowed.
            For small errors the mean cosine is then at least 1 - error**2 / 2.
          formats: to choose from, beside float32.

        Raises:
          ValueError: as ``Encoder``, and an empty sample or a bad error. FileNotFoundError: as ``Encoder``.
        """
        rules, trials, found, weight_bytes = _heddle.Encoder.choose_precisions(
            _model_folder("choose_precisions", folder),
            np.asarray(token_ids),
            np.asarray(cu_seqlens),
            error,
            list(formats),
        )
        return PrecisionChoice(dict(rules), [PrecisionTrial(*trial) for trial in trials], found, weight_bytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as held in memory: embeddings, norms and linear layers, packed as they are."""
        return self._native.weight_bytes

    @property
    def layers(self) -> list[EncoderLayer]:
        """The linear layers, in the order in which they run."""
        return [
            EncoderLayer(name, format, (rows, columns), held, PackingError(changed, largest, (row, column)))
            for name, format, rows, columns, held, changed, largest, row, column in self._native.layers
        ]

    def workspace(self, total: int, sequences: int, longest: int) -> int:
        """Scratch bytes of ``encode`` for `total` tokens in `sequences` sequences of at most `longest` tokens."""
        with self._current():
            return self._native.workspace(total, sequences, longest)

    @overload
    def encode(
        self,
        token_ids: AnyArray | Sequence[int],
        cu_seqlens: AnyArray | Sequence[int],
        *,
        normalize: bool = True,
        return_hidden_states: Literal[False] = False,
        out: Kind | None = None,
        hidden_states_out: Kind | None = None,
    ) -> Kind: ...
    @overload
    def encode(
        self,
        token_ids: AnyArray | Sequence[int],
        cu_seqlens: AnyArray | Sequence[int],
        *,
        normalize: bool = True,
        return_hidden_states: Literal[True],
        out: Kind | None = None,
        hidden_states_out: Kind | None = None,
    ) -> tuple[Kind, Kind]: ...
    @overload
    def encode(
        self,
        token_ids: AnyArray | Sequence[int],
        cu_seqlens: AnyArray | Sequence[int],
        *,
        normalize: bool = True,
        return_hidden_states: bool,
        out: Kind | None = None,
        hidden_states_out: Kind | None = None,
    ) -> Kind | tuple[Kind, Kind]: ...
    def encode(
        self,
        token_ids: AnyArray | Sequence[int],
        cu_seqlens: AnyArray | Sequence[int],
        *,
        normalize: bool = True,
        return_hidden_states: bool = False,
        out: Kind | None = None,
        hidden_states_out: Kind | None = None,
    ) -> Any:
        """Embeds sequences packed one after another, without padding.

        Args:
          token_ids: int32 [total]. cu_seqlens: int32 [sequences + 1], from 0 to total. Both on the CPU, also for an encoder
            on a GPU: they are checked there.
          normalize: scale each embedding to unit length.
          return_hidden_states: also return the last layer's rows.
          out, hidden_states_out: where to write the results, which are then those that are returned: contiguous, numpy
            arrays or, of an encoder on a GPU, torch tensors there. They share no memory.

        Returns:
          float32 [sequences, hidden]; with return_hidden_states a pair with float32 [total, hidden]. From the CPU numpy
          arrays, and the call's seconds by stage are then in ``times``; from a GPU torch tensors on it, in the order of its
          current stream, which the call does not wait for.

        Raises:
          ValueError: an id outside the vocabulary, a sequence longer than the position table, bad cu_seqlens, an out that
            is not what the result would be. TypeError: an out of another library.
        """
        if hidden_states_out is not None and not return_hidden_states:
            raise ValueError(
                "[encode] hidden_states_out is given and return_hidden_states is False: they are written where they are "
                "returned"
            )
        for name, given in (("token_ids", token_ids), ("cu_seqlens", cu_seqlens)):
            if getattr(given, "is_cuda", False):
                raise ValueError(f"[encode] {name} is on a GPU: it must be on the CPU, where it is checked")
        lengths = np.asarray(cu_seqlens)
        ids = np.asarray(token_ids)
        if lengths.ndim != 1 or lengths.size < 1 or lengths[0] != 0 or lengths[-1] != ids.size:
            raise ValueError(
                f"[encode] cu_seqlens is {lengths.tolist()}: it must be int32 [sequences + 1], from 0 to the number of "
                f"token_ids, {ids.size}"
            )
        hidden = self.config["hidden"]
        longest = int(np.diff(lengths).max(initial=0))

        def outputs(empty: Callable[[Any], Any], check: Callable[[str, Any, tuple[int, int]], Any]) -> tuple[Any, Any]:
            def memory(name: str, given: Any, shape: tuple[int, int]) -> Any:
                return empty(shape) if given is None else check(name, given, shape)

            embeddings = memory("out", out, (lengths.size - 1, hidden))
            if not return_hidden_states:
                return embeddings, None
            states = memory("hidden_states_out", hidden_states_out, (ids.size, hidden))
            return embeddings, states

        if self._gpu is None:
            embeddings, states = outputs(lambda shape: np.empty(shape, np.float32), _numpy_out)
            if states is not None and np.shares_memory(embeddings, states):
                raise ValueError("[encode] hidden_states_out shares memory with out")
            self.times = self._native.encode(ids, lengths, embeddings, states, normalize, longest)
        else:
            import torch

            with self._current():
                embeddings, states = outputs(lambda shape: torch.empty(shape, device=self._gpu), self._torch_out)
                stream = torch.cuda.current_stream().cuda_stream
                if _heddle.validates():
                    _heddle.raise_bad_index(stream)
                self._native.encode(ids, lengths, embeddings, states, normalize, longest, stream)
                torch_host().changed(out, hidden_states_out)
        return (embeddings, states) if return_hidden_states else embeddings
