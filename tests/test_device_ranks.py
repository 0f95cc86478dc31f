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

from kvtier.demo.daemon import Daemon
from storekit import KINDS, maker, until_sync

RANK = Path(__file__).with_name("rankproc.py")


class Process:
    """A rank, or the scheduler."""

    def __init__(self, daemon: Daemon, rank: int, kind: str) -> None:
        command = [sys.executable, str(RANK), str(daemon.socket), str(rank), "2", kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"

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
def tensor_parallel(home: Path, kind: str) -> Iterator[list[Process]]:
    """A scheduler and two ranks that have mapped a daemon's device memory; all is well there when they are gone."""
    maker(kind)
    flags = [f"--device-which={'cpu' if kind == 'cpu' else 'cuda:0'}", "--device-bytes=4MiB"]
    with Daemon(home, host="64MiB", disk="0", flags=flags) as daemon:
        engine = [Process(daemon, rank, kind) for rank in (-1, 0, 1)]
        try:
            assert [one("map") for one in engine] == [True] * 3
            yield engine
        finally:
            for one in engine:
                one.close()
        until_sync(lambda: daemon.broken_invariants() == [])


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_decode_into_pages_on_the_device_before_their_tokens_are_known(tmp_path: Path, kind: str):
    """TP=2: the scheduler reserves without keys and names each page; ranks fill their heads, each lets go."""
    with tensor_parallel(tmp_path, kind) as (head, *ranks):
        pages, there, share = head("begin", 7)
        assert (pages, there) == (6, True)
        for page in range(6):
            assert head("full", page) == page
            for rank in ranks:
                rank.send("decode", share, page, 70)
            assert max(rank.answer() for rank in ranks) == page + 1
        assert [one("end") for one in (head, *ranks)] == [True] * 3
        pages, there, share = head("acquire", 7)
        assert (pages, there) == (6, True)
        for rank in ranks:
            rank.send("load", share, 70)
        assert [rank.answer() for rank in ranks] == [True, True]
        assert head("release")


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_fill_and_read_pages_on_the_device_by_their_own_kernels(tmp_path: Path, kind: str):
    """TP=2: a scheduler reserves and leases on the device; each rank's kernels move its heads, at the same time."""
    with tensor_parallel(tmp_path, kind) as (head, *ranks):
        for number in range(4):
            pages, there, share = head("reserve", number)
            assert (pages, there) == (6, True)
            for rank in ranks:
                rank.send("store", share, 10 * number)
            assert max(rank.answer() for rank in ranks) == 6
        for number in range(4):
            pages, there, share = head("acquire", number)
            assert (pages, there) == (6, True)
            for rank in ranks:
                rank.send("load", share, 10 * number)
            assert [rank.answer() for rank in ranks] == [True, True]
            assert head("release")
