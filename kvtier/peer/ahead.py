"""What goes to a home together with the offer: a round trip less where the home lacks it, which it mostly does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.peer import frames
from kvtier.peer.base import Ahead, Place, Shared
from kvtier.peer.items import CHUNK_BYTES, echo, nbytes_of, picks_of, sums_of
from kvtier.peer.node import Node
from kvtier.peer.pipe import Pipe

if TYPE_CHECKING:
    from kvtier.peer.direct import Direct


def load_of(tier: Direct, peer: Node, shared: Shared, keys: bytes, ahead: Ahead) -> frames.Load | None:
    """What goes with an offer; None where that is too much, the link is slow, or the last offer was in vain."""
    items = [(place.group, place.page) for place in ahead.places]
    nbytes = nbytes_of(shared.spec, items)
    if not items or nbytes > CHUNK_BYTES or not peer.lacked or tier.terms.rate:
        return None
    if tier.packing.pays(peer.out, shared.id, len(items)):
        return None
    return frames.Load(picks_of(items), sums_of(ahead.sums), nbytes, echo(shared.id, keys))


async def offered(
    tier: Direct, peer: Node, offer: frames.Offer, places: Sequence[Place], pipe: Pipe, limit: asyncio.Timeout
) -> frames.Wanted:
    """Offer a path, with what goes ahead, which takes its time."""
    if offer.load is None:
        return await pipe.ask(offer, frames.Wanted)
    nbytes = offer.load.nbytes
    within, begin = pipe.within(nbytes), time.monotonic()
    limit.reschedule(asyncio.get_running_loop().time() + 2 * within)
    await pipe.pour(tier.pool, offer.load, places, within, offer)
    wanted = await pipe.receive(frames.Wanted)
    peer.out.note(nbytes, time.monotonic() - begin)
    return wanted
