"""Hardware, links, prices and planning constants: defaults in the package, overridden by a TOML file."""

from __future__ import annotations

import enum
import json
import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvtier.sizing.units import parse_bytes, parse_number, parse_rate, parse_seconds
from kvtier.types import bad


class Source(enum.StrEnum):
    """Where a number comes from."""

    EXACT = "exact"  # arithmetic on what you gave or what the config says
    MEASURED = "measured"  # on this host, or read from a log or a trace
    ASSUMED = "assumed"  # a default that you should replace


def worst(*sources: Source) -> Source:
    """The least certain of the inputs of a number."""
    order = (Source.EXACT, Source.MEASURED, Source.ASSUMED)
    return max(sources, key=order.index, default=Source.EXACT)


class Link(NamedTuple):
    """A path that KV moves on, towards the GPU (read) and away from it (write)."""

    name: str
    read_bps: float
    write_bps: float
    t0_s: float
    source: Source
    note: str = ""

    def load_s(self, size: float) -> float:
        """Seconds to bring `size` bytes."""
        return self.t0_s + size / self.read_bps

    def effective_bps(self, size: float) -> float:
        """Bytes per second of one transfer of `size` bytes, its start-up time included."""
        return size / self.load_s(size)


class Gpu(NamedTuple):
    """One accelerator."""

    name: str
    memory: int
    hbm_bps: float
    bf16_flops: float
    fp8_flops: float
    link: str
    source: Source
    note: str = ""

    def flops(self, dtype: str) -> float:
        """Dense FLOP/s; fp8 falls back to bf16 where the part has none."""
        return self.fp8_flops if dtype == "fp8" and self.fp8_flops else self.bf16_flops


SHARES: Final = ("utilization", "hbm_efficiency", "mfu_dense", "mfu_moe")
"""Constants that are shares of a whole, and not nothing."""

SECTIONS: Final = ("gpu", "link", "price", "plan")
ROW: Final = {"gpu": ("memory", "hbm", "bf16", "fp8", "link", "source", "note"),
              "link": ("read", "write", "t0", "source", "note")}  # fmt: skip
"""What a GPU or a link is described by."""


PRICES: Final = {"gpu": "gpu_hour", "dram": "dram_gb_month", "nvme": "nvme_gb_month", "object": "object_gb_month"}
"""Names that a price is given under -> fields of the table."""


class Hardware:
    """The tables, with a user's file laid over the defaults."""

    def __init__(self, override: Path | None = None) -> None:
        """Read the defaults and `override`; raises KvtierError naming the section or field that is wrong."""
        text = resources.files("kvtier.sizing").joinpath("hardware.json").read_text()
        self.data: dict[str, Any] = json.loads(text)
        if override is not None:
            self._lay(override)

    def _lay(self, path: Path) -> None:
        try:
            over = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
            raise bad("hardware", f"a readable TOML file ({exc})", str(path)) from None
        for section, table in over.items():
            if section == "host":
                continue
            if section not in SECTIONS or not isinstance(table, Mapping):
                raise bad(section, f"one of the tables {', '.join(SECTIONS)} or host")
            self._merge(section, table)

    def _merge(self, section: str, table: Mapping[str, Any]) -> None:
        mine = self.data[section]
        for key, value in table.items():
            if section in ("gpu", "link"):
                if not isinstance(value, Mapping):
                    raise bad(f"{section}.{key}", "a table")
                for name in value:
                    if name not in ROW[section]:
                        raise bad(f"{section}.{key}.{name}", f"one of {', '.join(ROW[section])}")
                same = next((known for known in mine if known.lower() == key.lower()), key)
                mine[same] = {**mine.get(same, {}), "source": "exact", **value}
            elif key == "gpu_hour":
                if not isinstance(value, Mapping):
                    raise bad("price.gpu_hour", "a table of dollars by kind of GPU", value)
                mine[key] = {**mine[key], **value}
                mine.setdefault("given", []).append(key)
            elif key not in mine:
                raise bad(f"{section}.{key}", f"one of {', '.join(k for k in mine if k not in ('source', 'note'))}")
            else:
                mine[key] = value
                mine.setdefault("given", []).append(key)

    def gpu(self, name: str) -> Gpu:
        """The accelerator of that name, whatever its case."""
        row = self._row("gpu", name)
        where = f"gpu.{name}"
        source = _source(row, where)
        gpu = Gpu(name, parse_bytes(str(_need(row, "memory", where)), f"{where}.memory"),
                  parse_rate(str(_need(row, "hbm", where)), f"{where}.hbm"),
                  _number(row, "bf16", where) * 1e12, _number(row, "fp8", where, 0.0) * 1e12,
                  str(row.get("link", "pcie5")), source, str(row.get("note", "")))  # fmt: skip
        if not gpu.bf16_flops:
            raise bad(f"{where}.bf16", "dense TFLOPS", row["bf16"])
        return gpu

    def link(self, name: str) -> Link:
        """The link of that name, or one written out as a rate: '7GB/s' or 'READ:WRITE:T0' such as 12GB/s:4GB/s:3ms."""
        if "/s" in name or "bps" in name:
            parts = name.split(":")
            if len(parts) > 3:
                raise bad("link", "a rate or READ:WRITE:T0 such as 12GB/s:4GB/s:3ms", name)
            read = parse_rate(parts[0], "link")
            write = parse_rate(parts[1], "link") if len(parts) > 1 else read
            t0 = parse_seconds(parts[2], "link") if len(parts) > 2 else 0.0
            return Link(name, read, write, t0, Source.EXACT)
        row = self._row("link", name)
        where = f"link.{name}"
        read = parse_rate(str(_need(row, "read", where)), f"{where}.read")
        write = parse_rate(str(row.get("write", row["read"])), f"{where}.write")
        t0 = parse_seconds(str(row.get("t0", "0s")), f"{where}.t0")
        return Link(name, read, write, t0, _source(row, where), str(row.get("note", "")))

    def links(self) -> list[Link]:
        """Every link of the table."""
        return [self.link(name) for name in self.data["link"]]

    def constant(self, name: str) -> tuple[float, Source]:
        """A planning constant, in bytes where it is a size."""
        plan = self.data["plan"]
        value = plan[name]
        source = Source.EXACT if name in plan.get("given", ()) else Source.ASSUMED
        if isinstance(value, str):
            return float(parse_bytes(value, f"plan.{name}")), source
        number = _number(plan, name, "plan")
        if name in SHARES and not 0 < number <= 1:
            raise bad(f"plan.{name}", "a share between 0 and 1", value)
        return number, source

    def price(self, name: str) -> tuple[float, Source]:
        """A price per GB and month."""
        table = self.data["price"]
        source = Source.EXACT if name in table.get("given", ()) else Source.ASSUMED
        return _number(table, name, "price"), source

    def gpu_hour(self, gpu: str) -> tuple[float, Source]:
        """Price of a GPU hour, 0 where no one gave one."""
        table = self.data["price"]
        given = "gpu_hour" in table.get("given", ())
        prices = {name.lower(): price for name, price in table["gpu_hour"].items()}
        dollars = _number(prices, gpu.lower(), "price.gpu_hour", 0.0)
        return dollars, Source.EXACT if given else Source.ASSUMED

    def set_price(self, text: str) -> None:
        """Take NAME=DOLLARS: gpu an hour; dram, nvme, object a GB and month. Raises KvtierError naming the price."""
        name, _, dollars = text.partition("=")
        if name not in PRICES:
            raise bad("price", f"one of {', '.join(PRICES)} as NAME=DOLLARS", text)
        price = parse_number(dollars, f"price {name}")
        table = self.data["price"]
        if name == "gpu":
            table["gpu_hour"] = dict.fromkeys(self.data["gpu"], price)
        else:
            table[PRICES[name]] = price
        table.setdefault("given", []).append(PRICES[name])

    def _row(self, section: str, name: str) -> Mapping[str, Any]:
        table: Mapping[str, Mapping[str, Any]] = self.data[section]
        for key, row in table.items():
            if key.lower() == name.lower():
                return row
        raise bad(section, f"one of {', '.join(table)}", name)


def _need(row: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in row:
        raise bad(f"{where}.{key}", "a value")
    return row[key]


def _number(row: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = row.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise bad(f"{where}.{key}", "a number of 0 or more", value)
    return float(value)


def _source(row: Mapping[str, Any], where: str) -> Source:
    try:
        return Source(row.get("source", "exact"))
    except ValueError:
        raise bad(f"{where}.source", "exact, measured or assumed", row.get("source")) from None
