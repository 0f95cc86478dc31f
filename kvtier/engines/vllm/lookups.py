"""Which opaque keys the daemon has, asked for in one batch per scheduler step and never waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final

from kvtier.engines.vllm.outcomes import outcome
from kvtier.types import Presence

PENDING_S: Final = 1.0
"""A page that somebody is still writing is asked for again so long; then it is computed."""


class Lookups:
    """Answers by key, kept as long as some request that asked is there. For one thread."""

    def __init__(self, ask: Callable[[list[bytes]], Future[bytes]]) -> None:
        """`ask` begins to look up keys; its future gives one Presence byte for each."""
        self._ask = ask
        self._known: dict[bytes, Presence | None] = {}
        """None: asked, or about to be."""
        self._new: list[bytes] = []
        self._asked: list[tuple[list[bytes], Future[bytes]]] = []
        self._since: dict[bytes, float] = {}
        self._keys: dict[str, set[bytes]] = {}
        self._users: dict[bytes, int] = {}

    def get(self, key: bytes, request: str) -> bool | None:
        """Whether the daemon has a key; None: not known yet."""
        self._use(key, request)
        self._take()
        found = self._known.get(key)
        if key not in self._known:
            self._known[key] = None
            self._new.append(key)
        elif found is Presence.PENDING:
            if time.monotonic() - self._since.setdefault(key, time.monotonic()) < PENDING_S:
                self._known[key] = None
                self._new.append(key)
            else:
                return False
        return None if self._known[key] is None else found is not Presence.MISS

    def flush(self) -> None:
        """Ask for what is new: once per step."""
        self._take()
        new, self._new = self._new, []
        if new:
            self._asked.append((new, self._ask(new)))

    def gone(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded: not there, as far as requests are concerned that have asked already."""
        for key in keys:
            if key in self._known:
                self._known[key] = Presence.MISS

    def forget(self, request: str) -> None:
        """A request is over; what nobody else has asked for is asked again next time."""
        for key in self._keys.pop(request, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._known.pop(key, None)
                self._since.pop(key, None)

    def _use(self, key: bytes, request: str) -> None:
        keys = self._keys.setdefault(request, set())
        if key not in keys:
            keys.add(key)
            self._users[key] = self._users.get(key, 0) + 1

    def _take(self) -> None:
        """Note answers that have come."""
        while self._asked and self._asked[0][1].done():
            keys, answer = self._asked.pop(0)
            states = outcome(answer, bytes([Presence.MISS]) * len(keys))
            for key, state in zip(keys, states, strict=True):
                if key in self._known:
                    self._known[key] = Presence(state)
