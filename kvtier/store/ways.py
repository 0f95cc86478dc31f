"""What every mover of pages is given: the clock, the policy and the counters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvtier.heat import Heat
from kvtier.policy import DEFAULT, Policy, load
from kvtier.store.busy import Busy


class Ways:
    """One per store. `now` is in seconds and never goes back; replay gives its own."""

    def __init__(self, policy: str = DEFAULT, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.heat = Heat()
        self.counts: Counter[str] = Counter()
        self.busy = Busy(self.counts)
        self.policy_name = policy
        self.policy: type[Policy[Any]] = load(policy)
