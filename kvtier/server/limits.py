"""How much connections may take of the daemon, each and together."""

from __future__ import annotations

import msgspec

from kvtier import wire


class Limits(msgspec.Struct, frozen=True):
    """Bounds of a server; at each of them a request is refused by name or its connection closed."""

    connections: int = 4096
    first_frame_s: float = 5.0
    """Seconds within which the first frame must be whole."""
    max_body: int = wire.MAX_BODY
    buffered: int = 256 << 20
    """Bytes of half-received bodies, over all connections."""
    tasks: int = 256
    """Requests of one connection that may be in flight."""
    write_high: int = 1 << 20
    """Unsent reply bytes at which a connection's requests are no longer read."""
    write_cap: int = 128 << 20
    """Unsent reply bytes at which a connection is closed."""
    stall_s: float = 30.0
    """Seconds without progress in a half-received body or unsent replies after which a connection is closed."""
    drain_s: float = 30.0
    """Seconds between looks whether a lost process still maps the arenas, where the kernel gives no pidfd."""
