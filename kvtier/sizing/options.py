"""Command-line options that the sizing commands share, and how an answer is printed."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvtier.sizing.alloc import Engine, Parallel, check
from kvtier.sizing.dtypes import parse_dtype
from kvtier.sizing.families import Reading
from kvtier.sizing.hardware import Hardware, Link
from kvtier.sizing.models import load
from kvtier.sizing.plan import Deployment
from kvtier.sizing.report import Report, Table, show
from kvtier.sizing.units import parse_bytes, parse_number, parse_rate, parse_seconds, parse_some, parse_tokens
from kvtier.types import KvtierError

WIDE = 7
STYLES: Final = {"exact": "green", "measured": "blue", "assumed": "yellow"}

if TYPE_CHECKING:
    Param = click.ParamType[Any]
else:
    Param = click.ParamType  # not generic before click 8.2

Command = Callable[..., Any]


class Quantity(Param):
    """An option with a strict unit."""

    def __init__(self, name: str, parse: Callable[[str, str], Any]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The quantity in base units."""
        if not isinstance(value, str):
            return value
        field = (param.name or self.name).replace("_", "-") if param else self.name
        try:
            return self.parse(value, field)
        except KvtierError as exc:
            self.fail(str(exc), param, ctx)


class Share(click.FloatRange):
    """A range of numbers, of which nan is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"expected a number, got {value!r}", param, ctx)
        return found


TOKENS = Quantity("tokens", parse_tokens)
SOME = Quantity("tokens", parse_some)
NUMBER = Quantity("number", parse_number)
COUNT: Final = click.IntRange(1)
BYTES = Quantity("bytes", parse_bytes)
RATE = Quantity("rate", parse_rate)
SECONDS = Quantity("time", parse_seconds)
DTYPE = Quantity("dtype", parse_dtype)


def default_hardware() -> Path:
    """Where `probe` writes and the other commands look: $XDG_CONFIG_HOME/kvtier/hardware.toml."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "kvtier" / "hardware.toml"


def _stack(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    return lambda command: functools.reduce(lambda f, d: d(f), reversed(decorators), command)


model_options = _stack(
    click.option("--kv-dtype", type=DTYPE, help="Precision of KV  [the model's own, else bf16]"),
    click.option(
        "--index-dtype", type=click.Choice(["bf16", "fp8", "fp4"]), help="Precision of sparse attention's keys."
    ),
    click.option("--draft", is_flag=True, help="Count the draft (MTP) layers that the config declares."),
    click.option("--assume-full", is_flag=True, help="Upper bound for an unknown architecture: all layers full."),
    click.option("--encoder-tokens", type=TOKENS, default=0, help="Positions that cross-attention keeps."),
)
"""What a model keeps."""

split_options = _stack(
    click.option("--tp", type=COUNT, default=1, show_default=True, help="Tensor-parallel ranks."),
    click.option("--pp", type=COUNT, default=1, show_default=True, help="Pipeline stages."),
    click.option("--dcp", type=COUNT, default=1, show_default=True, help="Decode-context-parallel ranks."),
    click.option("--block", type=COUNT, default=16, show_default=True, help="Tokens of an engine block."),
    click.option("--hybrid", is_flag=True, help="The engine frees sliding windows as they pass."),
    click.option("--batched-tokens", type=SOME, default=8192, show_default=True, help="Tokens of a scheduler step."),
)
"""How an engine allocates."""

place_options = _stack(
    click.option("--gpu", default="H100", show_default=True, help="Kind of GPU."),
    click.option("--dp", "replicas", type=COUNT, default=1, show_default=True, help="Replicas (data parallel)."),
    click.option("--weights", default="", help="Precision or size of the weights  [the checkpoint's]"),
    click.option("--mfu", type=NUMBER, default=0.0, help="Share of the dense rate that prefill reaches."),
    click.option("--compute", "compute_dtype", type=click.Choice(["bf16", "fp8"]), help="Precision of the matmuls."),
    click.option("--model-cost", type=click.Choice(["seed", "causal"]), default="causal", show_default=True,
                 help="Prefill work: causal attention, or the seed notes' linear account."),
)  # fmt: skip
"""Where a model runs."""

hardware_option = click.option("--hardware", type=click.Path(path_type=Path, dir_okay=False),
                               help="TOML over the defaults  [what `kvtierctl probe` wrote]")  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def hardware_of(path: Path | None) -> Hardware:
    """The tables with the user's file, or probe's, laid over them."""
    found = path or default_hardware()
    return Hardware(found if path is not None or found.is_file() else None)


def reading(o: dict[str, Any]) -> Reading:
    """How to read the model, of `model_options`."""
    return Reading(o["kv_dtype"] or "", o["index_dtype"] or "", o["draft"], o["assume_full"], o["encoder_tokens"])


def split(o: dict[str, Any]) -> tuple[Parallel, Engine]:
    """Ranks and allocation, of `split_options`."""
    return Parallel(o["tp"], o["pp"], o["dcp"]), Engine(o["block"], o["hybrid"], o["batched_tokens"])


def deployment(model: str, o: dict[str, Any]) -> Deployment:
    """A model on GPUs, of all the option groups."""
    hardware = hardware_of(o["hardware"])
    par, engine = split(o)
    found = load(model, reading(o))
    check(found.spec, par)
    return Deployment(found, hardware, hardware.gpu(o["gpu"]), par, engine, o["weights"], o["mfu"],
                      o["compute_dtype"] or "", o["replicas"], o["model_cost"] == "causal")  # fmt: skip


def memory_limit() -> int:
    """Bytes of memory that this process may have: RAM, or the tightest cgroup above it; 0 where neither is told."""
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemTotal:")).split()[1]))
    with contextlib.suppress(OSError, StopIteration):
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        group = Path("/sys/fs/cgroup") / own[3:].lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / "memory.max").read_text()))
    return min(limits, default=0)


def pick_link(hardware: Hardware, given: str | None, measured: str, default: str) -> Link:
    """The link that was named, else the one that probe measured, else the default."""
    return hardware.link(given or (measured if measured in hardware.data["link"] else default))


def answers(command: Command) -> Command:
    """A command that returns a Report, or what else --json prints: adds --json, prints, turns refusals into exit 1."""

    @functools.wraps(command)
    def run(as_json: bool, **options: Any) -> None:
        try:
            report = command(**options)
        except KvtierError as exc:
            click.echo(json.dumps({"error": exc.data()}) if as_json else f"error: {exc}", err=not as_json)
            sys.exit(1)
        if as_json:
            click.echo(json.dumps(report.as_json() if isinstance(report, Report) else report))
        elif isinstance(report, Report):
            render(report)
        else:
            click.echo(report)

    return json_option(run)


def render(report: Report) -> None:
    """The report as text for people."""
    from rich.console import Console  # noqa: PLC0415 - --json and --help stay quick
    from rich.table import Table as Grid  # noqa: PLC0415

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 140
    grid = Grid(title=report.title, title_justify="left", box=None, show_header=False, pad_edge=False)
    grid.add_column(no_wrap=True)
    for _ in range(3):
        grid.add_column(overflow="fold")
    for value in report.values:
        tag = value.source.value
        grid.add_row(
            value.key, show(value.value, value.unit), f"[{STYLES[tag]}]{tag}[/]", f"[dim]{_safe(value.note)}[/]"
        )
    console.print(grid)
    for table in report.tables:
        console.print(_grid(table))
    for note in report.notes:
        console.print(f"[dim]- {_safe(note)}[/]")


def _safe(text: str) -> str:
    return text.replace("[", "\\[")


def _grid(table: Table) -> Any:
    """A table for the terminal; one with many columns lies on its side."""
    from rich.table import Table as Grid  # noqa: PLC0415

    grid = Grid(title=table.key, title_justify="left", box=None, pad_edge=False, header_style="bold")
    cells = [[_safe(show(x, c.unit)) for x, c in zip(row, table.columns, strict=True)] for row in table.rows]
    heads = [f"[{STYLES[c.source.value]}]{c.key}[/]" for c in table.columns]
    if len(heads) <= WIDE or len(cells) > 12:
        for head in heads:
            grid.add_column(head, overflow="fold")
        _add(grid, cells)
        return grid
    grid.add_column(heads[0])
    for row in cells:
        grid.add_column(row[0])
    _add(grid, [[head, *column] for head, *column in zip(heads[1:], *(row[1:] for row in cells), strict=True)])
    return grid


def _add(grid: Any, rows: Sequence[Sequence[str]]) -> None:
    for row in rows:
        grid.add_row(*row)
