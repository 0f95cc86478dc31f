"""Copies of an async client: beside the loop, where they would hold it up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvtier.waits import lasting

LONG_BYTES: Final = 1 << 20
"""From here on a copy takes longer than to wake a thread."""


async def beside(work: Callable[[], None], nbytes: int) -> None:
    """Do work on so many bytes.

    Ends, cancelled too, when nothing of it is done any more: its slots may be given back then.
    """
    if nbytes < LONG_BYTES:
        work()
        return
    await lasting(asyncio.get_running_loop().run_in_executor(None, work))
