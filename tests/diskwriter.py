"""A real process that writes, frees and drops runs until it is killed, and says on stdout what became durable.

`python -m tests.diskwriter FOLDER SEED [SECONDS [FAULT]]`. Lines: `+ run seed pages cache` durable, `- run page` freed
(said before the free is asked for, so that a kill in between is no false alarm), `=` ready.
"""

from __future__ import annotations

import random
import sys
import time

from kvtier.identity import GroupSpec
from kvtier.tiers import commits
from kvtier.types import Kind
from tests.diskkit import KIB, MIB, Owner, spec

CAPACITY = 2 * MIB
SPEC = spec(GroupSpec(Kind.FULL, 1, 1, 4 * KIB), GroupSpec(Kind.FULL, 1, 1, 3001))
"""One group of whole blocks, one with a tail."""
LARGE = spec(GroupSpec(Kind.FULL, 1, 1, 7_000), model="large")
"""Cells of another size, so that slabs must be emptied for them."""


def say(*words: object) -> None:
    """One line, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def skip(step: str) -> None:
    """Leave out one step of the order of a write, to see that the tests notice."""
    if step == "payload sync":
        commits.Commits._sync_payload = lambda self, ops: None
    elif step == "catalogue sync":
        import lmdb

        real = lmdb.open
        lmdb.open = lambda *args, **more: real(*args, **{**more, "sync": False, "metasync": False})
    elif step == "catalogue after payload":

        def commit(self, ops):
            self._sync_catalogue(ops)
            self._sync_payload(ops)

        commits.Commits._commit = commit
    elif step == "free before reuse":
        from kvtier.tiers import ledger

        real_free = ledger.Ledger.free

        def free(self, masks):
            freed = real_free(self, masks)
            if freed:
                self.cells.release(self._pending[freed.ticket])
                self._pending[freed.ticket] = []
            return freed

        ledger.Ledger.free = free


class Load:
    """Random writes and frees that keep the tier near full."""

    def __init__(self, owner: Owner, seed: int) -> None:
        self.owner = owner
        self.rng = random.Random(seed)
        self.live: dict[int, list[int]] = {}
        self.caches = [owner.cache(SPEC), owner.cache(LARGE)]
        self.seed = seed * 100_000

    def step(self) -> None:
        """One write, or a free where there is no room."""
        self.seed += 1
        cache = self.caches[self.seed // 40 % 2]
        pages = self.rng.choice([1, 2, 4, 8])
        items = self.owner.items(cache, self.seed, pages)
        if self.owner.submit(cache, self.seed, items, keys=self.owner.keys(cache, self.seed, pages)):
            return
        if self.owner.tier.refusal == "no_space" and self.live:
            for run in self.rng.sample(sorted(self.live), min(3, len(self.live))):
                self.free(run)
            if self.rng.random() < 0.5:
                self.owner.flush()
        self.owner.step(0.05)

    def free(self, run: int) -> None:
        """Trim a run from its tail, or drop it whole."""
        pages = self.live[run]
        gone = pages[-self.rng.choice([1, 1, 2, len(pages)]) :]
        for page in gone:
            say("-", run, page)
        del pages[len(pages) - len(gone) :]
        if not pages:
            del self.live[run]
        self.owner.tier.free([run << 6 | page for page in gone])

    def heard(self) -> None:
        """Say what became durable."""
        while self.owner.step():
            pass
        for seed, (run, _) in list(self.owner.results.items()):
            del self.owner.results[seed]
            if run is not None:
                stored = self.owner.tier._ledger.runs[run]
                self.live[run] = list(range(stored.pages))
                say("+", run, seed, stored.pages, stored.cache)


def main() -> None:
    """Write until killed, or for a while."""
    folder, seed = sys.argv[1], int(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 3600.0
    if len(sys.argv) > 4:
        skip(sys.argv[4])
    owner = Owner(folder, CAPACITY, slab_bytes=128 * KIB, queue_bytes=512 * KIB, linger_s=0.001, load=False)
    owner.runs = list(owner.load())
    load = Load(owner, seed)
    load.live = {r.id: [p for p in range(r.pages) if r.live >> p & 1] for r, _, _ in owner.runs}
    say("=", load.caches)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        load.step()
        load.heard()
    emptied = owner.tier.stats["slabs_emptied"]
    owner.tier.close()
    load.heard()
    say("=", emptied, "slabs emptied")


if __name__ == "__main__":
    main()
