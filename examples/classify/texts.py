"""Text of four kinds that Debian has, cut into pieces of bytes."""

from __future__ import annotations

import dataclasses
import gzip
import pathlib
import sys
import sysconfig

import torch

#: kind: folder, which files of it, how deep.
KINDS = {
    "licences": [("/usr/share/common-licenses", "*"), ("/usr/share/doc", "*/copyright")],
    "manual pages": [("/usr/share/man/man1", "*.gz"), ("/usr/share/man/man3", "*.gz"), ("/usr/share/man/man8", "*.gz")],
    "C headers": [("/usr/include", "**/*.h")],
    "Python sources": [(sysconfig.get_paths()["stdlib"], "*.py"), (sysconfig.get_paths()["stdlib"], "*/*.py")],
}
EVERY = 5  # one file of so many is kept apart


@dataclasses.dataclass
class Pieces:
    """Of files that are trained on, or of those that are not."""

    x: torch.Tensor  # uint8 [pieces, context]; 0 behind a file's end
    lengths: torch.Tensor  # int32 [pieces], bytes in use
    y: torch.Tensor  # int64 [pieces], the kind

    def batch(self, count, generator):
        chosen = torch.randint(len(self.y), (count,), generator=generator)
        return self.x[chosen].long(), self.lengths[chosen], self.y[chosen]


def read(path):
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def files(kind, limit):
    """The first `limit` regular files of a kind, in a fixed order, spread over its folders."""
    found = [
        p
        for folder, pattern in KINDS[kind]
        for p in sorted(pathlib.Path(folder).glob(pattern))
        if p.is_file() and not p.is_symlink()
    ]
    return found[:: max(1, len(found) // limit)][:limit]


def gather(context, limit=200, least=10):
    """(train, test): a piece of each file, from a quarter of it on, where a licence's head or a guard's name gives less away."""
    parts = {False: ([], [], []), True: ([], [], [])}
    kinds = []
    for kind in KINDS:
        found = files(kind, limit)
        if len(found) < least:  # an image without manual pages, say
            continue
        for n, path in enumerate(found):
            content = read(path)
            piece = content[len(content) // 4 :][:context]
            if not piece:
                continue
            xs, lengths, ys = parts[n % EVERY == EVERY - 1]
            xs.append(torch.frombuffer(bytearray(piece.ljust(context, b"\0")), dtype=torch.uint8))
            lengths.append(len(piece))
            ys.append(len(kinds))
        kinds.append(kind)
    if len(kinds) < 2:
        sys.exit(
            f"texts.py: of {', '.join(KINDS)} there are {len(kinds)} kinds with {least} files: two are needed, as on Debian"
        )
    made = (
        Pieces(torch.stack(xs), torch.tensor(n, dtype=torch.int32), torch.tensor(ys)) for xs, n, ys in parts.values()
    )
    return kinds, *made
