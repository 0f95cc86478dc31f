"""What serving each part of a prompt costs: bytes and seconds from its tier, against seconds to compute it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]


def priced(rows: list[Row], page_tokens: int, bytes_s: Mapping[str, float], prefill_s: float = 0.0) -> list[Row]:
    """Segments with `load_s`, and where tokens a second of prefill are known `compute_s` and what is `faster`.

    Seconds are None where a tier's bytes a second are not known. Pages come out of disk by way of host; a `moves`
    of a row says how many of its bytes are where.
    """
    out = []
    for row in rows:
        moves: Mapping[str, int] = row["moves"]
        known = bool(moves) and all(tier in bytes_s for tier in moves)
        load = sum(size / bytes_s[tier] for tier, size in moves.items()) if known else None
        compute = row["pages"] * page_tokens / prefill_s if prefill_s > 0 and page_tokens else None
        more: Row = {"load_s": load, "compute_s": compute}
        if load is not None and compute is not None:
            more["faster"] = "load" if load < compute else "compute"
        out.append({**row, **{name: _short(value) for name, value in more.items()}})
    return out


def total(rows: list[Row]) -> Row:
    """Bytes and seconds of all priced rows; seconds are None where some row's are."""
    sums: Row = {"bytes": sum(row["bytes"] for row in rows)}
    for name in ("load_s", "compute_s"):
        each = [row[name] for row in rows if row["moves"]]
        sums[name] = _short(sum(each)) if each and None not in each else None
    return sums


def _short(value: Any) -> Any:
    """Three figures of a number of seconds are more than it is worth."""
    return float(f"{value:.3g}") if isinstance(value, float) else value
