"""Where a host is: an address is what it says, a name is looked up, once at a time however long that takes."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, NamedTuple


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

    async def find(self) -> Found:
        """Raises OSError."""
        host, port = self._address
        try:
            return _first(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except (socket.gaierror, UnicodeError):
            pass  # no address, but a name
        looking = self._looking
        if looking is None:
            question = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._looking = looking = asyncio.ensure_future(question)
        await asyncio.wait([looking])
        if self._looking is looking:
            self._looking = None
        try:
            return _first(looking.result())
        except UnicodeError as exc:
            raise OSError(f"{host!r} is no name of a host: {exc}") from None


def _first(found: Any) -> Found:
    family, _, _, _, address = found[0]
    return Found(family, address)
