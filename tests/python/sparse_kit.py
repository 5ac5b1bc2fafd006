"""Calls of attention over lists of key blocks, and the mask that says the same."""

import copy

import heddle
import torch
from heddle._options import pack
from heddle.patterns import pack_masks
from kit import leaf, plain

OPS = torch.ops.heddle
H, HKV, D, DV = 4, 2, 24, 20
ROWS, KEYS = (70, 41), (90, 150)  # of packed sequences; dense ones have the first

#: name: (shape of the lists, options)
CASES = {
    "plain": ({}, {}),
    "causal": ({"keys": 70}, {"causal": "top_left"}),
    "bottom right": ({"units": HKV, "entries": 3}, {"causal": "bottom_right"}),
    "a list for each head": ({"units": H, "block_size": 16}, {}),
    "counts": ({"counts": True, "units": HKV}, {"causal": "bottom_right", "sink": True}),
    "rows share lists": ({"query_rows": 16, "units": HKV}, {"sink": True}),
    "window": ({"units": HKV, "entries": 4}, {"window": (40, 11)}),
    "offsets": ({}, {"causal": "top_left", "q_offset": 30}),
    "anchors": ({"units": HKV}, {"causal": "top_left", "q_step": 2, "q_offset": 3}),
    "packed": ({"packed": True, "units": HKV, "counts": True}, {"causal": "bottom_right"}),
    "packed rows share lists": ({"packed": True, "query_rows": 8}, {"sink": True}),
    "masks": ({"masks": 3, "units": HKV, "query_rows": 16, "entries": 4}, {"causal": "bottom_right", "sink": True}),
    "masks of packed rows": ({"packed": True, "masks": 5, "block_size": 16, "query_rows": 1}, {}),
}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def csr(blocks, counts):
    """blocks [entries], or their masks, and offsets of the same lists, one behind the other."""
    batched = blocks.dim() == 4
    blocks = blocks.transpose(-3, -2)  # head units before lists
    there = torch.arange(blocks.shape[-1], device=blocks.device) < (
        torch.full_like(blocks[..., 0], blocks.shape[-1]) if counts is None else counts.transpose(-2, -1)
    ).unsqueeze(-1)
    ends = there.sum(-1).flatten().cumsum(0)
    lead = (blocks.shape[0], blocks.shape[1]) if batched else (blocks.shape[0],)
    ends = ends.view(*lead, -1)
    starts = torch.cat([ends.new_zeros(1), ends[..., -1].flatten()[:-1]]).view(*lead, 1)
    return blocks[there], torch.cat([starts, ends], -1).int()


class Call:
    """The arguments of a call, and those of attention() that say the same."""

    def __init__(self, name, dtype=torch.float32, requires_grad=False):
        shape, options = CASES[name]
        self.make = torch.Generator().manual_seed(5)
        self.packed, self.rows_of_list = shape.get("packed", False), shape.get("query_rows", 1)
        self.block_size = shape.get("block_size", 32)
        units, entries = shape.get("units", 1), shape.get("entries", 2)
        keys = shape.get("keys", KEYS[0])
        if self.packed:
            rows, keys = sum(ROWS), sum(KEYS)
            lead = [rows if self.rows_of_list == 1 else rows // self.rows_of_list + 2, units]
            extents = (rows,), (keys,)
        else:
            lead = [2, -(-ROWS[0] // self.rows_of_list), units]
            extents = (2, ROWS[0]), (2, keys)
        # Beside blocks of the sequence some that name none, and some twice.
        self.blocks = torch.randint(-1, 6, (*lead, entries), generator=self.make, dtype=torch.int32)
        self.counts = None
        if shape.get("counts"):
            self.counts = torch.randint(0, entries + 1, lead, generator=self.make, dtype=torch.int32)
        self.q, self.k, self.v = (
            self.normal(*e, h, d).to(dtype).requires_grad_(requires_grad)
            for e, h, d in ((extents[0], H, D), (extents[1], HKV, D), (extents[1], HKV, DV))
        )
        self.masks = self.mask_ids = None
        if shape.get("masks"):
            # Of the numbers one is no mask's.
            self.mask_ids = torch.randint(
                -1, shape["masks"] + 1, self.blocks.shape, generator=self.make, dtype=torch.int32
            )
            self.tiles = torch.rand(shape["masks"], self.rows_of_list, self.block_size, generator=self.make) > 0.4
            self.masks = pack_masks(self.tiles)
        self.options = dict(options)
        self.sink = None
        if self.options.pop("sink", False):
            self.sink = self.normal(H).requires_grad_(requires_grad)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.make)

    @property
    def inputs(self):
        return [x for x in (self.q, self.k, self.v, self.sink) if x is not None]

    @property
    def lists(self):
        masks = {} if self.masks is None else {"masks": self.masks, "mask_ids": self.mask_ids}
        return {"block_size": self.block_size, "query_rows": self.rows_of_list, **masks}

    def __call__(self, **more):
        packed = {}
        if self.packed:
            packed = {
                "cu_seqlens_q": ints(0, ROWS[0], sum(ROWS)),
                "cu_seqlens_k": ints(0, KEYS[0], sum(KEYS)),
            }
        options = {**self.lists, **self.options, **packed, "sink": self.sink, **more}
        return heddle.sparse_attention(self.q, self.k, self.v, self.blocks, self.counts, **options)

    def keep(self, lists, ids, counts, rows, keys):
        """bool [H, rows, keys], of a sequence's lists [N, L, n]."""
        entries = torch.arange(lists.shape[-1])
        listed = torch.where(entries < counts[..., None], lists, -1) if counts is not None else lists
        blocks = torch.arange(-(-keys // self.block_size))
        named = listed[..., None] == blocks  # [N, L, n, blocks]
        first = named & (named.cumsum(-2) == 1)
        # [N, L, n, rows of a list, keys of a block]
        if self.masks is None:
            tiles = torch.ones(1, self.rows_of_list, self.block_size, dtype=torch.bool).expand(*ids.shape, -1, -1)
        else:
            every = torch.cat((self.tiles, torch.zeros_like(self.tiles[:1]), torch.ones_like(self.tiles[:1])))
            tiles = every[ids.long()]  # of -1 the last
        held = torch.einsum("nlec,nlerj->nlrcj", first.float(), tiles.float()) > 0
        held = held.permute(1, 0, 2, 3, 4).reshape(lists.shape[1], len(lists) * self.rows_of_list, -1)
        return held[:, :rows, :keys].repeat_interleave(H // lists.shape[1], 0)

    def lie_one_behind_the_other(self):
        """Makes the lists so, and returns their offsets."""
        if self.mask_ids is not None:
            self.mask_ids, _ = csr(self.mask_ids, self.counts)
        self.blocks, offsets = csr(self.blocks, self.counts)
        self.counts = None
        return offsets

    @property
    def ids(self):
        return torch.full_like(self.blocks, -1) if self.mask_ids is None else self.mask_ids

    def sequences(self):
        """(q, k, v, mask [1, H, Sq, Sk]) of each, for attention()."""
        for b in range(2):
            counts = None
            if self.packed:
                first = sum(ROWS[:b]) // self.rows_of_list + (b if self.rows_of_list > 1 else 0)
                many = -(-ROWS[b] // self.rows_of_list)
                lists = self.blocks[first : first + many]
                ids = self.ids[first : first + many]
                counts = None if self.counts is None else self.counts[first : first + many]
                q = self.q[sum(ROWS[:b]) : sum(ROWS[: b + 1])][None]
                k, v = (x[sum(KEYS[:b]) : sum(KEYS[: b + 1])][None] for x in (self.k, self.v))
            else:
                lists, ids, counts = self.blocks[b], self.ids[b], None if self.counts is None else self.counts[b]
                q, k, v = self.q[b : b + 1], self.k[b : b + 1], self.v[b : b + 1]
            yield q, k, v, self.keep(lists, ids, counts, q.shape[1], k.shape[1])[None]

    def masked(self, attend):
        """(out, lse) of attend(q, k, v, mask=..., ...), laid out as the call's."""
        found = []
        for *qkv, mask in self.sequences():
            mask, options = without_steps(mask, self.options)
            found.append(attend(*qkv, mask=mask, sink=self.sink, **options))
        outs, lses = zip(*found)
        if self.packed:
            return torch.cat([o[0] for o in outs]), torch.cat([x[0] for x in lses], -1)
        return torch.cat(outs), torch.cat(lses)


def without_steps(mask, options):
    """The same said by the mask, beside which attention() takes no steps."""
    if "q_step" not in options:
        return mask, options
    rows, keys = mask.shape[-2:]
    assert options.keys() == {"causal", "q_step", "q_offset"} and options["causal"] == "top_left"
    at = options["q_offset"] + options["q_step"] * torch.arange(rows)
    return mask & (torch.arange(keys) <= at[:, None]), {}


def under_mask(call, dtype=torch.float64, order="forward"):
    """out, lse and leaves of attention written out under the mask that the call's lists say, in this dtype."""
    call = copy.copy(call)
    call.q, call.k, call.v = (leaf(x, dtype) for x in (call.q, call.k, call.v))
    call.sink = None if call.sink is None else leaf(call.sink, torch.promote_types(dtype, torch.float32))

    def attend(q, k, v, mask, q_offset=0, **options):
        if q_offset:  # what plain() has no word for
            mask, options = mask & (torch.arange(k.shape[1]) <= q_offset + torch.arange(q.shape[1])[:, None]), {}
        return plain(q, k, v, mask=mask, order=order, **options)

    return *call.masked(attend), call.inputs


def sample(call, **options):
    if call.packed:
        options |= {"cu_seqlens_q": ints(0, ROWS[0], sum(ROWS)), "cu_seqlens_k": ints(0, KEYS[0], sum(KEYS))}
        options |= {"max_seqlen_q": max(ROWS), "max_seqlen_k": max(KEYS)}
    operands = (
        call.q,
        call.k,
        call.v,
        call.blocks,
        call.counts,
        None,
        call.masks,
        call.mask_ids,
        call.block_size,
        call.rows_of_list,
    )
    return operands, pack(sink=call.sink, **call.options, **options)
