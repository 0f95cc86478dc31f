"""Whether weights of vLLM's have been written since it began: nobody tells its connectors of that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

WORKER: Final = (
    "load_model", "reload_weights", "reset_weights", "start_weight_update", "start_draft_weight_update",
    "update_weights", "finish_weight_update",
)  # fmt: skip
"""Methods of vLLM's workers that write weights, or begin or end that."""


class _Seen:
    count = 0


def count() -> int:
    """How often weights may have been written in this process: each counts when it begins and when it ends."""
    return _Seen.count


def watch(model_config: Any) -> None:
    """Count from now on, in a worker: what it is told to do, and what loads a model's weights, whoever calls it."""
    from vllm.model_executor.model_loader import get_model_cls  # noqa: PLC0415 - vLLM's model code, heavy
    from vllm.model_executor.models.utils import AutoWeightsLoader  # noqa: PLC0415
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415 - of all devices

    # Not every model's own method goes by the loader that most have in common.
    loaders = ((AutoWeightsLoader, "load_weights"), (get_model_cls(model_config), "load_weights"))
    for kind, name in [*((Worker, each) for each in WORKER), *loaders]:
        method = getattr(kind, name, None)
        if method is not None and not hasattr(method, "kvtier"):
            setattr(kind, name, _counted(method, lambda _: True))


def watch_orders() -> None:
    """Count from now on, beside the scheduler: what workers are told to do by vLLM's own names."""
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - is being built

    method = EngineCore.collective_rpc
    if not hasattr(method, "kvtier"):
        EngineCore.collective_rpc = _counted(method, lambda args: len(args) > 1 and args[1] in WORKER)


def _counted(method: Any, writes: Callable[[tuple[Any, ...]], bool]) -> Any:
    """The method, with its calls counted that may write weights."""

    @functools.wraps(method)
    def counted(*args: Any, **options: Any) -> Any:
        step = int(writes(args))
        _Seen.count += step
        try:
            return method(*args, **options)
        finally:
            _Seen.count += step

    counted.kvtier = True  # type: ignore[attr-defined]
    return counted
