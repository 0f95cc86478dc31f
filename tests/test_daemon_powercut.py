"""Power cuts and kill -9 of a real kvtierd: what it called durable is served again, and nothing incomplete is."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests import powercut
from tests.daemonwriter import CAPACITY, ROOT, SPEC, prompt
from tests.engines import Engine
from tests.storekit import MIB, storing

traced = pytest.mark.skipif(not powercut.works(), reason="needs strace, and leave to trace")
KILLS = int(os.environ.get("KVTIER_KILLS", "50"))
"""Rounds of the slow kill -9 tests."""
CUTS = int(os.environ.get("KVTIER_CUTS", "200"))
"""Rounds of the slow power cuts."""


def heard(*texts: str) -> dict[int, int]:
    """Pages by prompt that were said to be durable and not evicted since; a last line that was cut off says nothing."""
    promised: dict[int, int] = {}
    for text in texts:
        for line in text.splitlines(keepends=True):
            kind, *words = line.split()
            if kind == "+" and line.endswith("\n"):
                promised[int(words[0])] = int(words[1])
            elif kind == "-":
                promised.pop(int(words[0]), None)
    return promised


async def kept(folder: Path, promised: dict[int, int]) -> list[str]:
    """What is wrong with a folder after a cut."""
    async with storing(folder, host=16 * MIB, disk=CAPACITY) as store:
        stats = store.parts.disk.stats
        wrong = [f"{name} is {stats[name]}" for name in ("set_aside", "damaged_runs") if stats[name]]
        engine = Engine(store, uid=os.getuid())
        await engine.open(SPEC)
        for n, pages in promised.items():
            found = await engine.get(prompt(n))
            if found != pages:
                wrong.append(f"prompt {n} was durable to page {pages} and is served to {found}")
        async for batch in store.scrub.batches():
            await store.scrub.check(batch)
        lost = {name: count for name, count in store.parts.counts.items() if name.startswith(("load_", "host_"))}
        return wrong + [f"copies that are not what was stored: {lost}"] * bool(lost) + store.parts.check()


async def cuts(home: Path, rounds: int, *fault: str, seed: int = 1) -> list[str]:
    """What is wrong after cuts at random instants of one daemon's life."""
    base, out = home / "base", home / "out"
    out.mkdir(parents=True)
    words = [sys.executable, "-m", "tests.daemonwriter", str(base), str(seed), "0.3"]
    before = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    shutil.copytree(base, out / "copy")
    journal = powercut.trace(base, out, seed + 1, "1.5", *fault, module="tests.daemonwriter")
    writes = powercut.safe_at(journal)
    assert {write.file for write, _ in writes} == {"said", "extents", "data.mdb"}
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for instant in powercut.instants(writes, rounds, rng):
        said = powercut.cut(out / "copy", home / "cut", writes, instant, rng)
        wrong += await kept(home / "cut", heard(before, said))
    assert len(heard(before, powercut.cut(out / "copy", home / "cut", writes, writes[-1][0].end + 2, rng))) > 10
    return wrong


@traced
@pytest.mark.parametrize("rounds", [30, pytest.param(CUTS, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_what_the_daemon_called_durable_survives_power_cuts(tmp_path: Path, rounds: int) -> None:
    """Unsynced sectors may be there or not: every promise is kept and everything that is served is whole."""
    assert await cuts(tmp_path, rounds) == []


@traced
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", ["payload sync", "catalogue sync", "catalogue after payload", "free before reuse"])
async def test_without_any_one_step_the_daemon_loses_data(tmp_path: Path, step: str) -> None:
    """The test above can fail: a daemon that leaves out one sync, or reuses cells too early, is found out."""
    for seed in range(1, 6):
        if await cuts(tmp_path / str(seed), 40, step, seed=seed):
            return
    pytest.fail(f"nothing was lost without: {step}")


def write_and_kill(folder: Path, seed: int, after_s: float) -> str:
    """Start a daemon and an engine, kill the daemon a while after it was ready; what had been said."""
    words = [sys.executable, "-m", "tests.daemonwriter", str(folder), str(seed), "60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as writer:
        first = writer.stdout.readline()
        time.sleep(after_s)
        daemon = os.pidfd_open(int(first.split()[1]))
        signal.pidfd_send_signal(daemon, signal.SIGKILL)
        select.select([daemon], [], [], 30.0)
        os.close(daemon)
        writer.kill()
        return first + writer.stdout.read()


@pytest.mark.parametrize("rounds", [4, pytest.param(KILLS, marks=[pytest.mark.slow, pytest.mark.timeout(20 * KILLS)])])
async def test_what_the_daemon_called_durable_survives_kill_9(tmp_path: Path, rounds: int) -> None:
    """Round after round on the same folder, each ended at a random instant under load."""
    rng = random.Random(rounds)
    for seed in range(rounds):
        said = write_and_kill(tmp_path / "disk", seed, rng.uniform(0.05, 0.8))
        assert await kept(tmp_path / "disk", heard(said)) == []
