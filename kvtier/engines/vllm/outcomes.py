"""What threads that ask the daemon gave: whatever they met with is a miss, and never ends the engine's step."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
D = TypeVar("D")
_log = logging.getLogger("kvtier.vllm")


def outcome(future: Future[T], failed: D) -> T | D:
    """The result of a future that is done, or `failed` where it has none."""
    try:
        return future.result()
    except Exception as exc:  # noqa: BLE001 - an error of the disk's or of a decoder's ends the engine as well as ours
        _log.warning("a request to kvtier failed: %s: %s", type(exc).__name__, exc)
        return failed
