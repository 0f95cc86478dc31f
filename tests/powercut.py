"""Power cuts: a writer's system calls as a journal, and the folder as a cut at any instant could leave it.

The journal comes from strace of the real process, LMDB's own writes included. A write is on the device for certain
once a sync of its file began after it ended, and ended itself; of all others any subset of sectors may be there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SECTOR = 512
CALLS = "openat,lseek,pwrite64,pwritev,pwritev2,write,writev,fdatasync,fsync,msync,sync_file_range"
FILES = {"extents": "extents", "data.mdb": "catalogue/data.mdb"}
_HEX = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_LINE = re.compile(r"^(\d+) +(\w+)\((\d+|AT_FDCWD)(.*)$", re.DOTALL)
_RESUMED = re.compile(r"^(\d+) +<\.\.\. \w+ resumed>(.*)$")
_RESULT = re.compile(r"= (-?\d+)[^=]*$")


class Write(NamedTuple):
    """Bytes to one file, between two instants."""

    file: str
    offset: int
    data: bytes
    start: int
    end: int
    through: bool
    """Written past every cache (O_DSYNC): safe once it has ended."""


class Sync(NamedTuple):
    """A sync of one file."""

    file: str
    start: int
    end: int


def works() -> bool:
    """Whether strace is here and may trace."""
    if not shutil.which("strace"):
        return False
    return subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True).returncode == 0


def trace(folder: Path, out: Path, *args: object, module: str = "tests.diskwriter") -> list[Write | Sync]:
    """Run a writer on the folder under strace; its journal, with what it said as writes to `said`."""
    log, said = out / "trace", out / "said"
    paths = [folder / name for name in FILES.values()] + [said]
    watch = [word for path in paths for word in ("-P", str(path))]
    with said.open("wb") as stdout:
        subprocess.run(
            ["strace", "-f", "-v", "-xx", "-s", "100000000", "-e", f"trace={CALLS}", *watch, "-o", str(log),
             sys.executable, "-m", module, str(folder), *map(str, args)],
            stdout=stdout, cwd=ROOT, check=True,
        )  # fmt: skip
    return read(log)


def read(log: Path) -> list[Write | Sync]:
    """The journal in a trace, in the order in which calls began."""
    open_: dict[str, tuple[int, re.Match[str]]] = {}
    calls: list[tuple[int, int, re.Match[str], int]] = []
    with log.open() as lines:
        for at, line in enumerate(lines):
            if resumed := _RESUMED.match(line):
                start, call = open_.pop(resumed[1])
                result = _RESULT.search(resumed[2])
            elif call := _LINE.match(line):
                start = at
                if line.rstrip().endswith("<unfinished ...>"):
                    open_[call[1]] = (at, call)
                    continue
                result = _RESULT.search(line[-60:])
            else:
                continue
            if result and int(result[1]) >= 0:
                calls.append((start, at, call, int(result[1])))
    return _events(sorted(calls, key=lambda call: call[0]))


def _events(calls: list[tuple[int, int, re.Match[str], int]]) -> list[Write | Sync]:
    files: dict[str, tuple[str, bool]] = {"1": ("said", False)}
    place: dict[str, int] = {}
    events: list[Write | Sync] = []
    for start, end, call, result in calls:
        name, fd, rest = call[2], call[3], call[4]
        if name == "openat":
            path = _bytes(rest).decode()
            files[str(result)] = (Path(path).name, "O_DSYNC" in rest or "O_SYNC" in rest)
            continue
        file, through = files[fd]
        if name == "lseek":
            place[fd] = result
        elif name in {"fdatasync", "fsync", "msync", "sync_file_range"}:
            events.append(Sync(file, start, end))
        else:
            data = _bytes(rest)[:result]
            if name.startswith("pwrite"):
                offset = _offset(rest, 2 if name == "pwritev2" else 1)
            else:
                offset = place.get(fd, 0)
                place[fd] = offset + result
            events.append(Write(file, offset, data, start, end, through))
    return events


def _bytes(text: str) -> bytes:
    return b"".join(bytes.fromhex(part.replace("\\x", "")) for part in _HEX.findall(text))


def _offset(rest: str, from_end: int) -> int:
    """The offset argument: so many from the end, of a call that may be cut off by <unfinished ...>."""
    args = rest.rsplit(" <unfinished", 1)[0].rsplit(") ", 1)[0].rstrip(")")
    return int(args.rsplit(", ", from_end)[1])


def safe_at(journal: list[Write | Sync]) -> list[tuple[Write, int]]:
    """Each write with the instant from which no cut can lose it."""
    never = 1 << 60
    out = []
    for event in journal:
        if isinstance(event, Write):
            syncs = [s.end for s in journal if isinstance(s, Sync) and s.file == event.file and s.start > event.end]
            out.append((event, event.end if event.through else min(syncs, default=never)))
    return out


def instants(writes: list[tuple[Write, int]], rounds: int, rng: np.random.Generator) -> list[int]:
    """When to cut: in turn anywhere, and at moments that a cut anywhere meets by luck only.

    Just after cells were written that had been written before: the catalogue may still name what they had. Just after
    a meta page, which makes the records before it count: what they name must be there.
    """
    first, last = writes[0][0].start, writes[-1][0].end
    again, named, seen = [], [], set[int]()
    for write, _ in writes:
        if write.file == "extents":
            blocks = set(range(write.offset // 4096, -(-(write.offset + len(write.data)) // 4096)))
            if blocks & seen:
                again.append(write.end + 1)
            seen |= blocks
        elif write.file == "data.mdb" and write.through:
            named.append(write.end + 1)
    turns = [[], again, named]
    return [
        int(rng.choice(turns[n % 3])) if turns[n % 3] else int(rng.integers(first, last + 2)) for n in range(rounds)
    ]


def cut(base: Path, target: Path, writes: list[tuple[Write, int]], instant: int, rng: np.random.Generator) -> str:
    """Make `target` what a cut at this instant could leave of `base` and the writes; what had been said by then."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
    said = b"".join(w.data for w, _ in writes if w.file == "said" and w.start < instant)
    for short, name in FILES.items():
        with (target / name).open("r+b") as file:
            for write, safe in writes:
                if write.file == short and write.start < instant:
                    _apply(file, write, safe < instant, rng)
    return said.decode()


def _apply(file, write: Write, safe: bool, rng: np.random.Generator) -> None:
    """All of a write that is safe; of any other nothing, all, or some sectors."""
    count = -(-len(write.data) // SECTOR)
    luck = rng.random()
    keep = np.full(count, safe or luck < 0.25)
    if not safe and luck > 0.5:
        keep = rng.random(count) < 0.5
    for at in np.flatnonzero(keep):
        file.seek(write.offset + at * SECTOR)
        file.write(write.data[at * SECTOR : (at + 1) * SECTOR])
