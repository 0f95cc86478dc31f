"""kvtierctl: what operators ask of a running daemon. Exit codes: 0 ok, 1 refused or unhealthy, 2 usage or no daemon."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar

import click

from kvtier import __version__

OK: Final = 0
REFUSED: Final = 1
NO_DAEMON: Final = 2

R = TypeVar("R")
Data = dict[str, Any]


class Admin:
    """One connection to the admin socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Connect; raises OSError."""
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(timeout_s)
        self._last = 0
        try:
            self._sock.connect(str(path))
        except OSError:
            self._sock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._sock.close()

    def ask(self, message: Any, reply: type[R]) -> R:
        """Send a request and wait for its reply; raises KvtierError, OSError, EOFError."""
        from kvtier import frames, wire  # noqa: PLC0415 - keeps --help quick

        self._last += 1
        self._sock.sendall(wire.request_frame(message, self._last))
        stream = frames.Frames()
        while (frame := stream.next()) is None:
            data = self._sock.recv(1 << 18)
            if not data:
                raise EOFError("the daemon closed the connection")
            stream.feed(data)
        answer: R = wire.decode_reply(frame.verb, frame.body, reply)  # type: ignore[type-var]
        return answer


class Lazy(click.Group):
    """Adds groups of other modules without importing them before they are used."""

    more: Final = {
        "policies": ("kvtier.replay.cli", "policies", "List the eviction policies."),
        "probe": ("kvtier.sizing.cli", "probe", "Measure this host's links for `size`."),
        "replay": ("kvtier.replay.cli", "replay", "Replay a request trace through the store."),
        "size": ("kvtier.sizing.cli", "size", "Work out memory, bandwidth and capacity."),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all verbs."""
        return sorted([*super().list_commands(ctx), *(name for name in self.more if self._found(name))])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The verb of that name; for help, of another module only its name and what it is for."""
        if name in self.more and self._found(name):
            return click.Command(name, short_help=self.more[name][2])
        return super().get_command(ctx, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that was called."""
        if args[0] in self.more and self._found(args[0]):
            module, attribute, _ = self.more[args[0]]
            return args[0], getattr(importlib.import_module(module), attribute), args[1:]
        return super().resolve_command(ctx, args)

    def _found(self, name: str) -> bool:
        """Whether the module is installed."""
        module = self.more[name][0]
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False


class Call:
    """What the global options say."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s

    def admin(self, wait_s: float = 0.0) -> Admin:
        """A connection to the daemon; ends the program with code 2 where there is none."""
        try:
            return Admin(self.path, self.timeout_s + wait_s)
        except OSError as exc:
            _fail(f"no daemon at {self.path}: {exc}", NO_DAEMON)

    def info(self, message: Any) -> Data:
        """The tree of values that an admin verb replies with."""
        from kvtier.wire import Info  # noqa: PLC0415

        with self.admin() as admin:
            return admin.ask(message, Info).data


def _fail(text: str, code: int) -> NoReturn:
    """Say why, and end."""
    click.echo(f"kvtierctl: {text}", err=True)
    sys.exit(code)


def _verb(command: Callable[..., Data | None]) -> Callable[..., None]:
    """A verb of the daemon: adds --json, turns refusals into exit codes; the body returns what --json prints."""

    @functools.wraps(command)
    def run(call: Call, as_json: bool, **options: Any) -> None:
        from kvtier.types import KvtierError  # noqa: PLC0415

        try:
            data = command(call, show=not as_json, **options)
        except KvtierError as exc:
            _fail(f"{exc.code.value}: {exc}", REFUSED)
        except (OSError, EOFError) as exc:
            _fail(f"the daemon at {call.path} does not answer: {exc}", NO_DAEMON)
        if as_json:
            click.echo(json.dumps(data, default=str))
        sys.exit(REFUSED if data and data.get("healthy") is False else OK)

    option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return click.pass_obj(option(run))


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--socket", "path", type=click.Path(path_type=Path), help="Admin socket of the daemon.")
@click.option("--timeout", "timeout_s", default=10.0, show_default=True, help="Seconds to wait for an answer.")
@click.version_option(__version__, prog_name="kvtierctl")
@click.pass_context
def main(ctx: click.Context, path: Path | None, timeout_s: float) -> None:
    """Look into a running kvtierd and the cache that it keeps."""
    from kvtier.paths import admin_path, socket_path  # noqa: PLC0415

    ctx.obj = Call(path or admin_path(socket_path()), timeout_s)


@main.command()
@_verb
def status(call: Call, show: bool) -> Data:
    """Tiers, engines and counters."""
    from kvtier import views, wire  # noqa: PLC0415

    data = call.info(wire.Status())
    if show:
        views.status(data)
    return data


@main.command()
@_verb
def caches(call: Call, show: bool) -> Data:
    """One row per cache."""
    from kvtier import views, wire  # noqa: PLC0415

    data = call.info(wire.Caches())
    if show:
        views.caches(data)
    return data


@main.command()
@click.argument("cache")
@click.option("--depth", default=8, show_default=True, help="Levels of the tree to show.")
@click.option("--limit", default=1000, show_default=True, help="Nodes to show.")
@_verb
def tree(call: Call, show: bool, cache: str, depth: int, limit: int) -> Data:
    """Cached prefixes of one cache, named by the beginning of its id."""
    from kvtier import views, wire  # noqa: PLC0415

    data = call.info(wire.Tree(cache, depth, limit))
    if show:
        views.tree(data)
    return data


@main.command()
@click.option("--count", default=1, show_default=True, help="Round trips.")
@_verb
def ping(call: Call, show: bool, count: int) -> Data:
    """Round trips through the serving loop."""
    from kvtier import wire  # noqa: PLC0415

    times = []
    with call.admin() as admin:
        for _ in range(count):
            start = time.perf_counter()
            admin.ask(wire.Ping(), wire.Ok)
            times.append(round((time.perf_counter() - start) * 1e6, 1))
            if show:
                click.echo(f"{times[-1]:.0f} us")
    return {"round_trips_us": times}


@main.command()
@_verb
def check(call: Call, show: bool) -> Data:
    """Run the daemon's invariants now; exit code 1 when one is broken."""
    from kvtier import wire  # noqa: PLC0415

    data = call.info(wire.Check())
    broken = data.get("broken") or []
    if show:
        for line in broken:
            click.echo(line)
        click.echo(f"{len(broken)} broken" if broken else "ok")
    return {**data, "healthy": not broken}


@main.command()
@click.option("--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait.")
@_verb
def flush(call: Call, show: bool, wait_s: float) -> Data:
    """Wait until everything committed is durable."""
    from kvtier import wire  # noqa: PLC0415

    with call.admin(wait_s) as admin:
        admin.ask(wire.Flush(0, int(wait_s * 1000)), wire.Ok)
    if show:
        click.echo("durable")
    return {"durable": True}


if __name__ == "__main__":
    main()
