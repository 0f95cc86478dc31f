"""kvtierctl curve: what more or less room would have hit."""

from __future__ import annotations

from typing import Final

import click

from kvtier.config import size
from kvtier.control.call import Call, Data, verb
from kvtier.types import bad
from kvtier.views import amount, plain

WIDTH: Final = 50


@click.command()
@click.option("--add", "more", default="64GiB", show_default=True, help="So much more memory: GiB is 2^30, GB 1e9.")
@verb
def curve(call: Call, show: bool, more: str) -> Data:
    """Hits against capacity for the traffic just seen, as LRU would have had them."""
    from kvtier import wire  # noqa: PLC0415

    try:
        extra = size(more)
    except ValueError:
        raise bad("add", "a size such as 64GiB", more) from None
    data = call.info(wire.Curve((extra,)))
    if show:
        if not data["pools"]:
            click.echo("no requests yet")
        for pool in data["pools"]:
            _show(pool)
    return data


def _show(pool: Data) -> None:
    """One pool: what it is, the plot, and what is asked most."""
    points = pool["points"]
    whose = plain(f"{pool['model']} ({pool['scope']})")
    click.echo(f"{whose}: {pool['requests']} requests, {pool['pages_asked']} pages asked")
    if pool["requests_skipped"]:
        click.echo(f"  {pool['requests_skipped']} requests more were not looked at, for want of time")
    flat = next((n for n, p in enumerate(points) if p["hit_ratio"] == points[-1]["hit_ratio"]), 0)
    most = max((point["hit_ratio"] for point in points), default=0.0)
    for point in points[: flat + 1]:  # more room than that changes nothing
        filled = "#" * round(WIDTH * point["hit_ratio"] / most) if most else ""
        sampled = "~" if point["bytes"] > pool["exact_to_bytes"] else " "
        click.echo(f"  {amount(point['bytes']):>10} {100 * point['hit_ratio']:6.2f} %{sampled}|{filled}")
    for name, label in (("now", "host as it is"), ("with_disk", "host and disk"), ("added", "host and that much more")):
        for point in pool[name]:
            click.echo(f"  {label}: {amount(point['bytes'])}, {100 * point['hit_ratio']:.2f} %")
