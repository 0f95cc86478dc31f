"""On what terms this host talks to its peers: its name, its keys, its patience, how fast at most."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvtier.peer.secrets import Secrets
from kvtier.peer.tls import Certs

MIN_BYTES_S: Final = 32 << 20
"""A transfer may take its deadline and the time that its bytes need at this rate."""


class Terms(NamedTuple):
    """The same for who is asked and for who asks."""

    name: str
    """This host's in the fleet."""
    secrets: Secrets
    deadline_s: float = 0.2
    """Of one question."""
    certs: Certs | None = None
    """Where connections are TLS."""
    rate: int = 0
    """Bytes of pages a second to one peer, and as many from it, at most; 0: no limit."""

    def within(self, nbytes: int) -> float:
        """Seconds that a transfer may take."""
        return self.deadline_s + nbytes / (min(MIN_BYTES_S, self.rate / 2) if self.rate else MIN_BYTES_S)
