"""The budget of host memory: address space of all scopes, and the thread that warms and empties it."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvtier.numa import NODES, Node, places
from kvtier.tiers.arena import CHUNK_BYTES, HUGE_BYTES, Arena, free_huge_bytes, places_for, unit_of
from kvtier.tiers.extents import Extents
from kvtier.types import PAGE_ALIGN, align_up

NEAR: Final = 0.75
"""Of the GPU's node: the rest is the host's."""
_log: Final = logging.getLogger(__name__)


class Ground:
    """One arena's address space: every byte is in a slab (`used`), or free and cold (no memory) or warm."""

    def __init__(self, arena: Arena, weight: int) -> None:
        self.arena = arena
        self.weight = weight
        self.used = 0
        self.free = Extents()
        self.cold = Extents()
        self.warm = Extents()
        self.free.add(0, arena.bytes)
        self.cold.add(0, arena.bytes)


class Plot(NamedTuple):
    """A byte range of one arena."""

    ground: Any
    """The arena's address space, as the tier's own budget keeps it; its `arena` has a number."""
    lo: int
    hi: int


class _Work(enum.Enum):
    """What the thread does to a plot."""

    PUNCH = enum.auto()
    FAULT = enum.auto()


class HostSpace:
    """At most `budget` bytes in slabs over all scopes, each scope having the whole budget as address space.

    With `prefault` the thread warms the whole budget, slabs handed out first, then what is next in the scope that
    grew last; a range given back stays warm for its scope until another needs the memory. Without it, memory of
    a range given back is punched out at once. Calls from one thread; the lock is against the thread's own steps.
    `near`: the node of the GPU, whose memory is used first, as much of it as `NEAR`.
    """

    def __init__(
        self,
        budget: int,
        *,
        hugepages: str = "auto",
        prefault: bool = True,
        nodes: Path = NODES,
        near: int | None = None,
    ) -> None:
        self.budget = budget
        self.used = 0
        size = align_up(budget, unit_of(budget))
        self.huge = hugepages == "auto" and 0 < align_up(budget, HUGE_BYTES) <= free_huge_bytes()
        self.size = align_up(size, HUGE_BYTES) if self.huge else size
        self._nodes: list[Node | None] = [*places(nodes)] or [None]
        self._near = near
        self._prefault = prefault
        self._scopes: dict[str, list[Ground]] = {}  # the one that grew last is last
        self._retired: list[Ground] = []  # of scopes that are no more: the thread closes them
        self._owed: list[Plot] = []  # handed out cold: an engine's first touch would be charged to the engine
        self._change = threading.Condition()
        self._busy: tuple[_Work, Plot] | None = None
        self._paused = self._hold = self._closed = self._warned = False
        self._thread: threading.Thread | None = None

    def arenas(self, scope: str) -> list[Arena]:
        """The scope's arenas, one per NUMA node, made on first ask; none where the budget is 0. Raises OSError."""
        if not self.budget:
            return []
        if scope not in self._scopes:
            made = [self._ground(scope, number, node) for number, node in enumerate(self._nodes)]
            with self._change:
                self._scopes[scope] = made
                self._change.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvtier-host-space", daemon=True)
                self._thread.start()
        return [ground.arena for ground in self._scopes[scope]]

    def take(self, scope: str, want: int, least: int) -> Plot | None:
        """A range of `want` bytes in the node to be used first, or of what is left but at least `least`; or None."""
        self.arenas(scope)
        with self._change:
            want = min(want, self.budget - self.used)
            plot = self._find(scope, want, least)
            if want >= least and self._punching(scope) and (plot is None or plot.hi - plot.lo < want):
                # Space that is free but not yet usable: wait for the one step, well below a millisecond.
                self._hold = True
                self._change.wait_for(lambda: not self._busy)
                self._hold = False
                self._change.notify_all()
                plot = self._find(scope, want, least)
            if plot is None:
                return None
            ground, lo, hi = plot
            ground.free.discard(lo, hi)
            ground.warm.discard(lo, hi)
            if ground.cold.discard(lo, hi) and self._prefault:
                self._owed.append(plot)
            ground.used += hi - lo
            self.used += hi - lo
            self._scopes[scope] = self._scopes.pop(scope)
            self._wake()
        if self.huge and not self._faulted(plot):
            self.give(plot)
            return None
        return plot

    def give(self, plot: Plot) -> None:
        """Take the range of a slab back."""
        ground, lo, hi = plot
        with self._change:
            ground.free.add(lo, hi)
            ground.warm.add(lo, hi)
            ground.used -= hi - lo
            self.used -= hi - lo
            self._owed = [owed for owed in self._owed if owed.ground is not ground or not lo <= owed.lo < hi]
            self._wake()

    @property
    def scopes(self) -> list[str]:
        """Scopes that have arenas."""
        return list(self._scopes)

    def close_idle(self, keep: Collection[str]) -> None:
        """Close the arenas of scopes that are not in `keep` and have no slab: the thread does, which may take long."""
        with self._change:
            for scope, grounds in list(self._scopes.items()):
                if scope not in keep and not any(ground.used for ground in grounds):
                    self._retired += self._scopes.pop(scope)
            self._wake()

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until the thread has nothing to do; whether that came in time."""
        with self._change:
            return self._change.wait_for(
                lambda: not self._busy and not self._retired and self._next() is None, timeout_s
            )

    def close(self) -> None:
        """Stop the thread and close all arenas; a second call does nothing."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()
        for ground in [*self._retired, *self._all()]:
            ground.arena.close()
        self._scopes.clear()

    def check(self, plots: Iterable[Plot]) -> list[str]:
        """Broken invariants, given the ranges of all slabs."""
        wrong = []
        taken = {id(ground): Extents() for ground in self._all()}
        for ground, lo, hi in plots:
            if taken[id(ground)].discard(lo, hi):
                wrong.append(f"slabs overlap within [{lo}, {hi}) of {ground.arena.scope}")
            taken[id(ground)].add(lo, hi)
        with self._change:
            for ground in self._all():
                wrong += _wrong(ground, taken[id(ground)])
            if self.used != sum(extents.bytes for extents in taken.values()):
                wrong.append(f"slabs do not sum to {self.used} bytes used")
            if self.used > self.budget:
                wrong.append(f"{self.used} bytes used of a budget of {self.budget}")
        return wrong

    def _ground(self, scope: str, number: int, node: Node | None) -> Ground:
        """A new arena with all of its space free."""
        arena = Arena(scope, number, self.size, huge=self.huge, node=None if node is None else node.number)
        return Ground(arena, 1 if node is None else node.bytes)

    def _all(self) -> list[Ground]:
        """Every scope's grounds, the scope that grew last at the end."""
        return [ground for grounds in self._scopes.values() for ground in grounds]

    def _find(self, scope: str, want: int, least: int) -> Plot | None:
        """Where the next range of the scope goes: warm before cold, smaller where the space is in pieces."""
        if not self._scopes.get(scope):
            return None
        grounds = sorted(self._scopes[scope], key=lambda ground: self._order(ground, self._load(ground), want))
        for unit, fewest in places_for(want, least, huge=self.huge):
            size = min(want, max(ground.free.largest(unit) for ground in grounds)) // unit * unit
            if size < fewest:
                continue
            fits = ((ground, e.fit(size, unit)) for ground in grounds for e in (ground.warm, ground.free))
            return next(Plot(ground, lo, lo + size) for ground, lo in fits if lo is not None)
        return None

    def _order(self, ground: Ground, load: int, more: int) -> tuple[bool, float]:
        """Which of a scope's nodes is used first: the GPU's, as long as there is room, then the one with least load."""
        node = self._nodes[ground.arena.number]
        near = node is not None and node.number == self._near and load + more <= NEAR * node.bytes
        return not near, load / ground.weight

    def _load(self, ground: Ground) -> int:
        """Bytes in slabs on its NUMA node, over all scopes."""
        return sum(grounds[ground.arena.number].used for grounds in self._scopes.values())

    def _coldest(self) -> Ground | None:
        """What is warmed next: of the scope that grew last, where its next ranges will be taken from."""
        for grounds in reversed(self._scopes.values()):
            cold = [ground for ground in grounds if ground.cold.bytes]
            if cold:
                return min(cold, key=lambda g: self._order(g, g.used + g.warm.bytes, CHUNK_BYTES))
        return None

    def _punching(self, scope: str) -> bool:
        """Whether some space of the scope is being emptied right now."""
        return self._busy is not None and self._busy[0] is _Work.PUNCH and self._busy[1].ground.arena.scope == scope

    def _faulted(self, plot: Plot) -> bool:
        """Whether the range has its huge pages: touching one that the pool cannot give would kill the process."""
        try:
            plot.ground.arena.fault(plot.lo, plot.hi)
        except OSError as error:
            self._warn(f"no huge pages for a slab of {plot.hi - plot.lo} bytes: {error}")
            return False
        return True

    def _warn(self, message: str) -> None:
        """Log the first failure only: each later growth may meet it again."""
        if not self._warned:
            self._warned = True
            _log.warning(message)

    def _wake(self) -> None:
        """Let the thread look again, also after an error (the lock is held)."""
        self._paused = False
        self._change.notify_all()

    def _next(self) -> tuple[_Work, Plot] | None:
        """What the thread does next (the lock is held): memory over the budget goes first."""
        grounds = self._all()
        spare = self.budget - self.used if self._prefault else 0
        excess = sum(ground.warm.bytes for ground in grounds) - spare
        if self._paused or self._hold:
            return None
        if excess >= PAGE_ALIGN:
            ground = next(ground for ground in grounds if ground.warm.bytes)
            unit = HUGE_BYTES if self.huge else PAGE_ALIGN
            return _Work.PUNCH, Plot(ground, *ground.warm.tail(min(HUGE_BYTES, align_up(excess, unit))))
        if self._owed:
            ground, lo, hi = self._owed[0]
            return _Work.FAULT, Plot(ground, lo, min(hi, lo + CHUNK_BYTES))
        cold = self._coldest()
        room = -excess // HUGE_BYTES * HUGE_BYTES if self.huge else -excess // PAGE_ALIGN * PAGE_ALIGN
        if self._prefault and cold is not None and room > 0:
            return _Work.FAULT, Plot(cold, *cold.cold.head(min(CHUNK_BYTES, room)))
        return None

    def _run(self) -> None:
        """The thread: one chunk at a time, the lock let go while the kernel works."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._retired or self._next() is not None)
                retired, step = self._retired[:], self._next()
                if self._closed:
                    return
                if step is not None and not retired:
                    self._busy = step
                    self._begin(*step)
            if retired or step is None:
                self._close(retired)
                continue
            error = self._work(*step)
            with self._change:
                self._end(*step, error)
                self._busy = None
                self._change.notify_all()

    def _close(self, retired: list[Ground]) -> None:
        """Let go of arenas that nobody uses; their memory is over the budget until then, so that it goes first."""
        for ground in retired:
            ground.arena.close()
        with self._change:
            del self._retired[: len(retired)]
            self._change.notify_all()

    def _begin(self, work: _Work, plot: Plot) -> None:
        """Account for a step before it runs: a range being punched is nobody's, one being faulted counts as warm."""
        ground, lo, hi = plot
        if work is _Work.PUNCH:
            ground.free.discard(lo, hi)
            ground.warm.discard(lo, hi)
        elif self._owed and self._owed[0].ground is ground and self._owed[0].lo == lo:
            first = self._owed.pop(0)
            if hi < first.hi:
                self._owed.insert(0, Plot(ground, hi, first.hi))
        else:
            ground.cold.discard(lo, hi)
            ground.warm.add(lo, hi)

    def _work(self, work: _Work, plot: Plot) -> OSError | None:
        """The step itself; the error that ended it, if one did."""
        ground, lo, hi = plot
        try:
            (ground.arena.punch if work is _Work.PUNCH else ground.arena.fault)(lo, hi)
        except OSError as error:
            self._warn(f"cannot {work.name.lower()} {hi - lo} bytes of host memory: {error}")
            return error
        return None

    def _end(self, work: _Work, plot: Plot, error: OSError | None) -> None:
        """Account for a finished step; after an error nothing more is tried until something changes."""
        ground, lo, hi = plot
        self._paused = error is not None
        if work is _Work.PUNCH:
            ground.free.add(lo, hi)
            (ground.cold if error is None else ground.warm).add(lo, hi)


def _wrong(ground: Ground, taken: Extents) -> list[str]:
    """Broken invariants of one arena's address space."""
    name = f"arena {ground.arena.number} of {ground.arena.scope}"
    wrong = []
    if taken.bytes != ground.used:
        wrong.append(f"{name}: slabs hold {taken.bytes} bytes, {ground.used} counted")
    if any(ground.free.covers(lo, lo + 1) for lo, _ in taken):
        wrong.append(f"{name}: a slab is free space")
    if ground.warm.bytes + ground.cold.bytes != ground.free.bytes:
        wrong.append(f"{name}: warm and cold do not sum to free")
    if ground.free.bytes + taken.bytes > ground.arena.bytes:
        wrong.append(f"{name}: more space than the arena has")
    return wrong
