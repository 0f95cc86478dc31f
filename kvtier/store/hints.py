"""What engines say of the future of a path: it is kept for a while, or goes first. Nothing is held."""

from __future__ import annotations

from typing import Final

from kvtier.store.instance import Path, Process
from kvtier.store.parts import Parts
from kvtier.types import bad
from kvtier.wire import Hint, Ok

USUAL_S: Final = 60.0
MOST_S: Final = 3600.0


class Hints:
    """Marks on nodes that the eviction orders of all tiers read."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def hint(self, process: Process, msg: Hint) -> Ok:
        """Keep the cached part of a path, or give up its end. Raises bad_request, unknown."""
        path = process.instance.path(msg.handle)
        if msg.what not in {"continues", "waiting", "dead"}:
            raise bad("what", "continues, waiting or dead", msg.what)
        if not 0 <= msg.seconds <= MOST_S:
            raise bad("seconds", f"0..{MOST_S:.0f}", msg.seconds)
        if msg.page < 0:
            raise bad("page", "a page number", msg.page)
        if msg.what == "dead":
            self._give_up(path, msg.page)
        else:
            self._keep(path, self.parts.now() + (msg.seconds or USUAL_S))
        return Ok()

    def _keep(self, path: Path, until: float) -> None:
        """Its leaf goes after all leaves that nobody keeps, the one whose time runs out first before the others."""
        self.parts.counts["hints_keep"] += 1
        index = path.cache.radix
        node, end = index.deepest(path.keys)
        if end:
            index.keep(index.ending_at(node, end), until)

    def _give_up(self, path: Path, page: int) -> None:
        """Pages from `page` on go first, as far as no other path branches off or goes on."""
        self.parts.counts["hints_dead"] += 1
        index = path.cache.radix
        node, end = index.deepest(path.keys)
        if end > page:
            index.give_up(index.ending_at(node, end), page)
