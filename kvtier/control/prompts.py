"""Verbs about one prompt: requests, explain, pin, unpin, pins, prefetch, evict."""

from __future__ import annotations

import click

from kvtier import views, wire
from kvtier.control.address import load_tokenizer, prompt
from kvtier.control.call import Call, Data, verb, waiting
from kvtier.control.cost import priced, total
from kvtier.control.progress import ask_long
from kvtier.sizing.options import NUMBER
from kvtier.types import Tier, bad


@click.command()
@click.option("--session", default="", help="Only those of this conversation.")
@click.option("--limit", default=20, show_default=True, help="Requests to show, the latest first.")
@verb
def requests(call: Call, show: bool, session: str, limit: int) -> Data:
    """List recent requests by the engines' own ids, for explain, pin, prefetch and evict."""
    data = call.info(wire.Requests(session, limit))
    if show:
        views.requests(data)
    return data


def _rates(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    """Bytes a second of TIER=RATE."""
    from kvtier.sizing.units import parse_rate  # noqa: PLC0415
    from kvtier.types import KvtierError  # noqa: PLC0415

    found = {}
    for text in values:
        tier, equals, rate = text.partition("=")
        if not equals or tier.upper() not in Tier.__members__:
            raise click.BadParameter(f"expected TIER=RATE such as host=55GB/s, got {text!r}")
        try:
            found[tier.lower()] = parse_rate(rate)
        except KvtierError as exc:
            raise click.BadParameter(exc.message) from None
    return found


@click.command()
@click.option(
    "--prefill-tokens-per-s",
    "prefill",
    type=NUMBER,
    default=0.0,
    help="How fast the engine computes a prompt: shows where loading is slower than computing.",
)
@click.option(
    "--rate",
    "given",
    multiple=True,
    callback=_rates,
    metavar="TIER=RATE",
    help="Bytes a second of a tier, such as host=55GB/s, over what the daemon measured. Repeat it.",
)
@verb
@prompt
def explain(call: Call, show: bool, of: wire.Prompt, prefill: float, given: dict[str, float]) -> Data:
    """Why a prompt is served as it is: what matches, from which tier and at what cost, where it diverges, evictions."""
    data = call.info(wire.Explain(of))
    data["bytes_s"] = {**data["bytes_s"], **given}
    data["segments"] = priced(data["segments"], data["page_tokens"], data["bytes_s"], prefill)
    data["cost"] = total(data["segments"])
    folder = click.get_current_context().params["tokenizer"]
    if folder and data["diverges"]:
        decode = load_tokenizer(folder).decode
        data["diverges"] |= {f"{which}_text": decode(data["diverges"][which]) for which in ("asked", "cached")}
    if show:
        views.explain(data)
    return data


@click.command()
@click.option("--ttl", "ttl_s", default=3600.0, show_default=True, help="Seconds until it ends.")
@click.option("--priority", default=50, show_default=True, help="0..100; higher ones displace lower ones.")
@verb
@prompt
def pin(call: Call, show: bool, of: wire.Prompt, ttl_s: float, priority: int) -> Data:
    """Hold what is cached of a prompt in host for a time; pins end with the daemon."""
    data = call.info(wire.Pin(of, ttl_s, priority))
    if show:
        views.one("pinned", data)
    return data


@click.command()
@click.argument("number", type=int, required=False)
@click.option("--all", "every", is_flag=True, help="End all pins.")
@verb
def unpin(call: Call, show: bool, number: int | None, every: bool) -> Data:
    """End a pin by its number, or all of them."""
    if (number is None) != every or number == 0:
        raise bad("number", "a pin's number, or --all")
    data = call.info(wire.Unpin(number or 0))
    if show:
        click.echo(f"{len(data['unpinned'])} unpinned")
    return data


@click.command()
@verb
def pins(call: Call, show: bool) -> Data:
    """List the pins: what each holds, its priority and how long it lasts."""
    data = call.info(wire.Pins())
    if show:
        views.pins(data)
    return data


@click.command()
@waiting(60.0)
@verb
@prompt
def prefetch(call: Call, show: bool, of: wire.Prompt, wait_s: float) -> Data:
    """Bring what is cached of a prompt to host; exit code 1 where some of it did not get there in time."""
    message = wire.Warm(of, int(wait_s * 1000))
    data = ask_long(call, message, wire.Info, lambda status: status["moving"]["loads"], wait_s).data
    if show:
        views.one("in host", data)
    return {**data, "healthy": not data["left"]}


@click.command()
@click.option(
    "--from", "tier", default="host", show_default=True, help="device, host: slower tiers keep it; all: it is gone."
)
@waiting(60.0, "Seconds to wait for the disk.")
@verb
@prompt
def evict(call: Call, show: bool, of: wire.Prompt, tier: str, wait_s: float) -> Data:
    """Take the pages that only this prompt has, and all that continue them, out of a tier or out of every one."""
    message = wire.Evict(of, tier, int(wait_s * 1000))
    data = ask_long(call, message, wire.Info, lambda status: status["moving"]["disk_queue_pages"], wait_s).data
    if show:
        views.evicted(data)
    return data
