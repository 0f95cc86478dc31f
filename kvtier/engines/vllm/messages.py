"""What the scheduler's side and the workers' side of the connector tell each other, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

Blocks = tuple[Sequence[int], ...]
"""Block numbers per group, one for each page; 0, vLLM's null block, where the group keeps none for the page."""


def booted() -> str:
    """What no other host has, and all containers of this one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Formats(KVConnectorHandshakeMetadata):  # type: ignore[misc] # vLLM is not there when types are checked
    """From a worker, once: the cache that its KV belongs to."""

    spec: bytes
    """A CacheSpec in MessagePack; equal in all workers."""
    replicas: int = 1
    """Workers that hold the same shard."""
    device: bool = False
    """Whether the worker maps the daemon's device memory, so that slots may be there."""
    host: str = field(default_factory=booted)
    """Where it runs: only there is the daemon's memory."""


class Weights(NamedTuple):
    """The LoRA adapter that a request's keys are made of: vLLM's number for it, and the digest of its files."""

    number: int
    digest: str


@dataclass(frozen=True)
class Load:
    """Copy pages [first, first + pages) of a shared lease into blocks."""

    request: str
    lease: int
    share: bytes
    first: int
    blocks: Blocks
    later: bool
    """Between steps instead of before this one; vLLM waits for it to be reported."""
    weights: Weights | None = None
    """Nothing is loaded where the worker computes with others."""

    @property
    def pages(self) -> int:
        """How many there are to copy."""
        return len(self.blocks[0])


@dataclass(frozen=True)
class Save:
    """Copy blocks into the slots of a shared reservation and commit them."""

    reservation: int
    share: bytes
    first: int
    blocks: Blocks
    weights: Weights | None = None
    """Nothing is saved where the worker has computed with others."""


@dataclass(frozen=True)
class Plan(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler, every step."""

    changed: str = ""
    """Names the weights where they are not those that were read at start."""
    epoch: int = 0
    resets: int = 0
    """How often the scheduler's side was told that weights have changed."""
    computes: bool = True
    """Whether this step computes anything."""
    fence: bool = False
    """Blocks whose save may still run are given to something else: end all of them before this step."""
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    drops: tuple[bytes, ...] = ()
    """Shared reservations that nobody will write: the daemon keeps their slots until every process has said so."""
    heard: Mapping[int, int] = field(default_factory=dict)
    """By rank, how many failed loads the scheduler knew of when it planned this."""


@dataclass
class Done(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers, when there is something to tell."""

    leases: Counter[int] = field(default_factory=Counter)
    """How many workers have read what they were to read of a lease."""
    dropped: set[int] = field(default_factory=set)
    """Reservations that some worker has given up."""
    served: set[int] = field(default_factory=set)
    """Reservations of which every page is served."""
    failures: dict[int, int] = field(default_factory=dict)
    """By rank, how many loads that a step computed with have failed so far."""
    strange: set[int] = field(default_factory=set)
    """Numbers of LoRA adapters that some worker has read as other files than the scheduler's side."""
    changed: int = -1
    """`resets` of the plan after which a worker's weights were written and nobody has told the scheduler's side."""

    def aggregate(self, other: Done) -> Done:
        """What two workers have told."""
        dropped, served = self.dropped | other.dropped, self.served | other.served
        failures, strange = self.failures | other.failures, self.strange | other.strange
        changed = max(self.changed, other.changed)
        return Done(self.leases + other.leases, dropped, served, failures, strange, changed)
