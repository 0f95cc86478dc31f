"""Where a prompt is cheapest: this host and its peers weighed by one formula."""

from __future__ import annotations

from typing import Any, Final

from kvtier import wire
from kvtier.route import Sessions, View, rank
from kvtier.store.cache import Cache
from kvtier.store.parts import Parts
from kvtier.store.prompts import Prompt, peek, resolve
from kvtier.store.segments import segments
from kvtier.types import Code, KvtierError, Tier, bad

ALONE: Final = "this host"
MAX_SESSION: Final = 256


def weigh(parts: Parts, cache: Cache, keys: bytes, name: str) -> View:
    """This host's view of a path: pages by tier, pages being computed (reserved) and used (leased), and by how many."""
    found = peek(Prompt(cache, keys))
    tiers = dict.fromkeys(Tier, 0)
    for part in segments(cache, found.node, found.pages):
        tiers[Tier(part.tier)] += part.pages
    return View(name, tiers[Tier.DEVICE], tiers[Tier.HOST], tiers[Tier.DISK], *load(parts))


def load(parts: Parts) -> tuple[int, int, int]:
    """(pages being computed, pages in use, requests under way) of this host's engines."""
    held = list(parts.instances.values())
    backlog = sum(res.pages - res.published for each in held for res in each.reservations.values())
    leases = [lease for each in held for lease in each.leases.values()]
    return backlog, sum(lease.pages for lease in leases), len(leases)


class Routing:
    """The verb route."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._sessions = Sessions()

    async def route(self, msg: wire.Route) -> wire.Info:
        """Hosts for a prompt, the cheapest first. Raises bad_request, unknown."""
        if len(msg.session) > MAX_SESSION:
            raise bad("session", f"at most {MAX_SESSION} characters")
        prompt = await resolve(self.parts.caches, self.parts.requests, msg.of)
        cache, keys = prompt.cache, prompt.keys
        if cache.spec.keyed:
            raise bad("of", "a prompt of a token cache")
        peers = self.parts.peers
        pages = len(keys) // cache.index.stride
        if not pages:
            raise KvtierError(Code.BAD_REQUEST, "the prompt is shorter than a page", "tokens")
        views = [weigh(self.parts, cache, keys, ALONE if peers is None else peers.tier.name)]
        cold: list[str] = []
        shared = None if peers is None else peers.shared(cache)
        if peers is not None and shared is not None:
            views += [View(name, **numbers) for name, numbers in (await peers.tier.weigh(shared, keys)).items()]
            cold = peers.tier.preferred(shared, keys)
        now = self.parts.now()
        ranked = rank(views, pages, cold, self._sessions.get(msg.session, now) if msg.session else "")
        if msg.session:
            self._sessions.put(msg.session, ranked[0][0], now)
        known = {view.name: view for view in views}
        rows: list[dict[str, Any]] = [known[name]._asdict() | {"cost": round(value, 3)} for name, value in ranked]
        return wire.Info({"pages": pages, "page_tokens": cache.spec.page_tokens, "hosts": rows})
