"""Brings the catalogue of an older version up to date, in one transaction: a power cut leaves the old one or the new.

Format 1 named runs by depth and number; format 2 has their parent's and first page's digest in between, so that a
prefix is found while the rest still loads.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import lmdb

from kvtier.tiers.records import (
    FORMAT,
    VERSION_KEY,
    Damaged,
    Version,
    decode_number,
    decode_version,
    encode_number,
    encode_version,
    unseal,
)
from kvtier.tiers.runrecord import rename_run

log = logging.getLogger("kvtier.disk")

OLDEST: Final = 1
"""Older formats are set aside."""
ROOM: Final = 3
"""The map must hold the old records, the new ones and what lies between."""
_OLD_KEY: Final = struct.Struct(">IQ")
Dbs = Mapping[bytes, Any]


def upgrade(env: lmdb.Environment, dbs: Dbs) -> bool:
    """Upgrade where that is due; whether it was. Raises lmdb.Error, and then nothing has changed."""
    with env.begin() as txn:
        found = txn.get(VERSION_KEY, db=dbs[b"meta"])
    if found is None or decode_version(bytes(found)).format == FORMAT:
        return False
    version = decode_version(bytes(found))
    with env.begin(write=True) as txn:
        for old in range(version.format, FORMAT):
            _STEPS[old](txn, dbs)
        now = Version(FORMAT, version.slab_bytes, version.next_cache)
        txn.put(VERSION_KEY, encode_version(now), db=dbs[b"meta"])
    log.warning("the disk catalogue was upgraded from format %d to %d", version.format, FORMAT)
    return True


def _to_2(txn: lmdb.Transaction, dbs: Dbs) -> None:
    """Runs and their masks under the new keys; what is damaged goes."""
    renamed: dict[bytes, bytes] = {}
    for key, value in _drained(txn, dbs[b"runs"]):
        try:
            depth, number = _OLD_KEY.unpack(key)
            fresh, sealed = rename_run(unseal(key, value), depth, number)
        except (Damaged, struct.error):
            log.warning("run %s of the disk catalogue is damaged and dropped", key.hex())
            continue
        renamed[key] = fresh
        txn.put(fresh, sealed, db=dbs[b"runs"])
    for key, value in _drained(txn, dbs[b"live"]):
        if key not in renamed:
            continue
        try:
            live = encode_number(renamed[key], decode_number(key, value))
        except Damaged:  # which of its pages are stored is not known
            txn.delete(renamed[key], db=dbs[b"runs"])
            continue
        txn.put(renamed[key], live, db=dbs[b"live"])


def _drained(txn: lmdb.Transaction, db: Any) -> Iterator[tuple[bytes, bytes]]:
    """Every record of format 1, each deleted before it is given."""
    with txn.cursor(db) as cursor:
        keys = [bytes(key) for key in cursor.iternext(keys=True, values=False)]
    for key in keys:
        value = txn.get(key, db=db)
        txn.delete(key, db=db)
        yield key, bytes(value or b"")


_STEPS: Final[dict[int, Callable[[lmdb.Transaction, Dbs], None]]] = {1: _to_2}
