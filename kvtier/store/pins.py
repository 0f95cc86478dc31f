"""Pins: an operator's holds on prompts, each with an end and a priority. They end with the daemon."""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

from kvtier import wire
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.store.parts import Parts
from kvtier.store.prompts import Prompt, peek, resolve
from kvtier.types import Code, KvtierError, bad

SHARE: Final = 0.5
"""Of the host tier, so that engines always have room."""
MOST: Final = 1024
LOAD_S: Final = 60.0
WEEK_S: Final = 7 * 86400.0


class Pin(NamedTuple):
    """One hold: the path to `node`, `pages` long."""

    number: int
    cache: Cache
    node: Node
    pages: int
    cost: int
    priority: int
    ends: float
    """Loop time."""
    timer: asyncio.TimerHandle


class Pins:
    """All pins; they hold at most SHARE of the host tier, the higher priority first."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.pins: dict[int, Pin] = {}

    async def pin(self, msg: wire.Pin) -> wire.Info:
        """Hold what matches of a prompt, and load it; pins of lower priority make room.

        Raises bad_request, unknown, over_cap.
        """
        if not 0 < msg.ttl_s <= WEEK_S:
            raise bad("ttl_s", f"a time in (0, {WEEK_S:.0f}] seconds", msg.ttl_s)
        if not 0 <= msg.priority <= 100:
            raise bad("priority", "0..100", msg.priority)
        prompt = await resolve(self.parts.caches, self.parts.requests, msg.of)
        found = peek(prompt)
        if not found.pages:
            raise KvtierError(Code.UNKNOWN, "nothing of the prompt is cached", "of")
        needed = prompt.cache.radix.needed(found.pages)
        cost = sum(count * prompt.cache.slot_cost(group) for group, _, count in needed)
        self._make_room(cost, msg.priority)
        return wire.Info(self._row(self._hold(prompt, found.node, found.pages, cost, msg)))

    def _hold(self, prompt: Prompt, node: Node, pages: int, cost: int, msg: wire.Pin) -> Pin:
        """Lease the path, load what of it is not in host, end it in time."""
        cache, loop = prompt.cache, asyncio.get_running_loop()
        node = cache.radix.ending_at(node, pages)
        cache.index.lease(node)
        number = next(self.parts.numbers)
        timer = loop.call_later(msg.ttl_s, self._drop, number)
        pin = Pin(number, cache, node, pages, cost, msg.priority, loop.time() + msg.ttl_s, timer)
        self.pins[number] = pin
        missing = self.parts.loads.missing(cache, node, cache.radix.needed(pages))
        self.parts.loads.start(cache, missing, loop.time() + LOAD_S)
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
            raise KvtierError(Code.OVER_CAP, f"pins may hold {most} bytes of host and be {MOST}", "of")
        for pin in victims:
            self._drop(pin.number)

    def _drop(self, number: int) -> None:
        """Let a pin go."""
        pin = self.pins.pop(number, None)
        if pin is not None:
            pin.timer.cancel()
            self.parts.unlease(pin.cache, pin.node)

    def unpin(self, msg: wire.Unpin) -> wire.Info:
        """End a pin, or all of them (0). Raises unknown."""
        if msg.pin and msg.pin not in self.pins:
            raise KvtierError(Code.UNKNOWN, f"no pin {msg.pin}", "pin")
        gone = [msg.pin] if msg.pin else list(self.pins)
        for number in gone:
            self._drop(number)
        return wire.Info({"unpinned": gone})

    def list(self, msg: wire.Pins) -> wire.Info:
        """Every pin."""
        del msg
        return wire.Info({"pins": [self._row(pin) for pin in self.pins.values()]})

    @staticmethod
    def _row(pin: Pin) -> dict[str, Any]:
        """One pin for people."""
        return {
            "pin": pin.number,
            "cache": pin.cache.id.hex(),
            "pages": pin.pages,
            "held_bytes": pin.cost,
            "priority": pin.priority,
            "left_s": round(max(0.0, pin.ends - asyncio.get_running_loop().time()), 1),
            "lost": pin.node.dead,
        }
