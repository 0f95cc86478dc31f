"""kvtierd: builds the parts, serves, and drains in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import uvloop

from kvtier import __version__, wire
from kvtier.companions import Companions, notify, passed_sockets
from kvtier.config import Config, flag, load, settings, size, strangers, variable
from kvtier.device.find import named_device
from kvtier.fleet import announce, join
from kvtier.limits import check_budget, default_budget
from kvtier.live import Live
from kvtier.output import printing
from kvtier.paths import state_path
from kvtier.policy.quota import parse
from kvtier.server import Limits, Server
from kvtier.server.home import Home
from kvtier.server.listener import PathLock
from kvtier.store import Store
from kvtier.store.scrub import Pace
from kvtier.store.vram import DeviceMemory
from kvtier.store.ways import Ways
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.turns import short_turns
from kvtier.types import KvtierError

KEEP_BYTES: Final = 64 << 20
"""The C library keeps so much freed memory: prompts of some 100 KB come and go, and pages given back to the kernel
must be faulted in again (200,000 tokens: 0.3 instead of 1.5 ms)."""
SWITCH_S: Final = 1e-4
"""At the default of 5 ms a worker thread gets the interpreter back some 180 times a second beside a busy loop."""
SCRUB: Final = Pace(16 << 20, 3600.0)
"""A terabyte of disk is re-read in 18 hours, at a hundredth of what the device can do."""
GRACE_S: Final = 5.0
"""Seconds after the drain at which the process ends whatever its threads do."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_log = logging.getLogger("kvtier.daemon")


def build_store(config: Config, loop: asyncio.AbstractEventLoop) -> Store:
    """The tiers that the settings ask for, and the store over them. Raises KvtierError, OSError."""
    budget = default_budget() if config.host.bytes < 0 else check_budget(config.host.bytes)
    disk = None
    if config.disk.bytes:
        post, pack = loop.call_soon_threadsafe, config.disk.compress
        disk = DiskTier(config.disk_path, config.disk.bytes, post=post, compress=pack)
    ways = Ways(config.policy, high_water=config.host.high_water)
    device = None
    if config.device.bytes:
        make = functools.partial(named_device, config.device.which)
        device = DeviceMemory(make, config.device.bytes, slab_bytes=config.host.slab_bytes, folder=state_path())
    near = device.carrier.node if device is not None else None
    host = HostTier(budget, slab_bytes=config.host.slab_bytes, prefault=config.host.prefault, near=near)
    store = Store(host, disk, cap=config.caps.instance, version=__version__, scrub=SCRUB, ways=ways, device=device)
    store.limit(parse(config.quotas, size))
    return store


async def serve(config: Config, again: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `again` reads the settings anew, for SIGHUP."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    lock = PathLock(config.engine_socket)  # first, so that a second daemon touches nothing of the first one's
    store = build_store(config, loop)
    home = join(store, config.peers)
    hush = announce(store, config.events)
    store.start().add_done_callback(lambda task: _loaded(task, stop))
    limits = Limits(connections=config.caps.connections)
    server = Server(store, config.engine_socket, config.admin_socket, limits, lock, passed_sockets())
    live = Live(config, again, store, server)
    spans = server.keep_spans(config.otel.share if config.otel.endpoint else 0.0)
    store.admin = {**store.admin, wire.Spans: spans.take}
    loop.add_signal_handler(signal.SIGHUP, live.reload)
    await server.start()
    if home is not None:
        home.start()
    gc.disable()  # the store makes no cycles, and a collection would stop every engine
    gc.collect()
    gc.freeze()
    companions = Companions(config.http.port, config.engine_socket, config.admin_socket, config.otel.endpoint)
    short_turns()  # after its threads were begun, which copy: theirs are as they were
    notify("READY=1")
    _log.info("serving %s, operators at %s", config.engine_socket, config.admin_socket)
    await stop.wait()
    await _drain(live.config, server, store, companions, home)
    if hush is not None:
        hush()


def _loaded(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    """The catalogue is indexed; where that failed there is no use in going on."""
    if task.cancelled():
        return
    if task.exception() is not None:
        _log.critical("the catalogue cannot be indexed", exc_info=task.exception())
        stop.set()
    else:
        _log.info("the catalogue is indexed")


async def _drain(config: Config, server: Server, store: Store, companions: Companions, home: Home | None) -> None:
    """End within the time that the settings give."""
    notify("STOPPING=1")
    _log.info("draining for at most %.0f s", config.drain_s)
    watchdog = threading.Timer(config.drain_s + GRACE_S, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    loop = asyncio.get_running_loop()
    end = loop.time() + config.drain_s
    await server.drain(config.drain_s / 2)
    if home is not None:
        await home.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(end + 1.0):
            await store.drain(max(0.0, end - loop.time()))
    await companions.stop()
    await server.close()
    _log.info("ended")


def keep_freed_memory() -> None:
    """Ask glibc to keep what is freed; other C libraries are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)
        mallopt(_M_MMAP_THRESHOLD, KEEP_BYTES // 2)


def _flags(command: Callable[..., None]) -> Callable[..., None]:
    """One flag per setting."""
    for name, _ in reversed(list(settings())):
        command = click.option(flag(name), name.replace(".", "__"), metavar="VALUE", help=f"{name}, {variable(name)}")(
            command
        )
    return command


class _Program(click.Command):
    """The command line, whose help and settings may be printed to what is full or closed."""

    @printing("kvtierd")
    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the program."""
        return super().main(*args, **extra)


@click.command(cls=_Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.option("--check-config", is_flag=True, help="Print the settings in effect and end.")
@click.version_option(__version__, prog_name="kvtierd")
@_flags
def main(file: Path | None, check_config: bool, **flags: Any) -> None:
    """Keep the KV cache of this host's inference servers."""
    given = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    try:
        config, odd = load(file, flags=given), strangers()
        if not check_config:
            _run(config, lambda: load(file, flags=given), odd)
            return
    except (KvtierError, OSError) as exc:
        click.echo(f"kvtierd: {exc}", err=True)
        sys.exit(1)
    for line in odd:
        click.echo(f"kvtierd: {line}", err=True)
    click.echo(msgspec.json.format(msgspec.json.encode(config)).decode())


def _run(config: Config, again: Callable[[], Config], odd: list[str]) -> None:
    """Serve until the process is told to end; the log begins with what is odd about the environment."""
    level = config.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for line in odd:
        _log.warning("%s", line)
    sys.setswitchinterval(SWITCH_S)
    keep_freed_memory()
    uvloop.run(serve(config, again))


if __name__ == "__main__":
    main()
