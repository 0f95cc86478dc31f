"""The verb `doctor`: what this host gives the daemon, and what to change."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import click

from kvtier import views, wire
from kvtier.control.call import Call, Data, verb
from kvtier.types import KvtierError

GIB: Final = 1 << 30
ENOUGH_FILES: Final = 4096
POOR_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "overlay", "nfs", "nfs4", "cifs", "fuse.sshfs", "9p"})


class Finding(NamedTuple):
    """One check: `state` is ok, warn or fail; `advice` says what to change."""

    check: str
    state: str
    found: str
    advice: str = ""


def _text(file: Path) -> str:
    """A file's text, empty where it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _judge(check: str, good: bool, found: str, advice: str, bad: str = "warn") -> Finding:
    return Finding(check, "ok", found) if good else Finding(check, bad, found, advice)


def limits(proc: Path, pid: str) -> Iterator[Finding]:
    """Descriptors and locked memory of a process."""
    soft: dict[str, str] = {}
    for line in _text(proc / pid / "limits").splitlines()[1:]:
        soft[line[:26].strip()] = line[26:].split()[0]
    files = soft.get("Max open files", "0")
    good = files == "unlimited" or int(files) >= ENOUGH_FILES
    yield _judge("open files", good, files, f"LimitNOFILE={ENOUGH_FILES} or more: each connection is a descriptor")
    locked = soft.get("Max locked memory", "0")
    gpu = (proc / "driver" / "nvidia" / "version").exists()
    found = f"{locked} bytes"
    yield _judge("memlock", locked == "unlimited" or not gpu, found, "LimitMEMLOCK=infinity: arenas are pinned")


def memory(proc: Path, sys: Path) -> Iterator[Finding]:
    """Huge pages, NUMA nodes, swap."""
    huge = _text(sys / "kernel" / "mm" / "transparent_hugepage" / "shmem_enabled")
    chosen = huge.partition("[")[2].partition("]")[0]
    advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled: fewer TLB misses in copies"
    yield _judge("hugepages", chosen in {"advise", "always", "within_size", "force"}, chosen or "unknown", advice)
    nodes = sorted(path.name for path in (sys / "devices" / "system" / "node").glob("node[0-9]*"))
    found = f"{len(nodes) or 1} node" + "s" * (len(nodes) > 1)
    balancing = len(nodes) > 1 and _text(proc / "sys" / "kernel" / "numa_balancing") not in {"", "0"}
    advice = "sysctl kernel.numa_balancing=0: the kernel would move pages that the arenas bound to their nodes"
    yield _judge("NUMA", not balancing, found, advice)
    used = {line.split(":")[0]: line.split()[1] for line in _text(proc / "meminfo").splitlines()}
    swap = int(used.get("SwapTotal", "0"))
    yield _judge(
        "swap", not swap, f"{swap >> 10} MiB", "swapoff -a, or vm.swappiness=1: a swapped page costs more than it saves"
    )


def cgroup(pid: str) -> Finding:
    """How much memory the daemon may use."""
    from kvtier.limits import smallest_limit  # noqa: PLC0415

    limit = smallest_limit(pid=pid)
    found = f"{limit.bytes / GIB:.1f} GiB by {limit.source}"
    return _judge("memory limit", limit.bytes >= 2 * GIB, found, "raise MemoryMax: the host tier counts against it")


def gpu(proc: Path, dev: Path) -> Iterator[Finding]:
    """The driver and its device files, where there is one."""
    version = _text(proc / "driver" / "nvidia" / "version").splitlines()
    yield Finding("GPU driver", "ok", version[0] if version else "none: host, peer and disk tiers work without")
    if version:
        shut = [name for name in ("nvidiactl", "nvidia-uvm") if not os.access(dev / name, os.R_OK | os.W_OK)]
        found = "cannot be opened: " + ", ".join(shut) if shut else "can be opened"
        yield _judge("GPU devices", not shut, found, "nvidia-modprobe -u, or pass the devices into the container")


def spaces(proc: Path, pid: str, engines: list[str]) -> Iterator[Finding]:
    """Whether engines share the daemon's IPC namespace, which CUDA IPC needs."""
    mine = _link(proc / pid / "ns" / "ipc")
    apart = [engine for engine in engines if (its := _link(proc / engine / "ns" / "ipc")) and mine and its != mine]
    if engines:
        found = f"of other IPC namespaces: {', '.join(apart)}" if apart else "in the daemon's IPC namespace"
        yield _judge("engines", not apart, found, "docker: --ipc=host for engines on GPUs: CUDA IPC needs it")


def _link(file: Path) -> str:
    """Where a link leads, empty where it cannot be read."""
    try:
        return str(file.readlink())
    except OSError:
        return ""


def ipc(shm: Path) -> Iterator[Finding]:
    """Shared memory and what containers need."""
    size = shutil.disk_usage(shm).total if shm.is_dir() else 0
    advice = "mount tmpfs at /dev/shm (docker: --ipc=host or --shm-size), for engines that share memory of their own"
    yield _judge("shared memory", size >= 64 << 20, f"{size >> 20} MiB at {shm}", advice)
    yield _judge("memfd", hasattr(os, "memfd_create"), "there", "Linux 3.17 or newer", "fail")
    yield _judge(
        "pidfd", hasattr(os, "pidfd_open"), "there", "Linux 5.3 or newer: else slots of a dead engine wait 30 s"
    )


def file_system(path: Path, mounts: str) -> str:
    """Type of the file system that a path is on, by /proc/mounts."""
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        _, point, name, *_ = line.split()
        inside = str(path) == point or str(path).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind


def disk(path: Path, proc: Path) -> Iterator[Finding]:
    """The disk tier's folder: file system, room, mode."""
    place = path
    while not os.path.exists(place):  # noqa: PTH110 - which says no where one may not look, too
        place = place.parent
    kind = file_system(place.resolve(), _text(proc / "mounts"))
    advice = "disk.path on ext4 or xfs of a local NVMe device: this kind is not durable, or slow"
    yield _judge("disk file system", kind not in POOR_FILE_SYSTEMS, f"{kind} at {place}", advice)
    usage = shutil.disk_usage(place)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    yield _judge("disk room", usage.free > usage.total // 20, found, "less disk.bytes, or more room")
    mode = stat.S_IMODE(place.stat().st_mode)
    if place == path:
        yield _judge(
            "disk permissions", not mode & 0o077, f"{mode:04o}", f"chmod 0700 {path}: pages are prompts", "fail"
        )
    yield _judge("disk access", os.access(place, os.W_OK), str(place), "make it writable for the daemon's user", "fail")


def sockets(admin: Path) -> Iterator[Finding]:
    """Modes of the sockets."""
    for name, path, most in (("engine socket", admin.with_name("kvtierd.sock"), 0o660), ("admin socket", admin, 0o600)):
        if not path.exists():
            yield Finding(name, "warn", f"none at {path}", "start kvtierd, or say --socket")
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        yield _judge(name, not mode & ~most, f"{mode:04o} at {path}", f"chmod {most:04o} {path}", "fail")


def running(call: Call) -> tuple[Finding, Data]:
    """What the daemon says of itself, where it answers."""
    from kvtier.control.call import Admin  # noqa: PLC0415

    try:
        with Admin(call.path, call.timeout_s) as admin:
            data = admin.ask(wire.Status(), wire.Info).data
    except (OSError, EOFError, KvtierError) as exc:
        return Finding("daemon", "fail", f"no answer at {call.path}: {exc}", "start it, or look at its log"), {}
    tiers: Data = data["tiers"]  # type: ignore[assignment]
    sick = [f", {name} tier: {tier['sick']}" for name, tier in tiers.items() if tier.get("sick")]
    found = f"version {data['version']}, pid {data['pid']}"
    return _judge("daemon", not sick, found + "".join(sick), "look at its log", "fail"), data


def tiers(data: Data) -> Iterator[Finding]:
    """Memory in which engines read and write pages, and room on disk."""
    found: Data = data.get("tiers", {})
    if "host" in found and "device" not in found:
        size = int(found["host"]["budget_bytes"])
        advice = "host.bytes above 0: without it token caches are misses, and keyed ones are read through regions only"
        yield _judge("host tier", size > 0, f"{size >> 20} MiB", advice)
    if lacks := int(found.get("disk", {}).get("parked_bytes", 0)):
        said = f"the file system has no room for {lacks >> 20} MiB of disk.bytes"
        yield Finding("disk tier", "warn", said, "less disk.bytes, or more room")


@click.command()
@click.option("--disk", "folder", help="Folder of the disk tier  [the daemon's, else the configured one]")
@verb
def doctor(call: Call, show: bool, folder: str | None) -> Data:
    """Check limits, memory, driver, IPC, disk, permissions and the daemon; exit code 1 where something fails."""
    from kvtier.config import load  # noqa: PLC0415

    proc, sys = Path("/proc"), Path("/sys")
    alive, data = running(call)
    pid = str(data.get("pid", "self"))
    findings = [alive, *tiers(data), *limits(proc, pid), *memory(proc, sys), cgroup(pid), *gpu(proc, Path("/dev"))]
    path = Path(folder or data.get("disk_path") or load().disk_path)
    engines = [str(one) for engine in data.get("instances", ()) for one in engine["pids"]]
    findings += [*spaces(proc, pid, engines), *ipc(Path("/dev/shm")), *disk(path, proc), *sockets(call.path)]  # noqa: S108 - looked at only
    if show:
        views.findings([one._asdict() for one in findings])
    return {"findings": [one._asdict() for one in findings], "healthy": all(one.state != "fail" for one in findings)}
