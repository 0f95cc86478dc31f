"""`size breakeven`: whether loading a prefix beats computing it again, over which link, from what length on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.sizing.alloc import rank_share
from kvtier.sizing.cost import Compute
from kvtier.sizing.hardware import Link, Source, worst
from kvtier.sizing.plan import Deployment
from kvtier.sizing.report import Column, Report, Table, Value
from kvtier.sizing.spec import Spec, stored

NEVER = float("inf")
HOUR_S = 3600.0
MONTH_S = 730 * HOUR_S


def loaded_bytes(spec: Spec, tokens: int) -> int:
    """Bytes that a tier hands over for a prefix: what it stores, one resumable point, pages not rounded."""
    return stored(spec, tokens, 1).bytes


def rank_bytes(d: Deployment, tokens: int) -> int:
    """Bytes that cross one rank's own host link: its heads, or all of a latent that every rank keeps."""
    spec = d.model.spec
    total = 0
    for c in spec.components:
        part = spec._replace(components=(c,))
        total += round(loaded_bytes(part, tokens) * rank_share(c, d.par))
    return -(-total // d.par.pp)


class Verdict(NamedTuple):
    """Loading against computing for one prefix on one link."""

    link: Link
    load_s: float
    recompute_s: float
    min_prefix: float
    """Tokens from which loading wins; inf where it never does within the longest prefix that was tried."""
    required_bps: float
    """Bandwidth at which both take equally long, start-up time left out."""

    @property
    def wins(self) -> bool:
        """Whether to load."""
        return self.load_s < self.recompute_s


def required_bps(d: Deployment, tokens: int) -> float:
    """BW*: bytes a second that a tier must bring per replica, all of its links together, to equal recomputing."""
    return loaded_bytes(d.model.spec, tokens) / d.compute().prefill_s(d.model.spec, 0, tokens)


def load_seconds(d: Deployment, link: Link, tokens: int, private: bool) -> float:
    """Seconds to load a prefix: each rank its own part over its own link, or all of it over one shared link."""
    return link.load_s(rank_bytes(d, tokens) if private else loaded_bytes(d.model.spec, tokens))


def judge(d: Deployment, link: Link, tokens: int, private: bool = False) -> Verdict:
    """Loading `tokens` tokens of prefix over `link` against computing them from nothing."""
    recompute = d.compute().prefill_s(d.model.spec, 0, tokens)
    return Verdict(link, load_seconds(d, link, tokens, private), recompute, min_prefix(d, link, private),
                   required_bps(d, tokens))  # fmt: skip


def min_prefix(d: Deployment, link: Link, private: bool = False, most: int = 1 << 24) -> float:
    """The shortest prefix from which loading wins: doubled until it does, then halved between."""
    compute = d.compute()

    def wins(n: int) -> bool:
        return load_seconds(d, link, n, private) < compute.prefill_s(d.model.spec, 0, n)

    high = 1
    while not wins(high):
        high *= 2
        if high > most:
            return NEVER
    low = high // 2
    while high - low > 1:
        mid = (low + high) // 2
        low, high = (low, mid) if wins(mid) else (mid, high)
    return float(high)


class Ttft(NamedTuple):
    """Time to the first token of a prompt whose prefix comes from somewhere."""

    none_s: float
    serial_s: float
    overlapped_s: float


def ttft_with(d: Deployment, load_s: float, prefix: int, suffix: int, fixed_s: float) -> Ttft:
    """Without the hit; load then compute; layer by layer, the longer of both plus one layer of the shorter."""
    compute: Compute = d.compute()
    spec = d.model.spec
    own = compute.prefill_s(spec, prefix, suffix)
    overlapped = max(load_s, own) + min(load_s, own) / spec.layers
    return Ttft(fixed_s + compute.prefill_s(spec, 0, prefix + suffix), fixed_s + load_s + own, fixed_s + overlapped)


def best_cut(d: Deployment, link: Link, prefix: int, private: bool = False, step: int = 64) -> tuple[int, float]:
    """(tokens to compute at the head, seconds) when the GPU computes the head while the tail is on its way."""
    compute, spec = d.compute(), d.model.spec

    def both(head: int) -> float:
        tail = prefix - head
        return max(compute.prefill_s(spec, 0, head), load_seconds(d, link, tail, private) if tail else 0.0)

    cuts = range(0, prefix + 1, max(step, prefix // 512))
    head = min(cuts, key=both)
    return head, both(head)


def retention_s(d: Deployment, tokens: int, gb_month: float, gpu_hour: float) -> float:
    """How long a prefix that is sure to be asked for again is worth keeping: recompute price over storage price."""
    recompute = d.compute().prefill_s(d.model.spec, 0, tokens) * gpu_hour * d.par.ranks / HOUR_S
    hold_per_s = loaded_bytes(d.model.spec, tokens) * gb_month / 1e9 / MONTH_S
    return recompute / hold_per_s if hold_per_s else NEVER


def breakeven_report(
    d: Deployment, tokens: int, suffix: int, links: Sequence[tuple[Link, bool]], fixed_s: float
) -> Report:
    """BW*, minimum prefix and TTFT for each link; `links` says of each whether every rank has its own."""
    spec, compute = d.model.spec, d.compute()
    recompute = compute.prefill_s(spec, 0, tokens)
    rows: list[tuple[int | float | str | None, ...]] = []
    for link, private in links:
        v = judge(d, link, tokens, private)
        t = ttft_with(d, v.load_s, tokens, suffix, fixed_s)
        head, cut_s = best_cut(d, link, tokens, private)
        rows.append((link.name, link.read_bps, v.load_s, v.recompute_s / v.load_s, "load" if v.wins else "recompute",
                     None if v.min_prefix == NEVER else int(v.min_prefix), t.none_s, t.serial_s, t.overlapped_s,
                     head, cut_s, link.source.value))  # fmt: skip
    least = worst(compute.source, *(link.source for link, _ in links))
    named = (("read_bytes_per_s", "B/s"), ("load_s", "s"), ("speedup", "x"), ("verdict", ""),
             ("min_prefix_tokens", "tokens"), ("ttft_none_s", "s"), ("ttft_serial_s", "s"), ("ttft_overlapped_s", "s"),
             ("head_to_compute_tokens", "tokens"), ("head_and_tail_s", "s"))  # fmt: skip
    columns = [Column("link"), *(Column(key, unit, least) for key, unit in named), Column("source")]
    values = [
        Value("tokens", tokens, "tokens", Source.EXACT),
        Value("suffix_tokens", suffix, "tokens", Source.EXACT),
        Value("loaded_bytes", loaded_bytes(spec, tokens), "B", Source.EXACT, "one copy, one resumable point"),
        Value("recompute_s", recompute, "s", compute.source, "causal" if d.causal else "the seed's linear account"),
        Value("prefill_tokens_per_s", tokens / recompute, "tokens", compute.source),
        Value("required_bytes_per_s", required_bps(d, tokens), "B/s", compute.source, "BW*: a slower tier loses"),
        *_retention(d, tokens),
    ]  # fmt: skip
    notes = [
        *spec.notes,
        "host links count once a rank, network and disk once a replica; queues on links are not in these times",
    ]
    return Report(
        f"load or recompute: {spec.name} on {d.par.ranks} x {d.gpu.name}",
        values,
        (Table("links", columns, rows),),
        notes,
    )


def _retention(d: Deployment, tokens: int) -> list[Value]:
    """How long a prefix is worth its place, by the prices given."""
    gpu_hour, gpu_source = d.hardware.gpu_hour(d.gpu.name)
    if not gpu_hour:
        return []
    copies = rank_bytes(d, tokens) * d.par.ranks / loaded_bytes(d.model.spec, tokens)
    hbm = gpu_hour / d.gpu.memory * 1e9 * MONTH_S / HOUR_S * copies
    recompute = d.compute().prefill_s(d.model.spec, 0, tokens) / tokens * gpu_hour * d.par.ranks / HOUR_S
    out = [
        Value("recompute_dollars_per_mtok", recompute * 1e6, "$", Source.ASSUMED, f"at {gpu_hour:g} $/h a GPU"),
        Value("worth_keeping_hbm_s", retention_s(d, tokens, hbm, gpu_hour), "s", Source.ASSUMED,
              "how long a certain reuse pays for its place"),
    ]  # fmt: skip
    for tier, price in (("host", "dram_gb_month"), ("disk", "nvme_gb_month"), ("object", "object_gb_month")):
        dollars, source = d.hardware.price(price)
        note = f"at {dollars:g} $ a GB and month" + ("" if source is Source.EXACT else ": a placeholder, give your own")
        tag = worst(source, gpu_source, Source.ASSUMED)
        out.append(Value(f"worth_keeping_{tier}_s", retention_s(d, tokens, dollars, gpu_hour), "s", tag, note))
    return out
