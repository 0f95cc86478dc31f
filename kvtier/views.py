"""How kvtierctl shows what the daemon says."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

Data = dict[str, Any]
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def amount(value: float) -> str:
    """Bytes as people read them."""
    for unit in UNITS[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {UNITS[-1]}"


def shown(name: str, value: Any) -> str:
    """One value, by what its name says it is."""
    last = name.rsplit(".", 1)[-1]
    if (last.endswith("_bytes") or last.startswith("bytes_")) and isinstance(value, int):
        return amount(value)
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return str(value)


def rows(title: str, items: list[Data], columns: list[str] | None = None) -> Table:
    """A table with one row per item; columns are the names that the items have."""
    names = columns or list(dict.fromkeys(name for item in items for name in item))
    table = Table(title=title, title_justify="left")
    for name in names:
        number = any(isinstance(item.get(name), int | float) for item in items)
        table.add_column(name.removesuffix("_bytes"), justify="right" if number else "left")
    for item in items:
        table.add_row(*(shown(name, item.get(name, "")) for name in names))
    return table


def pairs(title: str, data: Data) -> Table:
    """A table of names and values, deeper trees flattened to dotted names."""
    table = Table(title=title, title_justify="left", show_header=False)
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
    console = Console(markup=False)
    apart = ("tiers", "instances", "counters")
    console.print(pairs("daemon", {name: value for name, value in data.items() if name not in apart}))
    for name, tier in (data.get("tiers") or {}).items():
        console.print(pairs(f"tier {name}", tier))
    if data.get("instances"):
        console.print(rows("engines", data["instances"]))
    if data.get("counters"):
        console.print(pairs("counters", data["counters"]))


def caches(data: Data) -> None:
    """One row per cache."""
    items = [{**cache, "id": cache["id"][:12]} for cache in data["caches"]]
    console = Console(markup=False)
    if not items:
        console.print("no caches")
        return
    names = ["id", "model", "kv_dtype", "adapter", "epoch", "page_tokens", "page_bytes", "pages", "nodes", "tiers"]
    console.print(rows("caches", items, names))


def one(title: str, data: Data) -> None:
    """A few names and values."""
    Console(markup=False).print(pairs(title, data))


def pins(data: Data) -> None:
    """One row per pin."""
    console = Console(markup=False)
    items = [{**pin, "cache": pin["cache"][:12]} for pin in data["pins"]]
    console.print(rows("pins", items) if items else "no pins")


def disk(data: Data) -> None:
    """How full and scattered the disk tier is."""
    console = Console(markup=False)
    console.print(pairs("disk", {name: value for name, value in data.items() if name not in {"classes", "caches"}}))
    if data["classes"]:
        console.print(rows("cells", data["classes"]))
    if data["caches"]:
        console.print(rows("caches", [{**row, "id": row["id"][:12]} for row in data["caches"]]))


def findings(items: list[Data]) -> None:
    """What doctor found."""
    Console(markup=False).print(rows("doctor", items))


def explain(data: Data) -> None:
    """One prompt: what is served and why not more."""
    console = Console(markup=False)
    lists = ("segments", "evictions", "diverges")
    console.print(pairs("prompt", {name: value for name, value in data.items() if name not in lists and value != ""}))
    if data["segments"]:
        console.print(rows("served", data["segments"]))
    apart = data["diverges"]
    if apart:
        console.print(f"diverges at token {apart['token']}: asked {apart['asked']}, cached {apart['cached']}")
    if data["evictions"]:
        ago = [{**row, "when": datetime.fromtimestamp(row["when"], UTC)} for row in data["evictions"]]
        console.print(rows("evicted lately", ago))


def top(data: Data) -> Table:
    """One reading of what happens now."""
    return pairs("kvtier", data)


def tree(data: Data) -> None:
    """Cached prefixes, a node per run of pages."""
    cache = data["cache"]
    top = Tree(f"{cache['model']} {cache['id'][:12]}: {cache['pages']} pages in {cache['nodes']} nodes")
    levels = [top]
    for node in data["nodes"]:
        del levels[node["level"] + 1 :]
        what = node.get("text") or node.get("key", "")[:16] or " ".join(map(str, node.get("tokens", [])[:8]))
        pages = f"pages {node['first_page']}..{node['first_page'] + node['pages'] - 1}"
        leases = f", {node['leases']} leases" if node["leases"] else ""
        used = f"heat {node['heat']}, idle {node['idle_s']:.0f} s"
        line = f"{pages} [{shown('tiers', node['tiers'])}]{leases}, {used}  {what!s:.60}"
        levels.append(levels[-1].add(line, highlight=False))
    console = Console(markup=False)
    console.print(top)
    if data.get("left_off"):
        console.print(f"{data['left_off']} nodes more")
