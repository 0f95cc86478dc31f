"""Worker lanes: reads overtake writes, one thread is theirs alone, and closing drops what waits."""

from __future__ import annotations

import threading

from kvtier.tiers.lanes import Lanes


class Work:
    """A job that says it began, and waits until it may end."""

    def __init__(self, name: str, log: list[str], gate: threading.Event) -> None:
        self.name, self.log, self.gate = name, log, gate
        self.began, self.dropped = threading.Event(), False

    def run(self) -> None:
        self.log.append(self.name)
        self.began.set()
        self.gate.wait()

    def drop(self) -> None:
        self.dropped = True


def test_bulk_jobs_leave_a_thread_to_urgent_ones():
    """With every bulk thread busy, an urgent job still begins at once."""
    gate, log = threading.Event(), []
    lanes = Lanes(2, "test")
    bulk = [Work(f"bulk {n}", log, gate) for n in range(4)]
    for job in bulk:
        lanes.submit(job, urgent=False)
    for job in bulk[:2]:
        assert job.began.wait(10)
    urgent = Work("urgent", log, gate)
    lanes.submit(urgent, urgent=True)
    assert urgent.began.wait(10)
    assert not bulk[2].began.is_set()
    gate.set()
    assert all(job.began.wait(10) for job in bulk)
    assert lanes.close(10)


def test_urgent_jobs_overtake_bulk_ones():
    """What waits longest goes first within a lane, but urgent before bulk."""
    hold, log = threading.Event(), []
    lanes = Lanes(1, "test")
    first, reader = Work("first", log, hold), Work("reader", log, hold)
    lanes.submit(first, urgent=False)
    lanes.submit(reader, urgent=True)
    assert first.began.wait(10)
    assert reader.began.wait(10)
    free = threading.Event()
    free.set()
    later = [Work("bulk", log, free), Work("urgent 1", log, free), Work("urgent 2", log, free)]
    for job in later:
        lanes.submit(job, urgent=job.name != "bulk")
    hold.set()
    assert all(job.began.wait(10) for job in later)
    assert lanes.close(10)
    assert log.index("urgent 1") < log.index("urgent 2")
    assert log.index("urgent 1") < log.index("bulk")


def test_closing_drops_what_waits_and_names_what_is_stuck():
    """Jobs that did not begin are dropped, later ones too; a stuck one makes close say so."""
    gate, log = threading.Event(), []
    lanes = Lanes(1, "test")
    stuck, waiting = Work("stuck", log, gate), Work("waiting", log, gate)
    lanes.submit(stuck, urgent=False)
    assert stuck.began.wait(10)
    lanes.submit(waiting, urgent=False)
    assert not lanes.close(0.05)
    assert waiting.dropped
    late = Work("late", log, gate)
    lanes.submit(late, urgent=True)
    assert late.dropped
    gate.set()
    assert lanes.close(10)


def test_a_job_that_raises_ends_no_thread(caplog):
    """The promise not to raise is broken: logged, and the next job runs."""
    gate, log = threading.Event(), []
    gate.set()
    lanes = Lanes(1, "test")
    bad, good = Work("bad", log, gate), Work("good", log, gate)
    bad.run = lambda: 1 / 0
    for job in (bad, bad, bad, good):
        lanes.submit(job, urgent=False)
    assert good.began.wait(10)
    assert lanes.close(10)
    assert "broke its promise" in caplog.text
