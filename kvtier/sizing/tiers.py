"""`size tiers`: what each tier holds, for how long, what it serves, and what its link and its flash must bear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvtier.sizing.curve import Curve
from kvtier.sizing.hardware import Link, Source

TIERS: Final = ("device", "host", "peer", "disk")
DAY_S: Final = 86400.0


class Tier(NamedTuple):
    """Room for KV in one place, and the way to it."""

    name: str
    bytes: int
    link: Link | None = None
    """None for the device tier: its pages are in place."""
    drive_writes_per_day: float = 0.0
    """Endurance; 0 for memory."""
    copies: float = 1.0
    """Of each byte: ranks that share no heads have a copy each."""
    links: int = 1
    """Links of this kind side by side: to host memory every replica has its own."""

    def holds(self, block: float) -> int:
        """Different blocks of so many bytes that there is room for."""
        return int(self.bytes / (block * self.copies))


class Flow(NamedTuple):
    """What the requests make the tiers do, per second."""

    prompt_tokens: float
    new_tokens: float
    """Tokens computed and inserted: the misses of all tiers together."""
    hits: tuple[float, ...]
    """Tokens served by each tier."""


class Held(NamedTuple):
    """One tier in numbers."""

    tier: Tier
    blocks: int
    tokens: int
    sessions: float
    hit: float
    """Part of prompt tokens that this tier serves."""
    read_bps: float
    write_bps: float
    read_load: float
    """Share of its link that promotion takes: rho."""
    write_load: float
    wait_s: float
    """Mean queueing of one block behind others on the link."""
    retention_s: float
    """How long a block lives in this tier, from its arrival there."""
    writes_per_day: float
    endurance: float
    """Bytes written a day over what the drives are rated for; 0 without a rating."""


def split_hits(curve: Curve, blocks: Sequence[int], exclusive: bool) -> list[float]:
    """Hit ratio of each tier. Exclusive: capacities add, each tier serves what the ones above lost.

    Inclusive (write-through): lower tiers hold copies of what is above, so that only the largest reach counts.
    """
    out = []
    reach = 0
    before = 0.0
    for size in blocks:
        reach = reach + size if exclusive else max(reach, size)
        now = curve.ratio(reach)
        out.append(now - before)
        before = now
    return out


def rates(flow: Flow, exclusive: bool) -> list[tuple[float, float]]:
    """(tokens read, tokens written) a second of each tier.

    Exclusive: whatever enters the device pushes as much down, so that each tier is written with the new tokens and
    all that it and the tiers below promote. Inclusive: a tier is written with what it did not hold.
    """
    out = []
    for k, served in enumerate(flow.hits):
        below = sum(flow.hits[k:] if exclusive else flow.hits[k + 1 :])
        written = flow.new_tokens + (below if k else sum(flow.hits[1:]))
        out.append((served if k else 0.0, written))
    return out


def wait_seconds(load: float, service_s: float) -> float:
    """Mean wait in a queue with random arrivals and equal service times (M/D/1); inf at or over full load."""
    return load / (1 - load) * service_s / 2 if load < 1 else float("inf")


def hold(
    tiers: Sequence[Tier], flow: Flow, block_tokens: int, token_bytes: float, session_bytes: int, exclusive: bool
) -> list[Held]:
    """Each tier in numbers, from the top down."""
    out = []
    for k, (tier, (read, write)) in enumerate(zip(tiers, rates(flow, exclusive), strict=True)):
        block = block_tokens * token_bytes
        blocks = tier.holds(block)
        tokens = blocks * block_tokens
        read_bps, write_bps = read * token_bytes, write * token_bytes
        link = tier.link
        # a lower tier's write comes over its own link, not over the one above it
        read_load = read_bps / (link.read_bps * tier.links) if link else 0.0
        write_load = write_bps / (link.write_bps * tier.links) if link else 0.0
        per_day = write_bps * DAY_S
        rated = tier.bytes * tier.drive_writes_per_day
        out.append(Held(
            tier, blocks, tokens, tier.bytes / (session_bytes * tier.copies) if session_bytes else 0.0,
            flow.hits[k] / flow.prompt_tokens if flow.prompt_tokens else 0.0,
            read_bps, write_bps, read_load, write_load,
            wait_seconds(read_load, link.load_s(block)) if link else 0.0, tokens / write if write else float("inf"),
            per_day, per_day / rated if rated else 0.0,
        ))  # fmt: skip
    return out


class Budget(NamedTuple):
    """Memory that the daemon itself takes beside the tiers."""

    host_bytes: int
    """Index and bookkeeping in host memory."""
    device_bytes: int
    """Context of the daemon on each GPU that it moves bytes for."""
    disk_bytes: int
    """Catalogue beside the payload."""
    source: Source


def own_budget(pages: Sequence[int], base: float, page: float, context: float, disk_page: float) -> Budget:
    """The daemon's own memory for so many pages in each tier."""
    return Budget(int(base + page * sum(pages)), int(context), int(disk_page * pages[-1]), Source.ASSUMED)
