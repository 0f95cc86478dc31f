"""Measures this host's memory, disk, loopback, a peer and pinned copies, for the planner's TOML file."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import mmap
import os
import platform
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from kvtier.sizing.hardware import Source
from kvtier.sizing.linkfit import Fitted, Measured, Sample, fit_link, replace_tables, sweep_sizes, toml_of
from kvtier.sizing.report import Column, Report, Table, Value
from kvtier.types import Code, KvtierError, bad

LANES: Final = 4
TIMEOUT_S: Final = 10.0

COLD: Final = 256 << 20
"""Bytes of memory that copies walk through, so that caches do not answer for it."""


def _best(act: Callable[[], object], budget_s: float) -> float:
    """The shortest of a few rounds."""
    best, spent = float("inf"), 0.0
    for n in range(1000):
        start = time.perf_counter()
        act()
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
        if spent > budget_s and n >= 2:
            break
    return max(best, 1e-9)


class Sweep(NamedTuple):
    """How large transfers get, and how long each size is tried."""

    most: int
    budget_s: float = 0.15

    def line(self, act: Callable[[int], object]) -> Fitted:
        """Start-up time and bandwidth of an act, from sizes up to the largest."""
        sizes = sweep_sizes(self.most)
        return fit_link([Sample(size, _best(functools.partial(act, size), self.budget_s)) for size in sizes])


def memory(sweep: Sweep) -> Measured:
    """Copies within host memory, one thread, walking through more than a processor's caches hold."""
    region = max(sweep.most, min(COLD, 64 * sweep.most))
    source, target = np.ones(region, np.uint8), np.ones(region, np.uint8)
    at = 0

    def once(size: int) -> None:
        nonlocal at
        at = at + size if at + 2 * size <= region else 0
        np.copyto(target[at : at + size], source[at : at + size])

    both = sweep.line(once)
    return Measured(both, both, "host memory to host memory, one thread")


def disk(folder: Path, sweep: Sweep) -> Measured:
    """Reads and writes past the page cache where the file system lets us, several at a time."""
    most = sweep.most
    buffer = mmap.mmap(-1, most)
    buffer.write(os.urandom(1 << 20) * (most >> 20))
    with _scratch(folder, most) as (fd, direct), ThreadPoolExecutor(LANES) as pool:
        view = memoryview(buffer)

        def each(act: Callable[[int, memoryview], int], size: int) -> None:
            piece = max(4096, size // LANES // 4096 * 4096)
            spans = [(at, min(piece, size - at)) for at in range(0, size, piece)]
            for done, (_, n) in zip(pool.map(lambda s: act(s[0], view[s[0] : s[0] + s[1]]), spans), spans, strict=True):
                if done != n:
                    raise bad("disk", f"{n} bytes in one go", done)

        def write(at: int, part: memoryview) -> int:
            return os.pwritev(fd, [part], at)

        def read(at: int, part: memoryview) -> int:
            if not direct:
                os.posix_fadvise(fd, at, len(part), os.POSIX_FADV_DONTNEED)
            return os.preadv(fd, [part], at)

        def written(size: int) -> None:
            each(write, size)
            os.fdatasync(fd)

        wrote = sweep.line(written)
        got = sweep.line(lambda size: each(read, size))
        view.release()
    return Measured(
        got,
        wrote,
        f"{folder.resolve().name or folder}: {LANES} at a time" + ("" if direct else ", page cache in the way"),
    )


@contextlib.contextmanager
def _scratch(folder: Path, size: int) -> Iterator[tuple[int, bool]]:
    """An unlinked file of `size` bytes, and whether it is open past the page cache. Raises bad_request."""
    wanted = f"a folder that can be written to, with room for {size} bytes"
    try:
        fd, name = tempfile.mkstemp(dir=folder, prefix="kvtier-probe-")
    except OSError as exc:
        raise bad("disk", f"{wanted} ({exc.strerror})", str(folder)) from None
    try:
        direct = True
        try:
            os.posix_fallocate(fd, 0, size)
            past = os.open(name, os.O_RDWR | os.O_DIRECT)
        except OSError as exc:
            if os.fstat(fd).st_size < size:
                raise bad("disk", f"{wanted} ({exc.strerror})", str(folder)) from None
            past, direct = os.dup(fd), False
        finally:
            Path(name).unlink()
        try:
            yield past, direct
        finally:
            os.close(past)
    finally:
        os.close(fd)


def _receive(sock: socket.socket, size: int, buffer: bytearray) -> None:
    """Take exactly `size` bytes; raises EOFError when the other side stops."""
    view = memoryview(buffer)
    left = size
    while left:
        got = sock.recv_into(view[: min(left, len(view))])
        if not got:
            raise EOFError("the other side closed the connection")
        left -= got


def loopback(sweep: Sweep) -> Measured:
    """TCP to ourselves: what a second process on this host costs at most."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        client = socket.create_connection(server.getsockname(), TIMEOUT_S)
        other, _ = server.accept()
    with client, other:
        other.settimeout(TIMEOUT_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        payload, sink = bytes(sweep.most), bytearray(1 << 20)

        def once(size: int) -> None:
            sender = threading.Thread(target=client.sendall, args=(memoryview(payload)[:size],))
            sender.start()
            _receive(other, size, sink)
            sender.join()

        both = sweep.line(once)
    return Measured(both, both, "TCP on 127.0.0.1, one connection")


def peer(address: str, sweep: Sweep) -> Measured:
    """An echo service elsewhere; each size goes there and back, half of the time counts. Raises KvtierError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise bad("peer", "HOST:PORT of an echo service", address)
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S)
    except OSError as exc:
        raise bad("peer", f"an echo service that answers ({exc})", address) from None
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        payload, sink = bytes(sweep.most), bytearray(1 << 20)

        def there_and_back(size: int) -> None:
            sender = threading.Thread(target=sock.sendall, args=(memoryview(payload)[:size],))
            sender.start()
            _receive(sock, size, sink)
            sender.join()

        try:
            trip = sweep.line(there_and_back)
        except (OSError, EOFError) as exc:
            raise bad("peer", f"an echo service that sends back all it gets ({exc})", address) from None
    one = Fitted(trip.bytes_per_s * 2, trip.t0_s / 2)
    return Measured(one, one, f"TCP echo at {address}, half of the round trip")


def pinned(sweep: Sweep) -> Measured | None:
    """Copies between pinned host memory and the first GPU, both ways; None without one. Raises KvtierError(io)."""
    if importlib.util.find_spec("cupy") is None:
        return None
    cupy: Any = importlib.import_module("cupy")
    if not cupy.is_available():
        return None
    try:
        return _copies(cupy, sweep)
    except (RuntimeError, MemoryError) as exc:  # an engine may have all of it
        raise KvtierError(Code.IO, f"GPU 0: {exc}") from exc


def _copies(cupy: Any, sweep: Sweep) -> Measured:
    """The same, by a cupy that sees a GPU."""
    runtime = cupy.cuda.runtime
    host = cupy.cuda.alloc_pinned_memory(sweep.most)
    device = cupy.cuda.alloc(sweep.most)
    stream = cupy.cuda.Stream(non_blocking=True)

    def copy(to: int, source: int, kind: int) -> Fitted:
        def once(size: int) -> None:
            runtime.memcpyAsync(to, source, size, kind, stream.ptr)
            stream.synchronize()

        return sweep.line(once)

    up = copy(device.ptr, host.ptr, runtime.memcpyHostToDevice)
    down = copy(host.ptr, device.ptr, runtime.memcpyDeviceToHost)
    return Measured(up, down, "pinned host memory and GPU 0, copy engine")


def _write(target: Path, tables: str) -> None:
    """Put the tables into the file, which has what a person wrote there however this ends. Raises bad_request."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = Path(os.path.realpath(target))
        text = replace_tables(file.read_text() if file.is_file() else "", tables)
        if file.exists() and not file.is_file():  # /dev/stdout
            file.write_text(text)
            return
        part = file.with_name(file.name + ".part")
        try:
            part.write_text(text)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as exc:
        raise bad("write", f"a file that can be written ({exc})", str(target)) from None


def measure(folder: Path, echo: str | None, sweep: Sweep, target: Path | None) -> Report:
    """All links of this host; written to `target` over what it measured before. Raises KvtierError."""
    if sweep.most < 1 << 20:
        raise bad("size", "at least 1MiB", sweep.most)
    links = {} if echo is None else {"peer": peer(echo, sweep)}
    links |= {"memcpy": memory(sweep), "disk": disk(folder, sweep), "loopback": loopback(sweep)}
    notes = []
    try:
        copies, lacks = pinned(sweep), "no GPU (or no cupy) here"
    except KvtierError as exc:
        copies, lacks = None, exc.message
    if copies is not None:
        links["h2d"] = copies
    else:
        notes.append(f"{lacks}: pinned copies not measured, the planner keeps its default")
    host = f"{platform.node()}, {os.cpu_count()} CPUs, Linux {platform.release()}"
    values = [Value("host", host, "", Source.MEASURED)]
    if target is not None:
        _write(target, toml_of(links, host))
        values.append(Value("written", str(target), "", Source.EXACT))
    rows = [(n, m.read.bytes_per_s, m.write.bytes_per_s, m.read.t0_s, m.write.t0_s, m.note) for n, m in links.items()]
    seen = Source.MEASURED
    columns = (Column("link"), Column("read_bytes_per_s", "B/s", seen), Column("write_bytes_per_s", "B/s", seen),
               Column("read_t0_s", "s", seen), Column("write_t0_s", "s", seen), Column("note"))  # fmt: skip
    return Report("this host's links", values, (Table("links", columns, rows),), notes)
