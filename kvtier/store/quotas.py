"""Who may have how much of which tier: whoever is over makes room among what is its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import add
from typing import Any, NamedTuple

from kvtier.policy.quota import Rule
from kvtier.store.cache import Cache
from kvtier.store.slices import sliced
from kvtier.types import Tier


class Tally(NamedTuple):
    """Caches of one rule whose slots are shared and whose pages need the same groups."""

    copies: list[list[int]]
    """Of all of them, by tier and group: what is held is asked with every request, and they may be thousands."""
    members: dict[Cache, None]

    @property
    def one(self) -> Cache:
        """Any of them."""
        return next(iter(self.members))


class Quotas:
    """Rules, and the caches that each is about. A cache's share in the orders is its rule's number, 0 without one."""

    def __init__(self) -> None:
        self.rules: Sequence[Rule] = ()
        self.writing: Counter[Cache] = Counter()
        """Bytes on their way to disk."""
        self._coming: Counter[tuple[Cache, int]] = Counter()
        """Bytes by tier in slots that are taken, and neither reserved nor published yet."""
        self._tallies: dict[int, dict[Any, Tally]] = {}
        self._dues: dict[int, list[int]] = {}
        """By rule: bytes by tier that are no copies yet."""
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
        self._tallies.clear()
        self._dues.clear()
        for cache in caches:
            self.join(cache)

    def join(self, cache: Cache) -> None:
        """A cache comes under the first rule that fits it."""
        fits = (n for n, rule in enumerate(self.rules, 1) if rule.fits(cache.id, cache.spec.salt, cache.scope))
        share = next(fits, 0)
        if share != cache.index.share:
            cache.index.share = share
            if cache.index.nodes:
                cache.index.moving = True
                self.moving[cache] = None
                self._changed.set()
        self._count(cache)

    def _count(self, cache: Cache) -> None:
        """What a cache has counts with the rest of its rule's from now on."""
        index = cache.index
        if not index.share:
            index.tally, cache.dues = None, [0] * len(Tier)
            return
        tallies = self._tallies.setdefault(index.share, {})
        tally = tallies.setdefault(_kind(cache), Tally([[0] * index.groups for _ in Tier], {}))
        tally.members[cache] = None
        for all_of_it, own in zip(tally.copies, index.held, strict=True):
            all_of_it[:] = map(add, all_of_it, own)
        index.tally = tally.copies
        cache.dues = self._dues.setdefault(index.share, [0] * len(Tier))
        for tier in Tier:
            cache.dues[tier] += self._due(cache, tier)

    def _due(self, cache: Cache, tier: int) -> int:
        """Bytes that a cache is about to have in a tier."""
        if tier == Tier.DISK:
            return self.writing[cache]
        return sum(res.cost for res in cache.reservations if res.tier == tier) + self._coming[cache, tier]

    def leave(self, cache: Cache) -> None:
        """A cache is forgotten, which has nothing any more."""
        del self.writing[cache]
        self.moving.pop(cache, None)
        if cache.index.share:
            tallies = self._tallies[cache.index.share]
            del tallies[_kind(cache)].members[cache]
            if not tallies[_kind(cache)].members:
                del tallies[_kind(cache)]

    def held(self, share: int, tier: int) -> int:
        """Bytes that the caches of a rule have in a tier, with what is on its way there."""
        total = self._dues[share][tier] if share in self._dues else 0
        for tally in self.tallies(share):
            total += sum(copies * tally.one.slot_cost(group) for group, copies in enumerate(tally.copies[tier]))
        return total

    def tallies(self, share: int) -> Iterable[Tally]:
        """The caches of a rule by their kind."""
        return self._tallies.get(share, {}).values()

    def check(self) -> list[str]:
        """Sums that are not those of their parts, in words."""
        wrong = []
        for share, tallies in self._tallies.items():
            members = [cache for tally in tallies.values() for cache in tally.members]
            for tier in Tier:
                total = sum(self._due(cache, tier) for cache in members)
                for cache in members:
                    held = cache.index.held[tier]
                    total += sum(copies * cache.slot_cost(group) for group, copies in enumerate(held))
                if total != self.held(share, tier):
                    wrong.append(f"quota {share}: {total} bytes in {tier.name}, {self.held(share, tier)} counted")
        return wrong

    def limit(self, cache: Cache, tier: int) -> int | None:
        """Bytes that the caches of its rule may have together."""
        share = cache.index.share
        return self.rules[share - 1].limits.get(tier) if share else None

    @contextlib.contextmanager
    def coming(self, cache: Cache, tier: int, nbytes: int) -> Iterator[None]:
        """Count bytes that a cache is about to have in a tier of slots."""
        self._coming[cache, tier] += nbytes
        cache.dues[tier] += nbytes
        try:
            yield
        finally:
            self._coming[cache, tier] -= nbytes
            cache.dues[tier] -= nbytes
            if not self._coming[cache, tier]:
                del self._coming[cache, tier]

    def write(self, cache: Cache, nbytes: int) -> None:
        """So many bytes are on their way to disk, or (less than 0) no more."""
        self.writing[cache] += nbytes
        cache.dues[Tier.DISK] += nbytes

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


def _kind(cache: Cache) -> Any:
    """What caches have in common that one of them can stand for."""
    return cache.pool, tuple(cache.index.anchors)
