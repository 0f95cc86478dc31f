"""Waits that outlast a cancellation of the waiting task: what goes on may write into memory that is given away next."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

T = TypeVar("T")


async def lasting(work: asyncio.Future[T]) -> T:
    """What work that nobody can cancel comes to; whoever waits is let go only once it has ended."""
    try:
        return await asyncio.shield(work)
    finally:
        await drained(work)
        del work  # an exception has this frame, which must not have it: nobody collects cycles


async def drained(future: asyncio.Future[Any]) -> None:
    """Wait for a future whatever happens to the waiting task, leaving its result alone."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
