"""The dashboard's routes: the page, what it shows as JSON, and pins and routing, which take the operator's token.

Only loopback reaches it, which on a host with several users is not enough: numbers anybody may see, while token ids of
prompts, and every change, need the token in a file beside the admin socket, of its owner alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.resources
import logging
import os
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
from aiohttp import web

from kvtier import wire
from kvtier.dashboard.history import EVERY_S, History
from kvtier.types import Code, KvtierError, bad

ADDRESS_NAME: Final = "dashboard.url"
"""File beside the admin socket: the page's address with the token in it."""
FILES: Final = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
MAX_BODY: Final = 4096
"""Bytes of the body of a pin."""
MAX_PROMPT: Final = 16 << 20
"""Bytes of the body of a prompt that is to be routed."""
MAX_DIGITS: Final = 20
"""Of a number in a query."""
NAMES: Final = {"127.0.0.1", "localhost", "[::1]"}
R = TypeVar("R", bound=wire.Message)
_log = logging.getLogger("kvtier.http")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Asks(Protocol):
    """A line to the daemon's admin socket."""

    async def ask(self, message: wire.Message, reply: type[R]) -> R:
        """The reply; raises TimeoutError, OSError, EOFError, KvtierError."""


class NewPin(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/pins."""

    cache: str
    chain: str
    ttl_s: float = 3600.0
    priority: int = 50


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/route."""

    tokens: list[int]
    cache: str = ""
    """Beginning of the cache's id; may be left out where there is one token cache."""
    session: str = ""


def new_token(folder: Path, page: str) -> str:
    """A fresh token, written (in the page's address) where its owner alone can read it; else nobody knows it."""
    token, path = secrets.token_urlsafe(24), folder / ADDRESS_NAME
    try:
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{page}#token={token}\n")
    except OSError as exc:
        _log.warning("the dashboard changes nothing: no place for its token: %s", exc)
    return token


@web.middleware
async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer only pages that this host was asked for by its own name, and say what went wrong as JSON.

    A page of another site that has its name resolve to loopback still sends its own name.
    """
    name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
    if request.path not in {"/metrics", "/healthz"} and name not in NAMES:
        return _refused(403, Code.FORBIDDEN, "ask for 127.0.0.1 or localhost", "host")
    try:
        response = await handler(request)
    except KvtierError as exc:
        status = {Code.UNKNOWN: 404, Code.FORBIDDEN: 403}.get(exc.code, 400)
        return _refused(status, exc.code, exc.message, exc.field)
    except (TimeoutError, OSError, EOFError) as exc:
        return _refused(503, Code.IO, f"the daemon does not answer: {str(exc) or 'not in time'}", "")
    response.headers.update(HEADERS)
    return response


def _refused(status: int, code: Code, message: str, field: str) -> web.Response:
    return web.json_response(
        {"error": {"code": code, "message": message, "field": field}}, status=status, headers=HEADERS
    )


class Dashboard:
    """Routes and the history behind them."""

    def __init__(self, line: Asks, patient: Asks, token: str) -> None:
        self._line = line
        self._patient = patient
        """A line of their own for pins and routing, which may take seconds: the page goes on meanwhile."""
        self._token = token
        self._history = History()

    def add_to(self, app: web.Application) -> None:
        """Put the routes into an application."""
        for path in FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/v1/overview", self._overview)
        app.router.add_get("/v1/tree", self._tree)
        app.router.add_get("/v1/curve", self._curve)
        app.router.add_get("/v1/pins", self._pins)
        app.router.add_post("/v1/pins", self._pin)
        app.router.add_delete("/v1/pins/{pin}", self._unpin)
        app.router.add_post("/v1/route", self._route)

    async def watch(self) -> None:
        """Read the counters now and then, for as long as the task lives."""
        while True:
            with contextlib.suppress(TimeoutError, OSError, EOFError, KvtierError):
                self._history.add(time.monotonic(), (await self._asked(wire.Metrics()))["counters"])
            await asyncio.sleep(EVERY_S)

    async def _asked(self, message: wire.Message) -> Any:
        """What the daemon says."""
        return (await self._line.ask(message, wire.Info)).data

    async def _done(self, message: wire.Message) -> web.Response:
        """What it says of something that may take a while."""
        return web.json_response((await self._patient.ask(message, wire.Info)).data)

    def _trusted(self, request: web.Request) -> bool:
        """Whether the request carries the token."""
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        return kind == "Bearer" and hmac.compare_digest(token.encode(errors="replace"), self._token.encode())

    def _demand(self, request: web.Request) -> None:
        if not self._trusted(request):
            raise KvtierError(Code.FORBIDDEN, "this takes the token that `kvtierctl dashboard` prints", "Authorization")

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = FILES[request.path]
        text = (importlib.resources.files("kvtier.dashboard") / "static" / name).read_text()
        return web.Response(text=text, content_type=kind)

    async def _overview(self, request: web.Request) -> web.Response:
        """Tiers, engines, caches and the history."""
        status = await self._asked(wire.Status())
        caches = (await self._asked(wire.Caches()))["caches"]
        if not self._trusted(request):
            for name in ("disk_path", "policy", "policy_mistake"):
                status.pop(name)
            for each in status["quotas"]:
                each.pop("rule")  # it may be a tenant's salt
            for each in status["instances"]:
                each.pop("pids")
            for each in status["peers"]:
                each.pop("why")
        body = {"status": status, "caches": caches, "history": self._history.steps(), "trusted": self._trusted(request)}
        return web.json_response(body)

    async def _tree(self, request: web.Request) -> web.Response:
        """Nodes of ?cache=, at most ?limit= of them, ?depth= levels deep."""
        asked = {name: _number(request.query, name, most) for name, most in (("depth", 10_000), ("limit", 10_000))}
        ask = wire.Tree(request.query.get("cache", ""), **{name: value for name, value in asked.items() if value})
        data = await self._asked(ask)
        if not self._trusted(request):
            for node in data["nodes"]:
                node.pop("tokens", None)
        return web.json_response(data)

    async def _curve(self, request: web.Request) -> web.Response:
        """Hits against capacity for the traffic just seen, and what ?add= bytes more would have hit."""
        add = _number(request.query, "add", 1 << 50)
        return web.json_response(await self._asked(wire.Curve((add,) if add else ())))

    async def _pins(self, request: web.Request) -> web.Response:
        """The pins; their numbers are texts, for scripts hold only 53 bits of a number."""
        del request
        pins = (await self._asked(wire.Pins()))["pins"]
        return web.json_response({"pins": [{**pin, "pin": str(pin["pin"])} for pin in pins]})

    async def _pin(self, request: web.Request) -> web.Response:
        """Pin the path that ends with a page, by its chain key."""
        self._demand(request)
        try:
            new = msgspec.json.decode(await _body(request, MAX_BODY), type=NewPin)
            of = wire.Prompt(new.cache, chain=bytes.fromhex(new.chain))
        except (msgspec.MsgspecError, ValueError) as exc:
            raise bad("body", f"a pin as JSON ({exc})") from None
        return await self._done(wire.Pin(of, new.ttl_s, new.priority))

    async def _route(self, request: web.Request) -> web.Response:
        """Hosts for a prompt, the cheapest first. What is cached of it is not for everybody: it takes the token."""
        self._demand(request)
        try:
            asked = msgspec.json.decode(await _body(request, MAX_PROMPT), type=Asked)
            of = wire.Prompt(asked.cache, array("i", asked.tokens).tobytes())
        except (msgspec.MsgspecError, OverflowError) as exc:
            raise bad("body", f"tokens, cache and session as JSON ({exc})") from None
        return await self._done(wire.Route(of, asked.session))

    async def _unpin(self, request: web.Request) -> web.Response:
        self._demand(request)
        number = _number(request.match_info, "pin", 1 << 63)
        if not number:
            raise bad("pin", "a pin's number")
        return await self._done(wire.Unpin(number))


async def _body(request: web.Request, most: int) -> bytes:
    """All of a body, in however many pieces it comes; raises bad_request for one that is too long, unread."""
    length = request.content_length or 0
    raw = bytearray()
    while length <= most and (piece := await request.content.readany()):
        raw += piece
        length = max(length, len(raw))
    if length > most:
        raise bad("body", f"at most {most} bytes", length)
    return bytes(raw)


def _number(values: Any, name: str, most: int) -> int:
    """A natural number of a query, 0 where there is none; raises bad_request."""
    text = values.get(name, "0")
    if not text.isascii() or not text.isdecimal() or len(text) > MAX_DIGITS or int(text) > most:
        raise bad(name, f"0..{most}", text[:40])
    return int(text)
