"""Quantities with strict units: GB is 1e9, GiB is 2^30, k is 1000, Ki is 1024; nothing is guessed."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

from kvtier.types import bad

_DECIMAL: Final = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_BYTES: Final = {"B": 1, "KB": 10**3} | {f"{k}B": n for k, n in (_DECIMAL | _BINARY).items()}
_TOKENS: Final = _DECIMAL | _BINARY
_RATES: Final = {f"{unit}/s": Fraction(n) for unit, n in _BYTES.items()} | {
    f"{k}{bits}": Fraction(n, 8) for k, n in _DECIMAL.items() for bits in ("bps", "bit/s")
}
_SECONDS: Final = {
    "us": Fraction(1, 10**6), "ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60),
    "h": Fraction(3600), "d": Fraction(86400),
}  # fmt: skip
_WHOLE: Final = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*"  # 1,500 is fifteen hundred, 1,5 is no number
_NUMBER: Final = re.compile(rf"\s*((?:{_WHOLE})(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z/]*)\s*")


def _split(text: str, units: dict[str, Fraction], field: str, expected: str, bare: str) -> Fraction:
    """The exact value of `text` in base units; `bare` names the unit of a number that has none, '' refuses it."""
    match = _NUMBER.fullmatch(text)
    unit = (match[2] or bare) if match else ""
    if match is None or unit not in units:
        raise bad(field, expected, text)
    return Fraction(match[1].replace(",", "").replace("_", "")) * units[unit]


def parse_bytes(text: str, field: str = "bytes") -> int:
    """Bytes of '64GiB', '1.5 TB', '524288'; fractions of a byte are dropped; raises KvtierError on '64G'."""
    expected = "bytes with a unit such as 64GiB (2^30) or 64GB (1e9)"
    return int(_split(text, {k: Fraction(n) for k, n in _BYTES.items()}, field, expected, "B"))


def parse_tokens(text: str, field: str = "tokens") -> int:
    """Tokens of '128k' (128000), '128Ki' (131072) or '4096'; raises KvtierError on '128K' and on parts of a token."""
    expected = "a whole number of tokens such as 131072, 128k (x1000) or 128Ki (x1024)"
    value = _split(text, {"": Fraction(1)} | {k: Fraction(n) for k, n in _TOKENS.items()}, field, expected, "")
    if value.denominator != 1:
        raise bad(field, expected, text)
    return int(value)


def parse_some(text: str, field: str = "tokens") -> int:
    """The same of at least one token."""
    tokens = parse_tokens(text, field)
    if not tokens:
        raise bad(field, "at least one token", text)
    return tokens


def parse_rate(text: str, field: str = "rate") -> float:
    """Bytes per second of '55GB/s', '100Gbps' or '12.5 GB/s'; raises KvtierError without a unit, and for none."""
    expected = "a rate such as 55GB/s, 7GiB/s or 100Gbps"
    rate = float(_split(text, _RATES, field, expected, ""))
    if not rate:
        raise bad(field, expected, text)
    return rate


def parse_number(text: str, field: str = "number") -> float:
    """A finite number of 0 or more; raises KvtierError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise bad(field, "a number of 0 or more", text)
    return value


def parse_seconds(text: str, field: str = "time") -> float:
    """Seconds of '2ms', '30s', '5min', '1h' or '7d'; raises KvtierError without a unit."""
    return float(_split(text, _SECONDS, field, "a time such as 500us, 2ms, 30s, 5min, 1h or 7d", ""))


def _shortest(n: int, units: dict[str, int], bare: str) -> str:
    """`n` in the largest unit that states it exactly."""
    fits = [(size, unit) for unit, size in units.items() if n and n % size == 0]
    size, unit = max(fits, default=(1, bare))
    return f"{n // size}{unit}"


def print_bytes(n: int) -> str:
    """The shortest exact form: parse_bytes(print_bytes(n)) == n."""
    return _shortest(n, _BYTES, "B")


def print_tokens(n: int) -> str:
    """The shortest exact form: parse_tokens(print_tokens(n)) == n."""
    return _shortest(n, _TOKENS, "")


def show_bytes(n: float) -> str:
    """A byte count for people, always in both conventions: '64.00 GiB = 68.72 GB'."""
    if abs(n) < 2**10:
        return f"{n:,.0f} B" if n == int(n) else f"{n:,.2f} B"
    power = min(5, next(p for p in range(1, 7) if abs(n) < 2 ** (10 * p + 10) or p == 6))
    letter = "?KMGTP"[power]
    return f"{n / 2 ** (10 * power):,.2f} {letter}iB = {n / 10 ** (3 * power):,.2f} {letter.replace('K', 'k')}B"


def show_seconds(s: float) -> str:
    """A duration for people in the unit that reads best."""
    if s == float("inf"):
        return "without end"
    for limit, size, unit in ((1e-3, 1e-6, "us"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if abs(s) < limit:
            return f"{s / size:.3g} {unit}"
    return f"{s / 3600:.3g} h" if abs(s) < 172800 else f"{s / 86400:.3g} d"


def show_rate(bytes_per_s: float) -> str:
    """A bandwidth for people, decimal as links are sold."""
    return f"{bytes_per_s / 1e9:,.3g} GB/s" if bytes_per_s < 1e12 else f"{bytes_per_s / 1e12:,.3g} TB/s"
