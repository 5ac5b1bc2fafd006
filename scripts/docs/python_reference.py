"""The Python reference: pages of directives of sphinx.ext.autodoc, which reads the docstrings of the package that is installed or on
the path. Every public name has a place: one that has none, and a place whose name is gone, are errors."""

import importlib
import inspect
import pkgutil
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer
from text import escaped

#: Of a page: title, and for each heading (none: no heading) the module and its names; all names of __all__ where none are given.
PAGES: dict[str, tuple[str, list[tuple[str, str, list[str]]]]] = {
    "attention": (
        "Attention",
        [("", "heddle", ["attention", "sdpa", "merge_attention", "attention_backward", "sparse_attention", "Causal"]),
         ("With a tolerance", "heddle", ["adaptive_attention", "audit_attention", "AttentionAudit"])],
    ),
    "patterns": (
        "heddle.patterns: patterns of sparse attention",
        [
            ("Attention", "heddle.patterns", ["attention", "Pattern", "parse", "Kept", "pack_masks", "per_head", "HeadChoice"]),
            ("Patterns", "heddle.patterns", ["local", "strided", "dilated", "sink", "columns", "rows", "diagonals", "random", "a_shape", "vertical_slash", "global_tokens", "by_head"]),
        ],
    ),
    "caches": (
        "Caches of keys and values",
        [("", "heddle", ["attention_with_kv_cache", "append_kv_cache", "apply_rotary", "Int4Cache"])],
    ),
    "flash_attn": (
        "FlashAttention's names",
        [("FlashAttention 2", "heddle.flash_attn", []), ("FlashAttention 3", "heddle.flash_attn_3", [])],
    ),
    "hosts": (
        "Unchanged models",
        [("transformers", "heddle.hosts.transformers", []), ("torch", "heddle.hosts.torch", [])],
    ),
    "lowbit": (
        "heddle.lowbit: weights in 4 and 8 bits",
        [
            ("Quantise", "heddle.lowbit", ["quantize", "dequantize", "QuantizedTensor", "QuantizationError", "FORMATS", "RULES"]),
            ("Multiply", "heddle.lowbit", ["pack", "PackedTensor", "PackingError", "linear", "ACTIVATIONS", "NORMS"]),
            ("Checkpoints", "heddle.lowbit", ["layers", "load", "StoredLayer", "layout_of", "quantize_checkpoint", "QuantizeReport", "LayerReport", "linear_layer"]),
            ("Calibrate", "heddle.lowbit", ["calibrate", "Calibration", "smooth"]),
            ("What would run", "heddle.lowbit", ["explain", "explain_quantize", "explain_dequantize"]),
            ("An early study's names", "heddle.lowbit", ["FP4Codec"]),
        ],
    ),
    "nn": (
        "heddle.nn: torch modules",
        [
            ("Modules", "heddle.nn", ["Linear", "TransformerBlock", "NativeSparseAttention", "BlockCompression"]),
            ("Split over ranks", "heddle.nn", ["ColumnParallelLinear", "RowParallelLinear", "TensorParallelBlock"]),
            ("Adaptive sparse attention", "heddle.nn", ["ASAMConfig", "ASAMLayer", "ASAMEncoder", "AdaptiveGate", "EfficientASAMLayer", "FlashASAMLayer", "HybridASAM"]),
            ("Precision of a model", "heddle.nn", ["quantize_model", "load_quantized", "linear_layers", "weights_report", "WeightsReport", "StoredWeight", "Policy", "choose_policy", "PolicyReport", "calibrate", "CalibrationReport", "LayerCalibration"]),
            ("An early study's names", "heddle.nn", ["FlashAttention", "FP4Codec", "FusedFP4Linear", "OptimizedTransformerBlock"]),
        ],
    ),
    "nsa": (
        "heddle.nsa: native sparse attention",
        [
            ("Attention", "heddle.nsa", ["parallel_nsa", "nsa_with_cache", "Cache"]),
            ("Its pieces", "heddle.nsa", ["pool_keys", "extend_pooled_keys", "select_blocks"]),
            ("Sharing between rows", "heddle.nsa", ["SharingOptions", "presets", "sharing_report", "SharingReport"]),
            ("What would run", "heddle.nsa", ["explain_parallel_nsa", "ParallelExplanation", "explain_pool_keys", "explain_select_blocks", "explain_nsa_step"]),
            ("Plain versions, to compare with", "heddle.nsa", ["naive_nsa", "naive_nsa_compression", "naive_nsa_compression_varlen", "naive_nsa_with_compression"]),
        ],
    ),
    "selection": (
        "heddle.selection: key blocks by input",
        [("", "heddle.selection", ["pooled", "antidiagonal", "vertical_slash"])],
    ),
    "distributed": ("heddle.distributed: several processes", [("", "heddle.distributed", [])]),
    "compat": (
        "Other packages' names",
        [
            ("asam", "heddle.compat.asam", []),
            ("asam.adaptive_gate", "heddle.compat.asam.adaptive_gate", []),
            ("asam.asam_layer", "heddle.compat.asam.asam_layer", []),
            ("asam.asam_layer_optimized", "heddle.compat.asam.asam_layer_optimized", []),
            ("asam.efficient_attention", "heddle.compat.asam.efficient_attention", []),
            ("asam.flash_asam", "heddle.compat.asam.flash_asam", []),
            ("asam.quantization", "heddle.compat.asam.quantization", []),
            ("asam.sparse_patterns", "heddle.compat.asam.sparse_patterns", []),
        ],
    ),
    "encoder": (
        "Encoders",
        [("", "heddle", ["Encoder", "EncoderLayer", "PrecisionChoice", "PrecisionTrial"])],
    ),
    "machine": (
        "What would run, and on what",
        [
            ("Candidates", "heddle", ["explain", "explain_adaptive_attention", "explain_append_kv_cache", "explain_apply_rotary", "explain_merge_attention", "explain_sparse_attention", "Explanation", "Candidate"]),
            ("Threads and instruction sets", "heddle", ["num_threads", "set_num_threads", "cpu_target", "cpu_targets", "set_cpu_target"]),
            ("Index data on a GPU", "heddle", ["check_errors"]),
        ],
    ),
}  # fmt: skip


def _comment_of(module: str, name: str) -> list[str]:
    """The `#:` comment of a constant, in whichever file of the package it is written."""
    package = importlib.import_module(module)
    for file in [module, *(f"{module}.{found.name}" for found in pkgutil.iter_modules(package.__path__))]:
        analyzer = ModuleAnalyzer.for_module(file)
        analyzer.analyze()
        if ("", name) in analyzer.attr_docs:
            return [line for line in analyzer.attr_docs["", name] if line]
    raise ValueError(f"{module}.{name} has no comment that begins with '#:'")


def _entry(module: str, name: str, documented: set[str]) -> list[str]:
    value = getattr(importlib.import_module(module), name)
    full = f"{module}.{name}"
    if inspect.isclass(value):
        # Under another public name, or another of its name, between which a signature's plain name could not choose.
        again = ["   :no-index:"] if value.__name__ in documented else []
        documented.add(value.__name__)
        return [f".. autoclass:: {full}", "   :members:", *again, ""]
    if callable(value):
        return [f".. autofunction:: {full}", ""]
    return [
        f".. py:data:: {full}",
        f"   :value: {value!r}",
        "",
        *(f"   {escaped(s)}" for s in _comment_of(module, name)),
        "",
    ]


def _heading(text: str, mark: str) -> list[str]:
    return [text, mark * len(text), ""]


def write(folder: Path) -> None:
    """All pages, and their list."""
    folder.mkdir(parents=True)
    placed: dict[str, set[str]] = {}
    documented: set[str] = set()
    for name, (title, sections) in PAGES.items():
        out = _heading(title, "=")
        seen = set()
        for heading, module, names in sections:
            public = importlib.import_module(module).__all__
            out += _heading(heading, "-") if heading else []
            if module != "heddle" and module not in seen:
                out += [f".. automodule:: {module}", ""]
                seen.add(module)
            for one in names or public:
                out += _entry(module, one, documented)
            placed.setdefault(module, set()).update(names or public)
        (folder / f"{name}.rst").write_text("\n".join(out), encoding="utf-8")
    for module, names in placed.items():
        public = {one for one in importlib.import_module(module).__all__ if one not in ("lowbit", "patterns")}
        if names != public:
            raise ValueError(
                f"scripts/docs/python_reference.py: names of {module} without a place: {sorted(names ^ public)}"
            )
    index = [*_heading("Python", "="), ".. automodule:: heddle", "", ".. toctree::", "   :maxdepth: 1", ""]
    (folder / "index.rst").write_text("\n".join([*index, *(f"   {name}" for name in PAGES), ""]), encoding="utf-8")
