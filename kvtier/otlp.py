"""Spans of requests to an OpenTelemetry receiver: OTLP over HTTP, as JSON. Runs in the HTTP process."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from typing import Any, Final

import aiohttp

from kvtier import __version__, wire
from kvtier.dashboard.site import Asks
from kvtier.types import KvtierError

EVERY_S: Final = 1.0
POST_S: Final = 5.0
SERVER: Final = 2
"""SPAN_KIND_SERVER."""
ERROR: Final = 2
"""STATUS_CODE_ERROR."""
_log = logging.getLogger("kvtier.http")


async def export(line: Asks, endpoint: str) -> None:
    """Take spans from the daemon and send them, for as long as the task lives.

    What a receiver does not take is lost: the next ones are tried, and the first failure in a row is logged.
    """
    url, failing = endpoint.rstrip("/") + "/v1/traces", False
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(POST_S)) as session:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                data = (await line.ask(wire.Spans(), wire.Info)).data
                if data["spans"]:
                    async with session.post(url, json=encoded(data["spans"]), allow_redirects=False) as answer:
                        answer.raise_for_status()
                    failing = False
            except (TimeoutError, OSError, EOFError, KvtierError, aiohttp.ClientError) as exc:
                if not failing:
                    _log.warning("spans are lost until %s takes them: %r", url, exc)
                failing = True


def encoded(spans: Any) -> dict[str, Any]:
    """An ExportTraceServiceRequest as OTLP's JSON has it: ids in hex, 64-bit numbers as texts."""
    resource = {"service.name": "kvtierd", "service.version": __version__, "host.name": platform.node()}
    scope = {"name": "kvtier", "version": __version__}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": scope, "spans": [_span(each) for each in spans]}],
            }
        ]
    }


def _span(span: dict[str, Any]) -> dict[str, Any]:
    """One of them, a trace of its own."""
    status = {"code": ERROR, "message": span["error"]} if span["error"] else {}
    return {
        "traceId": os.urandom(16).hex(),
        "spanId": os.urandom(8).hex(),
        "name": f"kvtier.{span['name']}",
        "kind": SERVER,
        "startTimeUnixNano": str(span["start_ns"]),
        "endTimeUnixNano": str(span["end_ns"]),
        "attributes": _attributes(span["attributes"]),
        "status": status,
    }


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Numbers and texts with their types."""
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in values.items()
    ]
