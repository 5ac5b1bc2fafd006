"""torch's scaled_dot_product_attention over the ranks of a group, for models that stay as they are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from .attention import attention
from .plan import Plan

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Self

    from .plan import SchemeName

_NAME = "distributed.sdpa"


def sdpa(
    plan: Plan,
    *,
    group: dist.ProcessGroup | None = None,
    scheme: SchemeName = "auto",
    deterministic: bool = True,
    chunked: bool = False,
    timeout: float | None = None,
) -> SDPA:
    """Has an unchanged model's ``torch.nn.functional.scaled_dot_product_attention`` calls computed over all ranks of a group.

    >>> with heddle.distributed.sdpa(plan):
    ...     loss = model(heddle.distributed.shard(tokens, plan, rank), ...)  # positions: plan.position_ids(rank)
    ...     loss.backward()

    Inside of the ``with``, in this thread and in backwards that it waits for, every such call is ``heddle.distributed.attention`` over
    the plan: each rank's model works on its own rows, and attention is that of the whole, with gradients. The plan says who attends
    whom. What a call says otherwise is refused. query, key and value are [B, H, S, E], S this rank's rows of the plan, of one float
    dtype (``torch.autocast`` casts them), key and value of fewer heads with enable_gqa. is_causal is as the plan's causal is, True for "top_left" and
    "bottom_right"; for a rank of one row, or a plan of areas, it may be either. There is no attn_mask and no dropout_p: a model that
    makes a mask of position_ids has to be kept from it (docs/distributed.md has how).

    A backward may come after the end, unless the model computes parts of itself again there (checkpointing): outside, these would call
    torch's own.

    Args:
      plan, group, scheme, deterministic, chunked, timeout: as of ``heddle.distributed.attention``.

    Returns:
      an SDPA, for one ``with`` after the other. Inside of another one, it is the inner one that serves.

    Raises:
      TypeError: what is no plan.
      ValueError: by the call of attention, before anything is sent: what a call says that the plan does not, or what
        ``heddle.distributed.attention`` refuses.
      RuntimeError: at the end of a ``with`` in which no call was made: a model with another attention would have attended its own rows
        alone. By the call of attention: where torch.export traces it, and what ``heddle.distributed.attention`` raises.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"[{_NAME}] plan is a {type(plan).__name__}: it must be of heddle.distributed.plan")
    options = {"group": group, "scheme": scheme, "deterministic": deterministic, "chunked": chunked, "timeout": timeout}
    return SDPA(plan, options)


class SDPA:
    """What ``sdpa`` returns, for a ``with``."""

    def __init__(self, plan: Plan, options: dict[str, Any]) -> None:
        self._plan, self._options = plan, options
        self._served = False
        self._mode = _Traced(self)

    def __enter__(self) -> Self:
        self._served = False
        _stand_in(self)
        _inside().append(self)
        self._mode.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._mode.__exit__(kind, error, traceback)
        _inside().remove(self)
        _give_back(self)
        if kind is None and not self._served:
            raise RuntimeError(
                f"[{_NAME}] nothing called torch.nn.functional.scaled_dot_product_attention: if a model ran, each rank attended its own "
                'rows alone; models of transformers call it with attn_implementation="sdpa"'
            )

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        plan = self._plan
        if isinstance(query, (FakeTensor, FunctionalTensor)):
            raise NotImplementedError(
                f"[{_NAME}] torch.export, and torch.compile where it does not see the call, do not trace attention over several processes"
            )
        if attn_mask is not None:
            raise ValueError(
                f"[{_NAME}] attn_mask is given, {list(attn_mask.shape)}: the plan says which rows attend which, and a mask of this rank's "
                "rows alone says nothing about the others'"
            )
        if dropout_p != 0:
            raise ValueError(f"[{_NAME}] dropout_p is {dropout_p}: attention over several processes has no dropout")
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 4:
                raise ValueError(f"[{_NAME}] {name} is {list(x.shape)}: query, key and value must be [B, H, S, E]")
        if plan.is_causal is not None and bool(is_causal) != plan.is_causal and query.shape[2] > 1:
            raise ValueError(
                f"[{_NAME}] is_causal is {bool(is_causal)} and the plan's causal is {'given' if plan.is_causal else 'none'}: they must "
                "say the same"
            )
        if not enable_gqa and not query.shape[1] == key.shape[1] == value.shape[1]:
            raise ValueError(
                f"[{_NAME}] query has {query.shape[1]} heads, key {key.shape[1]} and value {value.shape[1]}: pass enable_gqa=True to share "
                "heads of key and value"
            )
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = attention(q, k, v, plan=plan, scale=scale, **self._options).transpose(1, 2)
        self._served = True
        return out

    def traced(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """attention(), with the casts that an operator has from torch.autocast."""
        device = query.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
        return self.attention(query, key, value, *args, **kwargs)


class _Traced(TorchFunctionMode):
    """Serves calls that torch.compile traces, which never come to the operator. That it is there is a condition of what is traced: code
    from before the ``with`` is traced anew inside, and code from inside anew behind it, or for another plan."""

    def __init__(self, of: SDPA) -> None:
        super().__init__()
        self._of = of

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention and torch.compiler.is_compiling():
            return self._of.traced(*args, **kwargs)
        return function(*args, **kwargs)


_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
#: Above torch's choice of a kernel and its derivatives.
_KEYS = ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA")

_lock = threading.Lock()
_libraries: list[torch.library.Library] = []  # the one that has the operator, while there is one
_entered: list[tuple[int, SDPA]] = []  # with the thread that is inside
_fastpath = True  # torch's own setting, while it is off
_of_thread = threading.local()


def _inside() -> list[SDPA]:
    """What this thread is inside of, the innermost last."""
    if not hasattr(_of_thread, "inside"):
        _of_thread.inside = []
    inside: list[SDPA] = _of_thread.inside
    return inside


def _instead(*args: Any, **kwargs: Any) -> Any:
    serving = _serving()
    return _OPERATOR.decompose(*args, **kwargs) if serving is None else serving.attention(*args, **kwargs)


def _serving() -> SDPA | None:
    if inside := _inside():
        return inside[-1]
    # A backward, which of GPUs' tensors runs in a thread of autograd's own, which Python did not start: what is computed again there belongs
    # to the thread that waits.
    of_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    if not _entered or not of_autograd or torch._C._current_graph_task_id() == -1:
        return None
    entered = list(_entered)
    if len({thread for thread, _ in entered}) > 1:
        raise RuntimeError(
            f"[{_NAME}] a backward computes attention again and several threads are inside of a `with`: which of them waits for it cannot be told"
        )
    return entered[-1][1]


def _stand_in(entering: SDPA) -> None:
    """The operator itself, rather than a function of Python, so that whoever holds the function, calls it from C++, or computes again in
    a backward, is served. torch's TransformerEncoderLayer has a way past it for inference, which is closed meanwhile."""
    global _fastpath
    with _lock:
        _entered.append((threading.get_ident(), entering))
        if len(_entered) > 1:
            return
        library = torch.library.Library("aten", "IMPL")
        for key in _KEYS:
            library.impl("scaled_dot_product_attention", _instead, key)
        _libraries.append(library)
        _fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)


def _give_back(leaving: SDPA) -> None:
    with _lock:
        _entered.remove((threading.get_ident(), leaving))
        if not _entered:
            _libraries.pop()._destroy()
            torch.backends.mha.set_fastpath_enabled(_fastpath)
