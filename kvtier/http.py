"""Metrics, health and the dashboard over HTTP on 127.0.0.1, in a process of its own.

The daemon starts it and it ends with the daemon. It asks over the daemon's own sockets, as anybody would: so it still
answers, and says so, when the serving loop hangs, and a scrape costs the loop one small request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from aiohttp import web

from kvtier import wire
from kvtier.dashboard.site import Dashboard, guarded, new_token
from kvtier.frames import Frame, Frames
from kvtier.metrics import render
from kvtier.otlp import export
from kvtier.types import KvtierError

PROBE_S: Final = 1.0
"""A loop that does not answer a ping for so long is hung."""
CHANGE_S: Final = 20.0
"""What looks for a page by its chain key looks at all of them."""
RETRY_S: Final = 5.0
HOST: Final = "127.0.0.1"
MOST: Final = 256
"""Connections; the oldest goes for the next, so that nobody who connects and says nothing keeps others out."""

R = TypeVar("R", bound=wire.Message)
_log = logging.getLogger("kvtier.http")


async def _next(reader: asyncio.StreamReader) -> Frame:
    """The next frame of a stream; raises EOFError."""
    frames = Frames()
    while (frame := frames.next()) is None:
        data = await reader.read(1 << 18)
        if not data:
            raise EOFError("the daemon closed the connection")
        frames.feed(data)
    return frame


class Line:
    """One connection to a socket of the daemon, made again where it was lost; requests one after another."""

    def __init__(self, path: Path, within_s: float = PROBE_S) -> None:
        self._path = path
        self._within_s = within_s
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, message: wire.Message, reply: type[R]) -> R:
        """The reply; raises TimeoutError, OSError, EOFError, KvtierError."""
        async with asyncio.timeout(self._within_s), self._lock:
            try:
                if self._streams is None:
                    self._streams = await asyncio.open_unix_connection(self._path)
                reader, writer = self._streams
                writer.write(wire.request_frame(message, 1))
                frame = await _next(reader)
            except BaseException:
                self.close()
                raise
            return wire.decode_reply(frame.verb, frame.body, reply)

    def close(self) -> None:
        """Drop the connection."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def knock(path: Path) -> None:
    """Make sure that newcomers to the engine socket are answered; any frame will do. Raises as Line.ask."""
    async with asyncio.timeout(PROBE_S):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(wire.request_frame(wire.Ping(), 1))
            await _next(reader)
        finally:
            writer.transport.abort()


class Site:
    """Metrics and health, and the dashboard beside them."""

    def __init__(self, engine: Path, admin: Path, port: int) -> None:
        self._engine = engine
        self._line = Line(admin)
        self.dashboard = Dashboard(
            Line(admin), Line(admin, CHANGE_S), new_token(admin.parent, f"http://{HOST}:{port}/")
        )

    async def healthz(self, request: web.Request) -> web.Response:
        """200 while the loop answers a ping and the engine socket answers newcomers; else 503 and why."""
        del request
        start = time.perf_counter()
        faults = {}
        answers = await asyncio.gather(
            self._line.ask(wire.Ping(), wire.Ok), knock(self._engine), return_exceptions=True
        )
        for what, answer in zip(("loop", "engine_socket"), answers, strict=True):
            if isinstance(answer, BaseException):
                faults[what] = f"no answer in {PROBE_S} s" if isinstance(answer, TimeoutError) else str(answer)
        body = {"healthy": not faults, "faults": faults, "seconds": round(time.perf_counter() - start, 6)}
        return web.json_response(body, status=503 if faults else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        """The daemon's numbers; where it does not answer, kvtier_up 0."""
        del request
        data: dict[str, Any] | None = None
        try:
            data = (await self._line.ask(wire.Metrics(), wire.Info)).data
        except (TimeoutError, OSError, EOFError, KvtierError) as exc:
            _log.warning("no metrics: %r", exc)
        return web.Response(body=render(data), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[guarded])
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/metrics", self.metrics)
        self.dashboard.add_to(app)
        return app


async def _ended() -> None:
    """Wait until the daemon is gone: it holds the other end of this process's standard input."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with contextlib.suppress(OSError):
        await reader.read()
    transport.close()


def _bounded(server: web.Server) -> Callable[[], asyncio.Protocol]:
    """What makes the protocol of one connection more."""

    def trim() -> None:
        held = server.connections
        for oldest in held[: max(0, len(held) - MOST + 1)]:
            oldest.force_close()

    def made() -> asyncio.Protocol:
        asyncio.get_running_loop().call_soon(trim)  # by then the server knows of those that were accepted just before
        return server()

    return made


async def _listen(server: web.Server, port: int) -> None:
    """Bind the port, however long another process has it, and serve for as long as the task lives."""
    said = False
    while True:
        try:
            door = await asyncio.get_running_loop().create_server(_bounded(server), HOST, port)
        except OSError as exc:
            if not said:
                _log.warning("no metrics and health over HTTP until the port is free: %s", exc)
            said = True
            await asyncio.sleep(RETRY_S)
        else:
            _log.info("dashboard, metrics and health on http://%s:%d", HOST, port)
            async with door:
                await door.serve_forever()


async def serve(port: int, engine: Path, admin: Path, traced: str) -> None:
    """Serve until the daemon is gone; `port` 0: serve nothing; `traced`: where spans go, if anywhere."""
    tasks: list[asyncio.Task[None]] = []
    if traced:
        tasks.append(asyncio.create_task(export(Line(admin), traced)))
    runner = None
    if port:
        site = Site(engine, admin, port)
        runner = web.AppRunner(site.app(), access_log=None)
        await runner.setup()
        assert runner.server is not None
        tasks += [asyncio.create_task(_listen(runner.server, port)), asyncio.create_task(site.dashboard.watch())]
    await _ended()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if runner is not None:
        await runner.cleanup()


def main() -> None:
    """Arguments: port, engine socket, admin socket, where spans go."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    port, engine, admin, traced = sys.argv[1:]
    asyncio.run(serve(int(port), Path(engine), Path(admin), traced))


if __name__ == "__main__":
    main()
