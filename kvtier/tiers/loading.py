"""Reads the catalogue back into a ledger, and notes which records cannot be right."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvtier.tiers.catalogue import Catalogue
from kvtier.tiers.health import Health
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.records import Change, Damaged, Run, run_number
from kvtier.tiers.runrecord import parse

log = logging.getLogger("kvtier.disk")

CHUNK: Final = 32
"""Records read and parsed in one transaction: as many as stay in a processor's second cache."""


def load_runs(
    catalogue: Catalogue, ledger: Ledger, health: Health, strays: list[Change], early: set[int]
) -> Iterator[Run]:
    """Every run but the `early` ones, parents first; `strays` gets deletions of records damaged or of no cache.

    It comes with those of damaged caches. Where there is none, runs of no cache are what is left of one that was
    dropped as the daemon ended, and no loss.
    """
    damaged, lost = len(strays), Counter[int]()
    after = b""
    while chunk := catalogue.runs(after, CHUNK, _parse):
        if chunk[0][0] <= after:
            health.count(damaged_runs=1)
            log.error("the disk catalogue does not find run %s again: what is behind it is not loaded", after.hex())
            break
        after = chunk[-1][0]
        for key, parsed, mask in chunk:
            if early and run_number(key) in early:
                continue
            run = None
            try:
                run = ledger.restore(key, parsed, mask)
                if run is None and damaged and parsed is not None:
                    lost[parsed.cache] += 1
            except Damaged:
                health.count(damaged_runs=1)
                log.warning("run %s of the disk catalogue is damaged and dropped", key.hex())
            if run is None:
                strays += [Change(b"runs", key, None), Change(b"live", key, None)]
                continue
            yield run
    if damaged:
        log.error("%d records of caches in the disk catalogue are damaged and dropped", damaged)
    for number, runs in lost.items():
        health.count(damaged_runs=runs)
        log.error("cache %d of the disk catalogue has no sound record: its %d runs are dropped", number, runs)


def _parse(key: bytes, value: memoryview) -> Run | None:
    """A record; None where it is damaged."""
    try:
        return parse(key, value)
    except Damaged:
        return None
