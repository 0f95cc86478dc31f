"""Pins: an operator's holds on prompts, each with an end and a priority. They end with the daemon."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final, NamedTuple

from kvtier import wire
from kvtier.index import Hold, Node
from kvtier.store.cache import Cache
from kvtier.store.parts import Parts
from kvtier.store.prompts import Held, held, resolve
from kvtier.types import Code, KvtierError, bad

SHARE: Final = 0.5
"""Of the host tier, so that engines always have room."""
MOST: Final = 1024
LOAD_S: Final = 60.0
WEEK_S: Final = 7 * 86400.0
LOOK_S: Final = 1.0
"""So often it is looked whether something of a pin was cut away."""


class Pin(NamedTuple):
    """One hold."""

    number: int
    what: Held
    cost: int
    pages: int
    """That it was asked for and found."""
    priority: int
    ends: float
    """Loop time."""
    timer: asyncio.TimerHandle


class Pins:
    """All pins; they hold at most SHARE of the host tier, the higher priority first."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.pins: dict[int, Pin] = {}
        self._watching: asyncio.TimerHandle | None = None

    async def pin(self, msg: wire.Pin) -> wire.Info:
        """Hold what matches of a prompt, and load it; pins of lower priority make room.

        Raises bad_request, unknown, over_cap.
        """
        if not 0 < msg.ttl_s <= WEEK_S:
            raise bad("ttl_s", f"a time in (0, {WEEK_S:.0f}] seconds", msg.ttl_s)
        if not 0 <= msg.priority <= 100:
            raise bad("priority", "0..100", msg.priority)
        what = held(await resolve(self.parts.caches, self.parts.requests, msg.of))
        if not what.nodes:
            raise KvtierError(Code.UNKNOWN, "nothing of it is cached", "prompt")
        self._make_room(what.cost, msg.priority)
        return wire.Info(self._row(self._hold(what, msg)))

    def _hold(self, what: Held, msg: wire.Pin) -> Pin:
        """Lease it, load what of it is not in host, end it in time."""
        loop = asyncio.get_running_loop()
        what.lease()
        number = next(self.parts.numbers)
        timer = loop.call_later(msg.ttl_s, self._drop, number)
        pin = self.pins[number] = Pin(number, what, what.cost, what.pages, msg.priority, loop.time() + msg.ttl_s, timer)
        self.parts.loads.start(what.cache, what.missing(self.parts.loads), loop.time() + LOAD_S)
        self._watch()
        return pin

    def _make_room(self, cost: int, priority: int) -> None:
        """Drop pins of lower priority until `cost` bytes more fit; raises over_cap before dropping any in vain."""
        most = int(self.parts.host.budget_bytes * SHARE)
        over = sum(pin.cost for pin in self.pins.values()) + cost - most
        crowd = len(self.pins) + 1 - MOST
        victims = []
        for pin in sorted(self.pins.values(), key=lambda pin: (pin.priority, pin.ends)):
            if (over <= 0 and crowd <= 0) or pin.priority >= priority:
                break
            victims.append(pin)
            over -= pin.cost
            crowd -= 1
        if over > 0 or crowd > 0:
            raise KvtierError(Code.OVER_CAP, f"pins may hold {most} bytes of host and be {MOST}", "prompt")
        for pin in victims:
            self._drop(pin.number)

    def _drop(self, number: int) -> None:
        """Let a pin go."""
        pin = self.pins.pop(number, None)
        if pin is not None:
            pin.timer.cancel()
            for node in pin.what.nodes:
                self.parts.unlease(pin.what.cache, node, Hold.PIN)

    def _watch(self) -> None:
        """Look after all pins, as long as there are any."""
        if self.pins and self._watching is None:
            self._watching = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Let go of what was reset, purged or lost: nobody is served of it, and its room is lost until the pin ends."""
        self._watching = None
        for pin in list(self.pins.values()):
            if pin.what.cache.index.doomed and any(node.dead for node in pin.what.nodes):
                left = self._left(pin.what)
                self.pins[pin.number] = pin._replace(what=left, cost=left.cost)
                if not left.nodes:
                    self._drop(pin.number)
        self._watch()

    def _left(self, what: Held) -> Held:
        """What is still cached of something pinned, pinned in its place."""
        cache, nodes = what.cache, list[Node]()
        for node in what.nodes:
            up = node
            while up.dead and up.parent is not None:
                up = up.parent
            if up is not cache.index.root:
                cache.index.lease(up, Hold.PIN)
                nodes.append(up)
            self.parts.unlease(cache, node, Hold.PIN)
        if cache.spec.keyed:
            return Held(cache, nodes, len(nodes), what.needed)
        pages = nodes[0].end if nodes else 0
        return Held(cache, nodes, pages, cache.radix.needed(pages))

    def unpin(self, msg: wire.Unpin) -> wire.Info:
        """End a pin, or all of them (0). Raises unknown."""
        if msg.pin and msg.pin not in self.pins:
            raise KvtierError(Code.UNKNOWN, f"no pin {msg.pin}", "pin")
        gone = [msg.pin] if msg.pin else list(self.pins)
        for number in gone:
            self._drop(number)
        return wire.Info({"unpinned": gone})

    def held(self) -> Counter[Cache]:
        """How many leases pins hold of each cache."""
        return Counter(pin.what.cache for pin in self.pins.values() for _ in pin.what.nodes)

    def list(self, msg: wire.Pins) -> wire.Info:
        """Every pin."""
        del msg
        return wire.Info({"pins": [self._row(pin) for pin in self.pins.values()]})

    @staticmethod
    def _row(pin: Pin) -> dict[str, Any]:
        """One pin for people."""
        return {
            "pin": pin.number,
            "cache": pin.what.cache.id.hex(),
            "pages": pin.what.pages,
            "held_bytes": pin.cost,
            "priority": pin.priority,
            "left_s": round(max(0.0, pin.ends - asyncio.get_running_loop().time()), 1),
            "lost": pin.what.pages < pin.pages or any(node.dead for node in pin.what.nodes),
        }
