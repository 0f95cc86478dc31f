"""What every mover of pages is given: the clock, the policy and the counters."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvtier.heat import Heat
from kvtier.policy import DEFAULT, Policy, serving
from kvtier.store.busy import Busy
from kvtier.store.curves import Curves
from kvtier.store.quotas import Quotas

_log = logging.getLogger("kvtier.policy")


class Ways:
    """One per store. `now` is in seconds and never goes back; replay gives its own."""

    def __init__(
        self,
        policy: str = DEFAULT,
        now: Callable[[], float] = time.monotonic,
        curves: Curves | None = None,
        high_water: float = 1.0,
    ) -> None:
        """`high_water`: the share of a full host tier above which pages are evicted before anybody needs the room."""
        self.now = now
        self.high_water = high_water
        self.curves = curves or Curves()
        self.quotas = Quotas()
        self.heat = Heat()
        self.counts: Counter[str] = Counter()
        self.busy = Busy(self.counts)
        self.policy_name = policy
        self.policy: type[Policy[Any]] = serving(policy, self._mistaken)
        self.mistake = ""
        """What a user's own policy did wrong first, since when LRU serves in its place."""

    def _mistaken(self, where: str, exc: Exception) -> None:
        """Tell whoever wrote the policy."""
        line = next((f.lineno for f in reversed(traceback.extract_tb(exc.__traceback__)) if f.name == where), None)
        what = f"{type(exc).__name__}: {exc}, in {where}" + (f", line {line}" if line else "")
        self.mistake = self.mistake or what
        _log.error("policy %s is left for LRU: %s", self.policy_name, what, exc_info=exc)
