"""Host arenas: sealed, private, sparse memory, and the set of ranges that divides it."""

import errno
import fcntl
import mmap
import os
import platform
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.arena import HUGE_BYTES, Arena, free_huge_bytes
from kvtier.tiers.extents import Extents

MIB = 1 << 20


@pytest.fixture
def arena():
    """An arena of 16 MiB."""
    made = Arena("scope", 3, 16 * MIB)
    yield made
    made.close()


def held(arena):
    """Bytes of memory that the arena has."""
    return os.fstat(arena.fd).st_blocks * 512


def test_new_arena_holds_no_memory(arena):
    """An arena of full size takes memory only where it is touched."""
    assert (os.fstat(arena.fd).st_size, held(arena)) == (16 * MIB, 0)
    arena.data[5 * MIB] = 1
    assert 0 < held(arena) <= HUGE_BYTES
    assert (arena.number, arena.scope, arena.bytes, arena.data.size) == (3, "scope", 16 * MIB, 16 * MIB)


def test_size_is_sealed_for_whoever_gets_the_descriptor(arena):
    """Nobody can shrink or grow the file, nor add a seal that would stop the daemon's writes."""
    other = os.dup(arena.fd)
    try:
        for size in (0, 32 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(other, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(other)


def test_mode_keeps_other_users_from_reopening_the_memory(arena):
    """A descriptor inherited read-only cannot be reopened for writing by another uid."""
    assert os.fstat(arena.fd).st_mode & 0o777 == 0o600
    if os.geteuid():
        pytest.skip("needs root to become another user")
    reading = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDONLY)
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            os.open(f"/proc/self/fd/{reading}", os.O_RDWR)
        except OSError as error:
            os._exit(0 if error.errno == errno.EACCES else 1)
        os._exit(2)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_fault_backs_a_range_and_keeps_its_bytes(arena):
    """Faulting gives memory to exactly the range and changes no byte."""
    arena.data[MIB] = 7
    arena.fault(0, 4 * MIB)
    assert held(arena) == 4 * MIB
    assert arena.data[MIB] == 7


def test_punch_returns_memory_and_leaves_zeros(arena):
    """Punching gives back the memory of the range and no other byte changes."""
    arena.data[: 12 * MIB] = 9
    before = held(arena)
    arena.punch(2 * MIB, 12 * MIB)
    assert before - held(arena) == 10 * MIB
    assert (arena.data[: 2 * MIB] == 9).all()
    assert not arena.data[2 * MIB : 12 * MIB].any()


def test_a_view_outlives_close():
    """A worker still copying from a closed arena reads memory, not a signal."""
    arena = Arena("scope", 0, MIB)
    view = arena.data[:10]
    view[:] = 5
    arena.close()
    arena.close()
    assert view.tolist() == [5] * 10


def test_both_ends_of_a_shared_descriptor_see_the_same_bytes(arena):
    """What another mapping of the descriptor writes is what the arena reads."""
    with mmap.mmap(arena.fd, arena.bytes) as other:
        other[100:103] = b"abc"
        assert arena.data[100:103].tobytes() == b"abc"


@pytest.mark.skipif(platform.machine() not in {"x86_64", "aarch64"}, reason="no mbind number for this machine")
def test_memory_is_bound_to_the_node():
    """The kernel lists the mapping as bound to the node; a node that does not exist is refused, not fatal."""
    arena = Arena("scope", 0, 4 * MIB, node=0)
    absent = Arena("scope", 1, 4 * MIB, node=1000)
    try:
        if not arena.bound:
            pytest.skip("mbind is not allowed here")
        start = f"{arena.data.ctypes.data:08x} "
        line = next(line for line in Path("/proc/self/numa_maps").read_text().splitlines() if line.startswith(start))
        assert line.split()[1].startswith("bind:0")
        assert not absent.bound
        absent.data[0] = 1
    finally:
        arena.close()
        absent.close()


def test_huge_pages_come_from_the_pool():
    """A huge arena takes whole huge pages when faulted and gives them back when punched."""
    if free_huge_bytes() < 2 * HUGE_BYTES:
        pytest.skip("the host has no free huge pages")
    arena = Arena("scope", 0, 2 * HUGE_BYTES, huge=True)
    try:
        before = free_huge_bytes()
        arena.fault(0, HUGE_BYTES)
        arena.data[:HUGE_BYTES] = 1
        assert before - free_huge_bytes() == HUGE_BYTES
        arena.punch(0, HUGE_BYTES)
        assert free_huge_bytes() == before
    finally:
        arena.close()


def test_free_huge_pages_are_those_not_reserved(tmp_path):
    """Reserved huge pages do not count, and pages of another size not at all."""
    file = tmp_path / "meminfo"
    text = "MemTotal: 9 kB\nHugePages_Total: 9\nHugePages_Free: 7\nHugePages_Rsvd: 3\nHugepagesize: {} kB\n"
    file.write_text(text.format(2048))
    assert free_huge_bytes(file) == 4 * HUGE_BYTES
    file.write_text(text.format(1 << 20))
    assert free_huge_bytes(file) == 0


ranges = st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 12))


@given(st.lists(ranges, max_size=40))
def test_extents_are_a_set_of_bytes(steps):
    """Adding and discarding ranges is union and difference; what is in is found lowest first."""
    extents, model = Extents(), np.zeros(64, bool)
    for add, lo, size in steps:
        inside = int(model[lo : lo + size].sum())
        if add:
            extents.add(lo, lo + size)
        else:
            assert extents.discard(lo, lo + size) == inside
        model[lo : lo + size] = add
        seen = np.zeros(64, bool)
        for a, b in extents:
            assert a < b
            assert not seen[max(a - 1, 0) : b + 1].any()  # disjoint, and neighbours are merged
            seen[a:b] = True
            assert extents.covers(a, b)
            assert not extents.covers(a, b + 1)
        assert (seen == model).all()
        assert extents.bytes == model.sum()
        for align in (1, 4):
            fits = [at for at in range(0, 60, align) if model[at : at + 3].all() and at + 3 <= 64]
            assert extents.fit(3, align) == (fits[0] if fits else None)
