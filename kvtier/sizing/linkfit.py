"""Two numbers for a link from a sweep of sizes: start-up time and bandwidth, and how they are written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    """One size of a sweep and the shortest time it took."""

    size: int
    seconds: float


class Fitted(NamedTuple):
    """t = t0 + size / bytes_per_s."""

    bytes_per_s: float
    t0_s: float


def sweep_sizes(most: int, least: int = 32 * 1024, points: int = 10) -> list[int]:
    """Sizes of a sweep in equal ratios, in whole multiples of 4 KiB."""
    top = max(most, least)
    ratio = (top / least) ** (1 / (points - 1))
    return sorted({int(least * ratio**k) // 4096 * 4096 or 4096 for k in range(points)} | {top // 4096 * 4096})


def fit_link(samples: Sequence[Sample]) -> Fitted:
    """The line with the least relative error; a start-up time below zero counts as zero."""
    weights = [1 / s.seconds**2 for s in samples]
    total = sum(weights)
    mean_n = sum(w * s.size for w, s in zip(weights, samples, strict=True)) / total
    mean_t = sum(w * s.seconds for w, s in zip(weights, samples, strict=True)) / total
    spread = sum(w * (s.size - mean_n) ** 2 for w, s in zip(weights, samples, strict=True))
    both = sum(w * (s.size - mean_n) * (s.seconds - mean_t) for w, s in zip(weights, samples, strict=True))
    slope = both / spread if spread else 0.0
    t0 = mean_t - slope * mean_n
    if slope <= 0 or t0 < 0:  # noise, or a link faster for large transfers: through the origin
        slope = sum(w * s.size * s.seconds for w, s in zip(weights, samples, strict=True)) / sum(
            w * s.size**2 for w, s in zip(weights, samples, strict=True)
        )
        t0 = 0.0
    return Fitted(1 / slope, t0)


class Measured(NamedTuple):
    """A link as measured: towards the GPU or reader, and away from it."""

    read: Fitted
    write: Fitted
    note: str = ""


def toml_of(links: Mapping[str, Measured], host: str) -> str:
    """Tables that the planner reads."""
    parts = [f'[host]\nname = "{_plain(host)}"\n']
    for name, m in links.items():
        read, write = m.read.bytes_per_s / 1e9, m.write.bytes_per_s / 1e9
        parts.append(
            f'[link.{name}]\nread = "{read:.4f}GB/s"\nwrite = "{write:.4f}GB/s"\n'
            f't0 = "{m.read.t0_s * 1e6:.3f}us"\nsource = "measured"\nnote = "{_plain(m.note)}"\n'
        )
    return "\n".join(parts)


def _plain(text: str) -> str:
    return "".join(c for c in text if c.isprintable() and c not in '"\\')


def replace_tables(old: str, new: str) -> str:
    """`old` with the tables that `new` has taken out and `new` at the end; comments and other tables stay."""
    ours = {line.strip() for line in new.splitlines() if line.startswith("[")}
    kept, drop = [], False
    for line in old.splitlines():
        if line.strip().startswith("["):
            drop = line.strip() in ours
        if not drop:
            kept.append(line)
    body = "\n".join(kept).rstrip()
    return (body + "\n\n" if body else "") + new
