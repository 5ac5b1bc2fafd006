"""The native module. An array is an object here: the module asks each for its memory, and refuses by name what has none.
tests/python/test_native_stubs.py holds names and parameters to the module itself."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ._types import FormatName, OrderName

# What a dataclass of the package is made from, in the order of its fields.
_Candidate: TypeAlias = tuple[str, str, bool, str, float, int, bool, str, float]
_StoredLayer: TypeAlias = tuple[str, str | None, str, FormatName | None, int, int, int, bool, bytes, str]
_EncoderLayer: TypeAlias = tuple[str, str, int, int, int, int, float, int, int]
_PrecisionTrial: TypeAlias = tuple[str, str, int, float]
_LayerReport: TypeAlias = tuple[
    str, str, str, str, tuple[int, int], float, float, float, tuple[int, int], int, int, float
]

_Piece: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, bytes, bytes, bytes, bytes, int, int, bool]

_Described: TypeAlias = tuple[tuple[int, ...], int]  # an array's shape, and the code of its dtype

def adaptive_attention_backward(
    q: object,
    k: object,
    v: object,
    replaced: object,
    o: object,
    lse: object,
    d_o: object,
    d_lse: object | None,
    dq: object | None,
    dk: object | None,
    dv: object | None,
    dbias: object | None,
    dsink: object | None,
    options: tuple[Any, ...],
    stream: int = 0,
) -> None: ...
def adaptive_attention_forward(
    q: object,
    k: object,
    v: object,
    tol: object,
    on_exceed: object,
    o: object,
    lse: object,
    bound: object,
    replaced: object | None,
    options: tuple[Any, ...],
    stream: int = 0,
) -> None: ...
def append_int4_cache(
    k_new: object,
    v_new: object,
    blocks: object,
    k_tail: object,
    v_tail: object,
    page_table: object | None,
    row_idx: object | None,
    seqlens: object,
    cos: object | None,
    sin: object | None,
    interleaved: bool,
    stream: int = 0,
) -> None: ...
def append_kv_cache(
    k_new: object,
    v_new: object,
    k_cache: object,
    v_cache: object,
    seqlens: object,
    page_table: object | None,
    cache_batch_idx: object | None,
    cos: object | None,
    sin: object | None,
    interleaved: bool,
    k_scale: object | None,
    v_scale: object | None,
    stream: int = 0,
) -> None: ...
def apply_rotary(
    x: object, out: object, cos: object, sin: object, interleaved: bool, offsets: object | None, stream: int = 0
) -> None: ...
def attention_backward(
    q: object,
    k: object,
    v: object,
    o: object,
    lse: object,
    d_o: object,
    d_lse: object | None,
    dq: object | None,
    dk: object | None,
    dv: object | None,
    dbias: object | None,
    dsink: object | None,
    options: tuple[Any, ...],
    heads_first: bool = False,
    accumulate: bool = False,
    merged: bool = False,
    stream: int = 0,
) -> None: ...
def attention_forward(
    q: object,
    k: object,
    v: object,
    o: object,
    lse: object | None,
    options: tuple[Any, ...],
    heads_first: bool = False,
    stream: int = 0,
) -> None: ...
def attention_over_int4_cache(
    q: object,
    blocks: object,
    k_tail: object,
    v_tail: object,
    page_table: object | None,
    row_idx: object | None,
    o: object,
    lse: object | None,
    options: tuple[Any, ...],
    stream: int = 0,
) -> None: ...
def attention_with_kv_cache(
    q: object,
    k_new: object,
    v_new: object,
    k_cache: object,
    v_cache: object,
    o: object,
    lse: object | None,
    cos: object | None,
    sin: object | None,
    interleaved: bool,
    options: tuple[Any, ...],
    stream: int = 0,
) -> None: ...
def check_out(operation: str, out: object, names: Sequence[str], tensors: Sequence[Any]) -> None: ...
def codes() -> dict[str, dict[str, int]]: ...
def cpu_target() -> str: ...
def cpu_targets() -> list[str]: ...
def cuda_built() -> bool: ...
def describe(array: object | None, operation: str, name: str) -> tuple[tuple[int, ...], int]: ...
def dropout_mask(keep: object, p: float, seed: int) -> None: ...
def empty(shape: Sequence[int], dtype: int) -> Any: ...
def exchange_current_gpu(gpu: int) -> int: ...
def explain_adaptive_attention(
    q: object,
    k: object,
    v: object,
    tol: object,
    options: tuple[Any, ...],
    backward: bool,
) -> list[_Candidate]: ...
def explain_append_int4_cache(
    k_new: object,
    v_new: object,
    blocks: object,
    k_tail: object,
    v_tail: object,
    page_table: object | None,
    row_idx: object | None,
    seqlens: object,
    cos: object | None,
    sin: object | None,
    interleaved: bool,
    gpu: str = "",
) -> list[_Candidate]: ...
def explain_append_kv_cache(
    k_new: object,
    v_new: object,
    k_cache: object,
    v_cache: object,
    seqlens: object,
    page_table: object | None,
    cache_batch_idx: object | None,
    cos: object | None,
    sin: object | None,
    interleaved: bool,
    k_scale: object | None,
    v_scale: object | None,
    gpu: str = "",
) -> list[_Candidate]: ...
def explain_apply_rotary(
    x: object, cos: object, sin: object, interleaved: bool, offsets: object | None, gpu: str = ""
) -> list[_Candidate]: ...
def explain_attention(
    q: object, k: object, v: object, options: tuple[Any, ...], backward: bool, gpu: str = ""
) -> list[_Candidate]: ...
def explain_attention_over_int4_cache(
    q: object,
    blocks: object,
    k_tail: object,
    v_tail: object,
    page_table: object | None,
    row_idx: object | None,
    options: tuple[Any, ...],
    gpu: str = "",
) -> list[_Candidate]: ...
def explain_dequantize(out: object | None, matrix: tuple[Any, ...], gpu: str = "") -> list[_Candidate]: ...
def explain_linear(
    x: object | None, weights: tuple[Any, ...], options: tuple[Any, ...], gpu: str = ""
) -> list[_Candidate]: ...
def explain_linear_backward(
    x: object | None, weights: tuple[Any, ...], options: tuple[Any, ...], gpu: str = ""
) -> list[_Candidate]: ...
def explain_merge_attention(
    os: Sequence[Any], lses: Sequence[Any], sink: object | None, float32_out: bool, backward: bool, gpu: str = ""
) -> list[_Candidate]: ...
def explain_nsa_step(
    q: object,
    k_new: object,
    v_new: object,
    cache: tuple[Any, ...],
    gates: tuple[Any, ...],
    out: object,
    block_count: object,
    block_size: object,
    window: object,
    forced: int,
    scale: object | None,
    gpu: str = "",
) -> list[_Candidate]: ...
def explain_pool_keys(x: object, block: object, stride: object, backward: bool, gpu: str = "") -> list[_Candidate]: ...
def explain_quantize(
    weights: object | None, format: str, rule: str, importance: object | None, global_scale: float, gpu: str = ""
) -> list[_Candidate]: ...
def explain_select_blocks(
    q: object,
    k_pooled: object,
    n: int,
    with_lse: bool,
    block_size: object,
    compression_block: object | None,
    compression_stride: object | None,
    forced: int,
    scale: object | None,
    q_step: object,
    gpu: str = "",
) -> list[_Candidate]: ...
def explain_sparse_attention(
    q: object,
    k: object,
    v: object,
    blocks: object | None,
    counts: object | None,
    offsets: object | None,
    masks: object | None,
    mask_ids: object | None,
    block_size: object,
    query_rows: object,
    options: tuple[Any, ...],
    backward: bool,
    gpu: str = "",
) -> list[_Candidate]: ...
def explain_unpack_weights(out: object | None, weights: tuple[Any, ...], gpu: str = "") -> list[_Candidate]: ...
def extend_pooled_keys(
    x: object,
    k_pooled: object,
    block: object,
    stride: object,
    seqused: object,
    appended: object,
    page_table: object | None,
    stream: int = 0,
) -> None: ...
def gate_branches(os: Sequence[Any], gates: Sequence[Any], out: object, force: str, stream: int = 0) -> None: ...
def gate_branches_backward(
    os: Sequence[Any],
    gates: Sequence[Any],
    d_out: object,
    d_os: Sequence[Any],
    d_gates: Sequence[Any],
    force: str,
    stream: int = 0,
) -> None: ...
def int4_cache_block_bytes(D: int, Dv: int) -> int: ...
def int4_cache_blocks(keys: int) -> int: ...
def layer_matches(pattern: str, name: str) -> bool: ...
def linear_activations() -> list[str]: ...
def linear_backward(
    dy: object | None,
    x: object | None,
    weights: tuple[Any, ...],
    gradients: tuple[Any, ...],
    options: tuple[Any, ...],
    stream: int = 0,
) -> None: ...
def linear_forward(
    x: object | None, weights: tuple[Any, ...], y: object | None, options: tuple[Any, ...], stream: int = 0
) -> None: ...
def linear_norms() -> list[str]: ...
def linear_option_names() -> tuple[str, ...]: ...
def lowbit_dequantize(out: object | None, matrix: tuple[Any, ...], stream: int = 0) -> None: ...
def lowbit_error(
    weights: object | None, matrix: tuple[Any, ...], row_sqnr: object | None, row_max: object | None
) -> tuple[float, float, float, int, int]: ...
def lowbit_formats() -> list[str]: ...
def lowbit_linear_layer(name: str) -> bool: ...
def lowbit_pack(
    matrix: tuple[Any, ...], gated: bool, order: str, data: object, exact: bool = False
) -> tuple[int, float, int, int]: ...
def lowbit_packed_bytes(format: str, rows: int, columns: int, gated: bool, order: str) -> int: ...
def lowbit_packed_order(
    format: str, rows: int, columns: int, gpu: bool, gated: bool = False, int8_x: bool = False, fp8_x: bool = False
) -> tuple[OrderName, str]: ...
def lowbit_quantize(
    weights: object | None,
    out: tuple[Any, ...],
    rule: str,
    importance: object | None,
    global_scale: float,
    stream: int = 0,
) -> None: ...
def lowbit_rules() -> list[str]: ...
def lowbit_storage(
    format: str, rows: int, columns: int
) -> tuple[_Described, _Described, _Described | None, _Described | None]: ...
def merge_attention(
    os: Sequence[Any], lses: Sequence[Any], sink: object | None, out: object, lse_out: object | None, stream: int = 0
) -> None: ...
def merge_attention_backward(
    os: Sequence[Any],
    lses: Sequence[Any],
    sink: object | None,
    d_o: object,
    d_lse: object | None,
    d_os: Sequence[Any],
    d_lses: Sequence[Any],
    dsink: object | None,
    stream: int = 0,
) -> None: ...
def nsa_step(
    q: object,
    k_new: object,
    v_new: object,
    cache: tuple[Any, ...],
    gates: tuple[Any, ...],
    out: object,
    block_count: object,
    block_size: object,
    window: object,
    forced: int,
    scale: object | None,
    force: str,
    stream: int = 0,
) -> None: ...
def num_threads() -> int: ...
def option_names() -> tuple[str, ...]: ...
def packed_part_names() -> tuple[str, ...]: ...
def pattern_by_head(expression: str) -> bool: ...
def pattern_lists(
    expressions: Sequence[str],
    heads: int,
    sequences: Sequence[tuple[int, int]],
    causal: bool,
    block_size: int,
    query_rows: int,
    packed: bool,
) -> tuple[Any, Any, Any, Any, tuple[int, int, int, int, int]]: ...
def pattern_mask(expressions: Sequence[str], heads: int, rows: int, keys: int, causal: bool) -> object: ...
def pattern_text(expression: str) -> str: ...
def pool_keys(
    x: object,
    out: object,
    block: object,
    stride: object,
    cu_seqlens: object | None,
    seqused: object | None,
    stream: int = 0,
) -> None: ...
def pool_keys_backward(
    d_pooled: object,
    dx: object,
    block: object,
    stride: object,
    cu_seqlens: object | None,
    seqused: object | None,
    stream: int = 0,
) -> None: ...
def quantize_checkpoint(
    input: str,
    output: str,
    format: str,
    rule: str,
    layers: Sequence[tuple[str, str]],
    importance: object | None,
    importance_layers: Sequence[str],
    progress: object | None,
) -> tuple[list[_LayerReport], list[str], list[tuple[str, str, tuple[int, ...], int]], list[str], int, int, str]: ...
def capture_id(stream: int) -> int: ...
def copy_rows(to: int, to_pitch: int, from_: int, from_pitch: int, width: int, rows: int, stream: int) -> None: ...
def raise_bad_index(stream: int) -> None: ...
def raise_bad_indices(gpu: int) -> None: ...
def select_blocks(
    q: object,
    k_pooled: object,
    lse: object | None,
    out: object,
    block_size: object,
    compression_block: object | None,
    compression_stride: object | None,
    forced: int,
    scale: object | None,
    cu_seqlens_q: object | None,
    cu_seqlens_k: object | None,
    seqused_k: object | None,
    page_table: object | None,
    q_offset: object | None,
    q_step: object,
    max_seqlen_q: object,
    max_seqlen_k: object,
    stream: int = 0,
) -> None: ...
def set_cpu_target(name: str) -> None: ...
def set_num_threads(threads: int) -> None: ...
def sparse_attention_backward(
    q: object,
    k: object,
    v: object,
    blocks: object | None,
    counts: object | None,
    offsets: object | None,
    masks: object | None,
    mask_ids: object | None,
    block_size: object,
    query_rows: object,
    o: object,
    lse: object,
    d_o: object,
    d_lse: object | None,
    dq: object | None,
    dk: object | None,
    dv: object | None,
    dbias: object | None,
    dsink: object | None,
    options: tuple[Any, ...],
    stream: int = 0,
) -> None: ...
def sparse_attention_forward(
    q: object,
    k: object,
    v: object,
    blocks: object | None,
    counts: object | None,
    offsets: object | None,
    masks: object | None,
    mask_ids: object | None,
    block_size: object,
    query_rows: object,
    o: object,
    lse: object | None,
    options: tuple[Any, ...],
    stream: int = 0,
) -> None: ...
def unpack_weights(out: object | None, weights: tuple[Any, ...], stream: int = 0) -> None: ...
def use_torch(tensor_type: type[Any], dtypes: dict[Any, Any], allocate: Callable[..., Any]) -> None: ...
def validates() -> bool: ...
def version() -> str: ...
def wait_for(stream: int) -> None: ...

class Checkpoint:
    def layer(self, arg: str, /) -> _StoredLayer: ...
    def layers(self) -> list[_StoredLayer]: ...
    def load(self, name: str, out: tuple[Any, ...], expert: int, reorder_columns: bool) -> None: ...
    @staticmethod
    def open(paths: Sequence[str], gptq_version: int) -> Checkpoint: ...

class Encoder:
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def layers(self) -> list[_EncoderLayer]: ...
    @property
    def weight_bytes(self) -> int: ...
    @staticmethod
    def choose_precisions(
        folder: str, token_ids: object, cu_seqlens: object, error: float, formats: Sequence[str]
    ) -> tuple[list[tuple[str, str]], list[_PrecisionTrial], float, int]: ...
    def encode(
        self,
        token_ids: object,
        cu_seqlens: object,
        embeddings: object,
        hidden_states: object | None,
        normalize: bool,
        longest: int,
        stream: int = 0,
    ) -> dict[str, float]: ...
    @staticmethod
    def load(folder: str, dtype: str, method: str, layers: Sequence[tuple[str, str]], cuda: bool) -> Encoder: ...
    def workspace(self, arg0: int, arg1: int, arg2: int, /) -> int: ...

class ShardPlan:
    @property
    def balance(self) -> float: ...
    @property
    def digest(self) -> int: ...
    @property
    def ring_hops(self) -> int: ...
    def across(self) -> str: ...
    def chosen(self) -> str: ...
    def cost(self, scheme: str) -> tuple[float, float, float, float]: ...
    def grouped(self, size: int) -> ShardPlan: ...
    @staticmethod
    def head_shares(heads: int, kv_heads: int, ranks: int) -> list[tuple[int, int, int, int]]: ...
    def inverse(self) -> bytes: ...
    def keys_needed(self, rank: int) -> int: ...
    @staticmethod
    def make(
        rows: int,
        ranks: int,
        sizes: Sequence[int],
        dtype: str,
        causal: int,
        window_left: int,
        window_right: int,
        cu_seqlens: Sequence[int],
        areas: Sequence[tuple[int, int, int, int, int, int, int]],
        order: str,
        ulysses: int,
        costs: tuple[float, float, float, float, float, int, float],
    ) -> ShardPlan: ...
    def needed_keys(self, rank: int) -> bytes: ...
    def pairs(self, rank: int) -> float: ...
    def permutation(self) -> bytes: ...
    def pieces(self, rank: int, scheme: str) -> list[list[_Piece]]: ...
    def positions(self, rank: int) -> bytes: ...
    def rows(self, rank: int) -> int: ...
    def runs(self, rank: int) -> list[tuple[int, int, int, int]]: ...
    def splits_keys(self, scheme: str) -> bool: ...
    def ulysses(self, scheme: str) -> int: ...
