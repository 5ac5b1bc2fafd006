"""Layers of adaptive sparse attention, of heddle.nn, which is their public name."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import checks, patterns
from .adaptive import Adaptive
from .config import ASAMConfig
from .gate import AdaptiveGate
from .mixture import mixture
from .selection import Selection

Info = dict[str, torch.Tensor]


def feed_forward(dim: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(dim, dim * 4), nn.GELU(), nn.Dropout(dropout), nn.Linear(dim * 4, dim), nn.Dropout(dropout)
    )


class Projections(nn.Module):
    """``to_qkv`` and ``to_out``, and ``gate``."""

    def __init__(self, config: ASAMConfig, gate: bool) -> None:
        super().__init__()
        inner = config.num_heads * config.dim_head
        self.to_qkv = nn.Linear(config.dim, 3 * inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, config.dim), nn.Dropout(config.dropout))
        if gate:
            # The public layer makes every gate 128 wide, whatever gate_hidden_dim says.
            hidden = 128 if config.compat is not None else config.gate_hidden_dim
            self.gate = AdaptiveGate(
                config.dim, config.num_heads, hidden, causal=config.causal, block_size=config.block_size
            )


class ASAMLayer(nn.Module):
    """A Transformer layer of adaptive sparse attention: x + attention(norm(x)), then x + ffn(ffn_norm(x)), over x [B, T, dim].

    Each head attends the tiles of a pattern. With ``pattern_type="adaptive"`` the gate's pattern_logits, to which ``head_bias`` adds
    what is the head's own, choose it: the largest, with a straight-through gradient. The gate then says whether the pattern will do. With
    ``gate="hard"`` heads whose gate is at most a half attend all keys; with "soft" the keys outside the pattern weigh 1 - gate
    beside those in it, in one softmax. Both join disjoint sets of keys, so that no pair is computed or counted twice.

    Without gradients only what is attended is computed. With them the rest is, too, and every pattern that might have been chosen:
    choices learn from what they did not take. ``use_adaptive_gate=False`` trains at the cost of its pattern.

    Names and shapes of parameters are the public package's, whose state dicts load: of what its layers make as they run
    (``_pattern_modules``) the clusters' centroids, their temperature and the scales' weights are taken, if this layer has such a
    pattern, and the masks left. What it does not have (``selection.*``) stays as it is. What is there for its name
    alone is frozen: with the adaptive gate the layer's own ``to_qkv`` and ``to_out``, which the public layer does not use either, and with a
    pattern that is not chosen ``pattern_selector``.

    ``compat="asam"`` computes what the public layer computes, g * sparse + (1 - g) * dense of two softmaxes under masks of single pairs,
    at its cost. Rows that a mask leaves no key have 0 there, where the public layer's dense half has NaN.

    Args:
      config: an ASAMConfig.

    Raises:
      TypeError: what is no ASAMConfig.
    """

    def __init__(self, config: ASAMConfig) -> None:
        super().__init__()
        if not isinstance(config, ASAMConfig):
            raise TypeError(f"[ASAMLayer] config is a {type(config).__name__}: it must be an ASAMConfig")
        self.config = config
        inner = config.num_heads * config.dim_head
        self.to_qkv = nn.Linear(config.dim, 3 * inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, config.dim), nn.Dropout(config.dropout))
        self.norm = nn.LayerNorm(config.dim)
        self.ffn = feed_forward(config.dim, config.dropout)
        self.ffn_norm = nn.LayerNorm(config.dim)
        self.adaptive_attn: Projections | None = None
        if config.use_adaptive_gate:
            self.adaptive_attn = Projections(config, gate=True)
        self.selection = Selection(config)
        for unused in self._unused():
            unused.requires_grad_(False)

    def _unused(self) -> list[nn.Module]:
        """Modules that are there for their names alone."""
        unused: list[nn.Module] = []
        if self.adaptive_attn is not None:
            unused += [self.to_qkv, self.to_out]
            if self.config.pattern_type != "adaptive":
                unused.append(self.adaptive_attn.gate.pattern_selector)
        if self.config.compat is not None:
            unused.append(self.selection)  # public thresholds have no gradient
        return unused

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        return_info: bool = False,
        *,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Info | None]:
        """
        Args:
          x: [B, T, dim], T any from 1 up.
          mask: bool [B, T] or [B, 1, 1, T], the keys in use, which come first; it is read, so not under torch.compile. With
            compat="asam" any that is broadcastable to [B, H, T, T].
          return_info: whether to say what the layer chose.
          lengths: int32 [B]: in place of mask, how many positions of each sequence are in use, from 1 up.

        Returns:
          y [B, T, dim], and None or a dict: ``gate_values``, ``confidence`` and ``pattern_logits`` as ``AdaptiveGate`` returns them,
          if there is a gate; ``patterns``, int64 [B, H], or [B, H, N] for each tile of rows if it is causal, which of local, strided, random
          and clustered each head has, if they are chosen; ``sparse_ratio``, float32 []: of the pairs of a row and a key
          that causality and lengths leave, the share that y depends on, over all heads.

        Raises:
          ValueError: x of another width, a mask or lengths of another shape, a mask that lengths cannot say.
          TypeError: a mask that is not bool.
        """
        checks.width("ASAMLayer", x, self.config.dim)
        if self.config.compat is None:
            lengths, mask = checks.used_lengths("ASAMLayer", mask, lengths, x), None
        elif lengths is not None:
            raise ValueError("[ASAMLayer] lengths is given beside compat='asam': the public layer has mask")
        else:
            mask = checks.token_mask("ASAMLayer", mask, x, self.config.num_heads)
        if self.config.use_gradient_checkpointing and torch.is_grad_enabled():
            y, info = checkpoint(self._forward, x, mask, lengths, return_info, use_reentrant=False)
        else:
            y, info = self._forward(x, mask, lengths, return_info)
        return y, info

    def _forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None, return_info: bool
    ) -> tuple[torch.Tensor, Info | None]:
        config, normed = self.config, self.norm(x)
        projections = self if self.adaptive_attn is None else self.adaptive_attn
        q, k, v = (
            projections.to_qkv(normed).unflatten(-1, (3, config.num_heads, config.dim_head)).unbind(2)
        )  # [B, T, H, D]
        gate = None if self.adaptive_attn is None else self.adaptive_attn.gate
        scores = None if gate is None else gate.scores(normed, lengths)
        info: Info = {}
        if gate is not None and scores is not None:
            named = zip(("gate_values", "confidence", "pattern_logits"), gate.info(scores, x.shape[1]))
            info = dict(named)
        if config.compat is not None:
            o, info["sparse_ratio"] = mixture(config, self.selection, q, k, v, info.get("gate_values"), mask)
        else:
            temperature = 1.0 if gate is None else gate.temperature
            adaptive = Adaptive(self.selection, q, k, v, scores, temperature, lengths)
            o = adaptive()
            if return_info:
                if adaptive.choice is not None:
                    info["patterns"] = adaptive.choice if config.causal else adaptive.choice[..., 0]
                info["sparse_ratio"] = patterns.share_of_pairs(adaptive.attended(), x.shape[1], config, lengths)
        x = x + projections.to_out(o.flatten(2))
        x = x + self.ffn(self.ffn_norm(x))
        return x, info if return_info else None

    def extra_repr(self) -> str:
        c = self.config
        causal, compat = (", causal" if c.causal else ""), ("" if c.compat is None else f", compat={c.compat!r}")
        return f"heads={c.num_heads}, head_dim={c.dim_head}, pattern_type={c.pattern_type!r}{causal}{compat}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if not any(
            key.startswith(prefix + "selection.") for key in state_dict
        ):  # it is not this layer's, but a public one's
            own = {f"{prefix}selection.{name}": value for name, value in self.selection.state_dict().items()}
            own |= _public_patterns(state_dict, prefix, args[-1])
            state_dict.update({name: value for name, value in own.items() if self._has(name.removeprefix(prefix))})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _has(self, name: str) -> bool:
        return name.removeprefix("selection.") in self.selection.state_dict()


_PUBLIC = re.compile(r"_pattern_modules\.([a-z]+)_(\d+)\.(.*)")


def _public_patterns(state_dict: dict[str, Any], prefix: str, error_msgs: list[str]) -> dict[str, Any]:
    """Takes what a public layer keeps of its patterns, once for each length that it saw, out of a state dict: the parameters, by this
    layer's names."""
    found: dict[str, tuple[str, Any]] = {}
    for key in [key for key in state_dict if key.startswith(prefix + "_pattern_modules.")]:
        value = state_dict.pop(key)
        match = _PUBLIC.fullmatch(key.removeprefix(prefix))
        name = "" if match is None else match[3]
        if name.endswith("_cached_pattern"):  # a mask, which follows from the length
            continue
        if name not in ("centroids", "temperature", "scale_weights"):
            error_msgs.append(f"[ASAMLayer] {key} is no parameter of a pattern that this layer knows")
        elif name in found and not torch.equal(found[name][1], value):
            error_msgs.append(
                f"[ASAMLayer] {key} and {found[name][0]} differ: this layer has one {name} for all lengths, so a state dict must "
                "have one, or equal ones"
            )
        else:
            found[name] = key, value
    return {f"{prefix}selection.{name}": value for name, (_, value) in found.items()}


class ASAMEncoder(nn.Module):
    """``num_layers`` ASAMLayers and a norm.

    Args:
      config: of every layer.
      num_layers: how many.
    """

    def __init__(self, config: ASAMConfig, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ASAMLayer(config) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(config.dim)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        return_all_layers: bool = False,
        return_info: bool = False,
        *,
        lengths: torch.Tensor | None = None,
    ) -> Any:
        """
        Args:
          x, mask, lengths: as for ``ASAMLayer``.
          return_all_layers: whether to return what each layer gives, without the norm.
          return_info: whether to return a list of the layers' infos, too.

        Returns:
          [B, T, dim], or with return_all_layers a list of them; with return_info a pair of that and the infos.
        """
        outputs, infos = [], []
        for layer in self.layers:
            x, info = layer(x, mask, return_info, lengths=lengths)
            outputs.append(x)
            infos.append(info)
        y = outputs if return_all_layers else self.norm(x)
        return (y, infos) if return_info else y
