"""A process that writes three runs, each after the last is durable: `python -m tests.diskwriter_slow FOLDER`."""

from __future__ import annotations

import sys

from tests.diskkit import Owner
from tests.diskwriter import CAPACITY, SPEC, say


def main() -> None:
    """Write three runs, one at a time."""
    owner = Owner(sys.argv[1], CAPACITY)
    cache = owner.cache(SPEC)
    assert owner.flush() == ""
    say("= ready")
    for seed in range(3):
        say("+", owner.write(cache, seed, 2), seed, 2)
    owner.tier.close()


if __name__ == "__main__":
    main()
