"""Real text that every Debian machine has, cut into pieces and tokenised for the encoder."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LICENCES = Path("/usr/share/common-licenses")


@dataclass
class Packed:
    """Pieces of text as the encoder takes them: token_ids int32 [total], cu_seqlens int32 [pieces + 1]."""

    token_ids: np.ndarray
    cu_seqlens: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.cu_seqlens)

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def select(self, first: int, last: int) -> Packed:
        """Pieces first .. last - 1."""
        begin, end = self.cu_seqlens[first], self.cu_seqlens[last]
        return Packed(self.token_ids[begin:end], (self.cu_seqlens[first : last + 1] - begin).astype(np.int32))

    def batches(self, most_tokens: int) -> list[Packed]:
        """Consecutive pieces, as many as fit in most_tokens (at least one)."""
        groups, first = [], 0
        for last in range(1, len(self) + 1):
            full = last == len(self) or self.cu_seqlens[last + 1] - self.cu_seqlens[first] > most_tokens
            if full:
                groups.append(self.select(first, last))
                first = last
        return groups

    def padded_tokens(self, batch: int) -> int:
        """Tokens of the same pieces padded to the longest of each `batch` consecutive ones."""
        lengths = self.lengths
        return int(
            sum(lengths[i : i + batch].max() * len(lengths[i : i + batch]) for i in range(0, len(lengths), batch))
        )


def pack(pieces: list[list[int]]) -> Packed:
    """Token lists, one a piece, end to end without padding."""
    lengths = [len(piece) for piece in pieces]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    token_ids = np.fromiter((token for piece in pieces for token in piece), dtype=np.int32, count=int(cu_seqlens[-1]))
    return Packed(token_ids, cu_seqlens)


def licences() -> list[tuple[str, str]]:
    """(name, text) of the licences that Debian ships, links left out."""
    files = sorted(path for path in LICENCES.glob("*") if path.is_file() and not path.is_symlink())
    return [(str(path), path.read_text(encoding="utf-8", errors="replace")) for path in files]


def standard_library() -> list[tuple[str, str]]:
    """(name, text) of the modules of Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts))
    return [(str(path.relative_to(root)), path.read_text(encoding="utf-8", errors="replace")) for path in files]


def collect(least_bytes: int) -> list[tuple[str, str]]:
    """At least `least_bytes` of text: the licences, then as many modules of the standard library as that takes."""
    documents, held = [], 0
    for source in (licences, standard_library):
        for name, content in source():
            documents.append((name, content))
            held += len(content.encode())
            if source is standard_library and held >= least_bytes:
                return documents
        if held >= least_bytes:
            return documents
    raise RuntimeError(
        f"only {held} bytes of text found under {LICENCES} and in the standard library; {least_bytes} are needed"
    )


def paragraphs(content: str) -> list[str]:
    """Blocks between blank lines, with their white space folded."""
    blocks = (re.sub(r"\s+", " ", block).strip() for block in re.split(r"\n\s*\n", content))
    return [block for block in blocks if re.search(r"\w", block)]


def tokenise(documents: list[list[str]], tokenizer_file: Path, least: int, longest: int) -> list[list[int]]:
    """Pieces of token ids, each with [CLS] and [SEP]: consecutive paragraphs of one document, joined until there are `least` tokens.

    A piece that would be longer than `longest` tokens is cut; the rest begins the next piece.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    pieces = []
    for document in documents:
        held: list[int] = []
        for encoding in tokenizer.encode_batch(document):
            first, *inner, last = encoding.ids
            held += inner
            while len(held) + 2 >= least:
                pieces.append([first, *held[: longest - 2], last])
                held = held[longest - 2 :]
        if held:
            pieces.append([first, *held, last])
    return pieces
