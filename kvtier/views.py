"""How kvtierctl shows what the daemon says."""

from __future__ import annotations

import os
import time
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

Data = dict[str, Any]
MISSES = {
    "absent": "nobody stored what comes after it, or it went too long ago to be remembered",
    "evicted": "what comes after it was evicted",
    "lost": "what comes after it was lost: its bytes did not check out",
    "pending": "somebody is computing what comes after it",
    "rule": "more is cached, but a window or state that must be with it is not",
}
NAMING = ("id", "pin", "cache", "request", "session")
"""Columns by which other verbs name things: they are whole as long as there is room for anything."""
WIDE = 140
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def amount(value: float) -> str:
    """Bytes as people read them."""
    for unit in UNITS[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {UNITS[-1]}"


def plain(text: str) -> str:
    """Text that moves no cursor and breaks no row: engines' clients choose the ids of their requests."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(name: str, value: Any) -> str:
    """One value, by what its name says it is."""
    if value is None:
        return "-"
    if isinstance(value, int | float) and any("bytes" in part.split("_") for part in name.split(".")):
        return amount(value)
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    if isinstance(value, list):
        return plain(", ".join(map(str, value)))
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(name, part)}" for key, part in value.items())
    return plain(str(value))


def console() -> Console:
    """Standard output, as wide as its terminal; into a pipe or a file, wide enough for whole rows."""
    out = Console(markup=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = WIDE
    return out


def listing(title: str, items: list[Data], columns: list[str] | None = None) -> None:
    """Print a row for each item; where the terminal is too narrow for that, a table for each.

    Columns are the names that the items have. Text may be cut to its name's width: numbers, and what other verbs
    name things by, are whole.
    """
    names = columns or list(dict.fromkeys(name for item in items for name in item))
    cells = {name: [shown(name, item.get(name, "")) for item in items] for name in names}
    numbers = {name for name in names if any(isinstance(item.get(name), int | float) for item in items)}
    out, table, needed = console(), Table(title=title, title_justify="left"), 1
    for name in names:
        head, whole = name.removesuffix("_bytes"), name in numbers or name in NAMING
        table.add_column(head, justify="right" if name in numbers else "left", no_wrap=whole, overflow="fold")
        needed += 3 + max([len(head), *(cell_len(cell) for cell in cells[name] if whole)])
    if needed > out.width:
        for number, item in enumerate(items, 1):
            out.print(pairs(f"{title}: {number} of {len(items)}", {name: item.get(name, "") for name in names}))
        return
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    out.print(table)


def pairs(title: str, data: Data) -> Table:
    """A table of names and values, deeper trees flattened to dotted names."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _flat(data):
        table.add_row(name, shown(name, value))
    return table


def _flat(data: Data, prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves of a tree of values."""
    out: list[tuple[str, Any]] = []
    for name, value in data.items():
        out += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return out


def status(data: Data) -> None:
    """Tiers, engines, counters."""
    out = console()
    apart = ("tiers", "instances", "peers", "quotas", "counters", "bytes_s", "checked")
    table = pairs("daemon", {name: value for name, value in data.items() if name not in apart})
    if data.get("bytes_s"):
        table.add_row("tiers bring", ", ".join(f"{tier} {amount(rate)}/s" for tier, rate in data["bytes_s"].items()))
    if checked := data.get("checked"):
        table.add_row("checked", f"{time.time() - checked['at']:.0f} s ago, {checked['broken']} broken")
    out.print(table)
    for name, tier in (data.get("tiers") or {}).items():
        out.print(pairs(f"tier {name}", tier))
    if data.get("instances"):
        listing("engines", data["instances"])
    if data.get("peers"):
        listing("peers", data["peers"])
    if data.get("quotas"):
        listing("quotas", data["quotas"])
    if data.get("counters"):
        out.print(pairs("counters", data["counters"]))


def caches(data: Data) -> None:
    """One row per cache."""
    items = [
        cache
        | {
            "id": cache["id"][:12],
            "kind": "keyed" if cache["keyed"] else "token",
            "page size": amount(cache["page_bytes"]),
        }
        for cache in data["caches"]
    ]
    if not items:
        console().print("no caches")
        return
    names = ["id", "model", "kind", "scope", "kv_dtype", "adapter", "epoch", "page_tokens", "page size"]
    names += ["pages", "nodes", "tiers"]
    listing("caches", items, names)


def one(title: str, data: Data) -> None:
    """A few names and values."""
    console().print(pairs(title, data))


def pins(data: Data) -> None:
    """One row per pin."""
    if data["pins"]:
        listing("pins", [{**pin, "cache": pin["cache"][:12]} for pin in data["pins"]])
    else:
        console().print("no pins")


def disk(data: Data) -> None:
    """How full and scattered the disk tier is."""
    out = console()
    out.print(pairs("disk", {name: value for name, value in data.items() if name not in {"classes", "caches"}}))
    if data["classes"]:
        listing("cells", data["classes"])
    if data["caches"]:
        listing("caches", [{**row, "id": row["id"][:12]} for row in data["caches"]])


def findings(items: list[Data]) -> None:
    """What doctor found."""
    listing("doctor", items)


def requests(data: Data) -> None:
    """One row per request."""
    if data["requests"]:
        listing("recent requests", [{**row, "cache": row["cache"][:12]} for row in data["requests"]])
    else:
        console().print("no request had an id lately")


def evicted(data: Data) -> None:
    """What an eviction took, or why it took nothing."""
    if data["pages"] or data["held"]:
        one("evicted", data)
    else:
        console().print("nothing: none of it is there, or all that is belongs to other prompts too")


def emptied(title: str, data: Data) -> None:
    """What emptying caches took."""
    if data["caches"]:
        one(title, {**data, "caches": [cache[:12] for cache in data["caches"]]})
    else:
        console().print("no cache fits")


def explain(data: Data) -> None:
    """One prompt: what is served and why not more."""
    out = console()
    cache = data["cache"]
    shown_first = {
        "cache": f"{cache['model']} {cache['id'][:12]}, {cache['scope']}, epoch {cache['epoch']}",
        "asked": data["asked"],
        "matched": data["matched"],
        **{
            name: data[name]
            for name in ("present_pages", "pending_pages", "chain", "leases", "idle_s")
            if data.get(name)
        },
        **({"requests": data["requests"]} if data.get("requests") else {}),
    }
    table = Table(title="prompt", title_justify="left", show_header=False)
    for name, value in shown_first.items():
        table.add_row(name, shown(name, value))
    out.print(table)
    if data["segments"]:
        moves = [{**row, "moves": shown("bytes", row["moves"])} for row in data["segments"]]
        listing("parts", moves)
        out.print(_cost(data))
    if not data["asked"]["pages"]:
        out.print("it is shorter than a page: nothing of it can be cached")
    if data["miss"]:
        out.print(f"not served further: {MISSES[data['miss']]}")
    if data.get("rule"):
        out.print(_rule(data["rule"]))
    if data["diverges"]:
        out.print(_divergence(data["diverges"]))
    if data["evictions"]:
        now = time.time()
        ago = [
            {"ago_s": now - row["when"], **{k: v for k, v in row.items() if k != "when"}} for row in data["evictions"]
        ]
        listing("evicted lately", ago)


def _cost(data: Data) -> str:
    """What all parts cost, and what to say for more."""
    cost, rates = data["cost"], data["bytes_s"]
    known = f"at {', '.join(f'{tier} {amount(rate)}/s' for tier, rate in rates.items())}" if rates else ""
    load = f"{shown('load_s', cost['load_s'])} s to load {known}"
    if cost["load_s"] is None and not cost["bytes"]:
        load = "nothing to load"
    elif cost["load_s"] is None:
        load = "time to load not known: --rate TIER=RATE gives what has not been measured yet"
    compute = f", {shown('compute_s', cost['compute_s'])} s to compute" if cost["compute_s"] is not None else ""
    return f"in all: {amount(cost['bytes'])}, {load}{compute}"


def _rule(rule: Data) -> str:
    """What is cached of a prompt that cannot be resumed at the end of it."""
    states = [
        f"; group {group} has its state after {'pages ' + shown('', pages) if pages else 'none of them'}"
        for group, pages in rule["states_after_pages"].items()
    ]
    return f"{rule['cached_pages']} pages are cached{''.join(states)}"


def _divergence(where: Data) -> str:
    """Where a prompt leaves what is cached, and whose that is."""
    known = where["from"]["requests"]
    whose = f", of request {shown('requests', known)}" if known else ""
    asked, cached = (
        f"{where[which]} {where[text]!r}" if (text := f"{which}_text") in where else where[which]
        for which in ("asked", "cached")
    )
    return (
        f"diverges at token {where['token']}: asked {asked}, cached {cached}"
        f" (page {where['from']['chain']}{whose}, used {where['from']['idle_s']:.0f} s ago)"
    )


def top(data: Data) -> Table:
    """One reading of what happens now."""
    table = Table(title="kvtier", title_justify="left", show_header=False)
    hits = {tier: f"{rate:.0f}" for tier, rate in data["tokens_hit_s"].items()}
    table.add_row("requests/s", f"{data['requests_s']:.1f}")
    table.add_row("tokens/s", f"asked {data['tokens_asked_s']:.0f}, hit {shown('', hits) or 0}")
    table.add_row("hit ratio", shown("", data["hit_ratio"]))
    table.add_row("moved/s", shown("bytes", {way: rate for way, rate in data["bytes_s"].items() if rate}) or "-")
    table.add_row(
        "evicted pages/s", shown("", {tier: rate for tier, rate in data["pages_evicted_s"].items() if rate}) or "-"
    )
    table.add_row("queues", shown("", data["queues"]))
    table.add_row("engines", f"{data['instances']}, leases {data['leases']}, holding {amount(data['held_bytes'])}")
    for name, tier in data["tiers"].items():
        total = tier.get("budget_bytes", tier.get("capacity_bytes", 0))
        bad = f", {tier['sick']}" if tier.get("sick") else ""
        if short := tier.get("parked_bytes"):
            bad += f", no room on the file system for {amount(short)}"
        table.add_row(name, f"{amount(tier['used_bytes'])} of {amount(total)}{bad}")
    for verb, row in data["verbs"].items():
        table.add_row(verb, f"{row['calls'] / data['seconds']:.1f}/s, {row['mean_us']:.0f} us")
    return table


def tree(data: Data) -> None:
    """Cached prefixes, a node per run of pages."""
    cache = data["cache"]
    top = Tree(f"{plain(cache['model'])} {cache['id'][:12]}: {cache['pages']} pages in {cache['nodes']} nodes")
    levels = [top]
    for node in data["nodes"]:
        del levels[node["level"] + 1 :]
        what = node.get("text") or node.get("key", "")[:16] or " ".join(map(str, node.get("tokens", [])[:8]))
        pages = f"pages {node['first_page']}..{node['first_page'] + node['pages'] - 1}"
        leases = f", {node['leases']} leases" if node["leases"] else ""
        used = f"heat {node['heat']}, idle {node['idle_s']:.0f} s"
        line = f"{pages} [{shown('tiers', node['tiers'])}]{leases}, {used}  {plain(what)[:60]}"
        levels.append(levels[-1].add(line, highlight=False))
    out = console()
    out.print(top)
    if data.get("left_off"):
        out.print(f"{data['left_off']} nodes more")
