"""What a peer lacks is believed for a moment and takes no memory after it."""

from __future__ import annotations

import pytest

from kvtier.peer import lacks
from kvtier.peer.lacks import Lacks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test moves on."""
    now = [0.0]
    monkeypatch.setattr(lacks.time, "monotonic", lambda: now[0])
    return now


def test_what_ran_out_is_forgotten_and_what_did_not_is_known(clock):
    """A host that misses for days keeps no more than the misses of a second."""
    known = Lacks()
    for each in range(10_000):
        clock[0] += lacks.LACKS_S / 100
        known.note(each.to_bytes(8, "little"))
        assert each.to_bytes(8, "little") in known
    assert len(known) <= 101
    assert (9_950).to_bytes(8, "little") in known
    assert (9_800).to_bytes(8, "little") not in known


def test_a_page_that_is_lacked_again_is_known_a_second_longer(clock):
    """The newest no counts."""
    known = Lacks()
    known.note(b"one")
    clock[0] += 0.6 * lacks.LACKS_S
    known.note(b"one")
    clock[0] += 0.6 * lacks.LACKS_S
    assert b"one" in known


def test_no_more_than_so_many_are_kept(clock, monkeypatch):
    """A flood of misses within a second pushes out the oldest."""
    monkeypatch.setattr(lacks, "MAX_LACKS", 3)
    known = Lacks()
    for each in range(5):
        known.note(bytes([each]))
    assert [bytes([each]) in known for each in range(5)] == [False, False, True, True, True]
