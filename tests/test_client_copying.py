"""Large copies by two threads: every byte and sum as if one had done it, and nobody writes once a call is over."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from clientkit import interrupted
from kvtier.client import copying
from kvtier.client.copying import NEAR_BYTES, PAST_BYTES, SHARE_BYTES, WIDE_BYTES, Pieces, copy_rows

SIZES = (1, 4096, NEAR_BYTES - 1, NEAR_BYTES, NEAR_BYTES + 1, SHARE_BYTES + 3, PAST_BYTES, 3 * PAST_BYTES + 7)


def pairs_of(shapes: list[tuple[int, int]], seed: int = 0) -> list[copying.Pair]:
    """Targets of zeros beside random sources."""
    random = np.random.default_rng(seed)
    return [(np.zeros(shape, np.uint8), random.integers(0, 256, shape, np.uint8)) for shape in shapes]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(SIZES)), max_size=5), st.booleans())
def test_copies_are_whole_and_sums_are_in_order_whoever_made_them(shapes, summed):
    """Rows of any sizes, few or many bytes."""
    pairs = pairs_of(shapes)
    sums = copy_rows(pairs, summed=summed)
    assert all(np.array_equal(target, source) for target, source in pairs)
    rows = [row for _, source in pairs for row in source]
    assert sums == [xxhash.xxh3_64_intdigest(row) if summed else 0 for row in rows]


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_summed_in_pieces_has_the_sum_of_the_whole(size):
    """The pieces, tried or chosen, leave no trace in bytes or sum."""
    pieces = Pieces(tries=1)
    for seed in range(4):
        [(target, source)] = pairs_of([(1, size)], seed)
        assert pieces.copy(target[0], source[0]) == xxhash.xxh3_64_intdigest(source)
        assert np.array_equal(source, target)


def test_an_interrupted_copy_is_over_when_the_interrupt_gets_out(monkeypatch):
    """The other thread still writes when the first is interrupted: the slots must not be given back before it ends."""
    helping, over = threading.Event(), threading.Event()

    def slow(target: copying.Bytes, source: copying.Bytes) -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            helping.set()
            time.sleep(0.5)
            np.copyto(target, source)
            over.set()
        else:
            assert helping.wait(10)
        return [0] * len(target)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copying, "_plain", slow)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        with pytest.raises(KeyboardInterrupt):
            copy_rows(pairs_of([(2, WIDE_BYTES)]), summed=False)
        assert over.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("begun", [True, False])
def test_a_copy_interrupted_at_any_moment_is_over_when_the_interrupt_gets_out(monkeypatch, begun):
    """Also while the other thread is woken, or begun: nothing is copied any more, and nothing will be."""
    copying_now, shares = list[int](), list[int]()

    def slow(target: copying.Bytes, source: copying.Bytes) -> list[int]:
        copying_now.append(1)
        shares.append(1)
        time.sleep(0.002)
        copying_now.pop()
        return [0] * len(target)

    monkeypatch.setattr(copying, "_plain", slow)
    pairs = pairs_of([(4, WIDE_BYTES // 4)])
    copy_rows(pairs, summed=False)
    for number in itertools.count(1):
        if not begun:
            copying._helper.forget()
        if not interrupted(number, lambda: copy_rows(pairs, summed=False)):
            break
        assert not copying_now, number
        done = len(shares)
        time.sleep(0.005)
        assert len(shares) == done, number


@pytest.mark.parametrize("error", [MemoryError, IndexError])
@pytest.mark.parametrize("main", [True, False])
def test_a_copy_that_fails_in_either_thread_fails(monkeypatch, main, error):
    """What was not copied is never taken for copied."""
    both = threading.Barrier(2)

    def failing(target: copying.Bytes, source: copying.Bytes) -> list[int]:
        both.wait(10)
        if (threading.current_thread() is threading.main_thread()) == main:
            raise error
        return [0] * len(target)

    monkeypatch.setattr(copying, "_plain", failing)
    with pytest.raises(error):
        copy_rows(pairs_of([(2, WIDE_BYTES)]), summed=False)


def test_a_child_of_fork_copies_too():
    """The second thread is not there in the child."""
    copy_rows(pairs_of([(8, PAST_BYTES)]), summed=True)
    pairs = pairs_of([(8, PAST_BYTES)], 1)
    child = os.fork()
    if not child:
        sums = copy_rows(pairs, summed=True)
        right = np.array_equal(*pairs[0]) and sums == [xxhash.xxh3_64_intdigest(row) for row in pairs[0][1]]
        os._exit(0 if right else 1)
    until = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert ended[1] == 0
