"""The gate, by the public module's name."""

from __future__ import annotations

from ...nn import AdaptiveGate

__all__ = ["AdaptiveGate"]
