"""Power cuts at random instants: what was durable is there, nothing incomplete is served, and each step is needed."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests import powercut
from tests.diskkit import Owner
from tests.diskwriter import CAPACITY
from tests.test_disk_crash import ROOT, Promises

pytestmark = pytest.mark.skipif(not powercut.works(), reason="needs strace, and leave to trace")


def cuts(tmp_path, rounds: int, *skip: str, seed: int = 1) -> list[str]:
    """What is wrong after cuts at random instants of one writer's life, one line a cut."""
    base, out = tmp_path / "base", tmp_path / "out"
    out.mkdir(parents=True)
    words = [sys.executable, "-m", "tests.diskwriter", str(base), str(seed), "0.3"]
    before = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    shutil.copytree(base, out / "copy")
    writes = powercut.safe_at(powercut.trace(base, out, seed + 1, "1.0", *skip))
    base = out / "copy"
    rng = np.random.default_rng(seed)
    wrong = []
    for instant in powercut.instants(writes, rounds, rng):
        promises = Promises()
        promises.hear(before)
        promises.hear(powercut.cut(base, tmp_path / "cut", writes, instant, rng))
        try:
            with Owner(tmp_path / "cut", CAPACITY) as owner:
                promises.kept_by(owner)
                assert not owner.tier.stats["set_aside"]
                assert not owner.tier.stats["damaged_runs"]
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
    return wrong


@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_what_was_durable_survives_power_cuts(tmp_path, rounds):
    """Unsynced sectors may be there or not: every promise is kept and everything stored is whole."""
    assert cuts(tmp_path, rounds) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", ["payload sync", "catalogue sync", "catalogue after payload", "free before reuse"])
def test_without_any_one_step_power_cuts_lose_data(tmp_path, step):
    """The test above can fail: leaving out one sync, or their order, or the wait before reuse, is noticed."""
    for seed in range(1, 6):
        if cuts(tmp_path / str(seed), 40, step, seed=seed):
            return
    pytest.fail(f"nothing was lost without: {step}")


def test_payload_is_synced_before_the_catalogue_names_it(tmp_path):
    """The order on the wire to the device: payload, its sync, pages, their sync, meta page, and only then the word."""
    (tmp_path / "out").mkdir()
    with Owner(tmp_path / "d", CAPACITY):
        pass
    journal = powercut.trace(tmp_path / "d", tmp_path / "out", module="tests.diskwriter_slow")
    steps: list[list[str]] = [[]]
    payload_ends = other_ends = -1
    for event in journal:
        kind = type(event).__name__.lower() + " " + event.file + (" through" if getattr(event, "through", 0) else "")
        assert event.start > other_ends, f"{kind} began before the step before it had ended"
        if kind == "write extents":  # several at once
            payload_ends = max(payload_ends, event.end)
        else:
            assert event.start > payload_ends, f"{kind} began before the payload was written"
            other_ends = event.end
        if event.file == "said":
            steps.append([])
        else:
            steps[-1].append(kind)
    order = [[kind for kind, _ in itertools.groupby(step)] for step in steps]
    one = ["write extents", "sync extents", "write data.mdb", "sync data.mdb", "write data.mdb through"]
    assert order[1:4] == [one, one, one]
