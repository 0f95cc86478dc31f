"""Verbs about the disk tier: disk usage, scrub, verify, compact, purge."""

from __future__ import annotations

import click

from kvtier import views, wire
from kvtier.control.call import Call, Data, verb, waiting
from kvtier.control.progress import ask_long
from kvtier.types import bad

WAIT = waiting(600.0)


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def disk(ctx: click.Context, as_json: bool) -> None:
    """Look after the disk tier; by itself the same as `usage`."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(usage, as_json=as_json)


def _nothing(status: Data) -> int:
    """There is no telling how much is left to do."""
    del status
    return 0


def _ask(call: Call, message: wire.Message, wait_s: float) -> Data:
    return ask_long(call, message, wire.Info, _nothing, wait_s).data


@disk.command()
@verb
def usage(call: Call, show: bool) -> Data:
    """How full it is, how scattered its free space, what each cache holds."""
    data = call.info(wire.DiskUsage())
    if show:
        views.disk(data)
    return data


@disk.command()
@click.option("--cache", default="", help="Beginning of a cache's id; all caches where left out.")
@WAIT
@verb
def scrub(call: Call, show: bool, cache: str, wait_s: float) -> Data:
    """Read every stored copy again and drop what is not what was stored; exit code 1 where time ran out."""
    data = _ask(call, wire.DiskScrub(cache, int(wait_s * 1000)), wait_s)
    if show:
        views.one("scrubbed", data)
    return data


@disk.command()
@WAIT
@verb
def verify(call: Call, show: bool, wait_s: float) -> Data:
    """Compare catalogue, cells and indexes, changing nothing; exit code 1 where they disagree."""
    data = _ask(call, wire.DiskVerify(), wait_s)
    if show:
        for line in data["first"]:
            click.echo(line)
        views.one("verified", {name: value for name, value in data.items() if name != "first"})
    return data


@disk.command()
@WAIT
@verb
def compact(call: Call, show: bool, wait_s: float) -> Data:
    """Gather free space into whole slabs, and write the catalogue without what was deleted from it."""
    data = _ask(call, wire.DiskCompact(), wait_s)
    if show:
        views.one("compacted", data)
    return data


@disk.command()
@click.option("--cache", default="", help="Beginning of a cache's id.")
@click.option("--scope", default="", help="Trust scope, such as uid:1000.")
@click.option("--adapter", default="", help="Adapter (LoRA) of the caches.")
@click.option("--tenant", default="", help="The tenant's salt, in hex.")
@WAIT
@verb
def purge(call: Call, show: bool, cache: str, scope: str, adapter: str, tenant: str, wait_s: float) -> Data:
    """Empty a cache, or all of a scope, an adapter or a tenant, and make their bytes on disk unreadable.

    Exit code 1 where engines still hold some of their pages: those are discarded by a second call after that.
    """
    try:
        salt = bytes.fromhex(tenant)
    except ValueError:
        raise bad("tenant", "a salt in hex", tenant) from None
    data = _ask(call, wire.DiskPurge(cache, scope, adapter, salt), wait_s)
    if show:
        views.one("purged", data)
    return data
