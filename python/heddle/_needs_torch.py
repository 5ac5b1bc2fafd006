"""Imports torch for the parts of the package that are of no use without it, and says how to install it where it is
not."""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"this part of heddle needs torch, which cannot be imported ({error}): pip install 'heddle[torch]'"
    ) from error
