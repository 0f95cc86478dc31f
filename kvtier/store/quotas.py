"""Who may have how much of which tier: whoever is over makes room among what is its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvtier.policy.quota import Rule
from kvtier.store.cache import Cache
from kvtier.store.slices import sliced
from kvtier.types import Tier


class Quotas:
    """Rules, and the caches that each is about. A cache's share in the orders is its rule's number, 0 without one."""

    def __init__(self) -> None:
        self.rules: Sequence[Rule] = ()
        self.writing: Counter[Cache] = Counter()
        """Bytes on their way to disk."""
        self._coming: Counter[tuple[Cache, int]] = Counter()
        """Bytes by tier in slots that are taken, and neither reserved nor published yet."""
        self._members: dict[int, list[Cache]] = {}
        self.moving: dict[Cache, None] = {}
        """Caches whose leaves are not all found under their rule yet."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Move what comes under another rule, in slices, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self.moving:
                cache = next(iter(self.moving))
                share = cache.index.share
                async for _ in sliced(cache.index.move_to(share)):
                    if cache.index.share != share:
                        break
                else:
                    self.moving.pop(cache, None)

    def set(self, rules: Sequence[Rule], caches: Iterable[Cache]) -> None:
        """Other rules from now on; what is held beyond them goes when room is asked for next."""
        self.rules = rules
        self._members.clear()
        for cache in caches:
            self.join(cache)

    def join(self, cache: Cache) -> None:
        """A cache comes under the first rule that fits it."""
        fits = (n for n, rule in enumerate(self.rules, 1) if rule.fits(cache.id, cache.spec.salt, cache.scope))
        share = next(fits, 0)
        if share:
            self._members.setdefault(share, []).append(cache)
        if share != cache.index.share:
            cache.index.share = share
            if cache.index.nodes:
                cache.index.moving = True
                self.moving[cache] = None
                self._changed.set()

    def leave(self, cache: Cache) -> None:
        """A cache is forgotten."""
        del self.writing[cache]
        self.moving.pop(cache, None)
        if cache.index.share:
            self._members[cache.index.share].remove(cache)

    def held(self, share: int, tier: int) -> int:
        """Bytes that the caches of a rule have in a tier, with what is on its way there."""
        total = 0
        for cache in self._members.get(share, ()):
            total += sum(cache.index.held[tier][group] * cache.slot_cost(group) for group in range(cache.index.groups))
            if tier == Tier.DISK:
                total += self.writing[cache]
            else:
                total += sum(res.cost for res in cache.reservations if res.tier == tier) + self._coming[cache, tier]
        return total

    def members(self, share: int) -> Sequence[Cache]:
        """The caches of a rule."""
        return self._members.get(share, ())

    def limit(self, cache: Cache, tier: int) -> int | None:
        """Bytes that the caches of its rule may have together."""
        share = cache.index.share
        return self.rules[share - 1].limits.get(tier) if share else None

    @contextlib.contextmanager
    def coming(self, cache: Cache, tier: int, nbytes: int) -> Iterator[None]:
        """Count bytes that a cache is about to have in a tier of slots."""
        self._coming[cache, tier] += nbytes
        try:
            yield
        finally:
            self._coming[cache, tier] -= nbytes
            if not self._coming[cache, tier]:
                del self._coming[cache, tier]

    def room(self, share: int, tier: int) -> int:
        """Bytes of a tier that a rule leaves; less than 0 where more is held, all there is where it has no limit."""
        limit = self.rules[share - 1].limits.get(tier) if 0 < share <= len(self.rules) else None
        return 1 << 62 if limit is None else limit - self.held(share, tier)

    def over(self, cache: Cache, nbytes: int, tier: int) -> int:
        """Bytes that must go before a cache may have `nbytes` more of a tier."""
        limit = self.limit(cache, tier)
        return max(0, self.held(cache.index.share, tier) + nbytes - limit) if nbytes and limit is not None else 0

    def blocks(self, cache: Cache, nbytes: int, tier: int, evict: Callable[[int, int], Any]) -> bool:
        """Whether there is no place for so much more, after its rule's coldest pages went: evict(bytes, share).

        What is larger than the limit has none, and nothing goes for it.
        """
        over, limit = self.over(cache, nbytes, tier), self.limit(cache, tier)
        if not over or limit is None or nbytes > limit:
            return over > 0
        evict(over, cache.index.share)
        return self.over(cache, nbytes, tier) > 0

    def report(self) -> list[dict[str, Any]]:
        """For status: each rule with what is held."""
        return [
            {"rule": f"{rule.kind}={rule.name}"}
            | {f"{Tier(tier).name.lower()}_limit_bytes": limit for tier, limit in rule.limits.items()}
            | {f"{Tier(tier).name.lower()}_held_bytes": self.held(number, tier) for tier in rule.limits}
            for number, rule in enumerate(self.rules, 1)
        ]
