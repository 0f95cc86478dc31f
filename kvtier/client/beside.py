"""Copies of an async client: beside the loop, where they would hold it up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LONG_BYTES: Final = 1 << 20
"""From here on a copy takes longer than to wake a thread."""


async def beside(work: Callable[[], None], nbytes: int) -> None:
    """Do work on so many bytes.

    Ends, cancelled too, when nothing of it is done any more: its slots may be given back then.
    """
    if nbytes < LONG_BYTES:
        work()
        return
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        future.exception()  # nobody asks what came of it, and asyncio would complain
        raise
    finally:
        del future  # an exception has this frame, which must not have it
