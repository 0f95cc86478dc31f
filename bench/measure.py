"""What all benches share: interleaved rounds, rows, the printed table, the JSON."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

OURS = "kvtier"
MORE = "% more"
"""The unit of differences, which alone may be below 0."""
HIGHER_IS_BETTER = frozenset({"GB/s", "match/s"})
LEGEND = (
    "best/median/worst are of interleaved rounds; ratio = best / best of the limit measured in the same rounds; "
    "rivals show their best"
)
Subject = Callable[[], float]
"""Runs one round and gives its number."""
Samples = dict[str, list[float]]


class RivalFailed(Exception):  # noqa: N818 - the reason why a rival's numbers are absent
    """A rival cannot run here; the message says why."""


class Target(msgspec.Struct, frozen=True):
    """What kvtier wants: `of` is value or ratio, `sign` is <= or >=."""

    of: str
    sign: str
    number: float

    def met(self, value: float, ratio: float | None) -> bool:
        """Whether a result is good enough."""
        got = ratio if self.of == "ratio" else value
        if got is None:
            return False
        return got <= self.number if self.sign == "<=" else got >= self.number

    def __str__(self) -> str:
        return f"{self.sign} {self.number:,g}" + (" x limit" if self.of == "ratio" else "")


class Row(msgspec.Struct, kw_only=True):
    """One result; `value` is the best round's."""

    bench: str
    case: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    rivals: dict[str, float] = {}
    median: float
    worst: float
    rounds: int
    limit_name: str = ""
    target: str = ""
    met: bool | None = None


def best_of(unit: str, numbers: list[float]) -> float:
    """The best number of a unit."""
    return max(numbers) if unit in HIGHER_IS_BETTER else min(numbers)


def make_row(
    bench: str, case: str, unit: str, samples: Samples, *, limit: str = "", target: Target | None = None
) -> Row:
    """The row that samples of kvtier, of the limit of that name, and of rivals (the rest) make."""
    ours = samples[OURS]
    value = best_of(unit, ours)
    floor = best_of(unit, samples[limit]) if limit else None
    ratio = value / floor if floor else None
    return Row(
        bench=bench,
        case=case,
        value=value,
        unit=unit,
        limit=floor,
        ratio=ratio,
        rivals={name: best_of(unit, got) for name, got in samples.items() if got and name not in (OURS, limit)},
        median=statistics.median(ours),
        worst=min(ours) if unit in HIGHER_IS_BETTER else max(ours),
        rounds=len(ours),
        limit_name=limit,
        target="" if target is None else str(target),
        met=None if target is None else target.met(value, ratio),
    )


def interleave(subjects: Mapping[str, Subject], rounds: int) -> Samples:
    """Numbers of each subject, one a round, in an order that turns; a rival that fails is left out from then on."""
    samples: Samples = {name: [] for name in subjects}
    alive = list(subjects)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            turn = number % len(alive)
            for name in alive[turn:] + alive[:turn]:
                try:
                    samples[name].append(subjects[name]())
                except RivalFailed as exc:
                    alive.remove(name)
                    skipped(name, exc)
    finally:
        gc.enable()
    return samples


def middle(numbers: list[float]) -> tuple[float, float, float]:
    """The median, and between which two of the numbers the true one lies with 95 % confidence."""
    ordered = sorted(numbers)
    spread = 0.98 * len(ordered) ** 0.5  # of the rank, by the normal approximation of the binomial
    low = max(0, int(len(ordered) / 2 - spread))
    return statistics.median(ordered), ordered[low], ordered[len(ordered) - 1 - low]


def median_us(call: Callable[[], object], calls: int) -> float:
    """Microseconds of the median call."""
    times = []
    clock = time.perf_counter
    for _ in range(calls):
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times) * 1e6


def skipped(what: str, why: object) -> None:
    """Say that something is not measured here."""
    print(f"skipped: {what}: {why}", flush=True)


class Bench:
    """Command line, rows and output of one bench."""

    def __init__(self, name: str, about: str) -> None:
        parser = argparse.ArgumentParser(description=about, epilog=LEGEND)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
        parser.add_argument("--rivals", action="store_true", help="measure other projects too, in venvs made for them")
        parser.add_argument("--rounds", type=int, default=0, help="rounds of each measurement (0: the bench's own)")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--tiny", action="store_true", help="sizes that only show that the bench runs")
        args = parser.parse_args()
        self.name = name
        self.seed: int = args.seed
        self.tiny: bool = args.tiny
        self.rivals: bool = args.rivals
        self.rows: list[Row] = []
        self._json: Path | None = args.json
        self._rounds: int = args.rounds

    def rounds(self, usual: int) -> int:
        """How many rounds to run."""
        return self._rounds or (2 if self.tiny else usual)

    def add(self, case: str, unit: str, samples: Samples, *, limit: str = "", target: Target | None = None) -> Row:
        """Keep a result and show that it came."""
        row = make_row(self.name, case, unit, samples, limit=limit, target=target)
        self.rows.append(row)
        print(f"{case}: {number(row.value)} {unit}", flush=True)
        return row

    def compare(self, case: str, samples: Samples, other: str, target: Target | None = None) -> Row:
        """Keep how much more kvtier takes than another, in %, and how sure that is.

        `value` is by the medians, `median` that of the rounds' own differences and `worst` its upper bound.
        """
        more = [(ours / alone - 1) * 100 for ours, alone in zip(samples[OURS], samples[other], strict=True)]
        median, low, high = middle(more)
        value = (statistics.median(samples[OURS]) / statistics.median(samples[other]) - 1) * 100
        row = Row(
            bench=self.name, case=f"{case} (by medians; median of pairs; at most, 95 %)", value=value, unit=MORE,
            median=median, worst=high, rounds=len(more), target="" if target is None else str(target),
            met=None if target is None else target.met(value, None),
        )  # fmt: skip
        self.rows.append(row)
        print(f"{case}: {value:.2f} {MORE}; pairs {median:.2f}, 95 % between {low:.2f} and {high:.2f}", flush=True)
        return row

    def finish(self) -> None:
        """Print the table, write the JSON."""
        Console(width=max(120, Console().width)).print(table(self.name, self.rows))
        if self._json:
            self._json.write_bytes(msgspec.json.format(msgspec.json.encode(self.rows)) + b"\n")


def number(value: float | None) -> str:
    """Three significant digits, without exponents."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cells(row: Row) -> list[str]:
    """A row as columns of text: case, best, median, worst, unit, limit, ratio, target, rivals."""
    verdict = {True: " yes", False: " NO", None: ""}[row.met]
    limit = f"{number(row.limit)} {row.limit_name}" if row.limit is not None else ""
    rivals = "; ".join(f"{name} {number(value)}" for name, value in row.rivals.items())
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    numbers = [number(row.value), number(row.median), number(row.worst)]
    return [row.case, *numbers, row.unit, limit, ratio, row.target + verdict, rivals]


HEADS = ("case", "best", "median", "worst", "unit", "limit", "ratio", "target", "rivals")


def table(title: str, rows: list[Row]) -> Table:
    """The rows for a terminal."""
    out = Table(title=title, title_justify="left", caption=LEGEND, caption_justify="left")
    for head in HEADS:
        out.add_column(head, justify="right" if head in ("best", "median", "worst", "ratio") else "left")
    for row in rows:
        out.add_row(*cells(row))
    return out


def markdown(rows: list[Row]) -> str:
    """The rows for RESULTS.md."""
    lines = ["| " + " | ".join(HEADS) + " |", "|---|--:|--:|--:|---|---|--:|---|---|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"
