"""Catalogues of older versions: upgraded whole or not at all; those too old are set aside untouched.

`python -m tests.test_disk_upgrade FILE` makes what tests/catalogues has of each format: do it before a format changes.
"""

from __future__ import annotations

import struct
import sys
import tarfile
import tempfile
from pathlib import Path

import lmdb
import pytest

from kvtier.identity import GroupSpec
from kvtier.tiers import upgrade
from kvtier.tiers.records import (
    FORMAT,
    VERSION_KEY,
    Version,
    decode_number,
    decode_version,
    encode_number,
    encode_version,
    seal,
    unseal,
)
from kvtier.types import Kind, KvtierError
from tests.diskkit import KIB, MIB, Owner, spec

MADE = Path(__file__).parent / "catalogues"
SMALL = spec(GroupSpec(Kind.FULL, 1, 1, 1000))
OLD_KEY, NEW_KEY = struct.Struct(">IQ"), struct.Struct(">I8sQ")


def age(folder: Path, number: int = 1) -> None:
    """Make a catalogue what version 1 would have written."""
    with lmdb.open(str(folder / "catalogue"), max_dbs=16) as env, env.begin(write=True) as txn:
        meta, runs, live = (env.open_db(name, txn=txn, create=False) for name in (b"meta", b"runs", b"live"))
        version = decode_version(txn.get(VERSION_KEY, db=meta))
        txn.put(VERSION_KEY, encode_version(Version(number, version.slab_bytes, version.next_cache)), db=meta)
        for db in (runs, live):
            for key, value in [(bytes(key), bytes(value)) for key, value in txn.cursor(db)]:
                depth, _, run = NEW_KEY.unpack(key)
                old = OLD_KEY.pack(depth, run)
                body = (
                    seal(old, bytes(unseal(key, value)))
                    if db is runs
                    else encode_number(old, decode_number(key, value))
                )
                txn.delete(key, db=db)
                txn.put(old, body, db=db)


def format_of(folder: Path) -> int:
    """The format on record."""
    with lmdb.open(str(folder), max_dbs=16) as env, env.begin() as txn:
        return decode_version(txn.get(VERSION_KEY, db=env.open_db(b"meta", txn=txn, create=False))).format


def filled(folder: Path) -> dict[int, tuple[int, int]]:
    """A tier with runs, some of them trimmed: seed and pages by run."""
    with Owner(folder, 4 * MIB) as owner:
        cache = owner.cache()
        runs = {owner.write(cache, seed, 4, depth=seed % 3 * 4): (seed, 4) for seed in range(12)}
        for run in list(runs)[::3]:
            owner.tier.free([run << 6 | 3])
            runs[run] = (runs[run][0], 3)
        assert owner.flush() == ""
    return runs


def kept(folder: Path, runs: dict[int, tuple[int, int]]) -> None:
    """All of it is there, bit for bit, and nothing else."""
    with Owner(folder, 4 * MIB) as owner:
        assert len(owner.runs) == len(runs)
        assert owner.tier.stats["set_aside"] == owner.tier.stats["damaged_runs"] == 0
        for run, (seed, pages) in runs.items():
            assert owner.read(owner.cache(), run, seed, 4) == [""] * pages + ["gone"] * (4 - pages)


def test_a_catalogue_of_version_1_is_upgraded(tmp_path, caplog):
    """Every run and every mask, once; what is written afterwards is found beside it."""
    runs = filled(tmp_path / "d")
    age(tmp_path / "d")
    kept(tmp_path / "d", runs)
    assert "upgraded from format 1 to 2" in caplog.text
    assert format_of(tmp_path / "d" / "catalogue") == FORMAT
    caplog.clear()
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        run = owner.write(owner.cache(), 500, 4)
        assert run not in runs
    kept(tmp_path / "d", runs | {run: (500, 4)})
    assert "upgraded" not in caplog.text


def test_an_upgrade_that_fails_changes_nothing(tmp_path, monkeypatch):
    """An error in the middle leaves the old catalogue, which the next start upgrades."""
    runs = filled(tmp_path / "d")
    age(tmp_path / "d")
    real, calls = upgrade.rename_run, []

    def fail(*args):
        calls.append(args)
        if len(calls) == 7:
            raise lmdb.DiskError("injected")
        return real(*args)

    monkeypatch.setattr(upgrade, "rename_run", fail)
    with pytest.raises(KvtierError, match=r"disk\.path.*injected"):
        Owner(tmp_path / "d", 4 * MIB)
    assert format_of(tmp_path / "d" / "catalogue") == 1
    monkeypatch.setattr(upgrade, "rename_run", real)
    kept(tmp_path / "d", runs)


def test_a_damaged_run_does_not_stop_an_upgrade(tmp_path, caplog):
    """It is dropped by name; the others are there."""
    runs = filled(tmp_path / "d")
    age(tmp_path / "d")
    with lmdb.open(str(tmp_path / "d" / "catalogue"), max_dbs=16) as env, env.begin(write=True) as txn:
        db = env.open_db(b"runs", txn=txn, create=False)
        key, value = next(iter(txn.cursor(db)))
        key, value = bytes(key), bytearray(value)
        value[20] ^= 1
        txn.put(key, bytes(value), db=db)
    del runs[OLD_KEY.unpack(key)[1]]
    kept(tmp_path / "d", runs)
    assert f"run {key.hex()} of the disk catalogue is damaged" in caplog.text


def test_a_catalogue_older_than_any_that_can_be_upgraded_is_set_aside(tmp_path, caplog):
    """Named, untouched, and the tier starts empty."""
    filled(tmp_path / "d")
    age(tmp_path / "d", 0)
    raw = (tmp_path / "d" / "catalogue" / "data.mdb").read_bytes()
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        assert owner.runs == []
    assert (tmp_path / "d" / "catalogue.format0-1" / "data.mdb").read_bytes() == raw
    assert "format 0" in caplog.text


def make(file: Path) -> None:
    """The folder of a disk tier of the format of today, in a tar file: four runs of two pages, the last trimmed."""
    with tempfile.TemporaryDirectory() as name:
        with Owner(Path(name) / "d", 1 * MIB, slab_bytes=64 * KIB) as owner:
            cache = owner.cache(SMALL)
            runs = [owner.write(cache, seed, 2, depth=seed % 3 * 4) for seed in range(1, 5)]
            owner.tier.free([runs[-1] << 6 | 1])
            assert owner.flush() == ""
        with tarfile.open(file, "w:gz") as tar:
            tar.add(Path(name) / "d", ".")


def test_there_is_a_catalogue_of_each_format_that_is_read() -> None:
    """Written by the code of its time: whoever raises the format keeps one of the old."""
    numbers = range(upgrade.OLDEST, FORMAT + 1)
    assert {path.name for path in MADE.iterdir()} == {f"format{number}.tar.gz" for number in numbers}


@pytest.mark.parametrize("file", sorted(MADE.iterdir()), ids=lambda file: file.name)
def test_a_catalogue_as_its_own_version_wrote_it_is_served_whole(tmp_path, file):
    """Every page bit for bit, nothing set aside, and what is written now is beside it after another start."""
    with tarfile.open(file) as tar:
        tar.extractall(tmp_path / "d", filter="data")
    for seed in (500, 501):
        with Owner(tmp_path / "d", 1 * MIB) as owner:
            runs = sorted(run.id for run, _, _ in owner.runs)
            cache = owner.cache(SMALL)
            assert cache == 1
            for seed_of, run in enumerate(runs[:4], 1):
                assert owner.read(cache, run, seed_of, 2) == ["", "gone" if seed_of == 4 else ""]
            assert len(runs) == 4 + seed - 500
            assert owner.tier.stats["set_aside"] == owner.tier.stats["damaged_runs"] == 0
            owner.write(cache, seed, 2)
    assert format_of(tmp_path / "d" / "catalogue") == FORMAT


if __name__ == "__main__":
    make(Path(sys.argv[1]))
