"""torch as a host: the operators ``heddle::*``, what of torch's tensors they refuse, and the way past the dispatcher.

Importing it says how to install torch where that is missing, so that it comes before torch in the parts of the package
that are of no use without it.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"this part of heddle needs torch, which cannot be imported ({error}): pip install 'heddle[torch]'"
    ) from error
