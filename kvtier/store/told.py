"""What the disk tier tells a callback, as something to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtier.tiers.disk import DiskTier
from kvtier.types import Code, KvtierError


async def told(ask: Callable[[Callable[[str], None]], None]) -> None:
    """Wait for what the disk tier tells a callback; raises its error."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(error: str) -> None:
        if not ended.done():
            ended.set_result(error)

    ask(end)
    if error := await ended:
        raise KvtierError(Code(error) if error in set(Code) else Code.IO, f"the disk tier failed: {error}")


async def flushed(disk: DiskTier) -> None:
    """Everything asked before is durable, or has failed."""
    await told(disk.flush)
