"""The latest requests by the engines' own names for them, also after the engine forgot them. Bounded."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from kvtier.store.cache import Cache
from kvtier.store.instance import Path

MOST_REQUESTS: Final = 1024
MOST_BYTES: Final = 64 << 20


class Requests:
    """Paths that engines gave a request or session id, and when they last asked for them."""

    def __init__(self) -> None:
        self._paths: OrderedDict[Path, float] = OrderedDict()
        self._by_request: dict[str, Path] = {}
        self._bytes = 0

    def note(self, path: Path, added: int) -> None:
        """A request was asked for, with `added` bytes of keys more than before."""
        if not (path.request or path.session):
            return
        if path in self._paths:
            self._bytes += added
            self._paths.move_to_end(path)
        else:
            self._bytes += len(path.keys)
            before = self._by_request.get(path.request)
            if before is not None:
                self._drop(before)
            if path.request:
                self._by_request[path.request] = path
        self._paths[path] = time.time()
        while len(self._paths) > MOST_REQUESTS or (self._bytes > MOST_BYTES and len(self._paths) > 1):
            self._drop(next(iter(self._paths)))

    def _drop(self, path: Path) -> None:
        """Forget one."""
        del self._paths[path]
        self._by_request.pop(path.request, None)
        self._bytes -= len(path.keys)

    def get(self, request: str) -> Path | None:
        """The latest request of that id."""
        return self._by_request.get(request)

    def latest(self, session: str = "") -> Iterator[tuple[Path, float]]:
        """Requests (of one session) and when they were last asked for, in seconds since the epoch; latest first."""
        return ((path, when) for path, when in reversed(self._paths.items()) if not session or path.session == session)

    def through(self, cache: Cache, keys: bytes) -> Iterator[Path]:
        """Requests whose paths begin with these page keys, latest first."""
        return (path for path, _ in self.latest() if path.cache is cache and path.keys.startswith(keys))
