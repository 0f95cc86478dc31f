"""Requests to replay, as paths of segments: runs of blocks that every request has all or none of."""

from __future__ import annotations

import importlib
import io
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.sizing.curve import Trace
from kvtier.sizing.traces import coarse, load_trace
from kvtier.types import bad

PAUSE_S = 1800.0
"""Pauses within a session are cut to this when sessions are laid over each other."""
SESSIONS = 240
HOURS_EACH = 1 / 15
"""Sessions begin at any time within this many hours for each of them."""
BLOCK_TOKENS = 512
SEED = 1


class Mix(NamedTuple):
    """How sessions whose times are their own become one stream of requests."""

    sessions: int = SESSIONS
    hours: float = 0.0
    """0: as many as there are sessions, times HOURS_EACH."""
    block_tokens: int = BLOCK_TOKENS
    seed: int = SEED


class Requests(NamedTuple):
    """A trace in time order. Segment s follows segment parent[s] (-1: a root); a request is its last segment."""

    name: str
    block_tokens: int
    blocks: int
    """Different blocks: what a capacity in percent is of."""
    parent: list[int]
    keys: list[bytes]
    """Block numbers of each segment, int32: the page keys of pages of one token."""
    leaf: list[int]
    tokens: list[int]
    time_s: list[float]
    token_bytes: int = 0

    def path(self, request: int) -> list[int]:
        """Segments of a request, root first."""
        out = []
        at = self.leaf[request]
        while at >= 0:
            out.append(at)
            at = self.parent[at]
        return out[::-1]

    def pages(self, segment: int) -> int:
        """Blocks in a segment."""
        return len(self.keys[segment]) // 4


def read(paths: Iterable[Path], mix: Mix, limit: int = 0) -> Requests:
    """The requests of an npz file, or of JSON-lines files in the order given. Raises KvtierError."""
    files = list(paths)
    trace = _npz(files[0], mix, limit) if files and ".npz" in files[0].name else load_trace(files, limit)
    return segments(trace)


def _npz(path: Path, mix: Mix, limit: int) -> Trace:
    """A tree trace; sessions with times of their own are laid over each other."""
    trace = load_trace([path], limit)
    sessions = _sessions(path)[: len(trace.leaf)]
    if sessions.size == 0 or sessions.max() == 0:
        return _kept(trace, range(len(trace.leaf)), trace.time_s) if limit else trace
    if mix.block_tokens % trace.block_tokens:
        raise bad("block", f"a multiple of the trace's {trace.block_tokens} tokens", mix.block_tokens)
    trace = coarse(trace, mix.block_tokens // trace.block_tokens)
    rows, times = merged(sessions, np.array(trace.time_s), mix)
    kept = [(int(r), float(t)) for r, t in zip(rows, times, strict=True) if trace.leaf[r] >= 0]
    return _kept(trace, [r for r, _ in kept], [t for _, t in kept])


def _sessions(path: Path) -> NDArray[np.int64]:
    raw = path.read_bytes()
    if path.suffix == ".zst":
        with importlib.import_module("zstandard").ZstdDecompressor().stream_reader(io.BytesIO(raw)) as stream:
            raw = stream.read()
    with np.load(io.BytesIO(raw)) as arrays:
        return np.array(arrays.get("sess", []), dtype=np.int64)


def merged(
    sessions: NDArray[np.int64], time_s: NDArray[np.float64], mix: Mix
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Request numbers in time order and their times: some sessions, each begun at a time drawn at random."""
    total = int(sessions[-1]) + 1
    count = min(mix.sessions, total)
    if count < 1:
        raise bad("sessions", "at least 1", count)
    draw = np.random.default_rng(mix.seed)
    chosen = draw.choice(total, count, replace=False) if count < total else np.arange(total)
    starts = draw.uniform(0.0, (mix.hours or count * HOURS_EACH) * 3600, count)
    bounds = np.searchsorted(sessions, np.arange(total + 1))
    rows, times = [], []
    for number, start in zip(chosen, starts, strict=True):
        lo, hi = bounds[number], bounds[number + 1]
        pauses = np.minimum(np.diff(time_s[lo:hi], prepend=time_s[lo]), PAUSE_S)
        rows.append(np.arange(lo, hi))
        times.append(start + np.cumsum(pauses))
    every, when = np.concatenate(rows), np.concatenate(times)
    order = np.argsort(when, kind="stable")
    return every[order], when[order]


def _kept(trace: Trace, rows: Sequence[int], times: Sequence[float]) -> Trace:
    """Some of the requests, with only the blocks that they have, renumbered."""
    used = bytearray(len(trace.parent))
    for r in rows:
        node = trace.leaf[r]
        while node >= 0 and not used[node]:
            used[node] = 1
            node = trace.parent[node]
    number = array("l", [-1]) * len(used)
    parent = array("l")
    for node, there in enumerate(used):
        if there:
            number[node] = len(parent)
            up = trace.parent[node]
            parent.append(number[up] if up >= 0 else -1)
    return trace._replace(
        parent=parent,
        leaf=[number[trace.leaf[r]] if trace.leaf[r] >= 0 else -1 for r in rows],
        input_tokens=[trace.input_tokens[r] for r in rows],
        output_tokens=[trace.output_tokens[r] for r in rows],
        time_s=times,
    )


def segments(trace: Trace) -> Requests:
    """The trace with its blocks joined into segments; requests without a whole block keep the empty path."""
    blocks = len(trace.parent)
    parent = np.array(trace.parent, dtype=np.int64)
    children = np.bincount(parent[parent >= 0], minlength=blocks)
    ends = np.zeros(blocks, dtype=bool)
    ends[[leaf for leaf in trace.leaf if leaf >= 0]] = True
    begins = (parent < 0) | (children[parent] > 1) | ends[parent]
    of = [0] * blocks
    ups: list[int] = []
    members: list[list[int]] = []
    for block, (up, begin) in enumerate(zip(parent.tolist(), begins.tolist(), strict=True)):
        if begin:
            of[block] = len(ups)
            ups.append(of[up] if up >= 0 else -1)
            members.append([block])
        else:
            of[block] = of[up]
            members[of[up]].append(block)
    keys = [np.array(each, dtype="<i4").tobytes() for each in members]
    leaf = [of[block] if block >= 0 else -1 for block in trace.leaf]
    return Requests(
        trace.name, trace.block_tokens, blocks, ups, keys, leaf, _ints(trace.input_tokens), list(trace.time_s),
        trace.token_bytes,
    )  # fmt: skip


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]
