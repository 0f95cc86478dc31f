"""Engines' own memory: what may be registered, and that no file can hurt the daemon."""

import fcntl
import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers.region import Region
from kvtier.types import Code, KvtierError

STRIDE = 5000
ROWS = 7
OFFSET = 4097
SIZE = OFFSET + STRIDE * ROWS


@pytest.fixture(params=["sealed", "plain", "file"])
def kind(request):
    """Which sort of descriptor backs the region."""
    return request.param


@pytest.fixture
def fd(kind, tmp_path):
    """A file of SIZE bytes: a memfd sealed against shrinking, one that is not, or a file on disk."""
    if kind == "file":
        made = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    else:
        made = os.memfd_create("region", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, SIZE)
    if kind == "sealed":
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    yield made
    os.close(made)


def some_bytes(n, seed=0):
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


def test_only_files_that_cannot_shrink_are_mapped(fd, kind):
    """The seal decides between mapping and descriptor I/O."""
    region = Region(fd, OFFSET, STRIDE, ROWS, "r")
    assert region.mapped == (kind == "sealed")
    assert (region.row_bytes, region.rows, region.name) == (STRIDE, ROWS, "r")
    region.close()


def test_rows_are_where_the_engine_has_them(fd):
    """A write of several views lands on its row alone, and a read brings the engine's bytes back."""
    region = Region(fd, OFFSET, STRIDE, ROWS, "r")
    content = some_bytes(STRIDE)
    region.write(6, [content[:1], content[1:1], content[1:4000], content[4000:]])
    file = np.frombuffer(os.pread(fd, SIZE, 0), np.uint8)
    assert not file[: OFFSET + 6 * STRIDE].any()
    assert (file[OFFSET + 6 * STRIDE :] == content).all()
    os.pwrite(fd, some_bytes(STRIDE, 1).tobytes(), OFFSET)
    views = [np.zeros(10, np.uint8), np.zeros(STRIDE - 10, np.uint8)]
    region.read(0, views)
    assert (np.concatenate(views) == some_bytes(STRIDE, 1)).all()
    region.close()


def test_more_views_than_one_call_takes(tmp_path):
    """A row scattered over thousands of buffers arrives whole."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, STRIDE)
    region = Region(fd, 0, STRIDE, 1, "r")
    os.close(fd)
    content = some_bytes(STRIDE)
    region.write(0, list(content.reshape(-1, 2)))
    back = np.zeros(STRIDE, np.uint8)
    region.read(0, list(back.reshape(-1, 2)))
    assert (back == content).all()
    region.close()


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_short_calls_are_continued_where_they_ended(fd):
    """A kernel that moves a few bytes at a time still moves all of them, to the right views."""
    os.pwrite(fd, some_bytes(STRIDE).tobytes(), OFFSET + STRIDE)
    region = Region(fd, OFFSET, STRIDE, ROWS, "r")
    back = np.zeros(STRIDE, np.uint8)
    few = [back[:5], back[5:6], back[6:]]
    region._through(lambda number, views, at: os.preadv(number, [views[0][:7]], at), STRIDE, few)
    assert (back == some_bytes(STRIDE)).all()
    region.close()


def test_region_lives_on_its_own_descriptor(kind, tmp_path):
    """The engine's descriptor may be closed once the region is made."""
    fd = os.memfd_create("region", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, STRIDE)
    if kind == "sealed":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    region = Region(fd, 0, STRIDE, 1, "r")
    os.close(fd)
    region.write(0, [some_bytes(STRIDE)])
    back = np.zeros(STRIDE, np.uint8)
    region.read(0, [back])
    assert (back == some_bytes(STRIDE)).all()
    region.close()


@pytest.mark.parametrize("kind", ["plain", "file"], indirect=True)
def test_truncated_region_raises(fd):
    """A file cut under the daemon is an OSError for reads and writes, and a write does not grow it again."""
    region = Region(fd, OFFSET, STRIDE, ROWS, "r")
    os.ftruncate(fd, OFFSET + STRIDE + 100)
    region.read(0, [np.zeros(STRIDE, np.uint8)])
    for call in (region.read, region.write):
        with pytest.raises(OSError, match="shorter"):
            call(1, [np.zeros(STRIDE, np.uint8)])
    assert os.fstat(fd).st_size == OFFSET + STRIDE + 100
    region.close()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("offset", {"offset": -1}),
        ("stride", {"stride": 0}),
        ("rows", {"rows": 0}),
        ("rows", {"rows": ROWS + 1}),
        ("rows", {"rows": (1 << 31) + 1}),
        ("rows", {"offset": OFFSET + 1}),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(fd, field, change):
    """Each wrong number is a bad_request naming it."""
    with pytest.raises(KvtierError) as caught:
        Region(fd, **({"offset": OFFSET, "stride": STRIDE, "rows": ROWS, "name": "r"} | change))
    assert (caught.value.code, caught.value.field) == (Code.BAD_REQUEST, field)


@pytest.mark.parametrize("what", ["pipe", "closed", "read-only", "append", "write-sealed", "folder"])
def test_descriptors_that_cannot_be_served_are_refused(what, tmp_path):
    """Pipes, folders, closed, read-only, appending and write-sealed descriptors are a bad_request for fd."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    opened = []
    if what == "pipe":
        opened = list(os.pipe())
    elif what == "write-sealed":
        opened = [os.memfd_create("region", os.MFD_ALLOW_SEALING)]
        os.ftruncate(opened[0], 100)
        fcntl.fcntl(opened[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    elif what == "folder":
        opened = [os.open(tmp_path, os.O_RDONLY)]
    elif what != "closed":
        opened = [os.open(file, os.O_RDONLY if what == "read-only" else os.O_RDWR | os.O_APPEND)]
    with pytest.raises(KvtierError) as caught:
        Region(opened[0] if opened else 1 << 20, 0, 100, 1, "r")
    for fd in opened:
        os.close(fd)
    assert (caught.value.code, caught.value.field) == (Code.BAD_REQUEST, "fd")


def test_rows_and_sizes_out_of_bounds_are_refused(fd):
    """No call reaches the bytes of another row or beyond the region."""
    region = Region(fd, OFFSET, STRIDE, ROWS, "r")
    view = np.zeros(STRIDE, np.uint8)
    for call in (region.read, region.write):
        for row, views in ((-1, [view]), (ROWS, [view]), (0, [view, view[:1]])):
            with pytest.raises(KvtierError):
                call(row, views)
    region.close()


def test_closing_leaves_running_copies_alone(fd, kind):
    """Threads that read while the region is closed get bytes or an OSError, and no descriptor is left open."""
    gc.collect()  # tracebacks of earlier tests may still hold descriptors
    before = len(list(Path("/proc/self/fd").iterdir()))
    region = Region(fd, OFFSET, STRIDE, ROWS, "r")
    started = threading.Barrier(3)

    def work():
        started.wait()
        view = np.zeros(STRIDE, np.uint8)
        for _ in range(2000):
            try:
                region.read(3, [view])
            except OSError:
                return

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait()
    region.close()
    region.close()
    for thread in threads:
        thread.join()
    with pytest.raises(OSError, match="closed"):
        region.read(3, [np.zeros(1, np.uint8)])
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
