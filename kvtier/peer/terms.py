"""On what terms this host talks to its peers: its name, its keys, its patience, how fast at most."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvtier.peer.pace import STEP
from kvtier.peer.secrets import Secrets
from kvtier.peer.tls import Certs

MAX_OPS: Final = 8
"""Requests under way to one peer."""
TURNS: Final = 10
"""A request waits for so many deadlines at most until one more may be under way."""
SHARING: Final = 2 * MAX_OPS
"""A rate is believed to be shared by so many: all that may, and as much again for whatever else is slow."""
MIN_RATE: Final = 1 << 20
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

    def met(self, rate: int) -> Terms:
        """The same with a peer that keeps to that rate: transfers go at the lower one."""
        rates = [each for each in (self.rate, rate) if each > 0]
        return self._replace(rate=max(MIN_RATE, min(rates)) if rates else 0)

    def within(self, nbytes: int) -> float:
        """Seconds that a transfer may take, twice what it needs while as many as may share the rate."""
        return self.patience(nbytes) + (nbytes * SHARING / self.rate if self.rate else 0.0)

    def patience(self, nbytes: int) -> float:
        """The same without a rate, and a turn of all that share it: a transfer that stands still is over after two."""
        return self.deadline_s + nbytes / MIN_BYTES_S + (STEP * SHARING / self.rate if self.rate else 0.0)
