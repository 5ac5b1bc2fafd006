"""The native module, whose functions the package calls with arguments of any kind that it checks itself."""

from typing import Any

def __getattr__(name: str) -> Any: ...
