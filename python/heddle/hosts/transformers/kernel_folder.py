"""A folder in the format of the Hub's kernels, by which transformers loads Heddle in the place of FlashAttention."""

from __future__ import annotations

import json
import os
from pathlib import Path

# Variants without compiled code of their own: that is in the installed package.
_BACKENDS = ("cpu", "cuda")

_CODE = '''"""Heddle's attention by FlashAttention's names. The package heddle must be installed."""

from heddle.flash_attn.hub import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
'''


def write_kernel_folder(path: str | os.PathLike[str]) -> Path:
    """Writes a kernel in the Hub's format that calls the installed Heddle: for what takes no other attention than the Hub's
    kernels, such as transformers' continuous batching. Nothing is uploaded or downloaded.

    ``LOCAL_KERNELS="heddle/heddle-flash=PATH"`` in the environment, then attn_implementation="heddle/heddle-flash" with
    allow_all_kernels=True; the package ``kernels`` must be there, in the version that transformers asks for.

    Args:
      path: the folder, which must not exist or be empty; those above it are made.

    Returns:
      The path. It holds build/torch-cpu and build/torch-cuda, each with __init__.py and metadata.json.

    Raises:
      ValueError: the folder holds something. OSError: it cannot be written.
    """
    path = Path(path)
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(
            f"[write_kernel_folder] path is {str(path)!r}, which holds files: give a new or an empty folder"
        )
    for backend in _BACKENDS:
        folder = path / "build" / f"torch-{backend}"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(_CODE, encoding="utf-8")
        metadata = {
            "id": f"heddle_flash_{backend}",
            "name": "heddle-flash",
            "version": 1,  # of the functions' signatures: what transformers asks for where it knows no other
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return path
