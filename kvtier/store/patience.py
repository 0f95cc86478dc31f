"""Who finds no room because engines hold it waits, as long as it said it would, until they let go of something."""

from __future__ import annotations

import asyncio
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Self

from kvtier.store.cache import Cache
from kvtier.store.instance import Instance
from kvtier.tiers.pool import SlotPool

if TYPE_CHECKING:
    from kvtier.store.space import Space

CIRCLE_S: Final = 0.1
"""So long nothing was let go of while all who hold something wait themselves: nothing will be."""


class Patience:
    """What is let go of, and who waits for it. Whoever waits holds nothing, so that nobody waits for who waits."""

    def __init__(self, instances: Mapping[Any, Instance]) -> None:
        self._instances: Final = instances
        self.gone = 0
        """How often something was let go of."""
        self.stirred = asyncio.Event()
        self.waiting: Counter[Instance] = Counter()
        """Requests of each that wait."""
        self._turns: weakref.WeakKeyDictionary[SlotPool, asyncio.Lock] = weakref.WeakKeyDictionary()

    def stir(self) -> None:
        """Something was let go of."""
        self.gone += 1
        self.stirred.set()

    def held(self, tier: int) -> int:
        """Bytes of a tier that engines hold, or that are being loaded for them."""
        return sum(each.held(tier) for each in self._instances.values())

    def circular(self, tier: int) -> bool:
        """Whether whoever holds something waits: one that does one thing after another lets nothing go meanwhile."""
        return all(each in self.waiting for each in self._instances.values() if each.held(tier))

    def turn(self, pool: SlotPool, tier: int, instance: Instance, deadline: float) -> Turn:
        """Around all tries of one request for slots of a pool."""
        return Turn(self, self._turns.setdefault(pool, asyncio.Lock()), tier, instance, deadline)

    async def take(
        self,
        space: Space,
        cache: Cache,
        groups: Sequence[int],
        instance: Instance,
        deadline: float,
        keep: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[array[int]]:
        """As Space.take_first; where there is nothing at all since engines hold the room, once they let go of some.

        A part is better now than all of it later: whoever stores goes on with something else. `keep` is around each
        try: what it leases is no room.
        """
        wanted = set(groups)
        least = sum(map(cache.slot_cost, wanted))
        with self.turn(cache.pools[space.tier], space.tier, instance, deadline) as turn:
            while True:
                with keep():
                    got = await space.take_first(cache, groups, deadline)
                never = wanted and not space.allowance.first(cache, groups, now=False)
                if all(got[group] for group in wanted) or never or not turn.hopeful(least):
                    return got
                space.give_back(cache, got)
                if not await turn.again(least):
                    with keep():
                        return await space.take_first(cache, groups, deadline)


class Turn:
    """One request's tries. After its first, those who failed earlier for slots of the same pool go before it."""

    def __init__(self, patience: Patience, lock: asyncio.Lock, tier: int, instance: Instance, deadline: float) -> None:
        self._patience = patience
        self._lock = lock
        self._tier = tier
        self._instance = instance
        self._deadline = deadline
        self._mine = False
        self._seen = patience.gone
        """What had been let go of when the latest try began."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._mine:
            self._lock.release()

    def quietly(self, drop: Callable[[], None]) -> None:
        """Let go of what a try held: for the others a reason to try again, for this one none."""
        before = self._patience.gone
        drop()
        self._seen += self._patience.gone - before

    def hopeful(self, lacking: int) -> bool:
        """Whether there is time, and something was let go of since the latest try began, or may be: so many bytes."""
        in_time = asyncio.get_running_loop().time() < self._deadline and not self._instance.gone
        return in_time and (self._patience.gone > self._seen or self._patience.held(self._tier) >= lacking)

    async def _in_vain(self) -> bool:
        """Wait for something to be let go of, a while; True where nobody is left who would."""
        patience = self._patience
        patience.stirred.clear()
        circular = patience.circular(self._tier)
        try:
            async with asyncio.timeout(CIRCLE_S):
                await patience.stirred.wait()
        except TimeoutError:
            return circular and patience.circular(self._tier)
        return False

    async def again(self, lacking: int) -> bool:
        """Wait until another try may find so many bytes more; False where none can in time."""
        patience = self._patience
        patience.waiting[self._instance] += 1
        try:
            async with asyncio.timeout_at(self._deadline):
                if not self._mine:
                    await self._lock.acquire()
                    self._mine = True
                while patience.gone == self._seen and self.hopeful(lacking):
                    if await self._in_vain():
                        return False
        except TimeoutError:
            return False
        finally:
            patience.waiting -= Counter([self._instance])
        hopeful = self.hopeful(lacking)
        self._seen = patience.gone
        return hopeful
