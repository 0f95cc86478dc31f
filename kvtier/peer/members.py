"""Which hosts are homes of a prompt at present: those of the ring that are not away, and more where it is hot.

A host that has not answered for the grace time is away: the next in the ring is home in its place until it answers
again. Each host goes by what it sees itself; where two see it differently, a prompt is looked for in vain for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

import xxhash

from kvtier.peer import ring
from kvtier.peer.base import Move, Shared
from kvtier.peer.fame import Fame
from kvtier.peer.node import Node

_log = logging.getLogger("kvtier.peer")


class Members:
    """The hosts of the fleet as this one sees them."""

    def __init__(self, names: Collection[str], name: str, replicas: int, fame: Fame) -> None:
        self.names = sorted(names)
        self.name = name
        self.replicas = replicas
        self.fame = fame
        self._away: frozenset[str] = frozenset()
        self._present = self.names
        self._lives: dict[str, bytes] = {}
        """The life of each host that was seen last."""

    def homes(self, key: bytes) -> list[str]:
        """Homes of what the key names, this host too where it is one."""
        return ring.homes(self._present, key, self.replicas + self.fame.more(key, time.monotonic()))

    def turn(self, key: bytes) -> list[str]:
        """The homes in the order in which this host asks them; others begin elsewhere, so that all of them serve."""
        found = self.homes(key)
        at = xxhash.xxh3_64_intdigest(self.name.encode() + key) % max(1, len(found))
        return found[at:] + found[:at]

    def look(self, nodes: Collection[Node]) -> Move | None:
        """What changed since the last look: who is away, and who is back, was started again or missed some."""
        away = frozenset(node.name for node in nodes if node.away)
        fresh = {name for name in self._away if name not in away}
        for node in nodes:
            if node.incarnation and node.up:
                if self._lives.setdefault(node.name, node.incarnation) != node.incarnation:
                    fresh.add(node.name)
                self._lives[node.name] = node.incarnation
            if node.missed and node.up:
                node.missed = False
                fresh.add(node.name)
        if away == self._away and not fresh:
            return None
        for name in away - self._away:
            _log.warning("peer %s has been down for too long: others are homes in its place", name)
        if fresh:
            _log.info("pages are given to peers that may lack them: %s", ", ".join(sorted(fresh)))
        move = Move(tuple(self._present), frozenset(fresh))
        self._away = away
        self._present = [name for name in self.names if name not in away]
        return move

    def owed(self, keys: Sequence[bytes], move: Move) -> bool:
        """Whether what the keys name has homes since the move that may not have it.

        Whoever has it gives it to them, for nobody knows what others saw of the move: a second offer costs a question.
        """
        for key in keys:
            old, now = ring.homes(move.before, key, self.replicas), ring.homes(self._present, key, self.replicas)
            if any(name != self.name and (name not in old or name in move.fresh) for name in now):
                return True
        return False


def keys_of(shared: Shared, keys: bytes) -> list[bytes]:
    """What names the homes of a path of a token cache."""
    return [rung.key for rung in ring.rungs(shared, keys)]
