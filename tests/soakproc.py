"""An engine of the soak: stores, reads and compares prompts of two tenants at random until it is killed.

`python soakproc.py SOCKET INSTANCE SEED`. Lines: `+ n` prompt n of the kept ones is durable, `# n` so many requests
were answered since the last such line, `! ...` something that must not be.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np

from engines import content, spec, tokens
from kvtier.client import Cache, Client

KEPT, PROMPTS = spec(model="kept"), 400
"""Fits everywhere: what of it is durable must stay."""
PASSING, MANY, TENANT = spec(model="passing", salt=b"pa"), 2500, b"pa".hex()
"""Many times what its tenant may have."""
ITEM = KEPT.groups[0].item_bytes


def prompt(n: int) -> bytes:
    """Page keys of a prompt; half of them have a beginning in common with others."""
    own = tokens(*range(100 * n + 1000, 100 * n + 1000 + random.Random(n).randint(1, 12)))
    return own if n % 2 else tokens(*range(n % 7 + 1)) + own


def count(n: int) -> int:
    """Its pages."""
    return len(prompt(n)) // KEPT.stride


def right(cache: Cache, n: int, wait_ms: int = 2000) -> int:
    """Lease a prompt and compare every byte; pages that are served, -1 where one of them is wrong."""
    keys, out = prompt(n), np.empty(ITEM, np.uint8)
    with cache.match(keys, request=f"r{n}").acquire(wait_ms=wait_ms) as lease:
        for page in range(lease.pages):
            if not lease.read(0, page, out):
                return -1
            if not np.array_equal(out, content(keys[: (page + 1) * cache.spec.stride], 0, ITEM)):
                return -1
        return lease.pages


def put(cache: Cache, n: int) -> bool:
    """Store a prompt; whether all of it was committed."""
    keys = prompt(n)
    with cache.match(keys).reserve(0, count(n), wait_ms=500) as held:
        if held.pages < count(n):
            return False
        for page in range(held.pages):
            if held.view(0, page) is not None:
                held.write(0, page, content(keys[: (page + 1) * cache.spec.stride], 0, ITEM))
        return held.commit() == count(n)


class Soak:
    """What one engine does."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.kept, self.passing = client.open(KEPT), client.open(PASSING)
        self.fresh: set[int] = set()
        self.done = 0

    def step(self) -> None:
        """One thing."""
        n, what = self.rng.randrange(PROMPTS), self.rng.random()
        some = self.rng.randrange(MANY)
        if what < 0.08:
            self.fresh |= {n} if put(self.kept, n) else set()
            self.done += 3
        elif what < 0.25:
            put(self.passing, some)
            self.done += 3
        elif what < 0.5:
            self.read(*((self.kept, n) if what < 0.35 else (self.passing, some)))
            self.done += 3
        else:
            self.kept.match(prompt(n))
            self.done += 1
        if len(self.fresh) > 10:
            self.flush()

    def read(self, cache: Cache, n: int) -> None:
        """Compare what is served of a prompt."""
        if right(cache, n) < 0 and self.client.connected:
            say("!", cache.spec.model, n)

    def flush(self) -> None:
        """What was stored before is durable, and said so."""
        if self.kept.flush(20.0):
            for n in self.fresh:
                say("+", n)
        self.fresh.clear()
        self.done += 1


def say(*words: object) -> None:
    """One line, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Go on until killed."""
    socket, instance, seed = sys.argv[1:]
    with Client(socket, instance=instance, timeout_s=10.0, verify="always") as client:
        soak = Soak(client, int(seed))
        while True:
            if not client.connected and not client.ping():
                soak.fresh.clear()
                time.sleep(0.02)
                continue
            soak.step()
            if soak.done >= 500:
                say("#", soak.done)
                soak.done = 0


if __name__ == "__main__":
    main()
