"""The verb route: which host of the fleet a prompt is cheapest on."""

from __future__ import annotations

import click

from kvtier import wire
from kvtier.control.address import prompt
from kvtier.control.call import Call, Data, verb


@click.command()
@click.option("--stay", default="", help="Name of a session: it stays where it was while that is not too busy.")
@verb
@prompt
def route(call: Call, show: bool, of: wire.Prompt, stay: str) -> Data:
    """Which host a prompt is cheapest on, and why: cached pages by tier, and load."""
    data = call.info(wire.Route(of, stay))
    if show:
        click.echo(
            f"{'host':<16}{'cost':>10}{'device':>8}{'host':>8}{'disk':>8}{'backlog':>9}{'decode':>8}{'requests':>10}"
        )
        for row in data["hosts"]:
            click.echo(
                f"{row['name']:<16}{row['cost']:>10.1f}{row['device']:>8}{row['host']:>8}{row['disk']:>8}"
                f"{row['backlog']:>9}{row['decode']:>8}{row['requests']:>10}"
            )
        click.echo(f"in pages of {data['page_tokens']} tokens; the prompt has {data['pages']}")
    return data
