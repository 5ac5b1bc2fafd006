"""Dynamic batching: texts that come at about the same time are embedded in one call."""

from __future__ import annotations

import collections
import concurrent.futures
import threading

import numpy as np


class Full(Exception):
    """There is no room, or the batcher has been closed: try again later."""


class Batcher:
    """Hands the texts of concurrent callers to one encoder. Packed sequences need no padding, so that a batch costs what its
    tokens cost; and an embedding has the same bits alone and beside others (docs/encoder.md)."""

    def __init__(self, encode, *, most_tokens=2048, patience=0.002, room=256):
        """encode: (token_ids int32 [total], cu_seqlens int32 [texts + 1]) to embeddings [texts, hidden]. most_tokens: of a call,
        unless one text has more. patience: seconds that a text waits for company. room: texts that may wait."""
        self._encode, self._most_tokens, self._patience, self._room = encode, most_tokens, patience, room
        self._waiting: collections.deque = collections.deque()  # (token ids, future)
        self._changed = threading.Condition()
        self._closed = False
        self.calls = self.texts = self.tokens = self.refused = 0
        self._thread = threading.Thread(target=self._run, name="batcher")
        self._thread.start()

    @property
    def waiting(self):
        return len(self._waiting)

    def submit(self, texts):
        """Futures of the embeddings [hidden] of token lists: of all, or Full is raised."""
        made = [(ids, concurrent.futures.Future()) for ids in texts]
        with self._changed:
            if self._closed or len(self._waiting) + len(made) > self._room:
                self.refused += 1
                raise Full
            self._waiting.extend(made)
            self._changed.notify()
        return [future for _, future in made]

    def close(self):
        """Takes no more, and returns when what was taken is done."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self):
        while batch := self._next():
            ids = [np.asarray(ids, np.int32) for ids, _ in batch]
            cu_seqlens = np.cumsum([0, *map(len, ids)], dtype=np.int32)
            self.calls, self.texts, self.tokens = (
                self.calls + 1,
                self.texts + len(ids),
                self.tokens + int(cu_seqlens[-1]),
            )
            try:
                embeddings = self._encode(np.concatenate(ids), cu_seqlens)
            except Exception as error:  # its callers are told; the next batch is another one
                for _, future in batch:
                    future.set_exception(error)
            else:
                for (_, future), embedding in zip(batch, embeddings):
                    future.set_result(embedding)

    def _next(self):
        """The texts of the next call, in the order in which they came; none: closed, and all are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._changed.wait_for(lambda: self._tokens() >= self._most_tokens or self._closed, self._patience)
            batch, tokens = [], 0
            while self._waiting and (not batch or tokens + len(self._waiting[0][0]) <= self._most_tokens):
                batch.append(self._waiting.popleft())
                tokens += len(batch[-1][0])
            return batch

    def _tokens(self):
        return sum(len(ids) for ids, _ in self._waiting)
