"""How fast a peer's link is and how fast packing is, as measured; and whether it pays to pack what travels."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

SAMPLE_BYTES: Final = 256 << 10
"""Transfers of less say little of a link."""
WEIGHT: Final = 0.3
"""Of the newest measurement."""
PACK_BPS: Final = 250e6
UNPACK_BPS: Final = 500e6
RATIO: Final = 0.75
"""Until they are measured."""
WORTH: Final = 0.9
"""Packing must take less than this share of the time."""
AGAIN: Final = 32
"""One transfer of so many goes as it is, to measure the link anew."""
MAX_CACHES: Final = 1024


class Link:
    """One direction of the link with one peer."""

    def __init__(self) -> None:
        self.rate = 0.0
        """Bytes a second; 0: not measured."""
        self.turns = 0

    def note(self, nbytes: int, seconds: float) -> None:
        """Bytes travelled as they are, in so long."""
        if nbytes >= SAMPLE_BYTES and seconds > 0:
            rate = nbytes / seconds
            self.rate += (rate - self.rate) * (WEIGHT if self.rate else 1.0)


class Packing:
    """What packing costs and saves."""

    def __init__(self) -> None:
        self.pack_bps = PACK_BPS
        self.unpack_bps = UNPACK_BPS
        self._ratios: OrderedDict[bytes, float] = OrderedDict()

    def pays(self, link: Link, cache: bytes, items: int) -> bool:
        """Whether items of a cache come sooner packed; one is packed while the one before travels."""
        link.turns += 1
        if not link.rate or link.turns % AGAIN == 0:
            return False
        plain = 1 / link.rate
        steps = (1 / self.pack_bps, plain * self._ratios.get(cache, RATIO), 1 / self.unpack_bps)
        return (max(steps) if items > 1 else sum(steps)) < WORTH * plain

    def packed(self, cache: bytes, nbytes: int, wire: int, seconds: float) -> None:
        """This host packed items of `nbytes` bytes into `wire`, in so long."""
        self._ratio(cache, nbytes, wire)
        if seconds > 0:
            self.pack_bps += (nbytes / seconds - self.pack_bps) * WEIGHT

    def unpacked(self, cache: bytes, nbytes: int, wire: int, seconds: float) -> None:
        """The same of items that came packed."""
        self._ratio(cache, nbytes, wire)
        if seconds > 0:
            self.unpack_bps += (nbytes / seconds - self.unpack_bps) * WEIGHT

    def _ratio(self, cache: bytes, nbytes: int, wire: int) -> None:
        old = self._ratios.pop(cache, RATIO)
        self._ratios[cache] = old + (wire / max(1, nbytes) - old) * WEIGHT
        if len(self._ratios) > MAX_CACHES:
            self._ratios.popitem(last=False)
