"""A process that writes runs, one at a time: `python -m tests.diskwriter_slow FOLDER [RUNS]`.

Each line says how one ended: `+ run seed pages cache` or `! seed error`. A failed one is tried again later.
"""

from __future__ import annotations

import sys
import time

from tests.diskkit import Owner
from tests.diskwriter import CAPACITY, SPEC, say


def main() -> None:
    """Write runs, one at a time."""
    owner = Owner(sys.argv[1], CAPACITY)
    cache = owner.cache(SPEC)
    say("= ready", owner.flush())
    for seed in range(int(sys.argv[2]) if len(sys.argv) > 2 else 3):
        assert owner.submit(cache, seed, owner.items(cache, seed, 2), keys=owner.keys(cache, seed, 2))
        owner.wait(lambda at=seed: at in owner.results)
        run, error = owner.results[seed]
        if error:
            say("!", seed, error)
            time.sleep(0.1)
        else:
            say("+", run, seed, 2, cache)
    assert owner.tier.check() == []
    owner.tier.close()


if __name__ == "__main__":
    main()
