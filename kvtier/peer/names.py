"""Where a host is: an address is what it says, a name is looked up, once at a time however long that takes."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final, NamedTuple

HASTE_S: Final = 0.05
"""So long a look-up is waited for where an earlier one said something; it goes on, for who asks next."""


class Found(NamedTuple):
    """What a socket needs."""

    family: socket.AddressFamily
    address: Any


class Resolver:
    """Of one host. Owned by the loop thread."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._looking: asyncio.Future[Any] | None = None
        """A look-up in a thread, which cannot be cancelled: whoever gives up leaves it to the next."""
        self._known: list[Found] = []
        """What the latest one said: one that fails or hangs says nothing of where the host is."""
        self._failed: dict[Found, None] = {}
        """Addresses that failed, the latest last."""

    async def find(self) -> list[Found]:
        """All its addresses, those first that did not fail, or the longest ago. Raises OSError."""
        found = await self._find()
        self._failed = {each: None for each in self._failed if each in found}
        return [each for each in found if each not in self._failed] + [*self._failed]

    def failed(self, found: Found) -> None:
        """That address did not do: others are tried before it."""
        self._failed.pop(found, None)
        self._failed[found] = None

    async def _find(self) -> list[Found]:
        host, port = self._address
        try:
            return _all(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except (socket.gaierror, UnicodeError):
            pass  # no address, but a name
        looking = self._looking
        if looking is None:
            question = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._looking = looking = asyncio.ensure_future(question)
        await asyncio.wait([looking], timeout=HASTE_S if self._known else None)
        if not looking.done():
            return self._known
        if self._looking is looking:
            self._looking = None
        try:
            self._known = _all(looking.result())
        except OSError:
            if not self._known:
                raise
        except UnicodeError as exc:
            raise OSError(f"{host!r} is no name of a host: {exc}") from None
        return self._known


def _all(found: Any) -> list[Found]:
    return [Found(family, address) for family, _, _, _, address in found]
