"""What a command found: named values with units and sources, tables, notes; as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from kvtier.sizing.hardware import Source
from kvtier.sizing.units import show_bytes, show_rate, show_seconds

Number = int | float | str | bool | None


class Value(NamedTuple):
    """One number under the name it has in JSON."""

    key: str
    value: Number
    unit: str
    source: Source
    note: str = ""


class Column(NamedTuple):
    """One column of a table."""

    key: str
    unit: str = ""
    source: Source = Source.EXACT


class Table(NamedTuple):
    """Rows of numbers that share units and sources."""

    key: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Number]]


class Report(NamedTuple):
    """All of one command's answer."""

    title: str
    values: Sequence[Value]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()

    def get(self, key: str) -> Any:
        """The value of that name; raises KeyError."""
        for value in self.values:
            if value.key == key:
                return value.value
        raise KeyError(key)

    def as_json(self) -> dict[str, Any]:
        """Values by name, tables as lists of objects, the source of each under `sources`."""
        tables = {
            t.key: [dict(zip((c.key for c in t.columns), map(_plain, row), strict=True)) for row in t.rows]
            for t in self.tables
        }
        sources: dict[str, Any] = {v.key: v.source.value for v in self.values}
        sources |= {t.key: {c.key: c.source.value for c in t.columns} for t in self.tables}
        return {v.key: _plain(v.value) for v in self.values} | tables | {"sources": sources, "notes": list(self.notes)}


def _plain(value: Number) -> Number:
    """JSON has no infinity: never is null."""
    return None if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


SHOW: Final[dict[str, Callable[[Any], str]]] = {
    "B": show_bytes,
    "B/token": lambda n: f"{show_bytes(n)} a token",
    "B/s": show_rate,
    "s": show_seconds,
    "%": lambda x: f"{100 * x:.1f} %",
    "x": lambda x: f"{x:.2f}x",
    "$": lambda x: f"${x:,.0f}" if x >= 1000 else f"${x:.4g}",
    "tokens": lambda n: f"{round(n):,}",
}
"""Unit -> how people read it."""


def show(value: Number, unit: str) -> str:
    """A number as text, in both conventions where it is a size."""
    if value is None:
        return "-"
    if isinstance(value, (str, bool)):
        return str(value)
    if unit in SHOW:
        return SHOW[unit](value)
    if isinstance(value, float) and value != int(value):
        return f"{float(value):,.4g}"
    return f"{value:,.0f}"
