"""A burst of four times the host arena into a real daemon: what is durable lasts, the rest is dropped by name."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier import wire
from kvtier.client import Client, page_keys
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind

PAGE = 64 << 10
PAGES = 32
HOST = 32 << 20
PROMPTS = 4 * HOST // (PAGE * PAGES)
AT_ONCE = 20
"""Prompts that are reserved before the first of them is written: more than the host has room for."""
SLACK_S = 2.0
"""On top of a deadline: one call through a busy loop on a busy machine."""
SPEC = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, PAGE),))


def keys_of(n: int) -> bytes:
    """Page keys of prompt n."""
    return page_keys(SPEC, np.arange(n * 10_000, n * 10_000 + 4 * PAGES))


def bytes_of(n: int, page: int) -> np.ndarray:
    """What belongs in a page."""
    return np.random.default_rng([n, page]).integers(0, 256, PAGE, np.uint8)


@pytest.mark.parametrize("patience_ms", [0, 20, 500])
def test_a_burst_loses_nothing_that_was_called_durable(tmp_path: Path, patience_ms: int) -> None:
    """No store waits past its deadline; a kill -9 right after the burst leaves every page that was called durable."""
    data = [bytes_of(0, page) for page in range(PAGES)]  # made before: the burst is to be fast
    rng, durable, pages_of, refused, granted = random.Random(1), {}, {}, {}, 0
    with Daemon(tmp_path, host="32MiB", disk="512MiB", flags=["--host-slab-bytes=2MiB"]) as daemon:
        with Client(daemon.socket, instance="burst", events=True, timeout_s=30.0) as client:
            cache = client.open(SPEC)
            for first in range(0, PROMPTS, AT_ONCE):
                wave = []
                for n in range(first, min(first + AT_ONCE, PROMPTS)):
                    path = cache.match(keys_of(n))
                    wait = rng.choice([0, patience_ms])
                    begin = time.monotonic()
                    reserved = path.reserve(0, PAGES, wait_ms=wait)
                    assert time.monotonic() - begin < wait / 1000 + SLACK_S
                    if reserved.pages < PAGES:
                        assert reserved.refused in {"no_space", "over_cap"}
                        refused[reserved.refused] = refused.get(reserved.refused, 0) + PAGES - reserved.pages
                    wave.append((n, path, reserved))
                for n, path, reserved in wave:
                    for page in range(reserved.pages):
                        reserved.view(0, page)[:] = np.roll(data[page], n)
                    if reserved.pages:
                        assert reserved.commit() == reserved.pages
                        pages_of[reserved.number] = n
                    granted += reserved.pages
                    path.close()
            for event in client.events():
                if isinstance(event, wire.Durable):
                    n = pages_of[event.reservation]
                    durable[n] = max(durable.get(n, 0), event.pages)
            counters = client.stat()["counters"]
            daemon.kill()
        assert refused, "more than the host was granted at once"
        assert granted + sum(refused.values()) == PROMPTS * PAGES
        assert counters.get("pages_lost_unsaved", 0) == 0
        assert durable
        daemon.start()
        with Client(daemon.socket, instance="after", verify="always", timeout_s=30.0) as client:
            cache, out = client.open(SPEC), np.empty(PAGE, np.uint8)
            served = 0
            for n in range(PROMPTS):
                with cache.match(keys_of(n)).acquire(wait_ms=20_000) as lease:
                    assert lease.pages >= durable.get(n, 0), f"prompt {n}"
                    for page in range(lease.pages):
                        assert lease.read(0, page, out)
                        assert np.array_equal(out, np.roll(data[page], n)), f"prompt {n} page {page}"
                    served += lease.pages
            assert served >= sum(durable.values())
        assert not daemon.broken_invariants()


def test_a_burst_into_a_daemon_without_disk_drops_the_coldest(tmp_path: Path) -> None:
    """Nothing is called durable; the latest prompts are served, older ones are gone, and the counter says how many."""
    with (
        Daemon(tmp_path, host="32MiB", disk="0", flags=["--host-slab-bytes=2MiB"]) as daemon,
        Client(daemon.socket, instance="burst", events=True, timeout_s=30.0) as client,
    ):
        cache = client.open(SPEC)
        for n in range(PROMPTS):
            with cache.match(keys_of(n)).reserve(0, PAGES) as reserved:
                assert reserved.pages == PAGES
                for page in range(PAGES):
                    reserved.view(0, page)[:] = n
                assert reserved.commit() == PAGES
        assert client.events() == []
        assert cache.match(keys_of(PROMPTS - 1)).pages == PAGES
        assert cache.match(keys_of(0)).pages == 0
        assert client.stat()["counters"]["pages_lost_unsaved"] >= 3 * HOST // PAGE - PAGES
