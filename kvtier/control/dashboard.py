"""The verb `dashboard`."""

from __future__ import annotations

import click

from kvtier.control.call import Call, Data, verb
from kvtier.types import Code, KvtierError


@click.command()
@verb
def dashboard(call: Call, show: bool) -> Data:
    """Print the address of the daemon's dashboard, with the token that lets it change pins."""
    path = call.path.with_name("dashboard.url")
    try:
        url = path.read_text().strip()
    except OSError as exc:
        message = f"no dashboard here ({path}: {exc.strerror}); is http.port set, and is this the daemon's user?"
        raise KvtierError(Code.UNKNOWN, message) from None
    with call.admin():  # a daemon that was killed leaves its address behind
        pass
    if show:
        click.echo(url)
    return {"url": url}
