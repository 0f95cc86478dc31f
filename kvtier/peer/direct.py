"""The peer tier `direct`: daemons that talk to each other over TCP, without anything in between."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec

from kvtier.identity import CacheSpec
from kvtier.peer import frames, ring
from kvtier.peer.base import Pick, Shared, Sink, Source
from kvtier.peer.ends import DirectSink, DirectSource, refused
from kvtier.peer.items import items_of, page_name
from kvtier.peer.node import FAULTS, Node
from kvtier.peer.pipe import Pipe
from kvtier.peer.secrets import Secrets
from kvtier.types import KvtierError

T = TypeVar("T")
THREADS: Final = 16
MIN_BYTES_S: Final = 32 << 20
"""A transfer may take its deadline and the time that its bytes need at this rate."""
MAX_OPS: Final = 8
"""Requests under way to one peer."""


class Direct:
    """Peers of a static list of `name -> (host, port)`; names that DNS resolves are resolved at each connection."""

    def __init__(
        self,
        nodes: Mapping[str, tuple[str, int]],
        name: str,
        secrets: Secrets,
        *,
        replicas: int = 2,
        deadline_s: float = 0.2,
        counts: Counter[str] | None = None,
    ) -> None:
        """`name` is this host's own in `nodes`. `deadline_s`: of one question; a transfer has its bytes' time too."""
        self.counts = Counter() if counts is None else counts
        self.deadline_s = deadline_s
        self.pool = ThreadPoolExecutor(THREADS, "kvtier-peer")
        self.name = name
        self._names = sorted(nodes)
        self._late: set[asyncio.Future[Source | None]] = set()
        """Questions whose answers nobody waits for any more."""
        self._secrets = secrets
        self._replicas = replicas
        self._nodes = {
            each: Node(each, nodes[each], secrets, most=MAX_OPS, deadline_s=deadline_s, counts=self.counts)
            for each in self._names
            if each != name
        }

    def start(self) -> None:
        """Begin to ping every peer."""
        for node in self._nodes.values():
            node.start()

    def shared(self, spec: CacheSpec, scope: str, epoch: int) -> Shared | None:
        """The cache as peers know it; None where it is not shared."""
        return self._secrets.shared(spec, scope, epoch)

    # -- reading ---------------------------------------------------------------------------------------------------

    def worth(self, shared: Shared, keys: bytes, have: int) -> bool:
        """See PeerTier."""
        name = page_name(shared, keys, have)
        return any(not node.lacks(name) for node in self._homes_up(shared, keys))

    def _homes_up(self, shared: Shared, keys: bytes) -> list[Node]:
        """Other hosts that may have pages of a path and answer, those with the deepest first."""
        names = dict.fromkeys(
            name for rung in ring.rungs(shared, keys) for name in ring.homes(self._names, rung.key, self._replicas)
        )
        return [node for name in names if (node := self._nodes.get(name)) is not None and node.up]

    async def find(self, shared: Shared, keys: bytes, have: int) -> list[Source]:
        """See PeerTier. Ends as soon as one has all of it; who answers later is let go."""
        name = page_name(shared, keys, have)
        asked = [node for node in self._homes_up(shared, keys) if not node.lacks(name)]
        waits = {asyncio.ensure_future(self._find(node, shared, keys, have)) for node in asked}
        found: list[Source] = []
        total = len(keys) // shared.spec.stride
        try:
            while waits and not any(source.pages == total for source in found):
                done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                found += [source for task in done if (source := task.result()) is not None]
        except BaseException:
            for source in found:
                source.close()
            raise
        finally:
            for task in waits:
                self._late.add(task)
                task.add_done_callback(self._close_late)
        return sorted(found, key=lambda source: -source.pages)

    async def _ask(self, node: Node, shared: Shared, message: frames.Message, kind: type[T]) -> tuple[Pipe, T] | None:
        """A question to one peer on a connection that the caller gives back; None where it does not answer in time."""
        until = asyncio.get_running_loop().time() + self.deadline_s
        try:
            pipe = await node.take(until)
        except (*FAULTS, KvtierError) as exc:
            self.blame(node, exc)
            return None
        try:
            async with asyncio.timeout_at(until):
                await node.use(pipe, shared)
                return pipe, await pipe.ask(message, kind)
        except BaseException as exc:  # noqa: BLE001 - _blame raises what is not the peer's fault
            node.give(pipe, good=refused(exc))
            self.blame(node, exc)
            return None

    async def _find(self, node: Node, shared: Shared, keys: bytes, have: int) -> Source | None:
        """Ask one peer; None where it has no more, or does not say in time."""
        self.counts["peer_asked"] += 1
        answer = await self._ask(node, shared, frames.Find(shared.id, keys), frames.Found)
        if answer is None:
            return None
        pipe, reply = answer
        if reply.pages > len(keys) // shared.spec.stride or reply.pages <= have:
            node.note_lack(page_name(shared, keys, have))
            node.give(pipe, good=reply.pages <= have)
            return None
        return DirectSource(self, node, pipe, shared, keys, reply.pages)

    async def depth(self, node: str, shared: Shared, keys: bytes) -> int:
        """See PeerTier."""
        peer = self._nodes[node]
        answer = await self._ask(peer, shared, frames.Find(shared.id, keys), frames.Found) if peer.up else None
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

    def blame(self, node: Node, exc: BaseException) -> None:
        """A peer that failed is asked no more for now; one that refused is asked again. Others' errors go on."""
        if refused(exc):
            self.counts["peer_refused"] += 1
        elif isinstance(exc, (*FAULTS, KvtierError)):
            self.counts["peer_failures"] += 1
            node.failed(exc)
        else:
            raise exc

    # -- keys ------------------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """See PeerTier."""
        return any(node.up for node in self._nodes.values())

    def key_homes(self, shared: Shared, group: int, key: bytes) -> list[str]:
        """See PeerTier."""
        found = ring.homes(self._names, ring.key_name(shared, group, key), self._replicas)
        return [name for name in found if name != self.name]

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
        answer = await self._ask(self._nodes[name], shared, message, frames.Has)
        if answer is None:
            return b""
        self._nodes[name].give(answer[0], good=len(answer[1].have) == len(keys))
        return answer[1].have if len(answer[1].have) == len(keys) else b""

    async def source(self, node: str, shared: Shared, group: int, keys: bytes) -> Source | None:
        """See PeerTier."""
        peer = self._nodes[node]
        answer = await self._ask(peer, shared, frames.Have(shared.id, group, keys), frames.Has) if peer.up else None
        if answer is None:
            return None
        return DirectSource(self, peer, answer[0], shared, keys, len(keys) // shared.spec.stride)

    # -- writing ---------------------------------------------------------------------------------------------------

    def known(self, node: str) -> bool:
        """See PeerTier."""
        return node in self._nodes

    def homes(self, shared: Shared, keys: bytes) -> list[tuple[str, int]]:
        """See PeerTier: other hosts only. A home on several rungs is named once, with the most pages."""
        found: dict[str, int] = {}
        for rung in ring.rungs(shared, keys):
            for name in ring.homes(self._names, rung.key, self._replicas):
                if name != self.name:
                    found.setdefault(name, rung.pages)
        return list(found.items())

    async def offer(
        self, node: str, shared: Shared, keys: bytes, spare: tuple[Pick, ...], group: int = 0
    ) -> Sink | None:
        """See PeerTier."""
        peer = self._nodes[node]
        offer = frames.Offer(shared.id, keys, spare, group)
        answer = await self._ask(peer, shared, offer, frames.Wanted) if peer.up else None
        if answer is None:
            return None
        pipe, wanted = answer
        try:
            items_of(shared.spec, wanted.picks, len(keys) // shared.spec.stride)
        except KvtierError as exc:
            peer.give(pipe, good=False)
            self.blame(peer, exc)
            return None
        return DirectSink(self, peer, pipe, shared, keys, wanted.picks)

    async def forget(self, shared: Shared) -> None:
        """See PeerTier: peers' pages are theirs; a purge there empties them."""

    # -- routing ---------------------------------------------------------------------------------------------------

    async def weigh(self, shared: Shared, keys: bytes) -> dict[str, dict[str, int]]:
        """See PeerTier."""
        up = [node for node in self._nodes.values() if node.up]
        replies = await asyncio.gather(*(self._weigh(node, shared, keys) for node in up))
        return {
            node.name: msgspec.structs.asdict(reply)
            for node, reply in zip(up, replies, strict=True)
            if reply is not None
        }

    async def _weigh(self, node: Node, shared: Shared, keys: bytes) -> frames.Weighed | None:
        """Ask one peer; None where it does not say in time."""
        answer = await self._ask(node, shared, frames.Weigh(shared.id, keys), frames.Weighed)
        if answer is None:
            return None
        node.give(answer[0], good=True)
        return answer[1]

    def preferred(self, shared: Shared, keys: bytes) -> list[str]:
        """See PeerTier: by the deepest rung, so that prompts that begin alike go to one host."""
        found = ring.rungs(shared, keys)
        return ring.homes(self._names, found[0].key, len(self._names)) if found else self._names

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

    def within(self, nbytes: int) -> float:
        """Seconds that a transfer may take."""
        return self.deadline_s + nbytes / MIN_BYTES_S
