"""What the demo prints: progress while it runs, then turns side by side, bars and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvtier.demo.run import Answer
from kvtier.demo.scenario import Request

BAR: Final = 24
EIGHTHS: Final = " ▏▎▍▌▋▊▉"
COLORS: Final = {"without": "red", "cold": "yellow", "warm": "green", "restart": "cyan"}

Ways = Mapping[str, Sequence[Answer]]


def progress(console: Console) -> Progress:
    """A line per way."""
    return Progress(
        TextColumn("{task.description:<28}"), BarColumn(32), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"), console=console,
    )  # fmt: skip


def bar(value: float, most: float) -> str:
    """A horizontal bar of up to BAR cells, drawn in eighths."""
    eighths = round(value / most * BAR * 8) if most else 0
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def turns(ways: Ways, asked: Sequence[Request]) -> Table:
    """Time to first token and hit ratio of every request, the ways side by side."""
    table = Table(title="time to first token (ms) and share of the prompt that was loaded", title_justify="left")
    for name, justify in (("request", "left"), ("tokens", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ways:
        table.add_column(name, justify="right", style=COLORS[name], no_wrap=True)
    table.add_column("without ▏warm", no_wrap=True)
    most = max(answer.ttft_s for answers in ways.values() for answer in answers)
    part = ""
    for number, request in enumerate(asked):
        if request.part != part:
            part = request.part
            table.add_section()
        row = {name: answers[number] for name, answers in ways.items()}
        chart = Text(bar(row["without"].ttft_s, most), COLORS["without"])
        chart.append("\n").append(bar(row["warm"].ttft_s, most), COLORS["warm"])
        cells = [cell(name, answer) for name, answer in row.items()]
        table.add_row(f"{request.part}\n  {request.label}", str(len(row["without"].prompt)), *cells, chart)
    return table


def cell(name: str, answer: Answer) -> str:
    """One way's numbers for one request."""
    time = f"{answer.ttft_s * 1e3:.0f}"
    return time if name == "without" else f"{time}\n{answer.use.hit_ratio:.0%}"


def summary(ways: Ways) -> Table:
    """One row per way, with bars for the median time to first token."""
    table = Table(title="in all", title_justify="left")
    for name in ("way", "prompt tokens", "loaded", "hit ratio", "TTFT median", "TTFT sum", "served from", "median"):
        table.add_column(name, justify="left" if name in {"way", "served from", "median"} else "right", no_wrap=True)
    medians = {name: median(a.ttft_s for a in answers) for name, answers in ways.items()}
    for name, answers in ways.items():
        prompt, loaded = sum(len(a.prompt) for a in answers), sum(a.use.hit_tokens for a in answers)
        times = [a.ttft_s for a in answers]
        table.add_row(
            name, f"{prompt:,}", f"{loaded:,}", f"{loaded / prompt:.0%}", f"{medians[name] * 1e3:.0f} ms",
            f"{sum(times):.1f} s", tiers(answers), Text(bar(medians[name], max(medians.values())), COLORS[name]),
        )  # fmt: skip
    return table


def tiers(answers: Sequence[Answer]) -> str:
    """Pages by the tier that served them."""
    pages: dict[str, int] = {}
    for answer in answers:
        for tier, count in answer.use.tiers:
            pages[tier] = pages.get(tier, 0) + count
    return ", ".join(f"{count} {tier}" for tier, count in pages.items()) or "-"
