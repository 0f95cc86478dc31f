"""The verb `set`."""

from __future__ import annotations

import click

from kvtier import views, wire
from kvtier.control.call import Call, Data, verb
from kvtier.types import bad


@click.command("set")
@click.argument("pairs", nargs=-1, metavar="[KEY=VALUE]...")
@verb
def set_(call: Call, show: bool, pairs: tuple[str, ...]) -> Data:
    """Show the live settings, or change some until the next SIGHUP or restart: all of them or none."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise bad(pair, "KEY=VALUE")
        values[name] = value
    data = call.info(wire.Set(values))
    if show:
        views.one("live settings", data["settings"])
    return data
