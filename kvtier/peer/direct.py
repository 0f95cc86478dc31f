"""The peer tier `direct`: daemons that talk to each other over TCP, without anything in between."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import msgspec

from kvtier.identity import CacheSpec
from kvtier.peer import frames, ring
from kvtier.peer.ahead import load_of, offered
from kvtier.peer.base import NOTHING, Ahead, Move, Pick, Shared, Sink, Source
from kvtier.peer.ends import DirectSink, DirectSource
from kvtier.peer.fame import Fame
from kvtier.peer.items import chunk_pages, items_of, page_name, span_of
from kvtier.peer.members import Members, keys_of
from kvtier.peer.node import Node
from kvtier.peer.pipe import Pipe
from kvtier.peer.questions import Questions
from kvtier.peer.speed import Packing
from kvtier.peer.terms import MAX_OPS, Terms
from kvtier.types import Kind, KvtierError, bad

THREADS: Final = 16
AHEAD_BYTES: Final = 4 << 20
"""So much is asked for before it is known to be there and to have room here: a round trip is long beside it."""
HEDGE: Final = 40
"""The first home is asked alone for this part of the deadline."""


class Direct:
    """Peers of a static list of `name -> (host, port)`; names that DNS resolves are resolved at each connection."""

    keeps_all = True

    def __init__(
        self,
        nodes: Mapping[str, tuple[str, int]],
        terms: Terms,
        *,
        replicas: int = 2,
        grace_s: float = 60.0,
        counts: Counter[str] | None = None,
    ) -> None:
        """`nodes` has this host too. A host that is down for longer than `grace_s` is no home."""
        self.counts = Counter() if counts is None else counts
        self.terms = terms
        self.pool = ThreadPoolExecutor(THREADS, "kvtier-peer")
        self.name = terms.name
        self.fame = Fame()
        self.packing = Packing()
        self._members = Members(nodes, self.name, replicas, self.fame)
        self._late: set[asyncio.Future[Source | None]] = set()
        """Questions whose answers nobody waits for any more."""
        self.questions = Questions(terms, self.counts)
        self._nodes = {
            each: Node(each, where, terms, most=MAX_OPS, counts=self.counts, grace_s=grace_s)
            for each, where in sorted(nodes.items())
            if each != self.name
        }

    def start(self) -> None:
        """Begin to ping every peer."""
        for node in self._nodes.values():
            node.start()

    def shared(self, spec: CacheSpec, scope: str, epoch: int) -> Shared | None:
        """The cache as peers know it; None where it is not shared."""
        return self.terms.secrets.shared(spec, scope, epoch)

    # -- reading ---------------------------------------------------------------------------------------------------

    def worth(self, shared: Shared, keys: bytes, have: int) -> bool:
        """See PeerTier."""
        if len(keys) > frames.MAX_PATH:
            return False
        name = page_name(shared, keys, have)
        return any(name not in node.lacks for node in self._homes_up(shared, keys))

    def _homes_up(self, shared: Shared, keys: bytes) -> list[Node]:
        """Other hosts that may have pages of a path and answer, those with the deepest first."""
        names = dict.fromkeys(name for key in keys_of(shared, keys) for name in self._members.turn(key))
        return [node for name in names if (node := self._nodes.get(name)) is not None and node.up]

    async def find(self, shared: Shared, keys: bytes, have: int) -> list[Source]:
        """See PeerTier. Ends as soon as one has all of it; who answers later is let go.

        The first home is asked alone for a moment, and for the first piece at once: it mostly has it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self.terms.deadline_s
        name = page_name(shared, keys, have)
        asked = [node for node in self._homes_up(shared, keys) if name not in node.lacks]
        if not asked:
            return []
        first, *others = asked
        total = len(keys) // shared.spec.stride
        moment = self.terms.deadline_s / HEDGE if others else None
        posted = await self._post(first, shared, keys, have)
        waits: set[asyncio.Task[Source | None]] = set()
        found: list[Source] = []
        if posted is not None and await self._answers(first, posted[0], moment or self.terms.deadline_s):
            source = await self._find(first, shared, keys, have, until, posted)  # which is there: no task is needed
            found += [] if source is None else [source]
        else:
            waits.add(loop.create_task(self._find(first, shared, keys, have, until, posted)))
        try:
            while (waits or others) and not any(source.pages == total for source in found):
                if waits:
                    last = not others and found  # who holds one peer up waits for no turn at the next
                    until_s = max(0.0, until - loop.time()) if last else moment
                    done, waits = await asyncio.wait(waits, timeout=until_s, return_when=asyncio.FIRST_COMPLETED)
                    found += [source for task in done if (source := task.result()) is not None]
                    if last and not done:
                        break
                if not any(source.pages == total for source in found):
                    waits |= {loop.create_task(self._find(node, shared, keys, have, until)) for node in others}
                    others, moment = [], None
        except BaseException:
            for source in found:
                source.close()
            raise
        finally:
            for task in waits:
                if task in self.questions.unasked:
                    task.cancel()
                self._late.add(task)
                task.add_done_callback(self._close_late)
        return sorted(found, key=lambda source: -source.pages)

    async def _post(self, node: Node, shared: Shared, keys: bytes, have: int) -> tuple[Pipe, frames.Find] | None:
        """Ask what `_find` asks, and for the first piece, at once; None where that would have to wait for anything."""
        pipe = await node.free(shared)
        if pipe is None:
            return None
        picks = self._first(shared, have, len(keys) // shared.spec.stride)
        packed = bool(picks) and self.packing.pays(node.into, shared.id, sum(len(pick.pages) // 4 for pick in picks))
        find = frames.Find(shared.id, keys, picks, packed)
        try:
            pipe.post(find)
        except (OSError, KvtierError):  # the next try says why
            node.give(pipe, good=False)
            return None
        return pipe, find

    async def _answers(self, node: Node, pipe: Pipe, within_s: float) -> bool:
        """Whether something comes on a connection that soon; not where some of the question is to be sent yet."""
        if not pipe.stream.sent:
            return False
        try:
            await pipe.stream.something(within_s)
        except TimeoutError:
            return False
        except BaseException:
            node.give(pipe, good=False)
            raise
        return True

    async def _find(
        self,
        node: Node,
        shared: Shared,
        keys: bytes,
        have: int,
        until: float,
        posted: tuple[Pipe, frames.Find] | None = None,
    ) -> Source | None:
        """Ask one peer, unless that was posted; None where it has no more, or does not say in time."""
        self.counts["peer_asked"] += 1
        total = len(keys) // shared.spec.stride
        find = frames.Find(shared.id, keys) if posted is None else posted[1]
        answer = await self.questions.ask(
            node, shared, find, frames.Found, until, None if posted is None else posted[0]
        )
        if answer is None:
            return None
        pipe, reply = answer
        if not have < reply.pages <= total or (reply.load is not None and not find.picks):
            node.lacks.note(page_name(shared, keys, have))
            node.give(pipe, good=reply.pages <= have and reply.load is None)
            return None
        self.fame.tell(keys_of(shared, keys[: reply.pages * shared.spec.stride])[0], reply.more, time.monotonic())
        return DirectSource(self, node, pipe, shared, keys, reply.pages, find.picks, reply.load)

    def _first(self, shared: Shared, have: int, total: int) -> tuple[Pick, ...]:
        """The first piece of a path; none where it is large, or depends on how much there is."""
        groups = shared.spec.groups
        pages = range(have, min(total, have + chunk_pages(shared.spec)))
        if any(group.kind is not Kind.FULL for group in groups):
            return ()
        if len(pages) * sum(group.item_bytes for group in groups) > AHEAD_BYTES:
            return ()
        return span_of(len(groups), pages)

    async def depth(self, node: str, shared: Shared, keys: bytes) -> int:
        """See PeerTier."""
        peer = self._nodes[node]
        asks = peer.up and len(keys) <= frames.MAX_PATH
        answer = (
            await self.questions.ask(peer, shared, frames.Find(shared.id, keys), frames.Found, hasty=True)
            if asks
            else None
        )
        if answer is None:
            return 0
        pipe, found = answer
        right = found.pages <= len(keys) // shared.spec.stride
        peer.give(pipe, good=right)
        return found.pages if right else 0

    def _close_late(self, task: asyncio.Future[Source | None]) -> None:
        """Nobody waits any more for what this peer says."""
        self._late.discard(task)
        if not task.cancelled() and task.exception() is None and (source := task.result()) is not None:
            source.close()

    # -- keys ------------------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """See PeerTier."""
        return any(node.up for node in self._nodes.values())

    def key_homes(self, shared: Shared, group: int, key: bytes) -> list[str]:
        """See PeerTier."""
        return [name for name in self._members.homes(ring.key_name(shared, group, key)) if name != self.name]

    def gave_up(self) -> None:
        """See PeerTier."""
        for node in self._nodes.values():
            node.missed |= not node.up

    def moves(self) -> Move | None:
        """See PeerTier."""
        return self._members.look(self._nodes.values())

    def owed(self, shared: Shared, keys: bytes, move: Move, group: int = 0) -> bool:
        """See PeerTier."""
        keyed = shared.spec.keyed
        return self._members.owed([ring.key_name(shared, group, keys)] if keyed else keys_of(shared, keys), move)

    async def holders(self, shared: Shared, group: int, keys: list[bytes]) -> dict[bytes, list[str]]:
        """See PeerTier."""
        asked: dict[str, list[bytes]] = {}
        for key in keys:
            for name in self.key_homes(shared, group, key):
                if self._nodes[name].up:
                    asked.setdefault(name, []).append(key)
        replies = await asyncio.gather(*(self._have(name, shared, group, mine) for name, mine in asked.items()))
        found: dict[bytes, list[str]] = {}
        for (name, mine), have in zip(asked.items(), replies, strict=True):
            for key, there in zip(mine, have, strict=False):
                if there:
                    found.setdefault(key, []).append(name)
        return found

    async def _have(self, name: str, shared: Shared, group: int, keys: list[bytes]) -> bytes:
        """A byte per key; none where the peer does not say in time."""
        self.counts["peer_asked"] += 1
        message = frames.Have(shared.id, group, b"".join(keys))
        answer = await self.questions.ask(self._nodes[name], shared, message, frames.Has)
        if answer is None:
            return b""
        self._nodes[name].give(answer[0], good=len(answer[1].have) == len(keys))
        return answer[1].have if len(answer[1].have) == len(keys) else b""

    async def source(self, node: str, shared: Shared, group: int, keys: bytes) -> Source | None:
        """See PeerTier."""
        peer = self._nodes[node]
        answer = (
            await self.questions.ask(peer, shared, frames.Have(shared.id, group, keys), frames.Has) if peer.up else None
        )
        if answer is None:
            return None
        pages, have = len(keys) // shared.spec.stride, answer[1].have
        if len(have) != pages:
            peer.give(answer[0], good=False)
            return None
        lacking = frozenset(at for at, there in enumerate(have) if not there)
        return DirectSource(self, peer, answer[0], shared, keys, pages, lacking=lacking)

    # -- writing ---------------------------------------------------------------------------------------------------

    def known(self, node: str) -> bool:
        """See PeerTier."""
        return node in self._nodes

    def homes(self, shared: Shared, keys: bytes) -> list[tuple[str, int]]:
        """See PeerTier: other hosts only. A home on several rungs is named once, with the most pages."""
        found: dict[str, int] = {}
        for rung in ring.rungs(shared, keys) if len(keys) <= frames.MAX_PATH else ():
            for name in self._members.homes(rung.key):
                if name != self.name:
                    found.setdefault(name, rung.pages)
        return list(found.items())

    async def offer(
        self, node: str, shared: Shared, keys: bytes, spare: tuple[Pick, ...], group: int = 0, ahead: Ahead = NOTHING
    ) -> Sink | None:
        """See PeerTier. What may be missing there goes along, unless the last such offer was in vain."""
        peer = self._nodes[node]
        if not peer.up:
            return None
        load = load_of(self, peer, shared, keys, ahead)
        offer = frames.Offer(shared.id, keys, spare, group, load)
        answer = await self.questions.talk(peer, shared, partial(offered, self, peer, offer, ahead.places))
        peer.lacked = answer is not None and bool(answer[1].picks if load is None else answer[1].stored)
        if answer is None:
            return None
        pipe, wanted = answer
        try:
            items_of(shared.spec, wanted.picks, len(keys) // shared.spec.stride)
            if not 0 <= wanted.stored <= len(ahead.places):
                raise bad("stored", "pages that went with the offer", wanted.stored)
        except KvtierError as exc:
            peer.give(pipe, good=False)
            self.questions.blame(peer, exc)
            return None
        return DirectSink(self, peer, pipe, shared, keys, wanted)

    async def forget(self, shared: Shared) -> None:
        """See PeerTier: peers' pages are theirs; a purge there empties them."""

    # -- routing ---------------------------------------------------------------------------------------------------

    async def weigh(self, shared: Shared, keys: bytes) -> dict[str, dict[str, int]]:
        """See PeerTier."""
        up = [node for node in self._nodes.values() if node.up and len(keys) <= frames.MAX_PATH]
        replies = await asyncio.gather(*(self._weigh(node, shared, keys) for node in up))
        return {
            node.name: msgspec.structs.asdict(reply)
            for node, reply in zip(up, replies, strict=True)
            if reply is not None
        }

    async def _weigh(self, node: Node, shared: Shared, keys: bytes) -> frames.Weighed | None:
        """Ask one peer; None where it does not say in time."""
        answer = await self.questions.ask(node, shared, frames.Weigh(shared.id, keys), frames.Weighed, hasty=True)
        if answer is None:
            return None
        node.give(answer[0], good=True)
        return answer[1]

    def preferred(self, shared: Shared, keys: bytes) -> list[str]:
        """See PeerTier: by the deepest rung, so that prompts that begin alike go to one host."""
        found = ring.rungs(shared, keys)
        names = self._members.names
        return ring.homes(names, found[0].key, len(names)) if found else names

    def status(self) -> list[dict[str, Any]]:
        """See PeerTier."""
        return [node.status() for node in self._nodes.values()]

    async def close(self) -> None:
        """See PeerTier."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        for node in self._nodes.values():
            await node.close()
        self.pool.shutdown(wait=True)
