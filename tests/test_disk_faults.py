"""Failing calls: refused by name, nothing half done, hits go on, and writing works again without a restart."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import faultkit
import storekit
from kvtier.identity import GroupSpec, chain_keys
from kvtier.tiers import transfers
from kvtier.tiers.extentfile import Calls, Scratch
from kvtier.tiers.packing import Packing
from kvtier.types import Kind, KvtierError
from tests import powercut
from tests.diskkit import KIB, MIB, Owner, spec
from tests.diskwriter import CAPACITY, SPEC
from tests.test_disk_crash import ROOT, Promises


class Failing(Calls):
    """The real calls, of which chosen ones fail, or wait at a gate."""

    def __init__(self, **errors: int) -> None:
        self.errors = errors
        self.gate = threading.Event()
        self.gate.set()
        for name in ("pwritev", "preadv", "fdatasync", "fsync", "fallocate", "punch"):
            setattr(self, name, self.wrap(name, getattr(Calls, name)))

    def wrap(self, name: str, real):
        def call(*args):
            if name != "preadv":
                self.gate.wait()
            if name in self.errors:
                raise OSError(self.errors[name], os.strerror(self.errors[name]))
            return real(*args)

        return call


def outcome(owner: Owner, cache: int, seed: int, **more) -> tuple[int | None, str]:
    """Write a run and wait for its end, good or bad."""
    assert owner.submit(cache, seed, owner.items(cache, seed, 4), keys=owner.keys(cache, seed, 4), **more)
    owner.wait(lambda: seed in owner.results)
    return owner.results.pop(seed)


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        ("pwritev", errno.EIO, "io"),
        ("pwritev", errno.ENOSPC, "no_space"),
        ("fdatasync", errno.EIO, "io"),
        ("fdatasync", errno.ENOSPC, "no_space"),
        ("fallocate", errno.EIO, "io"),
        ("fallocate", errno.EROFS, "io"),
    ],
)
def test_a_failed_write_is_named_and_leaves_nothing(tmp_path, call, error, code):
    """Cells return, reads go on, the state names the error until a write works again."""
    calls = Failing()
    with Owner(tmp_path / "d", calls=calls) as owner:
        cache = owner.cache()
        kept = owner.write(cache, 1, 4)
        calls.errors[call] = error
        # a slab that is backed already needs no fallocate: fill it
        if call == "fallocate":
            for seed in range(2, 5):
                outcome(owner, cache, seed)
        used = owner.tier.used_bytes
        assert outcome(owner, cache, 50) == (None, code)
        assert owner.tier.state == "sick"
        assert owner.tier.sick == errno.errorcode[error]
        assert owner.tier.used_bytes == used
        assert owner.tier.check() == []
        assert owner.read(cache, kept, 1, 4) == [""] * 4
        calls.errors.clear()
        assert outcome(owner, cache, 51)[1] == ""
        assert (owner.tier.state, owner.tier.sick) == ("ready", "")
        assert owner.tier.check() == []
    with Owner(tmp_path / "d") as owner:
        assert 50 not in {run.id for run, _, _ in owner.runs}
        assert owner.read(cache, kept, 1, 4) == [""] * 4


class Once(Failing):
    """The first of one call fails, once it is told to."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.begun, self.go, self.written = threading.Event(), threading.Event(), 0
        real, write = getattr(self, which), self.pwritev

        def fail_first(fd):
            if not self.begun.is_set():
                self.begun.set()
                assert self.go.wait(30)
                raise OSError(errno.EIO, "injected")
            return real(fd)

        def count(*args):
            size = write(*args)
            self.written += size
            return size

        setattr(self, which, fail_first)
        self.pwritev = count


def test_a_sync_that_fails_is_believed_of_all_that_was_written_before_it(tmp_path):
    """The kernel tells a lost write to one sync and takes it for written from then on: the next sync proves nothing."""
    calls = Once("fdatasync")
    with Owner(tmp_path / "d", calls=calls, linger_s=0.0) as owner:
        cache = owner.cache()
        owner.flush()
        assert owner.submit(cache, "synced", owner.items(cache, 1, 4), keys=owner.keys(cache, 1, 4))
        owner.wait(calls.begun.is_set)
        assert owner.submit(cache, "written", owner.items(cache, 2, 4), keys=owner.keys(cache, 2, 4))
        owner.wait(lambda: calls.written == 2 * 64 * KIB)
        calls.go.set()
        owner.wait(lambda: len(owner.results) == 2)
        assert owner.results == {"synced": (None, "io"), "written": (None, "io")}
        assert owner.tier.check() == []
        kept = owner.write(cache, 3, 4)
        assert owner.tier.state == "ready"
    with Owner(tmp_path / "d") as owner:
        assert [run.id for run, _, _ in owner.runs] == [kept]


def test_a_purge_whose_sync_fails_takes_no_loss_from_who_waits_for_one(tmp_path):
    """Its failure is a failure of what was written beside it, too."""
    calls = Once("fsync")
    with Owner(tmp_path / "d", calls=calls, linger_s=0.0) as owner:
        cache = owner.cache()
        said = []
        owner.tier.upkeep.discard(lambda error, _: said.append(error))
        owner.wait(calls.begun.is_set)
        assert owner.submit(cache, "written", owner.items(cache, 1, 4), keys=owner.keys(cache, 1, 4))
        owner.wait(lambda: calls.written == 64 * KIB)
        calls.go.set()
        owner.wait(lambda: said and owner.results)
        assert (said, owner.results) == (["io"], {"written": (None, "io")})
        assert owner.write(cache, 2, 4)


def test_sickness_asks_for_another_try(tmp_path, monkeypatch):
    """A tier that nobody dares write to would stay sick for ever: after a while it says so no longer."""
    from kvtier.tiers import health

    calls = Failing(pwritev=errno.EIO)
    with Owner(tmp_path / "d", calls=calls) as owner:
        cache = owner.cache()
        assert outcome(owner, cache, 1) == (None, "io")
        assert owner.tier.sick == "EIO"
        monkeypatch.setattr(health, "RETRY_S", 0.0)
        assert owner.tier.sick == ""
        assert owner.tier.state == "sick"


def test_a_child_is_not_durable_without_its_parent(tmp_path):
    """A run queued behind one that fails, and its children too, fail with it; strangers do not."""
    calls = Failing()
    with Owner(tmp_path / "d", calls=calls, linger_s=0.05) as owner:
        cache = owner.cache()
        owner.flush()
        calls.gate.clear()
        chain, stride = b"p" * 16, spec().stride
        for seed in (1, 2, 3):
            keys = owner.keys(cache, seed, 4)
            chains = chain_keys(chain, keys, stride)
            items = owner.items(cache, seed, 4)
            assert owner.submit(cache, seed, items, keys=keys, parent=chain, depth=seed * 4, chains=chains)
            chain = chains[-16:]
        assert owner.submit(cache, "stranger", owner.items(cache, 9, 4), keys=owner.keys(cache, 9, 4))
        real, first = calls.pwritev, owner.items(cache, 1, 1)[0].views[0].tobytes()

        def fail_first(fd, views, offset):
            if bytes(views[0][:64]) == first[:64]:
                raise OSError(errno.EIO, "injected")
            return real(fd, views, offset)

        calls.pwritev = fail_first
        calls.gate.set()
        owner.wait(lambda: len(owner.results) == 4)
        assert [owner.results[seed][1] for seed in (1, 2, 3)] == ["io"] * 3
        assert owner.results["stranger"][1] == ""
        assert owner.tier.check() == []
        # the owner knows now: what it writes in spite of that is its own affair
        owner.results.clear()
        keys = owner.keys(cache, 2, 4)
        parent = chain_keys(b"p" * 16, owner.keys(cache, 1, 4), stride)[-16:]
        assert owner.submit(cache, 2, owner.items(cache, 2, 4), keys=keys, parent=parent)
        owner.wait(lambda: owner.results)
        assert owner.results[2][1] == ""


def test_a_failed_read_costs_that_item_only(tmp_path):
    """EIO in a call for many items: each is read by itself, and only the bad one is io."""
    calls = Failing()
    with Owner(tmp_path / "d", calls=calls) as owner:
        cache = owner.cache()
        run = owner.write(cache, 1, 8)
        bad, real = owner.tier._ledger.find(run << 6 | 5, 0).cells[0] * 4096, calls.preadv

        def preadv(fd, views, offset):
            if offset <= bad < offset + sum(map(len, views)):
                raise OSError(errno.EIO, "injected")
            return real(fd, views, offset)

        calls.preadv = preadv
        assert owner.read(cache, run, 1, 8) == [""] * 5 + ["io"] + [""] * 2
        assert owner.tier.stats["io_errors"] == 1


def no_memory(*_: object) -> None:
    """What an allocation ends in where none is left."""
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("compress", [False, True])
def test_a_write_that_finds_no_memory_is_named_and_holds_up_nothing(tmp_path, monkeypatch, compress):
    """What is not aligned needs some, and so does packing: that run fails, or is written as it is; others go on."""
    with Owner(tmp_path / "d", compress=compress) as owner:
        cache = owner.cache(spec(GroupSpec(Kind.FULL, 1, 1, 7000)))
        with monkeypatch.context() as patch:
            patch.setattr(Scratch, "stand_in", no_memory)
            assert outcome(owner, cache, 1) == (None, "io")
            assert owner.tier.sick == "ENOMEM"
            assert owner.flush() == ""
        with monkeypatch.context() as patch:
            patch.setattr(Packing, "_pack", no_memory)
            run, error = outcome(owner, cache, 2)
        assert error == ""
        assert owner.read(cache, run, 2, 4) == [""] * 4


def test_a_read_that_finds_no_memory_ends_with_the_last_of_its_calls(tmp_path, monkeypatch):
    """Until then they write into memory that is somebody else's afterwards."""
    calls = Failing()
    reading = threading.Semaphore(0)
    real = transfers.digest

    def digest(views) -> int:
        if not threading.current_thread().name.startswith("kvtier-disk"):
            raise MemoryError
        return real(views)

    def preadv(*args):
        if threading.current_thread().name.startswith("kvtier-disk"):
            reading.acquire()
        return os.preadv(*args)

    calls.preadv = preadv
    with Owner(tmp_path / "d", 64 * MIB, calls=calls) as owner:
        cache = owner.cache(spec(GroupSpec(Kind.FULL, 1, 1, MIB)))
        run = owner.write(cache, 1, 4)
        monkeypatch.setattr(transfers, "digest", digest)
        said = []
        reader = threading.Thread(target=lambda: said.extend(owner.read(cache, run, 1, 4)))
        reader.start()
        reader.join(0.3)
        assert reader.is_alive()
        reading.release(100)
        reader.join()
        assert sorted(said) == ["", "", "", "io"]


def test_short_calls_are_finished(tmp_path):
    """The kernel may move less than asked: the rest follows."""
    calls = Failing()
    pwritev, preadv = calls.pwritev, calls.preadv
    calls.pwritev = lambda fd, views, offset: pwritev(fd, [views[0][:4096]], offset)
    calls.preadv = lambda fd, views, offset: preadv(fd, [views[0][:8192]], offset)
    with Owner(tmp_path / "d", calls=calls) as owner:
        cache = owner.cache(spec(GroupSpec(Kind.FULL, 1, 1, 30001)))
        run = owner.write(cache, 1, 8)
        assert owner.read(cache, run, 1, 8) == [""] * 8


def test_where_the_file_system_is_full_one_write_finds_out_and_the_rest_goes_where_there_is_room(tmp_path, monkeypatch):
    """Not a write for each slab that was promised. Nothing is sick, accounts stay exact; room is found as it comes."""
    calls = Failing()
    with Owner(tmp_path / "d", 1 * MIB, slab_bytes=64 * KIB, calls=calls) as owner:
        cache = owner.cache(spec(GroupSpec(Kind.FULL, 1, 1, 4 * KIB)))
        runs = [owner.write(cache, seed, 4) for seed in range(4)]  # one slab
        calls.errors["fallocate"] = errno.ENOSPC
        assert outcome(owner, cache, 10) == (None, "no_space")
        assert owner.tier.state == "ready"
        assert owner.tier.stats["parked_bytes"] == 15 * 64 * KIB
        assert (owner.tier.room_bytes, owner.tier.free_bytes) == (64 * KIB, 0)
        assert not owner.submit(cache, "none", owner.items(cache, 30, 4), keys=owner.keys(cache, 30, 4))
        assert owner.tier.refusal == "no_space"
        owner.tier.free([runs[0] << 6 | page for page in range(4)])
        assert owner.flush() == ""
        assert outcome(owner, cache, 31)[1] == ""
        assert owner.tier.stats["write_errors"] == 1
        calls.errors.clear()
        assert not owner.submit(cache, "none", owner.items(cache, 30, 4), keys=owner.keys(cache, 30, 4))
        monkeypatch.setattr(owner.tier._backing, "_due", 0.0)
        for seed in range(100, 160):
            more = owner.items(cache, seed, 4)
            owner.wait(lambda s=seed, more=more: owner.submit(cache, s, more, keys=owner.keys(cache, s, 4)))
            owner.wait(lambda seed=seed: seed in owner.results)
            assert owner.results[seed][1] == ""
        assert owner.tier.stats["parked_bytes"] == 0
        assert owner.tier.free_bytes == 0
        assert owner.tier.check() == []
        assert owner.tier.stats["write_errors"] == 1


def test_room_that_was_found_for_a_part_of_a_slab_is_given_back_and_what_is_written_there_stays(tmp_path):
    """A file system keeps what it found before it had no more: the catalogue would have nothing left to grow into."""
    calls = Failing()
    real = calls.fallocate

    def half(fd, offset, size):
        real(fd, offset, size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = spec(GroupSpec(Kind.FULL, 1, 1, 4 * KIB))
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB) as owner:
        cache = owner.cache(one)
        runs = [owner.write(cache, seed, 4) for seed in (1, 2)]
        owner.tier.free([runs[0] << 6 | page for page in range(4)])
        assert owner.flush() == ""
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB, calls=calls) as owner:
        calls.fallocate = half
        written = 8 * 4 * KIB
        before = owner.tier.upkeep.usage()["file_bytes"]
        assert outcome(owner, owner.cache(one), 3) == (None, "no_space")
        after = owner.tier.upkeep.usage()["file_bytes"]
        assert written <= after <= before
        assert owner.read(owner.cache(one), runs[1], 2, 4) == [""] * 4


def test_closing_does_not_wait_for_a_stuck_device(tmp_path, caplog):
    """A call that never returns: close ends, says so, and leaves the folder locked."""
    calls = Failing()
    owner = Owner(tmp_path / "d", calls=calls)
    cache = owner.cache()
    owner.write(cache, 1, 4)
    real, inside, leave = calls.pwritev, threading.Event(), threading.Event()

    def pwritev(*args):
        inside.set()
        leave.wait()
        return real(*args)

    calls.pwritev = pwritev
    assert owner.submit(cache, 2, owner.items(cache, 2, 4), keys=owner.keys(cache, 2, 4))
    assert inside.wait(10)
    owner.tier.close(0.1)
    assert "stays locked" in caplog.text
    with pytest.raises(KvtierError, match="in use by process"):
        Owner(tmp_path / "d")
    leave.set()
    owner.wait(lambda: 2 in owner.results)


@contextlib.contextmanager
def no_file_beyond(size: int):
    """No file of this process can grow past this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_catalogue_that_cannot_grow_refuses_and_recovers(tmp_path):
    """LMDB's own write fails: the run is refused by name, freed cells wait, and all is well once there is room."""
    with Owner(tmp_path / "d", 1 * MIB, slab_bytes=64 * KIB) as owner:
        cache = owner.cache(spec(GroupSpec(Kind.FULL, 1, 1, 4 * KIB), page_tokens=1024))
        runs = [owner.write(cache, seed, 4) for seed in range(6)]
        size = owner.tier.stats["catalogue_bytes"]
        refused = 0
        with no_file_beyond(size):
            for seed in range(10, 16):
                refused += outcome(owner, cache, seed) == (None, "no_space")
                assert owner.tier.check() == []
            assert refused
            assert owner.tier.sick == "EFBIG"
            owner.tier.free([runs[0] << 6 | page for page in range(4)])
            said = []
            owner.tier.flush(said.append)
            owner.wait(lambda: said)
            assert owner.read(cache, runs[1], 1, 4) == [""] * 4
        assert owner.flush() == ""
        assert owner.tier.freeing_bytes == 0
        assert outcome(owner, cache, 20)[1] == ""
        assert owner.tier.state == "ready"
    with Owner(tmp_path / "d", 1 * MIB) as owner:
        assert runs[0] not in {run.id for run, _, _ in owner.runs}
        assert owner.tier.used_bytes == sum(run.pages for run, _, _ in owner.runs) * 4 * KIB


def test_a_catalogue_whose_meta_page_cannot_be_written_is_read_all_the_same(tmp_path):
    """LMDB refuses reads, too, after that: what looks at the catalogue, or loads it, goes on."""
    data = tmp_path / "d" / "catalogue" / "data.mdb"
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        runs = [owner.write(cache, seed, 4) for seed in range(50)]
        with storekit.full_for(data, os.O_DSYNC):
            assert outcome(owner, cache, 100) == (None, "no_space")
            assert owner.tier.upkeep.usage()["catalogue_free_bytes"] >= 0
        assert outcome(owner, cache, 101)[1] == ""
    with Owner(tmp_path / "d", load=False) as owner:
        said: list[str] = []
        loading = owner.tier.load()
        found = [next(loading).id]
        with storekit.full_for(data, os.O_DSYNC):
            owner.tier.set_epoch(b"b" * 32, 1, said.append)
            owner.wait(lambda: said)
            found += [run.id for run in loading]
        assert said == ["no_space"]
        assert set(runs) < set(found)


@contextlib.contextmanager
def no_descriptor_left():
    """This process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 16, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_catalogue_that_no_descriptor_is_left_for_refuses_and_recovers(tmp_path, monkeypatch):
    """Others take the last one while it is closed to be rewritten: named, hits go on, and writes once there is one."""
    with Owner(tmp_path / "d") as owner, contextlib.ExitStack() as others:
        cache = owner.cache()
        kept = owner.write(cache, 1, 4)
        real = Path.replace

        def replace(path, target):
            real(path, target)
            others.enter_context(no_descriptor_left())

        said = []
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            owner.tier.upkeep.compact(said.append)
            owner.wait(lambda: said)
        assert said == ["io"]
        assert outcome(owner, cache, 2) == (None, "io")
        assert owner.tier.sick == "EMFILE"
        assert owner.read(cache, kept, 1, 4) == [""] * 4
        others.close()
        fresh, error = outcome(owner, cache, 3)
        assert (error, owner.tier.state) == ("", "ready")
        owner.tier.upkeep.compact(said.append)
        owner.wait(lambda: said[1:])
        assert said[1] == ""
    with Owner(tmp_path / "d") as owner:
        assert [run.id for run, _, _ in owner.runs] == [kept, fresh]
        assert owner.read(cache, kept, 1, 4) + owner.read(cache, fresh, 3, 4) == [""] * 8


def test_a_tier_that_rested_while_its_file_system_turned_read_only_closes_as_ever(tmp_path):
    """It learns of it as it closes: who closes it goes on with what is left to close, and the next looks closely."""
    with faultkit.file_system(tmp_path, 64) as where:
        with Owner(where / "d", 16 * MIB) as owner:
            run = owner.write(owner.cache(), 1, 4)
            assert not faultkit.mount(f"-oremount,abort {where}")
            assert owner.read(owner.cache(), run, 1, 4) == [""] * 4
        faultkit.remount(tmp_path)
        assert (where / "d" / "lock").read_text().split() == [str(os.getpid())]
        with Owner(where / "d") as owner:
            assert owner.read(owner.cache(), run, 1, 4) == [""] * 4


def test_a_power_cut_right_after_a_start_is_not_taken_for_a_clean_end(tmp_path):
    """The device knows that somebody has the directory before anything in it changes."""
    cut = tmp_path / "cut"
    cut.mkdir()
    with faultkit.file_system(tmp_path, 64) as where:
        with Owner(where / "d", 16 * MIB):
            pass
        subprocess.run(["sync", "-f", str(where)], check=True)
        with Owner(where / "d"):
            shutil.copy(tmp_path / "image", tmp_path / "image-cut")
    assert not faultkit.mount(f"-oloop {tmp_path / 'image-cut'} {cut}")
    try:
        assert (cut / "d" / "lock").read_text().split() == [str(os.getpid())]
    finally:
        subprocess.run(["umount", str(cut)], check=True)


def test_a_tier_on_a_file_system_that_became_full_is_opened_and_served(tmp_path):
    """After a clean end, too: that somebody has the directory again takes no room."""
    with faultkit.file_system(tmp_path, 64) as where:
        with Owner(where / "d", 16 * MIB) as owner:
            run = owner.write(owner.cache(), 1, 4)
        with (where / "ballast").open("wb", 0) as ballast:
            for size in (MIB, 1):
                with contextlib.suppress(OSError):
                    while True:
                        ballast.write(bytes(size))
        assert os.statvfs(where).f_bavail == 0
        with Owner(where / "d", 16 * MIB) as owner:
            assert owner.read(owner.cache(), run, 1, 4) == [""] * 4
            assert (where / "d" / "lock").stat().st_size
        assert not (where / "d" / "lock").stat().st_size


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(where)], capture_output=True).returncode:
        pytest.skip("may not mount")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_full_file_system_is_refused_by_name(small_disk):
    """Capacity was promised that the file system does not have: named, hits go on, evict-then-write goes on."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 * MIB))
    with Owner(small_disk / "d", 64 * MIB, slab_bytes=256 * KIB) as owner:
        cache = owner.cache()
        runs, refused = {}, 0
        for seed in range(400):
            if not owner.submit(cache, seed, owner.items(cache, seed, 4), keys=owner.keys(cache, seed, 4)):
                break
            owner.wait(lambda at=seed: at in owner.results)
            run, error = owner.results.pop(seed)
            if run is None:
                assert error == "no_space"
                refused += 1
            else:
                runs[run] = seed
        assert refused > 0
        assert owner.tier.check() == []
        for run, seed in runs.items():
            assert owner.read(cache, run, seed, 4) == [""] * 4
        gone = next(iter(runs))
        owner.tier.free([gone << 6 | page for page in range(4)])
        assert owner.flush() == ""
        assert outcome(owner, cache, 1000)[1] == ""


@pytest.mark.skipif(not powercut.works(), reason="needs strace, and leave to trace")
@pytest.mark.parametrize(
    ("call", "when"),
    [("pwrite64", n) for n in (3, 9, 14, 15, 16)]
    + [("fdatasync", n) for n in (1, 3, 9)]
    + [("writev", n) for n in (1, 3)],
)
def test_failures_inside_lmdb_are_survived(tmp_path, call, when):
    """EIO in any of LMDB's calls, its meta page included: refused by name, then it works again; no promise breaks."""
    folder = tmp_path / "d"
    with Owner(folder, CAPACITY):
        pass
    data = folder / "catalogue" / "data.mdb"
    words = ["strace", "-f", "-o", str(tmp_path / "log"), "-P", str(data), "-e", f"trace={call}",
             "-e", f"inject={call}:error=EIO:when={when}",
             sys.executable, "-m", "tests.diskwriter_slow", str(folder), "12"]  # fmt: skip
    said = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    promises = Promises()
    promises.hear("".join(line for line in said.splitlines(keepends=True) if line[0] == "+"))
    assert "INJECTED" in (tmp_path / "log").read_text()
    assert len(promises.runs) >= 11, said
    with Owner(folder, CAPACITY) as owner:
        promises.kept_by(owner)
        assert owner.cache(SPEC) == 1
        owner.write(1, 500, 2)
