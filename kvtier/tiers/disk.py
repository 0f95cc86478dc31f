"""The disk tier: runs of pages in an extent file, named by a catalogue, durable before anybody is told so.

All metadata belongs to the thread that made the tier (the event loop); `read` alone is called from other threads.
The order of a write: payload -> fdatasync of the extents -> commit of the catalogue and its sync -> `done`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kvtier.identity import CacheSpec
from kvtier.tiers.backing import Backing
from kvtier.tiers.cells import BLOCK
from kvtier.tiers.commits import Commits, Op, unheard
from kvtier.tiers.completions import Completions
from kvtier.tiers.extentfile import Calls
from kvtier.tiers.folder import let_go, open_folder
from kvtier.tiers.gauges import Gauges
from kvtier.tiers.health import Health
from kvtier.tiers.lanes import Lanes
from kvtier.tiers.layouts import packed_layouts
from kvtier.tiers.ledger import Freed, Ledger
from kvtier.tiers.loading import load_runs
from kvtier.tiers.packing import Frame, Packing, repacked
from kvtier.tiers.records import (
    PAGE_BITS,
    PAGE_MASK,
    VERSION_KEY,
    CacheRecord,
    Change,
    Damaged,
    Item,
    Placed,
    Run,
    Version,
    View,
    cache_key,
    check_items,
    encode_cache,
    encode_number,
    encode_version,
    name_of,
    run_number,
    run_prefix,
)
from kvtier.tiers.relocate import Relocator
from kvtier.tiers.runrecord import encode_run, parse
from kvtier.tiers.transfers import Reads, Writing
from kvtier.tiers.upkeep import Upkeep
from kvtier.types import RUN_PAGES, Code, bad

__all__ = ["CacheRecord", "DiskTier", "Item", "Run"]

log = logging.getLogger("kvtier.disk")

CHUNK: Final = 128
"""Runs handled before the owner's thread is given back: about a millisecond."""
CLOSE_S: Final = 10.0

Done = Callable[[int | None, str], None]


class DiskTier(Gauges):
    """One directory of stored runs; `load` comes first."""

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        *,
        post: Callable[..., Any],
        slab_bytes: int = 64 << 20,
        threads: int = 4,
        queue_bytes: int = 256 << 20,
        batch_bytes: int = 64 << 20,
        linger_s: float = 0.005,
        direct: bool = True,
        sync: bool = True,
        compress: bool = False,
        calls: Calls | None = None,
    ) -> None:
        self.path = Path(path)
        self._lock, self._catalogue, self._extents, self._cells, set_aside = open_folder(
            self.path, capacity_bytes, slab_bytes, direct=direct, sync=sync, calls=calls
        )
        self._post = post
        self._queue_bytes = queue_bytes
        self._compress = compress
        self._packing: set[Writing] = set()
        self._remember(set_aside)
        self._lanes = Lanes(threads, "kvtier-disk")
        self._reads = Reads(self._ledger.find, self._extents, self._lanes, self._health.count)
        self._commits = Commits(
            self._catalogue,
            self._extents,
            self._completions.deliver,
            batch_bytes=batch_bytes,
            linger_s=linger_s,
            sync=sync,
        )
        self._backing = Backing(self._cells, self._extents, self._lanes, post)
        self._relocator = Relocator(
            self._ledger, self._catalogue, self._extents, self._lanes, self._reads, self._commits, post
        )
        self.upkeep = Upkeep(
            self._ledger, self._catalogue, self._extents, self._lanes, self._relocator, self._renew, post
        )

    def _remember(self, set_aside: int) -> None:
        """The state in memory, as far as it is known before the runs are loaded."""
        caches, damaged = self._catalogue.caches()
        self._strays = [Change(b"caches", key, None) for key in damaged]
        self._ledger = Ledger(self._cells, caches, self._catalogue.version.next_cache)
        self._epochs = self._catalogue.epochs()
        self._queued = self._heard = 0
        self._loaded = self._closing = False
        self._early: set[int] = set()  # runs that were looked up before their turn in loading came
        self._completions = Completions(self._post, self._settled)
        self._health = Health(set_aside=set_aside)
        self.refusal = ""
        """Why the last `write` said no: loading, no_space, busy or closing."""

    # -- caches and epochs --------------------------------------------------------------------------------------

    def open_cache(self, cache_id: bytes, base_id: bytes, scope: str, epoch: int, spec: CacheSpec) -> int:
        """The number of a cache here, the same as before if it is known; durable before any run of it."""
        for number, record in self._ledger.caches.items():
            if record.cache_id == cache_id:
                return number
        record = CacheRecord(cache_id, base_id, scope, epoch, spec)
        number = self._ledger.add_cache(record)
        key = cache_key(number)
        now = self._catalogue.version
        version = encode_version(Version(now.format, now.slab_bytes, self._ledger.next_cache))
        self._submit([Change(b"caches", key, encode_cache(key, record)), Change(b"meta", VERSION_KEY, version)])
        return number

    def drop_cache(self, number: int) -> None:
        """Free all its runs, a few at a time; no page of it may be in a read, and the number never returns."""
        self._ledger.drop_cache(number)
        self._submit([Change(b"caches", cache_key(number), None)])
        self._drop_some(number)

    def _drop_some(self, number: int) -> None:
        """Free the next few runs of a dropped cache; what a restart interrupts, loading finishes."""
        runs = [self._ledger.runs[run] for run in islice(self._ledger.of_cache.get(number, ()), CHUNK)]
        self._free([(run.id, run.live) for run in runs])
        if self._ledger.of_cache.get(number) and not self._closing:
            self._post(self._drop_some, number)

    def epoch(self, base_id: bytes) -> int:
        """The durable epoch of a base id; 0 where none was ever set."""
        return self._epochs.get(base_id, 0)

    def set_epoch(self, base_id: bytes, epoch: int, done: Callable[[str], None]) -> None:
        """Record an epoch; `done` gets an empty string once it is durable, or an error code."""

        def finish(error: str) -> None:
            if not error:
                self._epochs[base_id] = epoch
            done(error)

        self._submit([Change(b"epochs", base_id, encode_number(base_id, epoch))], finish, keep=False, urgent=True)

    def load(self) -> Iterator[Run]:
        """Every stored run, parents before children; nothing can be written before this has ended.

        Cut it into slices as you like; `free` and `forget` may be called in between. The caller clears the keys and
        chains of each run.
        """
        yield from load_runs(self._catalogue, self._ledger, self._health, self._strays, self._early)
        self._early.clear()
        self._cells.loaded()
        self._loaded = True
        if self._strays:
            self._submit(self._strays)

    def seek(self, cache: int, depth: int, parent: bytes, first: bytes) -> list[Run]:
        """While loading: runs of a cache that begin with this page key, at this depth below this parent.

        `load` passes over what was found here.
        """
        if self._loaded:
            return []
        name = name_of(parent, first)
        found = []
        for key, value, mask in self._catalogue.runs_at(run_prefix(depth, name)):
            number = run_number(key)
            if number not in self._early and number not in self._ledger.runs:
                with contextlib.suppress(Damaged):  # load will meet it
                    if run := self._ledger.restore(key, parse(key, value), mask, cache, parent, first):
                        self._early.add(number)
                        found.append(run)
        return found

    def forget(self, run_id: int) -> None:
        """Free a whole run, for which the index has no place."""
        if run := self._ledger.runs.get(run_id):
            self._free([(run_id, run.live)])

    # -- writing ------------------------------------------------------------------------------------------------

    def write(
        self, cache: int, parent: bytes, depth: int, keys: bytes, chains: bytes, items: Sequence[Item], done: Done
    ) -> bool:
        """Store a run; `done(run id, "")` once it is durable, else `done(None, error code)`.

        False, and no more, where `refusal` says why: no_space (free something, wait for `flush`, ask again),
        busy (too much is queued), loading, closing. The bytes must stay as they are until `done`.
        Parents are written before their children; if a parent's write fails, its children's fail too.
        """
        layouts = self._ledger.layouts(cache)
        stride = self._ledger.caches[cache].spec.stride
        pages = len(keys) // stride
        if not 1 <= pages <= RUN_PAGES or len(keys) % stride:
            raise bad("keys", f"1..{RUN_PAGES} keys of {stride} bytes", len(keys))
        check_items(items, pages, len(layouts))
        size = sum(layouts[item.group].blocks * layouts[item.group].parts for item in items) * BLOCK
        self.refusal = self._refuse(size)
        if self.refusal:
            return False
        self._backing.look()
        begun = self._ledger.begin(cache, pages, items)
        if begun is None:
            self._relocator.make_room(self._ledger.short(cache, items))
            self.refusal = Code.NO_SPACE.value
            return False
        run, placed = begun
        run.parent, run.depth, run.keys, run.chains = parent, depth, keys, chains
        run.name = name_of(parent, keys[:stride])
        self._send(run, placed, items, size, done)
        return True

    def _refuse(self, size: int) -> str:
        if self._closing:
            return Code.CLOSING.value
        if not self._loaded:
            return "loading"
        return Code.BUSY.value if self.queue_full(size) else ""

    def _send(self, run: Run, placed: list[Placed], items: Sequence[Item], size: int, done: Done) -> None:
        op = Op([Change(b"runs", run.key, encode_run(run, placed))], keep=False)
        op.size, op.ready, op.heard = size, False, self._heard
        op.parent, op.chains = run.parent, run.chains
        writing = Writing(op, run, items, self._extents, self._lanes, self._commits.ready)
        op.finish = partial(self._written, run, writing, done)
        self._queued += size
        self._commits.submit(op)
        if self._compress:
            self._packing.add(writing)
            layouts, packed = packed_layouts(run.layouts), partial(self._packed, run, writing)
            self._lanes.submit(Packing(items, layouts, self._post, packed, writing.drop), urgent=False)
        else:
            self._lanes.submit(writing, urgent=False)

    def _packed(self, run: Run, writing: Writing, frames: Sequence[Frame | None]) -> None:
        """Its items are packed, where that pays: give those smaller cells, and write."""
        if writing not in self._packing:
            return  # dropped: the tier closes
        self._packing.discard(writing)
        pairs = list(zip(writing.items, frames, strict=True))
        if sizes := {(item.page, item.group): frame.size for item, frame in pairs if frame is not None}:
            placed = self._ledger.repack(run, sizes)
            writing.items = [repacked(run, item, frame) for item, frame in pairs]
            writing.op.changes = [Change(b"runs", run.key, encode_run(run, placed))]
            full = sum(run.layouts[item.group % run.groups].blocks for item in writing.items)
            kept = sum(run.layouts[item.group].blocks for item in writing.items)
            self._health.count(packed_bytes_saved=(full - kept) * BLOCK)
        self._lanes.submit(writing, urgent=False)

    def _written(self, run: Run, writing: Writing, done: Done, error: str) -> None:
        """A run's write has ended: it is durable, or its cells go back."""
        self._queued -= writing.op.size
        run.keys = run.chains = b""
        if error:
            self._failed(run, writing)
            done(None, error)
            return
        self._health.recover()
        self._health.count(bytes_written=writing.op.size, runs_written=1)
        self._ledger.publish(run)
        if run.cache in self._ledger.caches:
            done(run.id, "")
        else:  # dropped meanwhile
            self.forget(run.id)
            done(None, Code.UNKNOWN.value)

    def _failed(self, run: Run, writing: Writing) -> None:
        op = writing.op
        self._heard = max(self._heard, op.failure)
        self._health.count(write_errors=1)
        self._ledger.abandon(run, doubtful=op.doubtful)
        if writing.unbacked >= 0:
            self._backing.lacks(writing.unbacked)
        else:
            self._health.ail(op.reason)

    # -- freeing ------------------------------------------------------------------------------------------------

    def free(self, handles: Iterable[int]) -> None:
        """Forget these pages (unknown ones are passed over); their cells are free once that is durable.

        No page may be in a read; children go before, or together with, their parents.
        """
        masks: dict[int, int] = {}
        for handle in handles:
            run = handle >> PAGE_BITS
            masks[run] = masks.get(run, 0) | 1 << (handle & PAGE_MASK)
        self._free(masks.items())

    def _free(self, masks: Iterable[tuple[int, int]]) -> None:
        if freed := self._ledger.free(masks):
            self._submit(freed.changes, partial(self._freed, freed))

    def _freed(self, freed: Freed, error: str) -> None:
        if not error:
            self._ledger.freed(freed.ticket)

    def flush(self, done: Callable[[str], None]) -> None:
        """`done` gets an empty string once everything asked before is durable, else the code of what prevented it.

        A slab that is being emptied for a write that was refused is part of it.
        """
        self._relocator.after(partial(self._submit, [], done, keep=False, urgent=True))

    def read(self, reqs: Sequence[tuple[int, int, Sequence[View]]]) -> list[str]:
        """Fill each (handle, group, views) with its item; blocks, for worker threads.

        Per request an empty string, or why its views hold nothing of use: io, checksum, gone, closing. The
        caller keeps the pages from being freed meanwhile.
        """
        return self._reads.read(reqs)

    def _renew(self, done: Callable[[str], None], rewrite: bool) -> None:
        """Flush, and where asked write the catalogue anew."""
        self._submit([], done, keep=False, urgent=True, rewrite=rewrite)

    def _submit(
        self,
        changes: list[Change],
        finish: Callable[[str], None] = unheard,
        *,
        keep: bool = True,
        urgent: bool = False,
        rewrite: bool = False,
    ) -> None:
        if self._closing:
            finish(Code.CLOSING.value)
            return
        op = Op(changes, finish, keep=keep)
        op.heard, op.urgent, op.rewrite = self._heard, urgent, rewrite
        self._commits.submit(op)

    def _settled(self, committed: bool, failure: str) -> None:
        self._health.ail(failure)
        if committed:
            self._ledger.settle_doubts()

    # -- closing -----------------------------------------------------------------------------------

    def checking(self) -> Iterator[list[str]]:
        """The same in steps. Raises Changed as soon as something changed between two of them."""
        return self._ledger.checking()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Finish what is under way, commit what is ready, refuse the rest; blocks, at most a few timeouts."""
        if self._closing:
            return
        self._closing = True
        self._relocator.close()
        idle = self._reads.close(timeout_s)
        ended = self._lanes.close(timeout_s) and idle
        packing, self._packing = self._packing, set()
        for writing in packing:
            writing.drop()
        committed = self._commits.close(timeout_s)
        self._completions.finish()
        if committed:
            self._catalogue.close()
        if ended and committed:
            self._extents.close()
            let_go(self._lock, clean=not self._health.reason)
            return
        log.error("the disk tier %s is stuck in a call: it stays locked until this process ends", self.path)
