"""Group commit on one thread: payload durable, then the catalogue names it, then the caller hears of it.

Operations are committed in the order they were submitted, so a run is never durable before its parent. Those
that arrive while a batch is syncing form the next batch.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

import lmdb

from kvtier.identity import CHAIN_BYTES
from kvtier.tiers.catalogue import Catalogue
from kvtier.tiers.extentfile import NO_ROOM, Extents
from kvtier.tiers.records import Change
from kvtier.types import Code

RETRY_S: Final = 0.5


def code_of(error: BaseException) -> str:
    """The refusal's code for a failed call: no_space or io."""
    number = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    full = number in NO_ROOM or isinstance(error, lmdb.MapFullError)
    return Code.NO_SPACE.value if full else Code.IO.value


def name_of(error: BaseException) -> str:
    """A failed call's error by name, as ENOSPC."""
    number = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    return errno.errorcode.get(number or 0, type(error).__name__)


def unheard(_error: str) -> None:
    """The finish of an operation that nobody waits for."""


class Op:
    """Changes to the catalogue that become durable together."""

    __slots__ = (
        "chains", "changes", "doubtful", "error", "failure", "finish", "heard", "keep", "lost", "parent", "ready",
        "reason", "rewrite", "size", "urgent",
    )  # fmt: skip

    def __init__(self, changes: list[Change], finish: Callable[[str], None] = unheard, *, keep: bool = True) -> None:
        self.changes = changes
        self.finish = finish
        """Called on the owner's thread with an error code, or an empty string once durable."""
        self.keep = keep
        """Whether a failed commit is tried again; a run's write is reported failed instead."""
        self.size = 0
        """Payload bytes."""
        self.ready = True
        """False until the payload has been written."""
        self.urgent = False
        """Somebody waits: no lingering for company."""
        self.rewrite = False
        """The catalogue is to be written anew once the changes are durable."""
        self.error = ""
        self.reason = ""
        """The error by name, as ENOSPC, where a call failed."""
        self.doubtful = False
        """Failed at the commit itself: the catalogue may name its cells until another commit succeeds."""
        self.parent = b""
        self.chains = b""
        self.heard = 0
        """The last failure that the owner knew of when it submitted this."""
        self.failure = 0
        """The number of this operation's own failure."""
        self.lost = 0
        """How many syncs of the extents had failed before its payload was written."""


class Commits:
    """The thread that owns catalogue writes, and the queue before it."""

    def __init__(
        self,
        catalogue: Catalogue,
        extents: Extents,
        deliver: Callable[[list[Op], str], None],
        *,
        batch_bytes: int,
        linger_s: float,
        sync: bool,
    ) -> None:
        self._catalogue = catalogue
        self._extents = extents
        self._deliver = deliver
        self._batch_bytes = batch_bytes
        self._linger_s = linger_s
        self._sync = sync
        self._queue: deque[Op] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failures = 0
        self._failed: dict[bytes, int] = {}  # chain key of a page whose write failed -> number of that failure
        self.commits = 0
        self._thread = threading.Thread(target=self._work, name="kvtier-disk-commit", daemon=True)
        self._thread.start()

    def submit(self, op: Op) -> None:
        """Queue an operation behind all earlier ones; its payload is written after this."""
        op.lost = self._extents.lost
        with self._changed:
            self._queue.append(op)
            self._changed.notify()

    def ready(self, op: Op) -> None:
        """Its payload is written (or has failed: `op.error`)."""
        with self._changed:
            op.ready = True
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Commit what is ready and end the thread; False where it is stuck in a call at the deadline."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _collect(self) -> list[Op]:
        """The next batch: the ready head of the queue; empty when closing and nothing is left."""
        deadline = None
        with self._changed:
            while True:
                count, size, urgent = self._head()
                if count and (urgent or self._closing or size >= self._batch_bytes):
                    break
                now = monotonic()
                if count and deadline is None:
                    deadline = now + self._linger_s
                if count and deadline is not None and now >= deadline:
                    break
                if self._closing and not self._queue:
                    return []
                self._changed.wait(None if deadline is None else deadline - now)
            return [self._queue.popleft() for _ in range(count)]

    def _head(self) -> tuple[int, int, bool]:
        """How many operations could go now, their payload, and whether one is urgent."""
        count = size = 0
        urgent = False
        for op in self._queue:
            if not op.ready or size >= self._batch_bytes:
                break
            count += 1
            size += op.size
            urgent = urgent or op.urgent
        return count, size, urgent

    def _work(self) -> None:
        while batch := self._collect():
            self._fail_orphans(batch)
            good = [op for op in batch if not op.error]
            error: BaseException | None = None
            try:
                self._commit(good)
            except (OSError, lmdb.Error) as caught:
                error = caught
            self._settle(batch, good, error)

    def _commit(self, ops: Sequence[Op]) -> None:
        """The order everything rests on: the payload is on the device before the catalogue names it."""
        self._sync_payload(ops)
        self._fail_lost(ops)
        self._sync_catalogue(ops)

    def _sync_payload(self, ops: Sequence[Op]) -> None:
        if self._sync and any(op.size for op in ops):
            self._extents.sync()

    def _sync_catalogue(self, ops: Sequence[Op]) -> None:
        if changes := [change for op in ops if not op.error for change in op.changes]:
            self._catalogue.commit(changes)
            self.commits += 1

    def _settle(self, batch: list[Op], good: list[Op], error: BaseException | None) -> None:
        """Report the batch; after a failure the changes that must not be lost go back to the head of the queue."""
        if error is None:
            self._rewrite([op for op in batch if op.rewrite])
            self._deliver(batch, "")
            return
        again = [] if self._closing else [op for op in good if op.keep]
        for op in good:
            if self._closing or not op.keep:
                op.error, op.reason, op.doubtful = code_of(error), name_of(error), True
                self._note_failed(op)
        self._deliver([op for op in batch if op.error], name_of(error))
        with self._changed:
            self._queue.extendleft(reversed(again))
            if again and not self._closing:
                self._changed.wait(RETRY_S)

    def _rewrite(self, ops: list[Op]) -> None:
        """Write the catalogue anew for those who asked; a failure is theirs alone: all else is durable already."""
        if not ops:
            return
        try:
            self._catalogue.rewrite()
        except (OSError, lmdb.Error) as caught:
            self._catalogue.drop_fresh()
            for op in ops:
                op.error, op.reason = code_of(caught), name_of(caught)

    def _fail_lost(self, ops: Sequence[Op]) -> None:
        """What was written before another sync failed may be what is lost, though this one knows nothing of it."""
        late = [op for op in ops if op.size and op.lost != self._extents.lost]
        for op in late:
            op.error, op.reason = Code.IO.value, "EIO"
        if late:
            self._fail_orphans(ops)

    def _fail_orphans(self, batch: Sequence[Op]) -> None:
        """A run whose parent's write failed must not become durable, unless its owner knew and still asked."""
        if self._failed and batch[0].heard >= self._failures:
            self._failed.clear()
        for op in batch:
            if not op.error and self._failed.get(op.parent, 0) > op.heard:
                op.error = Code.IO.value
            if op.error:
                self._note_failed(op)

    def _note_failed(self, op: Op) -> None:
        if op.chains:
            self._failures += 1
            op.failure = self._failures
            for at in range(0, len(op.chains), CHAIN_BYTES):
                self._failed[op.chains[at : at + CHAIN_BYTES]] = self._failures
