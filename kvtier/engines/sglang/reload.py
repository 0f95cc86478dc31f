"""Whether weights were changed in this process: SGLang tells its storage nothing of it and keeps what is stored."""

from __future__ import annotations

import functools
from typing import Any, Final

from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from kvtier.types import bad

CHANGING: Final = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""Methods of SGLang's that write weights which requests are then computed with."""

_changes = [0]


def count() -> int:
    """How often weights may have changed: each change counts when it begins and when it ends."""
    return _changes[0]


def watch() -> None:
    """Count changes from now on; raises bad_request where this release of SGLang changes weights in other ways."""
    for name in CHANGING:
        method = getattr(WeightUpdater, name, None)
        if method is None:
            raise bad("sglang", f"a release with WeightUpdater.{name}: else changed weights would go unseen")
        if not hasattr(method, "kvtier"):
            setattr(WeightUpdater, name, _counted(method))


def _counted(method: Any) -> Any:
    @functools.wraps(method)
    def counted(*args: Any, **options: Any) -> Any:
        _changes[0] += 1
        try:
            return method(*args, **options)
        finally:
            _changes[0] += 1

    counted.kvtier = True  # type: ignore[attr-defined]
    return counted
