"""Files and folders that a caller names."""

from __future__ import annotations

import os
from typing import Any


def existing(operation: str, name: str, path: Any) -> str:
    """path as text, if there is something at it.

    Raises:
      FileNotFoundError: there is nothing.
    """
    text = os.fspath(path)
    if not os.path.exists(text):
        raise FileNotFoundError(
            f"[{operation}] {name} is {text!r}, which is not there: it must be a file or folder on this machine; names "
            "of a hub are not downloaded"
        )
    return text
