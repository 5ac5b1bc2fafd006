"""Native sparse attention over a cache that holds pooled keys beside the keys, so that a step reads few of either."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..hosts.torch.checks import refuse_gradients
from ..kv_cache import append_kv_cache
from . import checks, step
from .branches import FORCED, Compress, compressed_of_blocks
from .cache_rows import CachedRows, StridedRows, kept_of_anchors, known_phase
from .kernels import extend_pooled_keys
from .parallel import attend, checked_form
from .sequences import Form
from .sharing import Sharing, checked_sharing

if TYPE_CHECKING:
    from .._types import BranchName, ForcedName, GateName, OwnKeyName, ShareName

OWN_KEYS: tuple[OwnKeyName, ...] = ("cmp", "swa")


class Cache:
    """Keys and values of B sequences, each of a length of its own, and their pooled keys and values.

    Args:
      batch, capacity: B, and the most keys of a sequence.
      kv_heads, head_size, v_head_size: H, D, Dv (D if None).
      block, stride: keys of a pooled one, and from one to the next (block if None): compression_block and
        compression_stride of the calls that read it.
      query_stride, share, share_branches, gate: what rows take from their anchor in the calls that read it, as for naive_nsa:
        ``Cache(..., query_heads=HQ, **heddle.nsa.presets(HQ // H)["seed"])``.
      query_heads: HQ; needed where rows share outputs.
      block_counts: where rows share lists, the longest one, S.
      page_size, pages: where the cache is in pages: keys of one, a multiple of stride of which capacity is one, and how many
        there are. On a GPU also a multiple of the calls' block_size.
      compress: what makes a key and a value of a block in place of the mean, as for parallel_nsa; not in pages.
      own_keys: which of the branches "cmp" and "swa" have keys and values of their own.

    Attributes:
      k, v: [B, capacity, H, D], [B, capacity, H, Dv].
      k_cmp, v_cmp, k_swa, v_swa: the same of the compressed branch, not yet pooled, and of the window; k and v where a branch
        has none of its own.
      k_pooled, v_pooled: [B, N, H, D], [B, N, H, Dv], N = (capacity - block) // stride + 1, of complete blocks alone.
      page_table: None, or with page_size int32 [B, capacity // page_size], which page has keys n * page_size and on of sequence
        b, -1: none yet. The caller writes it, before the call that needs the page; pages that a call appends to are one
        sequence's alone, others may be in the tables of several. Then k, v are [pages, page_size, H, D or Dv] and k_pooled,
        v_pooled [pages, page_size // stride, H, D or Dv].
      lengths: int32 [B], keys there are. Smaller ones forget the keys behind them, and what was pooled of those is
        replaced when new keys complete the blocks again. With a query stride r, a multiple of r is always right. Another length
        is, where the next row's anchor is the one that is kept: on a CPU calls check it, on a GPU where ``HEDDLE_VALIDATE`` is
        set; else rows up to the next anchor mean nothing.
      anchors: with a query stride, what the last anchor of each sequence has for the rows behind it, by name: "position", int32
        [B], -1: none yet; "lists", int32 [B, H, S], of share="selection"; of branches that share their output, "cmp", "slc"
        and "swa", [B, HQ, Dv], of share="delta" "slc" and "swa", and with gate="anchor" "g_cmp", "g_slc" and "g_swa", float32
        [B, HQ]; but of all three branches with gate="anchor" "sum" alone, [B, HQ, Dv]. Outputs are float32 on a CPU, the sum
        and on a GPU all of the cache's dtype. Who copies a sequence copies its part of each; {} without a query stride.

    Raises:
      ValueError, TypeError: a bad argument; the message names it, its value and the rule.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_size: int,
        v_head_size: int | None = None,
        *,
        block: int = 64,
        stride: int | None = None,
        query_stride: int = 1,
        share: ShareName = "none",
        share_branches: Iterable[BranchName] = ("slc",),
        gate: GateName = "own",
        query_heads: int | None = None,
        block_counts: int = 16,
        page_size: int | None = None,
        pages: int | None = None,
        compress: Compress | None = None,
        own_keys: Iterable[OwnKeyName] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
    ) -> None:
        sizes = {"batch": batch, "capacity": capacity, "kv_heads": kv_heads, "head_size": head_size, "block": block}
        for name, value in sizes.items():
            checks.integer("Cache", name, value, 1)
        stride = block if stride is None else checks.integer("Cache", "stride", stride, 1)
        if block % stride != 0:
            raise ValueError(f"[Cache] block is {block}: it must be a multiple of stride, {stride}")
        widths = (
            head_size,
            head_size if v_head_size is None else checks.integer("Cache", "v_head_size", v_head_size, 1),
        )
        self.block, self.stride, self.capacity = block, stride, capacity
        rows = batch, capacity
        of_pooled = batch, max(0, (capacity - block) // stride + 1)
        self.page_table: torch.Tensor | None = None
        if page_size is not None:
            rows, of_pooled = _of_pages(capacity, stride, page_size, pages)
            table = torch.full((batch, capacity // rows[1]), -1, dtype=torch.int32, device=device)
            self.page_table = table
        elif pages is not None:
            raise ValueError(
                f"[Cache] pages is {checks.shown(pages)} and page_size is None: say how many keys a page has"
            )
        # Zeros: what lies behind a sequence's end takes part in products, with a weight of 0.
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.k, self.v = (torch.zeros(*rows, kv_heads, width, **made) for width in widths)
        self.own_keys = checks.some_of("Cache", "own_keys", own_keys, OWN_KEYS)
        self._own = {f"k_{branch}": torch.zeros_like(self.k) for branch in self.own_keys}
        self._own |= {f"v_{branch}": torch.zeros_like(self.v) for branch in self.own_keys}
        checks.callable_or_none("Cache", compress)
        if compress is not None and page_size is not None:
            raise ValueError(
                "[Cache] compress is given beside page_size: blocks in pages are compressed by their means"
            )
        self.compress = compress
        self.k_pooled, self.v_pooled = (torch.zeros(*of_pooled, kv_heads, width, **made) for width in widths)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.sharing = checked_sharing("Cache", query_stride, share, share_branches, gate, None)
        slots = checks.integer("Cache", "block_counts", block_counts, 0)
        heads = 0
        if query_heads is not None:
            heads = checks.integer("Cache", "query_heads", query_heads, 1)
        elif self.sharing.share in ("output", "delta"):
            raise ValueError(
                f"[Cache] query_heads is None and share is {share!r}: say how many heads q has, whose outputs are kept"
            )
        self.anchors = kept_of_anchors(self.sharing, batch, (heads, kv_heads), widths[1], slots, dtype, self.k.device)

    @property
    def k_cmp(self) -> torch.Tensor:
        return self._own.get("k_cmp", self.k)

    @property
    def v_cmp(self) -> torch.Tensor:
        return self._own.get("v_cmp", self.v)

    @property
    def k_swa(self) -> torch.Tensor:
        return self._own.get("k_swa", self.k)

    @property
    def v_swa(self) -> torch.Tensor:
        return self._own.get("v_swa", self.v)

    def complete(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many blocks end within the first ``lengths`` keys."""
        if self.stride == self.block:
            return lengths // self.block
        return (lengths - self.block).clamp(min=-self.stride) // self.stride + 1

    @torch.no_grad()
    def append(
        self,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        *,
        k_cmp: torch.Tensor | None = None,
        v_cmp: torch.Tensor | None = None,
        k_swa: torch.Tensor | None = None,
        v_swa: torch.Tensor | None = None,
    ) -> None:
        """k_new [B, n, H, D] and v_new [B, n, H, Dv] behind each sequence's keys, and the pooled ones of blocks that end among
        them; k_cmp, v_cmp, k_swa, v_swa of branches with keys of their own, the same shapes. With a query stride, anchors among them have no rows of q here: what follows begins at another.

        Raises:
          ValueError: a shape or dtype that is not the cache's, or a sequence that would be longer than the capacity.
        """
        first = self.lengths.clone()
        self._append("Cache.append", {"k_new": k_new, "v_new": v_new}, k_cmp, v_cmp, k_swa, v_swa)
        if "position" in self.anchors:
            position = self.anchors["position"]
            position.masked_fill_(position >= first, -1)

    def _append(
        self,
        operation: str,
        new: dict[str, torch.Tensor],
        k_cmp: torch.Tensor | None,
        v_cmp: torch.Tensor | None,
        k_swa: torch.Tensor | None,
        v_swa: torch.Tensor | None,
    ) -> None:
        own = {"cmp": (k_cmp, v_cmp), "swa": (k_swa, v_swa)}
        appended = [(*new.values(), self.k, self.v)]
        for branch, pair in own.items():
            k, v = (
                checks.of_branch(operation, f"{part}_{branch}", x, name, like, branch in self.own_keys)
                for part, x, (name, like) in zip("kv", pair, new.items())
            )
            if k is not None and v is not None:
                appended.append((k, v, getattr(self, "k_" + branch), getattr(self, "v_" + branch)))
        for k, v, k_cache, v_cache in appended:
            append_kv_cache(k, v, k_cache, v_cache, self.lengths, page_table=self.page_table)
        n = next(iter(new.values())).shape[1]
        if n == 0:
            return
        self.lengths += n
        try:
            if self.compress is not None:
                self._compress(n, self.compress)
                return
            for x, pooled in ((self.k_cmp, self.k_pooled), (self.v_cmp, self.v_pooled)):
                extend_pooled_keys(
                    x, pooled, self.block, self.stride, seqused=self.lengths, appended=n, page_table=self.page_table
                )
        except Exception:  # what kernels alone refuse
            self.lengths -= n
            raise

    def _compress(self, appended: int, compress: Compress) -> None:
        """What the blocks become that the last ``appended`` keys complete."""
        rows = self.k_pooled.shape[1]
        if rows == 0:
            return
        before, after = self.complete(self.lengths - appended), self.complete(self.lengths)
        count = min(rows, (appended - 1) // self.stride + 1)
        # [B, count]. What is no row is the last one: if that one is written, then with what is written there anyway.
        number = (before[:, None] + torch.arange(count, device=before.device)).clamp(max=rows - 1)
        sequence = torch.arange(len(before), device=before.device)[:, None]
        keys = number[..., None] * self.stride + torch.arange(self.block, device=before.device)
        k_blocks, v_blocks = (x[sequence[..., None], keys].flatten(0, 1) for x in (self.k_cmp, self.v_cmp))
        complete = (number < after[:, None])[..., None, None]
        for x, pooled in zip(compressed_of_blocks(k_blocks, v_blocks, compress), (self.k_pooled, self.v_pooled)):
            pooled[sequence, number] = torch.where(complete, x.unflatten(0, number.shape), pooled[sequence, number])


def _of_pages(capacity: int, stride: int, page_size: Any, pages: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Pages and rows of one, of keys and of pooled keys."""
    page_size = checks.integer("Cache", "page_size", page_size, 1)
    if page_size % stride != 0 or capacity % page_size != 0:
        raise ValueError(
            f"[Cache] page_size is {page_size}: it must be a multiple of stride, {stride}, and capacity, {capacity}, one of it"
        )
    if pages is None:
        raise ValueError("[Cache] pages is None: say how many pages of page_size keys there are")
    pages = checks.integer("Cache", "pages", pages, 1)
    return (pages, page_size), (pages, page_size // stride)


def nsa_with_cache(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: Cache,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor,
    g_swa: torch.Tensor | None = None,
    block_counts: torch.Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    *,
    block_indices: torch.Tensor | None = None,
    k_cmp: torch.Tensor | None = None,
    v_cmp: torch.Tensor | None = None,
    k_swa: torch.Tensor | None = None,
    v_swa: torch.Tensor | None = None,
    forced: Iterable[ForcedName] = FORCED,
    max_block_counts: int | None = None,
    phase: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Appends k_new and v_new to the cache, then native sparse attention of q's rows, which are the last n positions of each
    sequence: a step of decoding with n = 1, a chunk of a prefill with more. What ``parallel_nsa`` gives over all keys there
    are, with the cache's query stride. Without gradients. On a Hopper GPU a step in 16 bits is one launch, and one that counts
    it, where block_counts is an int to 32, compressed blocks are block_size keys and as far apart, heads are multiples of 8 to
    128, and HQ is no more than 16 H; its branches are not rounded before they are summed. With a query stride so is a step in
    which rows copy all of their anchor's row ("seed_4_3"), beside what copies it; others are composed of operations.

    Args:
      q: [B, n, HQ, D]; k_new, v_new: [B, n, H, D], [B, n, H, Dv], of the cache's dtype.
      g_cmp, g_slc, g_swa, block_indices, block_counts, block_size, window_size, scale, forced, max_block_counts: as for
        parallel_nsa, with a list for each of q's rows. k_cmp, v_cmp, k_swa, v_swa: like k_new and v_new, of the branches whose
        keys are their own in the cache. Compressed blocks and what rows share are the cache's. With a query stride they are the same kind in all calls: a branch
        that is there in one is there in all.
      phase: cache.lengths modulo the query stride, where the caller knows that all sequences have the same: shared branches are
        then computed for anchors alone, and a step that has none leaves them out. None: on a CPU lengths are read; on a GPU
        they are not, so that every step computes shared branches and drops those of rows that are no anchors.
      out: where to write the result, as for ``heddle.attention``; it shares no memory with the cache either.

    Returns:
      [B, n, HQ, Dv] of q's dtype.

    Raises:
      ValueError, TypeError: a bad argument, or a sequence that would be longer than the capacity; the cache has the keys it had.
        On a CPU also a phase that is not the sequences', and a row whose anchor's part the cache does not have. Also a tensor
        that requires a gradient, unless torch's gradients are off.
    """
    name = "nsa_with_cache"
    if not isinstance(cache, Cache):
        raise TypeError(f"[{name}] cache is {checks.shown(cache)}: it must be a heddle.nsa.Cache")
    checks.operands(name, q, k_new, v_new)
    if q.shape[1] != k_new.shape[1]:
        raise ValueError(f"[{name}] q has {q.shape[1]} rows and k_new {k_new.shape[1]}: each row comes with its key")
    most = None if max_block_counts is None else checks.integer(name, "max_block_counts", max_block_counts, 0)
    if block_indices is not None:
        checks.lists(name, block_indices, q, k_new)
        most = block_indices.shape[3] if most is None else min(most, block_indices.shape[3])
    sharing = cache.sharing
    given = {"q": q, "k_new": k_new, "v_new": v_new, "g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa}
    given |= {"k_cmp": k_cmp, "v_cmp": v_cmp, "k_swa": k_swa, "v_swa": v_swa}
    refuse_gradients(name, given, given.values(), "a call over a cache has no backward")
    gates, form, counts = checked_form(
        name, q, k_new, (g_cmp, g_slc, g_swa), block_counts, block_size, window_size, scale, forced, cache.block,
        cache.stride, None, sharing.stride, sharing.share, sharing.branches, sharing.gate, most,
    )  # fmt: skip
    _check_anchors(name, cache, q, form)
    phase = known_phase(name, cache, phase)
    if out is not None:
        held = ("k", "v", "k_cmp", "v_cmp", "k_swa", "v_swa", "k_pooled", "v_pooled", "lengths", "page_table")
        read = {**given, "block_indices": block_indices, **{f"cache.{part}": getattr(cache, part) for part in held}}
        read |= {f"cache.anchors[{part!r}]": x for part, x in cache.anchors.items()}
        checks.out(name, out, (*q.shape[:3], v_new.shape[3]), read)
    with torch.no_grad():
        plain = replace(form, sharing=Sharing())
        if sharing.stride == 1 or (sharing.whole and phase in (None, 0)):
            if block_indices is None and step.serves(q, k_new, v_new, cache, plain, counts):
                o = step.step(q, k_new, v_new, cache, gates, plain, out if sharing.stride == 1 else None)
                return o if sharing.stride == 1 else StridedRows(1, cache, phase).copied(o, out)
        before = cache.lengths.clone()
        cache._append(name, {"k_new": k_new, "v_new": v_new}, k_cmp, v_cmp, k_swa, v_swa)
        if q.shape[0] * q.shape[1] == 0:
            return q.new_zeros(*q.shape[:3], v_new.shape[3]) if out is None else out
        keys, pooled = (cache.k, cache.v, cache.k_swa, cache.v_swa), (cache.k_pooled, cache.v_pooled)
        try:
            if sharing.stride == 1:
                return attend(CachedRows(q.shape[1], cache), q, keys, pooled, gates, block_indices, counts, form, out)
            rows = StridedRows(q.shape[1], cache, phase)
            if not sharing.whole:
                o = attend(rows, q, keys, pooled, gates, block_indices, counts, form, out)
                rows.commit()
                return o
            o = q.new_empty(q.shape[0], 0, q.shape[2], v_new.shape[3])
            if rows.has_anchors:
                of_q, cmp, slc, swa, lists, counts = (
                    None if x is None else rows.at(x, sharing.stride) for x in (q, *gates, block_indices, counts)
                )
                assert of_q is not None and slc is not None
                o = attend(rows.anchors(), of_q, keys, pooled, (cmp, slc, swa), lists, counts, plain)
            return rows.copied(o, out)
        except Exception:  # what kernels alone refuse
            cache.lengths.copy_(before)
            raise


def _check_anchors(name: str, cache: Cache, q: torch.Tensor, form: Form) -> None:
    for part, x in cache.anchors.items():
        if part == "lists" and form.slots > x.shape[2]:
            raise ValueError(
                f"[{name}] block_counts has {form.slots} blocks in a list: the cache was made for block_counts {x.shape[2]}"
            )
        if x.dim() > 1 and part != "lists" and q.shape[2] != x.shape[1]:
            raise ValueError(f"[{name}] q has {q.shape[2]} heads: the cache was made for query_heads {x.shape[1]}")
