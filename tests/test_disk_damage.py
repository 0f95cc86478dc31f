"""Damage: flipped, cut, torn, foreign or future files cost what they hold and never the daemon."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys

import lmdb
import msgspec
import pytest

from kvtier.tiers.records import FORMAT, VERSION_KEY, Version, run_number, seal
from kvtier.tiers.scan import scan
from tests.diskkit import KIB, Owner, spec
from tests.test_disk_crash import ROOT


def make(folder, runs: int = 6) -> dict[int, int]:
    """A tier with runs of 4 pages; seed by run id."""
    with Owner(folder) as owner:
        cache = owner.cache()
        return {owner.write(cache, seed, 4): seed for seed in range(runs)}


def edit(folder, db: bytes, key, value: bytes | None) -> int:
    """Change one value of the catalogue from outside; key None is the first. The run of the key, if it is one's."""
    with lmdb.open(str(folder / "catalogue"), max_dbs=16) as env, env.begin(write=True) as txn:
        handle = env.open_db(db, txn=txn)
        if key is None:
            key = next(iter(txn.cursor(handle)))[0]
        if value is None:
            value = bytearray(txn.get(key, db=handle))
            value[len(value) // 2] ^= 4
        txn.put(key, bytes(value), db=handle)
        return run_number(bytes(key))


def still_works(owner: Owner) -> None:
    """The tier stores and serves."""
    cache = owner.cache()
    run = owner.write(cache, 777, 4)
    assert owner.read(cache, run, 777, 4) == [""] * 4


def test_flipped_payload_is_a_miss_of_that_page_only(tmp_path):
    """One bit in one page: that page says checksum, is counted, the others are whole."""
    runs = make(tmp_path / "d")
    run, seed = next(iter(runs.items()))
    with Owner(tmp_path / "d") as owner:
        cell = next(r.cells[0][2] for r, _, _ in owner.runs if r.id == run)
    with (tmp_path / "d" / "extents").open("r+b") as file:
        file.seek(cell * 4096 + 5000)
        byte = file.read(1)[0]
        file.seek(cell * 4096 + 5000)
        file.write(bytes([byte ^ 0x10]))
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        assert owner.read(cache, run, seed, 4) == ["", "", "checksum", ""]
        assert owner.tier.stats["checksum_failures"] == 1
        still_works(owner)


@pytest.mark.parametrize("keep", [0, 1, 100 * KIB])
def test_a_cut_extent_file_costs_what_lay_there(tmp_path, keep):
    """Whatever the file lost is a miss, and the file has its full size again."""
    runs = make(tmp_path / "d")
    size = (tmp_path / "d" / "extents").stat().st_size
    os.truncate(tmp_path / "d" / "extents", keep)
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        said = [word for run, seed in runs.items() for word in owner.read(cache, run, seed, 4)]
        assert said[: keep // (16 * KIB)] == [""] * (keep // (16 * KIB))
        assert set(said[-(-keep // (16 * KIB)) :]) == {"checksum"}
        still_works(owner)
    assert (tmp_path / "d" / "extents").stat().st_size == size


def test_extents_cut_under_a_running_tier_say_io(tmp_path):
    """A file that ends early is an error of that page, not of its neighbours in the same call."""
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        run = owner.write(cache, 1, 4)
        os.truncate(tmp_path / "d" / "extents", 2 * 16 * KIB + 4 * KIB)
        assert owner.read(cache, run, 1, 4) == ["", "", "io", "io"]
        assert owner.tier.stats["io_errors"] == 2


def test_missing_extents_cost_their_pages(tmp_path):
    """The catalogue without its payload: every page is a miss."""
    runs = make(tmp_path / "d")
    (tmp_path / "d" / "extents").unlink()
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        assert {w for run, seed in runs.items() for w in owner.read(cache, run, seed, 4)} == {"checksum"}
        still_works(owner)


@pytest.mark.parametrize("db", [b"runs", b"live"])
def test_a_damaged_record_costs_its_run(tmp_path, db):
    """One flipped bit in a run's record or mask: that run is gone and counted, its cells are free, the rest loads."""
    runs = make(tmp_path / "d")
    with Owner(tmp_path / "d") as owner:
        owner.tier.free([min(runs) << 6 | 3])
        assert owner.flush() == ""
    hurt = edit(tmp_path / "d", db, None, None)
    with Owner(tmp_path / "d") as owner:
        assert {run.id for run, _, _ in owner.runs} == set(runs) - {hurt}
        assert owner.tier.stats["damaged_runs"] == 1
        kept = sum(4 - (run == min(runs)) for run in runs if run != hurt)
        assert owner.tier.used_bytes == kept * 16 * KIB
        still_works(owner)
    with Owner(tmp_path / "d") as owner:
        assert owner.tier.stats["damaged_runs"] == 0


def test_a_damaged_cache_record_costs_its_cache_and_says_so(tmp_path, caplog):
    """Its runs are gone, counted, and named once with their number; another cache's runs are served."""
    make(tmp_path / "d")
    with Owner(tmp_path / "d") as owner:
        kept = owner.write(owner.cache(spec(model="other")), 50, 4)
    edit(tmp_path / "d", b"caches", None, None)
    with Owner(tmp_path / "d") as owner:
        assert [run.id for run, _, _ in owner.runs] == [kept]
        assert [record.spec.model for record in owner.tier.caches().values()] == ["other"]
        assert owner.tier.used_bytes == 4 * 16 * KIB
        assert owner.tier.stats["damaged_runs"] == 6
        assert caplog.text.count("has no sound record: its 6 runs are dropped") == 1
        still_works(owner)
    with Owner(tmp_path / "d") as owner:
        assert owner.tier.stats["damaged_runs"] == 0


def test_what_is_left_of_a_dropped_cache_is_no_loss(tmp_path, caplog):
    """Runs without a cache, as a crash amid a drop leaves them, are freed and neither counted nor complained of."""
    make(tmp_path / "d")
    with lmdb.open(str(tmp_path / "d" / "catalogue"), max_dbs=16) as env, env.begin(write=True) as txn:
        handle = env.open_db(b"caches", txn=txn)
        txn.delete(next(iter(txn.cursor(handle)))[0], db=handle)
    with Owner(tmp_path / "d") as owner:
        assert owner.runs == []
        assert owner.tier.used_bytes == owner.tier.stats["damaged_runs"] == 0
        assert not caplog.records


def test_runs_that_share_cells_are_not_both_kept(tmp_path):
    """A record put back from outside after its cells were given away is dropped."""
    make(tmp_path / "d", 2)
    with lmdb.open(str(tmp_path / "d" / "catalogue"), max_dbs=16) as env, env.begin() as txn:
        db = env.open_db(b"runs", txn=txn)
        key, value = next(iter(txn.cursor(db)))
    with Owner(tmp_path / "d") as owner:
        owner.tier.forget(run_number(bytes(key)))
        owner.flush()
        owner.write(owner.cache(), 50, 4)
    edit(tmp_path / "d", b"runs", key, value)
    with Owner(tmp_path / "d") as owner:
        assert len(owner.runs) == 2
        assert owner.tier.stats["damaged_runs"] == 1


def asides(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("catalogue."))


@pytest.mark.parametrize("damage", ["garbage", "cut", "empty", "zero meta", "zero middle"])
def test_a_torn_catalogue_is_set_aside(tmp_path, damage, caplog):
    """The daemon starts empty, keeps the torn one under a new name, counts it, says so, and stores again."""
    make(tmp_path / "d", 60)
    data = tmp_path / "d" / "catalogue" / "data.mdb"
    raw = bytearray(data.read_bytes())
    if damage == "garbage":
        raw[:] = random.Random(1).randbytes(len(raw))
    elif damage == "cut":
        del raw[len(raw) // 3 :]
    elif damage == "empty":
        raw.clear()
    elif damage == "zero meta":
        raw[:8192] = bytes(8192)
    else:
        raw[8192 : 8192 * 20] = bytes(8192 * 19)
    data.write_bytes(raw)
    if damage == "empty":  # LMDB takes an empty file for a new one: nothing is lost by using it
        with Owner(tmp_path / "d") as owner:
            assert owner.runs == []
            still_works(owner)
        return
    with Owner(tmp_path / "d") as owner:
        assert owner.runs == []
        assert owner.tier.stats["set_aside"] == 1
        assert asides(tmp_path / "d") == ["catalogue.damaged-1"]
        assert (tmp_path / "d" / "catalogue.damaged-1" / "data.mdb").read_bytes() == raw
        assert "set aside as catalogue.damaged-1" in caplog.text
        assert owner.tier.free_bytes == owner.tier.capacity_bytes
        still_works(owner)
    with Owner(tmp_path / "d") as owner:
        assert len(owner.runs) == 1
        assert owner.tier.stats["set_aside"] == 0


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 200))])
def test_random_flips_never_stop_the_daemon(tmp_path, seed):
    """Whatever bits flip in the catalogue: it opens, checks clean, stores, and serves nothing wrong."""
    runs = make(tmp_path / "d", 30)
    data = tmp_path / "d" / "catalogue" / "data.mdb"
    raw, rng = bytearray(data.read_bytes()), random.Random(seed)
    for _ in range(rng.choice([1, 1, 5, 50])):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    data.write_bytes(raw)
    with Owner(tmp_path / "d") as owner:
        known = set(owner.tier.caches())
        for run, _, _ in owner.runs:
            assert run.cache in known
            if run.id in runs:
                assert set(owner.read(run.cache, run.id, runs[run.id], 4)) <= {"", "gone", "checksum"}
        still_works(owner)


@pytest.mark.parametrize("value", [Version(FORMAT + 1, 1 << 20, 1), {"format": 99, "news": ["x"]}])
def test_a_future_catalogue_is_left_as_it_is(tmp_path, value, caplog):
    """Its format is named, the files stay untouched under a new name, and the tier starts empty."""
    make(tmp_path / "d")
    edit(tmp_path / "d", b"meta", VERSION_KEY, seal(VERSION_KEY, msgspec.msgpack.encode(value)))
    raw = (tmp_path / "d" / "catalogue" / "data.mdb").read_bytes()
    number = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=Version).format
    with Owner(tmp_path / "d") as owner:
        assert owner.runs == []
        assert asides(tmp_path / "d") == [f"catalogue.format{number}-1"]
        assert (tmp_path / "d" / f"catalogue.format{number}-1" / "data.mdb").read_bytes() == raw
        assert f"format {number}; this daemon reads {FORMAT}" in caplog.text
        still_works(owner)


def test_a_foreign_catalogue_is_left_as_it_is(tmp_path):
    """Another program's LMDB is not touched."""
    (tmp_path / "d" / "catalogue").mkdir(parents=True)
    with lmdb.open(str(tmp_path / "d" / "catalogue")) as env, env.begin(write=True) as txn:
        txn.put(b"theirs", b"data")
    with Owner(tmp_path / "d") as owner:
        assert asides(tmp_path / "d") == ["catalogue.foreign-1"]
        still_works(owner)
    with lmdb.open(str(tmp_path / "d" / "catalogue.foreign-1")) as env, env.begin() as txn:
        assert txn.get(b"theirs") == b"data"


@pytest.mark.parametrize("key", [VERSION_KEY, b"b" * 32])
def test_a_damaged_version_or_epoch_sets_the_catalogue_aside(tmp_path, key):
    """An epoch that started over could serve what a reset has freed."""
    make(tmp_path / "d")
    with Owner(tmp_path / "d") as owner:
        said = []
        owner.tier.set_epoch(b"b" * 32, 3, said.append)
        owner.wait(lambda: said)
    edit(tmp_path / "d", b"meta" if key == VERSION_KEY else b"epochs", key, None)
    with Owner(tmp_path / "d") as owner:
        assert asides(tmp_path / "d") == ["catalogue.damaged-1"]
        still_works(owner)


KINDS = ("file", "folder", "pipe", "link to a file", "link to a folder", "dangling link")
WRONG = [
    (name, kind)
    for name in ("catalogue", "catalogue/data.mdb", "catalogue/lock.mdb", "extents", "lock")
    for kind in KINDS
    if kind != ("folder" if name == "catalogue" else "file")
]


def put_instead(path, kind: str, elsewhere) -> None:
    """Put something else in the place of a file or folder of the tier; links point elsewhere."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "file":
        path.write_bytes(b"theirs")
    elif kind == "folder":
        path.mkdir()
        (path / "theirs").touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a file":
        elsewhere.write_bytes(b"theirs")
        path.symlink_to(elsewhere)
    elif kind == "link to a folder":
        elsewhere.mkdir()
        path.symlink_to(elsewhere)
    else:
        path.symlink_to(elsewhere)


@pytest.mark.parametrize(("name", "kind"), WRONG)
def test_what_is_of_the_wrong_kind_is_set_aside(tmp_path, name, kind, caplog):
    """Renamed as it is, counted and named; a link is not followed; what is sound beside it is used."""
    runs = make(tmp_path / "d")
    path, elsewhere = tmp_path / "d" / name, tmp_path / "elsewhere"
    put_instead(path, kind, elsewhere)
    with Owner(tmp_path / "d") as owner:
        assert owner.tier.stats["set_aside"] == 1
        assert f"set aside as {path.name}.foreign-1" in caplog.text
        kept = {run.id for run, _, _ in owner.runs}
        assert kept == (set() if name in {"catalogue", "catalogue/data.mdb"} else set(runs))
        still_works(owner)
    aside = path.with_name(f"{path.name}.foreign-1")
    assert aside.is_symlink() == ("link" in kind)
    assert elsewhere.exists() == kind.startswith("link")
    if kind == "link to a file":
        assert elsewhere.read_bytes() == b"theirs"
    if kind == "link to a folder":
        assert list(elsewhere.iterdir()) == []
    with Owner(tmp_path / "d") as owner:
        assert owner.tier.stats["set_aside"] == 0


@pytest.mark.parametrize("where", ["/proc/kvtier", "taken"])
def test_a_folder_that_cannot_be_written_is_refused_with_its_field(tmp_path, where):
    """The daemon ends with 1 and says which setting is wrong, and how."""
    (tmp_path / "taken").touch()
    path = str(tmp_path / where)
    words = ["--socket-path", str(tmp_path / "s"), "--host-bytes=16MiB", f"--disk-path={path}", "--disk-bytes=4MiB"]
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.daemon", *words], env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvtierd: ")
    assert "disk.path" in last
    assert "expected a folder that can be written to" in last
    assert path in last


def test_few_catalogues_set_aside_are_kept(tmp_path):
    """A folder that keeps being damaged does not fill the disk."""
    for _ in range(5):
        make(tmp_path / "d", 1)
        (tmp_path / "d" / "catalogue" / "data.mdb").write_bytes(b"x" * 9000)
    make(tmp_path / "d", 1)
    assert asides(tmp_path / "d") == [f"catalogue.damaged-{n}" for n in (3, 4, 5)]


def test_a_deleted_catalogue_starts_empty(tmp_path):
    """Without names there are no pages, and every cell is free."""
    make(tmp_path / "d")
    shutil.rmtree(tmp_path / "d" / "catalogue")
    with Owner(tmp_path / "d") as owner:
        assert owner.runs == []
        assert owner.tier.free_bytes == owner.tier.capacity_bytes
        still_works(owner)


def test_a_damaged_lock_file_is_no_obstacle(tmp_path):
    """LMDB's reader table is rebuilt."""
    runs = make(tmp_path / "d")
    (tmp_path / "d" / "catalogue" / "lock.mdb").write_bytes(b"\xff" * 8192)
    with Owner(tmp_path / "d") as owner:
        assert {run.id for run, _, _ in owner.runs} == set(runs)
        still_works(owner)


def test_the_scan_changes_nothing(tmp_path):
    """Reading a catalogue through, trial write included, leaves every byte as it was."""
    make(tmp_path / "d")
    before = (tmp_path / "d" / "catalogue" / "data.mdb").read_bytes()
    assert scan(tmp_path / "d" / "catalogue") == (True, "")
    assert (tmp_path / "d" / "catalogue" / "data.mdb").read_bytes() == before


def test_another_capacity_keeps_what_fits(tmp_path):
    """A grown tier has more room; a shrunk one drops the runs beyond its end, never its limit."""
    make(tmp_path / "d", 30)
    with Owner(tmp_path / "d", 8 << 20) as owner:
        assert len(owner.runs) == 30
        assert owner.tier.capacity_bytes == 8 << 20
    with Owner(tmp_path / "d", 1 << 20) as owner:
        assert 0 < len(owner.runs) <= 16
        assert owner.tier.capacity_bytes == (tmp_path / "d" / "extents").stat().st_size == 1 << 20
        still_works(owner) if owner.tier.free_bytes >= 64 * KIB else None
