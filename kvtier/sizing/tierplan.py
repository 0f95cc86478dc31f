"""`size tiers`: the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier.sizing.analyse import Plan, analyse, tier_columns, tier_row, token_bytes
from kvtier.sizing.hardware import Source, worst
from kvtier.sizing.plan import Deployment
from kvtier.sizing.report import Report, Table, Value
from kvtier.sizing.spec import stored
from kvtier.sizing.tiers import Flow, Held, Tier, hold, own_budget
from kvtier.sizing.traces import load_trace
from kvtier.sizing.units import show_bytes
from kvtier.types import bad

BLOCK = 64


class Asked(NamedTuple):
    """Tiers and what comes in."""

    tiers: Sequence[Tier]
    rate: float
    prompt: int
    answer: int
    session: int
    hits: str | None
    exclusive: bool
    checkpoint_every: int
    copy_bps: float = 0.0
    """What host memory copies; 0 where no one measured it."""
    ram: int = 0
    """Memory of the host; 0 where unknown."""
    ram_measured: bool = False


def _given_hits(text: str | None, tiers: Sequence[Tier]) -> tuple[float, ...]:
    """One ratio a tier; zeros where none were given."""
    if text is None:
        return (0.0,) * len(tiers)
    names = ", ".join(t.name for t in tiers)
    try:
        hits = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise bad("hits", f"numbers for {names}", text) from None
    if len(hits) != len(tiers) or not all(0 <= hit <= 1 for hit in hits) or sum(hits) > 1:
        raise bad("hits", f"one ratio for each of {names}, together at most 1", text)
    return hits


def _planned(d: Deployment, asked: Asked, traces: Sequence[Path]) -> tuple[Flow, list[Held], float, Source]:
    """Flow and tiers, from a trace or from the rates that were given."""
    if traces:
        a = analyse(
            load_trace(traces),
            d,
            Plan(asked.tiers, asked.exclusive, checkpoint_every=asked.checkpoint_every, belady=False),
        )
        return a.flow, a.held, a.token_bytes, Source.EXACT
    per_token = token_bytes(d, asked.checkpoint_every)
    hits = _given_hits(asked.hits, asked.tiers)
    prompt = asked.rate * asked.prompt
    flow = Flow(prompt, prompt * (1 - sum(hits)) + asked.rate * asked.answer, tuple(h * prompt for h in hits))
    held = hold(asked.tiers, flow, BLOCK, per_token, _session_bytes(d, asked), asked.exclusive)
    return flow, held, per_token, Source.EXACT if asked.hits else Source.ASSUMED


def tiers_report(d: Deployment, asked: Asked, traces: Sequence[Path] = ()) -> Report:
    """Capacity, hits, traffic and the daemon's own share."""
    flow, held, per_token, source = _planned(d, asked, traces)
    link = worst(source, *(t.link.source for t in asked.tiers if t.link))
    pages = [h.tier.holds(BLOCK * per_token) for h in held]
    c = d.hardware.constant
    own = own_budget(pages, c("daemon_base")[0], c("page_overhead")[0], c("gpu_context")[0], c("disk_page_overhead")[0])
    host = next((h.tier.bytes for h in held if h.tier.name == "host"), 0)
    total = (sum if asked.exclusive else max)(h.tokens for h in held)
    values = [
        Value("bytes_per_token", per_token, "B/token", Source.EXACT, "as a tier stores it"),
        Value("session_bytes", _session_bytes(d, asked), "B", Source.EXACT, f"{asked.session:,} tokens"),
        Value("distinct_tokens", total, "tokens", Source.EXACT, _reach(asked)),
        Value("hit", sum(h.hit for h in held), "%", source, "" if source is Source.EXACT else "give --hits or --trace"),
        Value("insert_bytes_per_s", flow.new_tokens * per_token, "B/s", source, "new KV"),
        Value("daemon_host_bytes", own.host_bytes, "B", own.source, "index and bookkeeping, beside the tiers"),
        Value("daemon_gpu_bytes", own.device_bytes, "B", own.source, "context on each GPU"),
        Value("daemon_disk_bytes", own.disk_bytes if held[-1].tier.name == "disk" else 0, "B", own.source, "catalogue"),
        Value("host_memory_needed", host + own.host_bytes, "B", own.source, "host tier and daemon"),
        Value("host_memory_limit", asked.ram, "B", Source.MEASURED if asked.ram_measured else Source.EXACT,
              "of this host" if asked.ram_measured else ""),
        Value("sharing", "exclusive" if asked.exclusive else "inclusive", "", Source.EXACT),
    ]  # fmt: skip
    notes = [*d.model.spec.notes, *_warnings(held, asked, flow, per_token)]
    if host and 0 < asked.ram < host + own.host_bytes:
        notes.append(
            f"host: {show_bytes(host + own.host_bytes)} do not fit in {show_bytes(asked.ram)}; engines pin more"
        )
    return Report(
        f"tiers for {d.model.spec.name}",
        values,
        (Table("tiers", tier_columns(link), [tier_row(h) for h in held]),),
        notes,
    )


def _session_bytes(d: Deployment, asked: Asked) -> int:
    """Bytes of a session in a tier, its resumable points included."""
    return stored(d.model.spec, asked.session, BLOCK, asked.checkpoint_every).bytes


def _reach(asked: Asked) -> str:
    return "capacities add" if asked.exclusive else "the largest tier: lower ones hold copies"


def _warnings(held: Sequence[Held], asked: Asked, flow: Flow, per_token: float) -> list[str]:
    out = [] if asked.tiers[0].bytes else ["device: no room for KV: `size fit` says what the weights leave"]
    for h in held:
        if h.read_load > 1 or h.write_load > 1:
            out.append(f"{h.tier.name}: the link is over its bandwidth")
        if h.endurance > 1:
            out.append(
                f"{h.tier.name}: writes {h.endurance:.1f} times what the drives are rated for: store later, or less"
            )
    moved = flow.new_tokens * per_token * max(1, len(asked.tiers) - 1)
    if asked.copy_bps and moved > asked.copy_bps:
        out.append(f"host memory copies {asked.copy_bps / 1e9:.1f} GB/s and {moved / 1e9:.1f} are needed")
    return out
