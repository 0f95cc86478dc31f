"""The verb `top`: rates between two readings of the daemon's counters."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import click

from kvtier import views, wire
from kvtier.control.call import SECONDS, Call, Data, verb


@click.command()
@click.option("--interval", type=SECONDS, default=1.0, show_default=True, help="Seconds between readings.")
@click.option("--count", type=click.IntRange(0), default=0, help="Readings to show; without it, until interrupted.")
@verb
def top(call: Call, show: bool, interval: float, count: int) -> Data:
    """What happens now: hits by tier, bytes by direction, latency and queues; --json prints the last reading.

    A terminal shows the last reading, a file or a pipe all of them. Without --count an interrupt is its end, and no
    failure.
    """
    from rich.live import Live  # noqa: PLC0415

    last: Data = {}
    shown = 0
    out = views.console()
    live = Live(console=out, auto_refresh=False) if show and out.is_terminal else None
    with call.admin() as admin, live or contextlib.nullcontext():
        before, at = admin.ask(wire.Metrics(), wire.Info).data, time.monotonic()
        try:
            while not count or shown < count:
                time.sleep(interval)
                after, now = admin.ask(wire.Metrics(), wire.Info).data, time.monotonic()
                last = rates(before, after, now - at)
                before, at = after, now
                shown += 1
                if live is not None:
                    live.update(views.top(last), refresh=True)
                elif show:
                    out.print(views.top(last))
        except KeyboardInterrupt:
            if count or not last:
                raise
    return last


def rates(before: Data, after: Data, seconds: float) -> Data:
    """What happened between two readings, per second."""

    def grown(prefix: str) -> dict[str, float]:
        names = {name for name in after["counters"] if name.startswith(prefix)}
        new = {n: after["counters"][n] - before["counters"].get(n, 0) for n in names}
        return {name[len(prefix) :]: round(value / seconds, 1) for name, value in sorted(new.items())}

    asked = grown("tokens_asked").get("", 0.0)
    hit = grown("tokens_hit_")
    return {
        "seconds": round(seconds, 3),
        "requests_s": grown("requests").get("", 0.0),
        "tokens_asked_s": asked,
        "tokens_hit_s": hit,
        "hit_ratio": round(sum(hit.values()) / asked, 4) if asked else None,
        "bytes_s": grown("bytes_"),
        "pages_evicted_s": grown("pages_evicted_"),
        "queues": after["queues"],
        "leases": after["leases"],
        "held_bytes": after["held_bytes"],
        "instances": after["instances"],
        "tiers": after["tiers"],
        "verbs": {name: row for name in after["server"]["verbs"] if (row := _verb(before, after, name))["calls"]},
    }


def _verb(before: Data, after: Data, name: str) -> dict[str, Any]:
    """Calls of a verb between two readings, and their mean time."""
    new = after["server"]["verbs"][name]
    old = before["server"]["verbs"].get(name, {"buckets": [0], "seconds": 0.0})
    calls = sum(new["buckets"]) - sum(old["buckets"])
    seconds = new["seconds"] - old["seconds"]
    return {"calls": calls, "mean_us": round(seconds / calls * 1e6, 1) if calls else 0.0}
