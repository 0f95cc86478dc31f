"""Questions to peers: who waits for a turn, by when an answer must be there, and who is blamed where none comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvtier.peer import frames
from kvtier.peer.base import Shared
from kvtier.peer.frames import Refusal
from kvtier.peer.node import FAULTS, Node, overlooked
from kvtier.peer.pipe import Pipe
from kvtier.peer.terms import Terms
from kvtier.types import KvtierError

T = TypeVar("T")


class Questions:
    """Of one host. Owned by the loop thread."""

    def __init__(self, terms: Terms, counts: Counter[str]) -> None:
        self.unasked: set[asyncio.Task[Any] | None] = set()
        """Who waits until the peer may be asked one question more."""
        self._terms = terms
        self._counts = counts

    async def ask(
        self,
        node: Node,
        shared: Shared,
        message: frames.Message,
        kind: type[T],
        until: float = 0.0,
        posted: Pipe | None = None,
        *,
        hasty: bool = False,
    ) -> tuple[Pipe, T] | None:
        """A question to one peer on a connection that the caller gives back; None where it does not answer in time.

        `posted`: where it was asked already. `hasty`: waits for no turn longer than for the answer.
        """

        async def say(pipe: Pipe, _: asyncio.Timeout) -> T:
            return await (pipe.heard(kind) if posted else pipe.ask(message, kind))

        return await self.talk(node, shared, say, until, posted, hasty=hasty)

    async def talk(
        self,
        node: Node,
        shared: Shared,
        say: Callable[[Pipe, asyncio.Timeout], Awaitable[T]],
        until: float = 0.0,
        posted: Pipe | None = None,
        *,
        hasty: bool = False,
    ) -> tuple[Pipe, T] | None:
        """The same of whatever is said and heard; `say` may take more time."""
        until = until or asyncio.get_running_loop().time() + self._terms.deadline_s
        task = asyncio.current_task()
        self.unasked.add(task)
        try:
            pipe, until = (posted, until) if posted else await node.take(until, hasty=hasty)
        except (*FAULTS, KvtierError) as exc:
            self.blame(node, exc)
            return None
        finally:
            self.unasked.discard(task)
        limit = asyncio.timeout_at(until)
        try:
            async with limit:
                await node.use(pipe, shared)
                return pipe, await say(pipe, limit)
        except BaseException as exc:  # noqa: BLE001 - blame raises what is not the peer's fault
            missed = isinstance(exc, TimeoutError) and overlooked(limit, pipe)
            node.give(pipe, good=refused(exc))
            if missed:
                self._counts["peer_late"] += 1
            else:
                self.blame(node, exc)
            return None

    def blame(self, node: Node, exc: BaseException) -> None:
        """A peer that failed is asked no more for now; one that refused is asked again. Others' errors go on."""
        if refused(exc):
            self._counts["peer_refused"] += 1
        elif isinstance(exc, (*FAULTS, KvtierError)):
            self._counts["peer_failures"] += 1
            node.failed(exc)
        else:
            raise exc


def refused(exc: BaseException) -> bool:
    """Whether a peer answered, with a no."""
    return isinstance(exc, Refusal)
