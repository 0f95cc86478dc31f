"""What operators do to a disk tier: look how full and scattered it is, gather free cells, discard freed bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kvtier.tiers.catalogue import Catalogue
from kvtier.tiers.cells import BLOCK
from kvtier.tiers.extentfile import Extents
from kvtier.tiers.lanecall import Done, LaneCall
from kvtier.tiers.lanes import Lanes
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.records import Damaged
from kvtier.tiers.relocate import Relocator

AT_ONCE: Final = 16
"""Slabs whose free bytes one job discards; nothing is stored in them meanwhile."""
LOOK: Final = 128
"""Records compared in one transaction."""

Submit = Callable[[Done, bool], None]
"""Queue a flush: `done` gets an error code or an empty string; with True the catalogue is written anew as well."""
Discarded = Callable[[str, int], None]
"""Gets an error code, or an empty string, and the bytes that were discarded."""


class Upkeep:
    """Belongs to the tier's owner; what takes long runs in lanes and in the thread that commits."""

    def __init__(
        self,
        ledger: Ledger,
        catalogue: Catalogue,
        extents: Extents,
        lanes: Lanes,
        relocator: Relocator,
        submit: Submit,
        post: Callable[..., Any],
    ) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._extents = extents
        self._lanes = lanes
        self._relocator = relocator
        self._submit = submit
        self._post = post
        self._asked: list[Discarded] = []  # those who wait for the discarding that comes next
        self._discarding = False

    def usage(self) -> dict[str, Any]:
        """Sizes in bytes, one row per size of cells, and which share of what is free lies in slabs in use."""
        cells = self._ledger.cells
        classes = cells.classes()
        scattered = sum(row["free"] * row["cell_bytes"] for row in classes)
        free = (cells.total - cells.used - cells.pending) * BLOCK
        return {
            "slab_bytes": cells.slab_blocks * BLOCK,
            "slabs": cells.slabs,
            "slabs_in_use": sum(row["slabs"] for row in classes),
            "scattered_bytes": scattered,
            "fragmentation": round(scattered / free, 4) if free else 0.0,
            "file_bytes": self._extents.file_bytes,
            "catalogue_bytes": self._catalogue.used_bytes,
            "catalogue_free_bytes": self._catalogue.free_bytes,
            "classes": classes,
        }

    def held(self, run_id: int) -> tuple[int, int]:
        """Pages and bytes that a run holds; nothing for one that is not stored."""
        run = self._ledger.runs.get(run_id)
        if run is None:
            return 0, 0
        return run.live.bit_count(), sum(span.total for span in run.spans(run.live)) * BLOCK

    def runs_of(self, cache: int) -> list[int]:
        """The runs of a cache, by the tier's number of it."""
        return list(self._ledger.of_cache.get(cache, ()))

    def sum_of(self, handle: int, group: int) -> int | None:
        """The checksum under which a page's item is stored; None where it is not."""
        place = self._ledger.find(handle, group)
        return None if place is None else place.sum

    # -- comparing -----------------------------------------------------------------------------------------------

    def compare(self, after: bytes) -> tuple[bytes, int, list[str]]:
        """Compare the next records with memory: where to go on (b"" at the end), how many, what is wrong.

        What is being written, freed or moved at the moment may look wrong: ask again after a flush.
        """
        chunk = self._catalogue.runs(after, LOOK, lambda _, value: bytes(value))
        wrong = []
        for key, value, mask in chunk:
            try:
                problem = self._ledger.differs(key, value, mask)
            except Damaged:
                problem = "is damaged"
            if problem:
                wrong.append(f"run record {key.hex()} {problem}")
        return (chunk[-1][0] if len(chunk) == LOOK else b""), len(chunk), wrong

    # -- gathering -----------------------------------------------------------------------------------------------

    def compact(self, done: Done) -> None:
        """Empty sparse slabs until none is left, then write the catalogue anew; `done` gets '' or an error code."""
        self._relocator.make_room(())
        if self._relocator.busy:
            self._relocator.after(partial(self._post, self.compact, done))
        else:
            self._submit(done, True)

    # -- discarding ----------------------------------------------------------------------------------------------

    def discard(self, done: Discarded) -> None:
        """Make every byte read as zeros that is free once what was asked before is durable, then renew the catalogue.

        The catalogue's free pages, in which old records linger, go with its file, and so do catalogues that were set
        aside. A slab that is emptied meanwhile has its turn after that. Who asks while it is done for somebody else
        is answered, together with all who do, by a second time after it.
        """
        self._asked.append(done)
        self._again()

    def _again(self) -> None:
        """Discard for all who have asked, once nobody else is being served."""
        if self._discarding or not self._asked:
            return
        asked, self._asked, self._discarding = self._asked, [], True

        def ended(error: str, gone: int) -> None:
            self._discarding = False
            for done in asked:
                done(error, gone)
            self._again()

        self._begin(list(range(self._ledger.cells.slabs)), 0, ended)

    def _begin(self, slabs: list[int], gone: int, done: Discarded, error: str = "") -> None:
        """Discard in these slabs once all caches that were dropped are freed, durably, and nothing is being moved."""
        if error:
            done(error, gone)
        elif self._ledger.dropping:
            self._submit(partial(self._begin, slabs, gone, done), False)
        else:
            self._relocator.after(lambda: self._submit(partial(self._next, slabs, [], gone, done), False))

    def _next(self, slabs: list[int], later: list[int], gone: int, done: Discarded, error: str) -> None:
        """Discard in the next few of the slabs; one that is being emptied is left for later."""
        cells = self._ledger.cells
        if error:
            done(error, gone)
            return
        if not slabs and later:
            self._begin(later, gone, done)
            return
        if not slabs:
            self._job(self._last, lambda fault: self._renew(fault, gone, done))
            return
        now, rest = slabs[:AT_ONCE], slabs[AT_ONCE:]
        held = [each for each in now if cells.hold(each)]
        later = later + [each for each in now if each not in held]
        gaps = {each: [(at * BLOCK, size * BLOCK) for at, size in cells.gaps(each)] for each in held}
        size = sum(length for found in gaps.values() for _, length in found)

        def ended(fault: str) -> None:
            for each in held:
                cells.let_go(each)
            self._next(rest, later, gone + size, done, fault)

        def discard() -> None:
            for each, found in gaps.items():
                if found:
                    self._extents.discard(each, found)

        self._job(discard, ended)

    def _last(self) -> None:
        """What was discarded stays so, and no other file has what was deleted."""
        self._extents.settle()
        self._catalogue.drop_aside()

    def _renew(self, error: str, gone: int, done: Discarded) -> None:
        if error:
            done(error, gone)
        else:
            self._submit(lambda fault: done(fault, gone), True)

    def _job(self, call: Callable[[], Any], ended: Done) -> None:
        self._lanes.submit(LaneCall(call, self._post, ended), urgent=False)
