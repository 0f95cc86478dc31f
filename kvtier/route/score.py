"""Which host a prompt is cheapest on. Pure.

    credit = 1.0 x pages in device + 0.75 x further pages in host + 0.25 x further pages on disk
    cost   = max(pages being prefilled + pages of the prompt - credit, 0) + pages being decoded + weight x requests

The same formula as Dynamo's router, whose selection this agrees with. A prompt that nobody has goes to the host that
rendezvous hashing names, so that the next one with the same beginning finds it; a session stays where it was. Both
give way where that host is busier than the cheapest by more than the prompt is worth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

MAX_SESSIONS: Final = 1 << 16


class View(NamedTuple):
    """What is known of one host, in pages: of the prompt, by the fastest tier that has them, and of its load."""

    name: str
    device: int = 0
    host: int = 0
    disk: int = 0
    backlog: int = 0
    decode: int = 0
    requests: int = 0


class Weights(NamedTuple):
    """What a cached page is worth against one to be computed, and what an active request costs in pages."""

    device: float = 1.0
    host: float = 0.75
    disk: float = 0.25
    request: float = 0.0


DEFAULT: Final = Weights()


def credit(view: View, weights: Weights = DEFAULT) -> float:
    """Pages' worth of work that the host's copies save."""
    return weights.device * view.device + weights.host * view.host + weights.disk * view.disk


def cost(view: View, pages: int, weights: Weights = DEFAULT) -> float:
    """Work, in pages, before and beside a prompt of `pages` pages on that host; the lowest wins."""
    prefill = max(view.backlog + pages - credit(view, weights), 0.0)
    return prefill + view.decode + weights.request * view.requests


def rank(
    views: Sequence[View], pages: int, cold: Sequence[str] = (), stay: str = "", weights: Weights = DEFAULT
) -> list[tuple[str, float]]:
    """(host, cost), the best first. `cold`: hosts in the order that hashing prefers; `stay`: where the session is."""
    costs = {view.name: cost(view, pages, weights) for view in views}
    best = min(costs.values(), default=0.0)
    preferred = [stay] if stay else []
    if not any(credit(view, weights) for view in views):
        preferred += cold
    first = next((name for name in preferred if costs.get(name, float("inf")) <= best + pages), None)
    return sorted(costs.items(), key=lambda each: (each[0] != first, each[1], each[0]))


class Sessions:
    """Where sessions were sent last. Bounded; forgotten after `ttl_s` without a request."""

    def __init__(self, ttl_s: float = 600.0, most: int = MAX_SESSIONS) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._known: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def get(self, session: str, now: float) -> str:
        """The host of a session; empty where none is known."""
        name, seen = self._known.get(session, ("", 0.0))
        return name if name and now - seen < self._ttl_s else ""

    def put(self, session: str, name: str, now: float) -> None:
        """A session goes to that host."""
        self._known.pop(session, None)
        self._known[session] = name, now
        while len(self._known) > self._most:
            self._known.popitem(last=False)
