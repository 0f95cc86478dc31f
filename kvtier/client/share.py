"""Leases and reservations on their way to another process of the same instance."""

from __future__ import annotations

import msgspec

from kvtier import wire
from kvtier.client.caches import OpenCache
from kvtier.client.link import Joined
from kvtier.identity import Slice
from kvtier.types import bad


class Share(msgspec.Struct, forbid_unknown_fields=True):
    """What `share` gives and `adopt` takes."""

    cache_id: bytes
    start: int
    run: bytes = b""
    """Of the daemon that gave it: its places mean something else to another."""
    instance: str = ""
    """Which holds it: the daemon waits for no other before it gives the places away."""
    lease: wire.Acquired | None = None
    reservation: wire.Reserved | None = None
    slices: tuple[Slice, ...] = ()
    """What who reserved holds: nobody else writes that, if it writes at all (`reservation.writes`)."""


def adopted(raw: bytes, cache: OpenCache, joined: Joined | None) -> Share:
    """What `share` gave another process, for one that is joined so; raises bad_request unless it is about this cache.

    What another run of the daemon gave is nothing here: its places are in other memory.
    """
    try:
        share = msgspec.msgpack.decode(raw, type=Share)
    except (TypeError, msgspec.MsgspecError) as exc:
        raise bad("share", f"what share() returned ({exc})") from None
    if joined is None or share.run != joined.welcome.run:
        return Share(b"", share.start, lease=share.lease and wire.Acquired(0, 0))
    if joined.instance != share.instance:
        raise bad("share", f"a lease or reservation of this process's instance, {joined.instance}", share.instance)
    if cache.cache_id != share.cache_id:
        raise bad("share", "a lease or reservation of this cache and epoch")
    if share.reservation is not None:
        share.reservation = msgspec.structs.replace(share.reservation, writes=_writes(share, share.reservation, cache))
    return share


def _writes(share: Share, told: wire.Reserved, cache: OpenCache) -> bool:
    """Whether this process, and no replica of it, writes its shard of what another has reserved."""
    taken = told.writes and share.slices in ((), cache.slices)
    return not taken and -1 < cache.writes_above < told.reservation
