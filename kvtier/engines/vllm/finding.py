"""What the daemon has of a request's prompt: matched, brought to host and leased, in threads."""

from __future__ import annotations

import time
from typing import Final

from kvtier.client import Lease
from kvtier.engines.vllm.asked import Asked, tiers_of
from kvtier.engines.vllm.keys import Keys
from kvtier.types import Tier

LOAD_MS: Final = 5000
"""A request waits at most so long for pages that come from disk."""
PENDING_S: Final = 0.25
"""It waits at most so long for pages that are being committed right now."""
POLL_S: Final = 0.005


class Finder:
    """Looks requests up. Thread-safe: what concerns one request has its lock."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def warm(self, asked: Asked, pages: int) -> None:
        """Match, and start loading what is on disk."""
        with asked.lock:
            if asked.over:
                return
            self.extend(asked, pages)
            asked.sources = tiers_of(asked.path)
            if asked.sources.keys() - {Tier.HOST}:
                asked.path.prefetch()

    @staticmethod
    def nothing(asked: Asked, pages: int) -> bool:
        """Whether it was just heard that there is nothing of a request; asks nobody and waits for nobody."""
        if not asked.lock.acquire(blocking=False):
            return False
        try:
            path = asked.path
            known = not asked.stale(pages) and not (path.pages or path.pending or path.asking)
            if known:
                asked.saved = 0
            return known
        finally:
            asked.lock.release()

    def find(self, asked: Asked, pages: int) -> Lease:
        """Match and lease, waiting for what is on disk."""
        with asked.lock:
            if asked.stale(pages):
                self.extend(asked, pages)
            path, until = asked.path, time.monotonic() + PENDING_S
            while path.pages < pages and (path.pending or path.asking) and time.monotonic() < until:
                time.sleep(POLL_S)
                path.extend()
            limit = min(path.pages, pages)
            if sum(asked.sources.values()) != path.pages:
                asked.sources = tiers_of(path)
            asked.saved = path.pages
            return path.acquire(limit, wait_ms=LOAD_MS) if limit else Lease(path.cache, None)

    def extend(self, asked: Asked, pages: int) -> None:
        """Match a path of at least so many pages; none of a request whose KV depends on what nobody here knows.

        Only with the request's lock.
        """
        said = self.keys.said(asked.request, asked.shown)
        if said is None:
            asked.loads = asked.saves = False
            return
        asked.weights = said.weights
        keys = self.keys.of(asked.request, said, asked.keyed, pages) if pages > asked.keyed else b""
        asked.keyed = max(asked.keyed, pages)
        asked.path.extend(keys)
        asked.matched = time.monotonic()

    @staticmethod
    def forget(asked: Asked) -> None:
        """A request is over."""
        with asked.lock:
            asked.over = True
            asked.path.close()
