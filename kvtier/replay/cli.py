"""kvtierctl replay and kvtierctl policies."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import click

from kvtier.policy import DEFAULT, every
from kvtier.sizing.options import COUNT, NUMBER
from kvtier.sizing.units import parse_bytes
from kvtier.tiers.cells import CELLS_PER_SLAB_MIN
from kvtier.types import KvtierError, Tier, bad

Data = dict[str, Any]
_CAPACITY = re.compile(r"(\d+(?:\.\d+)?)(%|[A-Za-z]+)?")
LEAST_DISK: Final = CELLS_PER_SLAB_MIN
TIERS: Final = (Tier.HOST, Tier.DISK)


class Capacity(NamedTuple):
    """Room in one or more tiers as it was asked for, and in pages, the fastest tier first."""

    text: str
    pages: tuple[int, ...]


def capacity(text: str, blocks: int, page_bytes: int) -> Capacity:
    """Pages of 5%, 1000, 64GiB, or 1%+4% for two tiers. Raises bad_request."""
    pages = tuple(_pages(part.strip(), blocks, page_bytes) for part in text.split("+"))
    if len(pages) > len(TIERS):
        raise bad("capacity", "room in host, or in host and on disk", text)
    if len(pages) > 1 and pages[1] < LEAST_DISK:
        raise bad("capacity", f"at least {LEAST_DISK} blocks on disk", text)
    return Capacity(text, pages)


def _pages(text: str, blocks: int, page_bytes: int) -> int:
    match = _CAPACITY.fullmatch(text)
    if match is None:
        raise bad("capacity", "a share such as 5%, a number of blocks, or a size such as 64GiB", text)
    number, unit = Fraction(match[1]), match[2] or ""
    if unit == "%":
        pages = int(blocks * number / 100)
    elif unit:
        if not page_bytes:
            raise bad("capacity", "a share or a number of blocks, or --token-bytes to go with a size", text)
        pages = parse_bytes(text, "capacity") // page_bytes
    else:
        pages = int(number)
    if pages < 1:
        raise bad("capacity", "at least one block", text)
    return pages


def _fail(exc: KvtierError, as_json: bool) -> NoReturn:
    click.echo(json.dumps({"error": exc.data()}) if as_json else f"kvtierctl: {exc.code.value}: {exc}", err=not as_json)
    sys.exit(1)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def policies(as_json: bool) -> None:
    """Eviction policies that ship with kvtier; a path to a file of your own works wherever a name does."""
    found = every()
    if as_json:
        click.echo(json.dumps([each._asdict() for each in found]))
        return
    width = max(len(each.name) for each in found)
    for each in found:
        mark = "*" if each.name == DEFAULT else " "
        click.echo(f"{mark} {each.name:{width}}  {each.summary}\n    {each.path}")


FROM_0: Final = click.IntRange(0)


def _traced(command: Callable[..., None]) -> Callable[..., None]:
    """Options that say what is replayed."""
    for option in reversed(
        [
            click.option("--limit", type=FROM_0, default=0, help="Only the first so many requests."),
            click.option("--warmup", default="0%", show_default=True, help="Share of the requests not counted."),
            click.option("--sessions", type=FROM_0, default=0, help="Sessions overlaid, where times are per session."),
            click.option("--hours", type=NUMBER, default=0.0, help="Hours in which they begin  [1 for 15 sessions]"),
            click.option("--block", type=COUNT, default=512, show_default=True, help="Tokens a block is made there."),
            click.option("--seed", type=FROM_0, default=1, show_default=True, help="Which sessions, and when."),
            click.option("--token-bytes", type=FROM_0, default=0, help="KV of one token, for sizes and bytes moved."),
        ]
    ):
        command = option(command)
    return command


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--policy",
    "policies_",
    multiple=True,
    default=(DEFAULT,),
    show_default=True,
    help="Name, or path of a file; `all` for every one that ships. Repeat it.",
)
@click.option("--capacity", "capacities", multiple=True, help="As 5%, 1000, 64GiB; 1%+4% for host and disk. Repeat it.")
@click.option("--no-bound", is_flag=True, help="Leave Belady's bound out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object, or a list where there are several.")
@_traced
def replay(
    files: tuple[Path, ...], as_json: bool, capacities: tuple[str, ...], policies_: tuple[str, ...], **options: Any
) -> None:
    """Replay a request trace through the real store, with tiny pages and a clock of its own.

    FILES: an npz trace (plain or .zst), Mooncake JSON lines, or LMCache lookup-hash JSON lines.
    Capacity is exact and nothing is evicted before it is full.
    """
    wanted = [part for text in capacities or ("1%,5%,10%,25%",) for part in text.split(",")]
    names = [each.name for each in every()] if "all" in policies_ else list(policies_)
    results = []
    try:
        for result in _replayed(files, wanted, names, options):
            results.append(result)
            if not as_json:
                _show(result)
    except KvtierError as exc:
        _fail(exc, as_json)
    if as_json:
        click.echo(json.dumps(results if len(wanted) * len(names) > 1 else results[0]))


def _replayed(files: tuple[Path, ...], wanted: list[str], names: list[str], options: Data) -> Iterator[Data]:
    from kvtier.replay.bound import belady  # noqa: PLC0415 - keeps --help quick
    from kvtier.replay.drive import replay as drive  # noqa: PLC0415
    from kvtier.replay.trace import SESSIONS, Mix, read  # noqa: PLC0415

    mix = Mix(options["sessions"] or SESSIONS, options["hours"], options["block"], options["seed"])
    requests = read(files, mix, options["limit"])
    token_bytes = options["token_bytes"] or requests.token_bytes
    page_bytes = token_bytes * requests.block_tokens
    first = int(len(requests.leaf) * _share(options["warmup"]))
    bounds: dict[int, float] = {}
    for each, name in product([capacity(text, requests.blocks, page_bytes) for text in wanted], names):
        all_of_it = max(requests.blocks, LEAST_DISK)  # more room than that changes nothing
        outcome = asyncio.run(drive(requests, name, [min(pages, all_of_it) for pages in each.pages], first))
        total = sum(each.pages)
        if total not in bounds and not options["no_bound"]:
            bounds[total] = belady(requests, total, first)
        yield {
            "trace": requests.name,
            "policy": name,
            "capacity": each.text,
            "capacity_pages": total,
            "requests": outcome.requests,
            "tokens": outcome.asked_tokens,
            "hit_ratio": outcome.ratio,
            "belady_hit_ratio": bounds.get(total),
            "tiers": {
                tier.name.lower(): {
                    "capacity_pages": pages,
                    "hit_tokens": outcome.hit_tokens[tier],
                    "hit_ratio": outcome.hit_tokens[tier] / outcome.asked_tokens if outcome.asked_tokens else 0.0,
                }
                for tier, pages in zip(TIERS, each.pages, strict=False)
            },
            "pages_moved": outcome.moved,
            "bytes_moved": sum(outcome.moved.values()) * (page_bytes or outcome.page_bytes),
            "page_bytes": page_bytes or outcome.page_bytes,
        }


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise bad("warmup", "a share such as 50%", text)
    return share


def _show(result: Data) -> None:
    bound = result["belady_hit_ratio"]
    tiers = ", ".join(f"{name} {100 * tier['hit_ratio']:.2f} %" for name, tier in result["tiers"].items())
    click.echo(
        f"{result['trace']}  {result['policy']}  {result['capacity']} ({result['capacity_pages']} pages): "
        f"{100 * result['hit_ratio']:.2f} % of {result['tokens']} tokens"
        + (f" (best possible {100 * bound:.2f} %)" if bound is not None else "")
        + (f"; {tiers}" if len(result["tiers"]) > 1 else "")
    )
