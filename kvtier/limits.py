"""How much memory this process may use: the host's, or less where a cgroup says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.types import Code, KvtierError

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
SHARE: Final = 0.9
"""At most this part of the limit may be host tier."""
OWN_BYTES: Final = 128 << 20
"""What the daemon needs beside it at least: itself, its buffers, the index of a few 100,000 pages."""
DEFAULT_BYTES: Final = 1 << 30
"""The host tier of a daemon that was told nothing, on a machine large enough."""


class Limit(NamedTuple):
    """Bytes of memory, and the file that says so."""

    bytes: int
    source: str


def _cgroup_files(proc: Path, cgroups: Path, pid: str) -> Iterator[Path]:
    """Files that may limit a process: its own cgroup's and all above it, versions 1 and 2."""
    try:
        lines = (proc / pid / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            roots, name = [cgroups, cgroups / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [cgroups / "memory", cgroups / controllers], "memory.limit_in_bytes"
        else:
            continue
        below = Path(path.lstrip("/"))
        for root in roots:
            # In a container the path may be the host's: what is not there is skipped, the root always asked.
            yield from (root / part / name for part in (below, *below.parents))


def _number(file: Path) -> int | None:
    """The number in the file; None where there is no file or it says `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def smallest_limit(proc: Path = PROC, cgroups: Path = CGROUPS, pid: str = "self") -> Limit:
    """The tightest of the host's memory and the limits of a process's cgroups. Raises OSError without meminfo."""
    file = proc / "meminfo"
    total = next(int(line.split()[1]) << 10 for line in file.read_text().splitlines() if line.startswith("MemTotal:"))
    found = Limit(total, str(file))
    for file in _cgroup_files(proc, cgroups, pid):
        value = _number(file)
        if value is not None and value < found.bytes:
            found = Limit(value, str(file))
    return found


def memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes of memory available to this process."""
    return smallest_limit(proc, cgroups).bytes


def check_budget(requested: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """The host tier's bytes as requested. Raises bad_request for host.bytes where they do not fit the limit."""
    limit = smallest_limit(proc, cgroups)
    most = max(0, min(int(limit.bytes * SHARE), limit.bytes - OWN_BYTES))
    if not 0 <= requested <= most:
        message = (
            f"expected 0..{most} bytes ({SHARE:.0%} of the {limit.bytes} bytes in {limit.source}, and {OWN_BYTES} less "
            f"than those), got {requested}"
        )
        raise KvtierError(Code.BAD_REQUEST, message, "host.bytes")
    return requested


def default_budget(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes of host tier where nothing is configured: 1 GiB, or an eighth of a smaller limit."""
    return min(DEFAULT_BYTES, memory_limit(proc, cgroups) // 8)
