"""transformers' mask functions read for what they say, so that most masks need not be written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from .limits import Limits

_ANY = torch.zeros(1, 1, dtype=torch.int64)
# transformers says a pattern as a function of four indices. Its parts are closures: which one, its code tells, and what
# about, its variables.
_AND = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_WINDOW_BOTH_SIDES = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_REMAPPED = None  # in versions before 5.23, whose positions count through
if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
    _REMAPPED = masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, _ANY).__code__
_SAME_DOCUMENT = masking_utils.packed_sequence_mask_function(_ANY).__code__


@dataclass
class Pattern:
    """What a mask function says besides padding: see Limits. both_sides: the window's. documents: [B, S], a number that is
    equal in a document."""

    causal: bool = False
    window: int | None = None
    both_sides: bool = False
    documents: torch.Tensor | None = None


def _add(function: Callable, pattern: Pattern) -> bool:
    """Narrows `pattern` by a mask function; False if it is none that is known."""
    if function is masking_utils.causal_mask_function:
        pattern.causal = True
        return True
    if function is masking_utils.bidirectional_mask_function:
        return True
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    if code is None:
        return False
    said = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells)))
    if code is _AND:
        return all(_add(part, pattern) for part in said["mask_functions"])
    if code is _WINDOW or code is _WINDOW_BOTH_SIDES:
        if pattern.window is not None:
            return False
        pattern.window, pattern.both_sides = said["sliding_window"], code is _WINDOW_BOTH_SIDES
        return True
    if code is _REMAPPED:  # positions count from each document's beginning, which distances do not notice
        return _add(said["mask_function"], pattern)
    if code is _SAME_DOCUMENT:
        pattern.documents = said["packed_sequence_mask"]
        return True
    return False


def read_pattern(function: Callable) -> Pattern | None:
    """What a mask function says, or None if that is more than a Pattern can."""
    pattern = Pattern()
    if not _add(function, pattern):
        return None
    if pattern.window is not None:
        # Limits count distances to the left of a causal row, and to both sides of another.
        if not isinstance(pattern.window, int) or pattern.window < 1 or pattern.both_sides == pattern.causal:
            return None
    return pattern


def _pattern_in_graph(arguments: dict[str, Any]) -> Pattern | None:
    """As read_pattern, while a graph is traced, where closures cannot be read: what transformers' own functions say of
    what they ask for, where that is plain causal or windowed and no values are needed."""
    if arguments["attention_mask"] is not None or not arguments["allow_is_causal_skip"]:
        return None
    if isinstance(arguments["q_offset"], torch.Tensor) or isinstance(arguments["kv_offset"], torch.Tensor):
        return None
    size, config = arguments.get("local_size"), arguments.get("config")
    if size is None:
        return Pattern(True) if arguments["mask_function"] is masking_utils.causal_mask_function else None
    windowed = getattr(config, "sliding_window", None) == size and getattr(config, "attention_chunk_size", None) is None
    return Pattern(True, size) if windowed else None


def _starts(documents: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: where documents begin in rows laid end to end, from their numbers [B, S]; a row of the batch begins one."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = begins.flatten().nonzero().flatten()
    return torch.cat((places, places.new_tensor([documents.numel()]))).to(torch.int32)


def restarts(position_ids: torch.Tensor) -> torch.Tensor:
    """bool [B, S - 1]: whether a document begins behind each of positions [B, S]. Positions that repeat or leap ahead, as those
    of images do, are of one document."""
    return (position_ids[:, 1:] == 0) | (position_ids[:, 1:] < position_ids[:, :-1])


def documents_of(position_ids: torch.Tensor) -> torch.Tensor | None:
    """int32 [n + 1], where documents begin in rows [B * S] of positions [B, S]; None if each row is one."""
    found = restarts(position_ids)
    if not found.any():
        return None
    return _starts(torch.nn.functional.pad(found.cumsum(-1), (1, 0)))


def _spans(padding: torch.Tensor) -> list[tuple[int, int]] | None:
    """(begin, end) of the tokens of each sequence of a padding mask [B, keys]; None where some lie between padding, or there
    are none."""
    keys = padding.shape[1]
    count = padding.sum(1)
    begin = padding.int().argmax(1)
    end = keys - padding.flip(1).int().argmax(1)
    rows = torch.stack((count, begin, end), 1).tolist()
    if any(count == 0 or end - begin != count for count, begin, end in rows):
        return None
    return [(begin, end) for _, begin, end in rows]


def _lengths(values: list[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _causal(pattern: Pattern, spans: list, first: int, rows: int, keys: int, device: Any) -> Limits | None:
    """The limits of `rows` rows, the first at the key numbered `first`, over the keys of `spans`; None if they are not one."""
    end = first + rows
    window = pattern.window if pattern.window is not None and pattern.window < end else None
    begins, ends = [begin for begin, _ in spans], [last for _, last in spans]
    leftpad = _lengths(begins, device) if any(begins) else None
    if all(last == end for last in ends):
        used = _lengths(ends, device) if end < keys else None
        return Limits(rows > 1 or window is not None, window, leftpad, used)
    if rows == 1 and window is None:
        return Limits(False, None, leftpad, _lengths(ends, device))
    if first == 0 and leftpad is None:
        # Rows from there on are padding, too.
        return Limits(True, window, None, _lengths(ends, device), _lengths(ends, device))
    return None


def _both_sides(pattern: Pattern, spans: list, first: int, rows: int, keys: int, device: Any) -> Limits | None:
    begins, ends = [begin for begin, _ in spans], [last for _, last in spans]
    leftpad = _lengths(begins, device) if any(begins) else None
    full = all(last == keys for last in ends)
    window = pattern.window if pattern.window is not None and pattern.window < max(rows, keys) else None
    if window is not None and not (full and first == 0 and rows == keys):
        return None  # rows may be another sequence's than keys, and then they do not end where the keys do
    return Limits(False, window, leftpad, None if full else _lengths(ends, device))


def _limits(pattern: Pattern, padding: torch.Tensor | None, first: int, batch: int, rows: int, keys: int, device: Any):
    """The limits, None if only a mask says it."""
    if pattern.documents is not None:
        if padding is not None or first != 0 or rows != keys or pattern.documents.shape != (batch, rows):
            return None
        return Limits(pattern.causal, pattern.window, documents=_starts(pattern.documents))
    if pattern.causal and not 0 <= first <= keys - rows:
        return None
    met = first + rows if pattern.causal else keys
    spans: list[tuple[int, int]] | None = [(0, met)] * batch
    if padding is not None:
        spans = _spans(padding[:, :met])
    if spans is None:
        return None
    return (_causal if pattern.causal else _both_sides)(pattern, spans, first, rows, keys, device)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> torch.Tensor | None:
    """The cheapest thing that says which keys a row meets, as transformers' AttentionMaskInterface asks for it.

    Args: as ``transformers.masking_utils.sdpa_mask``; attention_mask is bool [B, keys so far], False = padding.

    Returns:
      None: all keys, or as causal as the layer is, from the first key. Else Limits as a tensor where the pattern is causal,
      windowed or packed and padding lies at the ends only; else (and while a graph is traced, where values are not known)
      what sdpa_mask gives, bool [B, 1, q_length, kv_length].
    """
    asked = dict(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        device=device,
        **others,
    )
    padding = attention_mask
    if is_tracing(padding) or is_tracing(q_offset):
        pattern = _pattern_in_graph(asked)
    else:
        pattern = read_pattern(mask_function)
    if pattern is not None and pattern.documents is None:
        # The caller may want to see the mask itself; that of one row of a static cache is to have the same shape each time.
        skips = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
        pattern = pattern if skips else None
    limits = None
    if pattern is not None and (padding is None or (padding.dim() == 2 and padding.shape[0] == batch_size)):
        begin = int(kv_offset)
        if padding is not None:
            longer = max(0, begin + kv_length - padding.shape[1])
            padding = torch.nn.functional.pad(padding, (0, longer))[:, begin : begin + kv_length]
        limits = _limits(pattern, padding, int(q_offset) - begin, batch_size, q_length, kv_length, device)
    if limits is None:
        return masking_utils.sdpa_mask(**asked)
    plain = limits.of_all_keys() and limits.window is None
    if plain and (not limits.causal or (int(q_offset) == int(kv_offset))):
        return None
    return limits.tensor(batch_size, device)
