"""A tensor-parallel engine of several processes, whose kernels work on the daemon's device memory: CPU, and GPU."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankproc
from clientkit import status
from kvtier.client import Client
from kvtier.demo.daemon import Daemon
from storekit import KINDS, maker, until_sync

RANK = Path(__file__).with_name("rankproc.py")


class Process:
    """A rank, or the scheduler."""

    def __init__(self, daemon: Daemon, rank: int, kind: str) -> None:
        command = [sys.executable, str(RANK), str(daemon.socket), str(rank), "2", kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, *words: Any) -> None:
        """Tell it something."""
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What came of it."""
        return json.loads(self.process.stdout.readline())

    def __call__(self, *words: Any) -> Any:
        self.send(*words)
        return self.answer()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def serving(home: Path, kind: str) -> Iterator[Daemon]:
    """A daemon with a device tier; all is well there when its engines are gone."""
    maker(kind)
    flags = [f"--device-which={'cpu' if kind == 'cpu' else 'cuda:0'}", "--device-bytes=4MiB"]
    with Daemon(home, host="64MiB", disk="0", flags=flags) as daemon:
        yield daemon
        until_sync(lambda: daemon.broken_invariants() == [])


@contextlib.contextmanager
def tensor_parallel(daemon: Daemon, kind: str) -> Iterator[list[Process]]:
    """A scheduler and two ranks that have mapped a daemon's device memory; they are killed at the end."""
    with contextlib.ExitStack() as all_of:
        engine = [all_of.enter_context(contextlib.closing(Process(daemon, rank, kind))) for rank in (-1, 0, 1)]
        assert [one.answer() for one in engine] == ["ready"] * 3
        assert [one("map") for one in engine] == [True] * 3
        yield engine


def slots(daemon: Daemon) -> dict[str, int]:
    """What slots on the device are used for."""
    return status(daemon)["device_slots"]


def decode(engine: list[Process], number: int, pages: int) -> list[int]:
    """Reserve pages that have no keys yet and fill the first of them: where these are."""
    head, *ranks = engine
    granted, there, share = head("begin", number)
    assert (granted, there) == (rankproc.PAGES, True)
    for page in range(pages):
        assert head("full", page) == page
        for rank in ranks:
            rank.send("decode", share, page, number)
        assert max(rank.answer() for rank in ranks) == page + 1
    return head("where")[:pages]


def hit(engine: list[Process], number: int, pages: int) -> list[int]:
    """So many pages of a path are on the device, as they were computed: where."""
    head, *ranks = engine
    found, there, share = head("acquire", number)
    assert (found, there) == (pages, True)
    for rank in ranks:
        rank.send("load", share, number, pages)
    assert [rank.answer() for rank in ranks] == [True, True]
    where = head("where")
    assert head("release")
    return where


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_decode_into_pages_on_the_device_before_their_tokens_are_known(tmp_path: Path, kind: str):
    """TP=2: the scheduler reserves without keys and names each full page; ranks fill their heads, each lets go.

    What was committed is cached where it was computed, without a copy; the slots of the others go back, also
    where a rank is killed instead of letting go.
    """
    with serving(tmp_path, kind) as daemon, tensor_parallel(daemon, kind) as engine:
        where = decode(engine, 100, 4)
        assert [one("end") for one in engine] == [True] * 3
        until_sync(lambda: slots(daemon) == {"cached": 4})
        assert hit(engine, 100, 4) == where
        decode(engine, 200, 2)
        assert [one("end") for one in engine[:2]] == [True] * 2
        until_sync(lambda: slots(daemon) == {"cached": 6, "reserved": 4})
        engine[2].close()
        until_sync(lambda: slots(daemon) == {"cached": 6})


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_is_killed_as_it_decodes_leaves_what_it_committed(tmp_path: Path, kind: str):
    """All its processes are killed, one page half written and two without names: those it served are a hit, no more."""
    with serving(tmp_path, kind) as daemon:
        with tensor_parallel(daemon, kind) as engine:
            decode(engine, 100, 3)
            assert engine[0]("full", 3) == 3
            assert engine[1]("decode", "", 3, 100) == 3  # the other rank's heads are not there yet
            until_sync(lambda: slots(daemon) == {"cached": 3, "reserved": 3})
        until_sync(lambda: slots(daemon) == {"cached": 3})
        with Client(daemon.socket, verify="always", timeout_s=20.0) as other:
            lease = other.open(rankproc.SPEC).match(rankproc.keys(100)).acquire(wait_ms=5000)
            assert [lease.view(0, page) is None for page in range(lease.pages)] == [False] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_fill_and_read_pages_on_the_device_by_their_own_kernels(tmp_path: Path, kind: str):
    """TP=2: a scheduler reserves and leases on the device; each rank's kernels move its heads, at the same time."""
    with serving(tmp_path, kind) as daemon, tensor_parallel(daemon, kind) as engine:
        head, *ranks = engine
        for number in range(4):
            pages, there, share = head("reserve", number)
            assert (pages, there) == (6, True)
            for rank in ranks:
                rank.send("store", share, number)
            assert max(rank.answer() for rank in ranks) == 6
        for number in range(4):
            hit(engine, number, 6)
