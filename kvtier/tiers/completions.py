"""Settled operations on their way back to the thread that owns the tier."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from kvtier.tiers.commits import Op, unheard

log = logging.getLogger("kvtier.disk")


class Completions:
    """The commit thread delivers, the owner finishes, in the same order."""

    def __init__(self, post: Callable[..., Any], settled: Callable[[bool, str], None]) -> None:
        self._post = post
        self._settled = settled
        """Called by the owner before each batch: whether a commit worked, and the failure's name if one did not."""
        self._batches: SimpleQueue[tuple[Sequence[Op], str]] = SimpleQueue()

    def deliver(self, ops: Sequence[Op], failure: str) -> None:
        """From the commit thread: have the owner finish these."""
        self._batches.put((ops, failure))
        with contextlib.suppress(RuntimeError):  # the loop is closed: whoever closes the tier finishes them
            self._post(self.finish)

    def finish(self) -> None:
        """On the owner's thread: finish everything delivered so far."""
        while True:
            try:
                ops, failure = self._batches.get_nowait()
            except Empty:
                return
            self._settled(any(op.changes and not op.error for op in ops), failure)
            for op in ops:
                try:
                    finish, op.finish = op.finish, unheard  # which knows the operation: no cycle is to be left
                    finish(op.error)
                except Exception:
                    log.exception("what waited for a write to disk failed")
