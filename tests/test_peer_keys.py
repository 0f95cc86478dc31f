"""Keys of keyed caches that peers have: what one home does not give another one does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engineproc import CELL, HEADS, KEYED, LAYERS, content, key_of
from fleetkit import Fleet, until
from kvtier.types import Presence


def test_keys_of_a_home_that_dies_come_from_the_other_one_in_the_same_request(tmp_path: Path) -> None:
    """R=2: b is killed after it said what it has; an engine on a gets every key that c has too."""
    names = [key_of(1, n) for n in range(24)]
    keys, size = b"".join(names), LAYERS * HEADS * CELL
    with Fleet(tmp_path, 3, replicas=2) as hosts:
        a, b, c = hosts["a"], hosts["b"], hosts["c"]
        with b.engine().open(KEYED).reserve_keys(0, keys, wait_ms=2000) as held:
            for at, name in enumerate(names):
                assert held.write(0, at, content(name).reshape(-1))
            assert held.commit() == len(names)
        until(b.settled)
        on_c = c.engine().open(KEYED).exists(0, keys)
        cache = a.engine().open(KEYED)
        until(lambda: Presence.PENDING not in cache.exists(0, keys))
        both = [
            n for n, state in enumerate(cache.exists(0, keys)) if state == Presence.PEER and on_c[n] == Presence.HOST
        ]
        assert both
        b.daemon.kill()
        asked = b"".join(names[n] for n in both)
        with cache.acquire_keys(0, asked, wait_ms=10_000) as lease:
            out = np.empty(size, np.uint8)
            for at, n in enumerate(both):
                assert lease.read(0, at, out)
                assert np.array_equal(out, content(names[n]).reshape(-1))
        c.sound()
