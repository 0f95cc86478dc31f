"""What every verb of kvtierctl shares: the connection to the daemon, --json, exit codes."""

from __future__ import annotations

import errno
import functools
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import click

from kvtier.output import printing

OK: Final = 0
REFUSED: Final = 1
NO_DAEMON: Final = 2
MOST_S: Final = 1e6

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
Data = dict[str, Any]

if TYPE_CHECKING:
    Param = click.ParamType[float]
else:
    Param = click.ParamType  # not generic before click 8.2


class Seconds(Param):
    """An option in seconds: no less than none, and not for ever."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= MOST_S:
            self.fail(f"expected seconds from 0 to {MOST_S:.0f}, got {value!r}", param, ctx)
        return seconds


SECONDS: Final = Seconds()


def waiting(default_s: float, text: str = "Seconds to wait.") -> Callable[[F], F]:
    """The option `--wait` of a verb, which gets `wait_s`."""
    return click.option("--wait", "wait_s", type=SECONDS, default=default_s, show_default=True, help=text)


class Silent(OSError):  # noqa: N818 - what it is, not what went wrong
    """A connection to the daemon that fails, or gives no answer in time."""


class Admin:
    """One connection to the admin socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Connect; raises OSError."""
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._timeout_s = timeout_s
        self._last = 0
        self._until(time.monotonic() + timeout_s)
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
        """Send a request and wait for its reply, whole by the deadline; raises KvtierError, Silent, EOFError."""
        from kvtier import frames, wire  # noqa: PLC0415 - keeps --help quick

        self._last += 1
        end = time.monotonic() + self._timeout_s
        stream = frames.Frames()
        try:
            self._until(end)
            self._sock.sendall(wire.framed(message, self._last))
            while (frame := stream.next()) is None:
                self._until(end)
                data = self._sock.recv(1 << 18)
                if not data:
                    raise EOFError("the daemon closed the connection")
                stream.feed(data)
        except OSError as exc:
            raise Silent(*exc.args) from None
        answer: R = wire.decode_reply(frame.verb, frame.body, reply)  # type: ignore[type-var]
        return answer

    def _until(self, end: float) -> None:
        """The next call of the socket ends by then."""
        self._sock.settimeout(max(1e-3, end - time.monotonic()))


class Call:
    """What the global options say."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s

    def admin(self, wait_s: float = 0.0) -> Admin:
        """A connection to the daemon; raises NoDaemon where there is none."""
        try:
            return Admin(self.path, self.timeout_s + wait_s)
        except OSError as exc:
            raise NoDaemon(f"no daemon at {self.path}: {exc}") from None

    def info(self, message: Any) -> Data:
        """The tree of values that an admin verb replies with."""
        from kvtier.wire import Info  # noqa: PLC0415

        with self.admin() as admin:
            return admin.ask(message, Info).data


class Refused(click.ClickException):
    """Ends the program with a code and a sentence, or with JSON where that was asked for."""

    exit_code = REFUSED

    def __init__(self, error: dict[str, str], text: str) -> None:
        super().__init__(text)
        self.error = error

    def show(self, file: Any = None) -> None:
        """For people."""
        click.echo(f"kvtierctl: {self.message}", err=True, file=file)


class NoDaemon(Refused):
    """Nobody answers."""

    exit_code = NO_DAEMON

    def __init__(self, text: str) -> None:
        super().__init__({"code": "no_daemon", "message": text, "field": ""}, text)


class Group(click.Group):
    """A group whose failures, those of wrong usage too, are JSON on standard output where --json was given."""

    @printing("kvtierctl")
    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        """Run the program."""
        words = sys.argv[1:] if args is None else list(args)
        if "--json" not in words or extra.get("standalone_mode") is False:
            return super().main(args, *more, **extra)
        try:
            code = super().main(args, *more, **{**extra, "standalone_mode": False})
        except Refused as exc:
            error, code = exc.error, exc.exit_code
        except click.ClickException as exc:
            error, code = {"code": "usage", "message": exc.format_message(), "field": _wrong(exc)}, exc.exit_code
        except click.Abort:
            error, code = {"code": "interrupted", "message": "interrupted", "field": ""}, REFUSED
        else:
            sys.exit(code if isinstance(code, int) else OK)
        try:
            click.echo(json.dumps({"error": error}))
        except OSError:  # what takes it is full, or gone
            click.echo(f"kvtierctl: {error['message']}", err=True)
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; a file or a screen that takes no more is a sentence, whichever verb it is."""
        try:
            return super().invoke(ctx)
        except OSError as exc:
            if exc.errno == errno.EPIPE:
                raise
            raise Refused({"code": "io", "message": str(exc), "field": ""}, f"io: {exc}") from None


def _wrong(exc: click.ClickException) -> str:
    """The option or argument that wrong usage is about, as the command line has it; "" where it is about none."""
    param = exc.param if isinstance(exc, click.BadParameter) else None
    if param is not None:
        return param.opts[-1]
    return exc.option_name if isinstance(exc, click.NoSuchOption | click.BadOptionUsage) else ""


def verb(command: Callable[..., Data | None]) -> Callable[..., None]:
    """A verb of the daemon: adds --json, turns refusals into exit codes; the body returns what --json prints."""

    @functools.wraps(command)
    def run(call: Call, as_json: bool, **options: Any) -> None:
        from kvtier.types import KvtierError  # noqa: PLC0415

        try:
            data = command(call, show=not as_json, **options)
            if as_json:
                click.echo(json.dumps(data, default=str))
        except KvtierError as exc:
            where = f" (is {call.path} the admin socket?)" if exc.field == "verb" else ""
            raise Refused(exc.data(), f"{exc.code.value}: {exc}{where}") from None
        except (Silent, EOFError) as exc:
            raise NoDaemon(f"the daemon at {call.path} does not answer: {exc}") from None
        sys.exit(REFUSED if data and data.get("healthy") is False else OK)

    option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return click.pass_obj(option(run))
