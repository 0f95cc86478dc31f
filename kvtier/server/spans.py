"""A share of the requests, kept as spans until somebody takes them: what was asked, how long it took, what came.

Nothing here knows OpenTelemetry: the HTTP process takes the spans and exports them, so that the daemon pays for a
sampled request only, and by a tuple.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any, Final

from kvtier import wire
from kvtier.types import KvtierError, Tier

MOST: Final = 4096
"""Spans kept; the oldest are given up."""
SILENT: Final = (wire.Spans, wire.Metrics, wire.Ping)
"""What observers ask, again and again."""


class Spans:
    """Owned by the loop thread."""

    def __init__(self, share: float) -> None:
        """`share`: of the requests, 0 to 1; 0: none, and `on` is false."""
        self.on = share > 0
        self._share = share
        self._kept: deque[dict[str, Any]] = deque(maxlen=MOST)
        self._noted = 0

    def note(self, instance: str, asked: wire.Message, came: wire.Message | BaseException, seconds: float) -> None:
        """A request was answered, or refused with an exception."""
        if random.random() >= self._share or isinstance(asked, SILENT):  # noqa: S311 - a sample
            return
        end = time.time_ns()
        self._noted += 1
        self._kept.append(
            {
                "name": type(asked).__name__,
                "start_ns": end - int(seconds * 1e9),
                "end_ns": end,
                "error": _code(came),
                "attributes": {"kvtier.instance": instance} | _asked(asked) | _came(came),
            }
        )

    def take(self, msg: wire.Spans) -> wire.Info:
        """What was kept since the last time, and how many were given up."""
        del msg
        spans, lost = list(self._kept), self._noted - len(self._kept)
        self._kept.clear()
        self._noted = 0
        return wire.Info({"spans": spans, "lost": lost})


def _code(came: wire.Message | BaseException) -> str:
    """Why it was refused; empty where it was not."""
    if isinstance(came, KvtierError):
        return came.code.value
    return "internal" if isinstance(came, BaseException) else ""


def _asked(message: wire.Message) -> dict[str, Any]:
    """The engine's own ids, where it gave some: as much of them as is kept elsewhere."""
    if not isinstance(message, wire.Match):
        return {}
    ids = {"kvtier.request": message.request, "kvtier.session": message.session}
    return {name: text[: wire.MAX_NAME] for name, text in ids.items() if text}


def _came(reply: wire.Message | BaseException) -> dict[str, Any]:
    """Pages by what became of them."""
    match reply:
        case wire.Matched(pages=pages, pending=pending, segments=segments):
            tiers: dict[str, Any] = {}
            for segment in segments:
                name = f"kvtier.pages.{Tier(segment.tier).name.lower()}"
                tiers[name] = tiers.get(name, 0) + segment.pages
            return {"kvtier.pages": pages, "kvtier.pending": pending, **tiers}
        case wire.Acquired(pages=pages):
            return {"kvtier.pages": pages}
        case wire.Reserved(pages=pages, refused=refused):
            return {"kvtier.pages": pages, "kvtier.refused": refused}
        case wire.Committed(published=published, waiting=waiting):
            return {"kvtier.pages": published, "kvtier.waiting": waiting}
        case wire.Loaded(done=done) | wire.Stored(done=done):
            return {"kvtier.items": sum(done)}
    return {}
