"""kill -9 of a real writer at random instants: what it said was durable is there, bit for bit, and nothing is lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.diskkit import Owner, view
from tests.diskwriter import CAPACITY

ROOT = Path(__file__).resolve().parent.parent
KILLS = int(os.environ.get("KVTIER_KILLS", "50"))
"""Rounds of the slow test."""


class Promises:
    """What writers have said so far."""

    def __init__(self) -> None:
        self.runs: dict[int, tuple[int, int, set[int]]] = {}
        """By run: seed, cache, pages."""

    def hear(self, text: str) -> None:
        """Take in a writer's lines; the last may be cut off."""
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):
                return
            kind, *words = line.split()
            if kind == "+":
                run, seed, pages, cache = map(int, words)
                self.runs[run] = (seed, cache, set(range(pages)))
            elif kind == "-":
                run, page = map(int, words)
                if run in self.runs:  # else it became durable, and the writer was killed before it could say so
                    self.runs[run][2].discard(page)

    def kept_by(self, owner: Owner) -> None:
        """Every promise holds, what else is stored is whole too, and exactly the cells of live pages are in use."""
        stored = {run.id: run for run, _, _ in owner.runs}
        for run, (seed, cache, pages) in self.runs.items():
            if pages:
                assert run in stored, f"run {run} was durable and is gone"
                said = owner.read(cache, run, seed, sorted(pages))
                assert set(said) == {""}, f"run {run} pages {sorted(pages)}: {said}"
        used = 0
        for run in stored.values():
            live = [page for page in range(run.pages) if run.live >> page & 1]
            for group, size in enumerate(owner.tier.caches()[run.cache].item_bytes):
                said = owner.tier.read([(run.id << 6 | page, group, [view(size)]) for page in live])
                assert set(said) == {""}, f"run {run.id} pages {live}: {said}"
                used += len(live) * run.layouts[group].blocks * 4096
        assert owner.tier.used_bytes == used
        assert owner.tier.check() == []


def write_and_kill(folder: Path, seed: int, after_s: float) -> str:
    """Start a writer, kill it a while after its first word, return what it said."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.diskwriter", str(folder), str(seed)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as writer:
        first = writer.stdout.readline()
        time.sleep(after_s)
        writer.kill()
        return first + writer.stdout.read()


@pytest.mark.parametrize("rounds", [10, pytest.param(KILLS, marks=[pytest.mark.slow, pytest.mark.timeout(20 * KILLS)])])
def test_what_was_durable_survives_kill_9(tmp_path, rounds):
    """Round after round on the same folder: every promise is kept, checks are clean, accounting is exact."""
    promises, rng = Promises(), random.Random(rounds)
    for round_ in range(rounds):
        said = write_and_kill(tmp_path / "d", round_, rng.uniform(0.01, 0.25))
        promises.hear(said)
        with Owner(tmp_path / "d", CAPACITY) as owner:
            promises.kept_by(owner)
    assert promises.runs
