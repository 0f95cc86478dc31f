"""A report as one HTML file: tables and plots, nothing loaded from anywhere."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.sizing.report import Report, Table, show
from kvtier.sizing.units import show_bytes, show_seconds

WIDTH, HEIGHT, MARGIN = 720, 300, 56

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{padding:.25rem .7rem;border-bottom:1px solid #d8dee4;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left} .exact{color:#116329}.measured{color:#0550ae}.assumed{color:#953800}
svg{max-width:100%;height:auto} .note{color:#57606a} h2{margin-top:2rem}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}th,td{border-color:#30363d}.exact{color:#56d364}
.measured{color:#79c0ff}.assumed{color:#ffa657}.note{color:#8b949e}}
"""


class Mark(NamedTuple):
    """A vertical line in a plot."""

    x: float
    label: str


def curve_svg(points: Sequence[tuple[float, float]], ceiling: float, marks: Sequence[Mark]) -> str:
    """Hits (0 to 1) against bytes on a logarithmic axis."""
    usable = [(x, y) for x, y in points if x > 0]
    if not usable:
        return ""
    every = [x for x, _ in usable] + [m.x for m in marks if m.x > 0]
    low, high = math.log10(min(every)), math.log10(max(*every, min(every) * 10))
    top = max(0.05, ceiling, *(y for _, y in usable)) * 1.1

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / (high - low)
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - y / top * (HEIGHT - 2 * MARGIN)

    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(x, y) for x, y in usable))
    left, right = at(10**low, ceiling), at(10**high, ceiling)
    parts = [
        _frame("hit ratio against capacity"),
        _line(left, right, 'stroke="currentColor" stroke-dasharray="2 4"'),
        _text(right[0], right[1] - 6, f"ceiling {ceiling:.1%}", "end"),
        f'<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="2"/>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        x, y = at(10.0**power, 0)
        parts += [
            _line((x, y), (x, y + 5), 'stroke="currentColor"'),
            _text(x, y + 18, show_bytes(10.0**power).split(" = ")[-1], "middle"),
        ]
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = at(10**low, top * share / 1.1)
        parts.append(_text(x - 6, y + 4, f"{top * share / 1.1:.0%}", "end"))
    for n, mark in enumerate(marks):
        x, _ = at(mark.x, 0) if mark.x > 0 else (MARGIN, 0)
        parts.append(_line((x, MARGIN), (x, HEIGHT - MARGIN), 'stroke="#cf222e" stroke-dasharray="4 3"'))
        parts.append(_text(x + 4, MARGIN + 12 + 14 * n, mark.label, "start"))
    return _svg(parts)


def bars_svg(title: str, bars: Sequence[tuple[str, float]]) -> str:
    """Seconds as horizontal bars from zero."""
    most = max((v for _, v in bars), default=0.0) or 1.0
    step = (HEIGHT - 2 * MARGIN) / max(1, len(bars))
    parts = [_frame(title)]
    for n, (name, value) in enumerate(bars):
        y = MARGIN + n * step
        length = value / most * (WIDTH - 4 * MARGIN)
        box = f'x="{2 * MARGIN}" y="{y + step * 0.15:.1f}" width="{length:.1f}" height="{step * 0.7:.1f}"'
        parts.append(f'<rect {box} fill="#0969da"/>')
        parts += [
            _text(2 * MARGIN - 6, y + step / 2 + 4, name, "end"),
            _text(2 * MARGIN + length + 6, y + step / 2 + 4, show_seconds(value), "start"),
        ]
    return _svg(parts)


def _svg(parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg {size} xmlns="http://www.w3.org/2000/svg" role="img">{"".join(parts)}</svg>'


def _frame(title: str) -> str:
    axes = f'<path d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{WIDTH - MARGIN}" fill="none" stroke="currentColor"/>'
    return f"<title>{html.escape(title)}</title>{axes}" + _text(MARGIN, MARGIN - 16, title, "start")


def _line(a: tuple[float, float], b: tuple[float, float], style: str) -> str:
    return f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" {style}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    style = f'font-size="12" text-anchor="{anchor}" fill="currentColor"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'


def _table(table: Table) -> str:
    head = "".join(
        f'<th class="{c.source.value}" title="{c.source.value}">{html.escape(c.key)}</th>' for c in table.columns
    )
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(show(x, c.unit))}</td>" for x, c in zip(row, table.columns, strict=True))
        + "</tr>"
        for row in table.rows
    )
    return f"<h2>{html.escape(table.key)}</h2><table><tr>{head}</tr>{rows}</table>"


def page(report: Report, plots: Sequence[str]) -> str:
    """The whole file."""
    values = "".join(
        f"<tr><td>{html.escape(v.key)}</td><td>{html.escape(show(v.value, v.unit))}</td>"
        f'<td class="{v.source.value}">{v.source.value}</td><td class="note">{html.escape(v.note)}</td></tr>'
        for v in report.values
    )
    notes = "".join(f"<li>{html.escape(n)}</li>" for n in report.notes)
    tables = "".join(_table(t) for t in report.tables)
    title = html.escape(report.title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{''.join(plots)}<table>{values}</table>{tables}"
        f'<h2>notes</h2><ul class="note">{notes}</ul></html>\n'
    )


def trace_page(report: Report, exclusive: bool) -> str:
    """The page of a trace's analysis, with its curve and its times plotted."""
    tables = {t.key: t for t in report.tables}
    points = [
        (float(row[1]), float(row[2]))
        for row in tables["curve"].rows
        if isinstance(row[1], int) and isinstance(row[2], float)
    ]
    reach, marks = 0.0, []
    for row in tables["tiers"].rows:
        own = float(row[1] or 0)
        reach = reach + own if exclusive else max(reach, own)
        marks.append(Mark(reach, f"{row[0]} {show_bytes(reach).split(' = ')[0]}"))
    times = [(str(row[0]), float(row[4] or 0)) for row in tables["ttft"].rows]
    plots = [
        curve_svg(points, float(report.get("ceiling")), marks),
        bars_svg("TTFT p95 (overlapped), with tiers down to", times),
    ]
    return page(report, plots)
