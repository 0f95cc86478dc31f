"""Verbs about whole caches: caches, caches rm, tree, purge, flush."""

from __future__ import annotations

from typing import Any

import click

from kvtier import views, wire
from kvtier.control.call import Call, Data, verb, waiting
from kvtier.control.progress import ask_long
from kvtier.types import bad


def _pages(status: Data) -> int:
    """What is left to do while caches are emptied."""
    return int(status["pages"])


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def caches(ctx: click.Context, as_json: bool) -> None:
    """One row per cache; `rm` empties one."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(_list, as_json=as_json)


@verb
def _list(call: Call, show: bool) -> Data:
    """One row per cache."""
    data = call.info(wire.Caches())
    if show:
        views.caches(data)
    return data


@caches.command("rm")
@click.argument("cache")
@waiting(600.0)
@verb
def remove(call: Call, show: bool, cache: str, wait_s: float) -> Data:
    """Empty a cache, named by the beginning of its id; one that no engine has open is forgotten."""
    data = ask_long(call, wire.Remove(cache), wire.Info, _pages, wait_s).data
    if show:
        views.emptied("removed", data)
    return data


@click.command()
@click.option("--scope", default="", help="Trust scope, such as uid:1000.")
@click.option("--adapter", default="", help="Adapter (LoRA) of the caches.")
@click.option("--tenant", default="", help="The tenant's salt, in hex.")
@waiting(600.0)
@verb
def purge(call: Call, show: bool, scope: str, adapter: str, tenant: str, wait_s: float) -> Data:
    """Empty every cache of a trust scope, an adapter or a tenant; what is given must all fit."""
    try:
        salt = bytes.fromhex(tenant)
    except ValueError:
        raise bad("tenant", "a salt in hex", tenant) from None
    data = ask_long(call, wire.Purge(scope, adapter, salt), wire.Info, _pages, wait_s).data
    if show:
        views.emptied("purged", data)
    return data


@click.command()
@click.argument("cache", default="")
@click.option("--depth", default=8, show_default=True, help="Levels of the tree to show.")
@click.option("--limit", default=1000, show_default=True, help="Nodes to show.")
@click.option("--width", default=64, show_default=True, help="Children of a node to show, latest used first.")
@click.option("--tokenizer", help="Folder of a tokenizer, to show text (needs transformers).")
@verb
def tree(call: Call, show: bool, cache: str, depth: int, limit: int, width: int, tokenizer: str | None) -> Data:
    """Cached prefixes of one cache, named by the beginning of its id where there are several."""
    data = call.info(wire.Tree(cache, depth, limit, width))
    if tokenizer:
        _add_text(data["nodes"], tokenizer)
    if show:
        views.tree(data)
    return data


def _add_text(nodes: list[dict[str, Any]], folder: str) -> None:
    """Say what the first tokens of each node are."""
    from kvtier.control.address import load_tokenizer  # noqa: PLC0415

    one = load_tokenizer(folder)
    for node in nodes:
        if "tokens" in node:
            node["text"] = one.decode(node["tokens"])


@click.command()
@waiting(60.0)
@verb
def flush(call: Call, show: bool, wait_s: float) -> Data:
    """Wait until everything committed is durable."""
    message = wire.Flush(0, int(wait_s * 1000))
    ask_long(call, message, wire.Ok, lambda status: status["moving"]["disk_queue_pages"], wait_s)
    if show:
        click.echo("durable")
    return {"durable": True}
