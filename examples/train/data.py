"""Real text that every machine has: the sources of Python's standard library, and Debian's licences where they are."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import sysconfig

import torch

LICENCES = pathlib.Path("/usr/share/common-licenses")
NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}  # what was installed beside the library
LEAST = 5_000_000  # bytes
EVERY = 20  # one file of so many is kept for validation


@dataclasses.dataclass
class Corpus:
    train: torch.Tensor  # uint8, files one after another, a zero byte behind each
    validation: torch.Tensor
    sha256: str  # of both: two runs with one hash have read the same bytes

    def __str__(self):
        return f"{len(self.train) / 1e6:.1f} MB for training, {len(self.validation) / 1e6:.1f} MB for validation, sha256 {self.sha256[:12]}"


def files():
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    sources = (path for path in library.rglob("*.py") if not NOT_OURS.intersection(path.relative_to(library).parts))
    licences = (path for path in LICENCES.glob("*") if path.is_file() and not path.is_symlink())
    return [*sorted(sources), *sorted(licences)]


def gather(limit=None):
    """All of it in a fixed order, each EVERY-th file for validation. limit: only so many files, for tests."""
    parts = {False: [], True: []}
    for n, path in enumerate(files()[:limit]):
        parts[n % EVERY == EVERY - 1].append(path.read_bytes() + b"\0")
    train, validation = b"".join(parts[False]), b"".join(parts[True])
    if limit is None and len(train) + len(validation) < LEAST:
        raise SystemExit(f"data.py: found {len(train) + len(validation)} bytes of text: at least {LEAST} are needed")
    digest = hashlib.sha256(train + validation).hexdigest()
    as_tensor = lambda text: torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(as_tensor(train), as_tensor(validation), digest)


def batch(text, count, context, generator):
    """(inputs, targets), int64 [count, context] each: pieces from random places, and what follows each byte."""
    starts = torch.randint(len(text) - context, (count,), generator=generator)
    pieces = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return pieces[:, :-1], pieces[:, 1:]
