"""`size transfer`: prefill on one machine, decode on another, and what the KV between them costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.sizing.breakeven import loaded_bytes
from kvtier.sizing.families import read_config
from kvtier.sizing.hardware import Link, Source, worst
from kvtier.sizing.plan import Deployment
from kvtier.sizing.report import Column, Report, Table, Value
from kvtier.sizing.spec import CAPPED, Rule, Spec


class Move(NamedTuple):
    """One request's KV from prefill to decode."""

    prompt: int
    cached: int = 0
    """Tokens of the prompt that the decode side holds already: they are neither computed nor sent."""
    rate: float = 0.0
    links: int = 1
    """Links that carry one request side by side (one NIC a GPU)."""


def sent_bytes(spec: Spec, move: Move) -> int:
    """Bytes of a prompt's KV that the decode side lacks: of states all, of windows what the new tokens are in."""
    total = 0
    for c in spec.components:
        part = spec._replace(components=(c,))
        size, had = loaded_bytes(part, move.prompt), loaded_bytes(part, move.cached)
        if c.rule in CAPPED:
            had = size - min(size, c.layer_bytes() * (move.prompt - move.cached))
        elif c.rule is Rule.STATE:
            had = 0
        total += size - had
    return total


def transfer_report(d: Deployment, move: Move, links: Sequence[Link], dtypes: Sequence[str]) -> Report:
    """Bytes, time and verdict for each link and precision; 'bottleneck' where sending takes longer than computing."""
    spec = d.model.spec
    suffix = move.prompt - move.cached
    prefill = d.compute().prefill_s(spec, move.cached, suffix)
    whole = loaded_bytes(spec, move.prompt)
    rows = []
    for dtype in dtypes:
        sent_spec = read_config(d.model.config, d.model.how._replace(kv_dtype=dtype)) if dtype else spec
        sent = sent_bytes(sent_spec, move)
        for link in links:
            seconds = link.t0_s + sent / (link.read_bps * move.links)
            busy = move.rate * sent / (link.read_bps * move.links)
            verdict = (
                "bottleneck" if seconds > prefill or busy >= 1 else "hidden" if seconds < 0.1 * prefill else "visible"
            )
            rows.append((sent_spec.kv_dtype, link.name, sent, whole / sent if sent else 1.0, seconds, seconds / prefill,
                         busy, verdict))  # fmt: skip
    tag = worst(Source.EXACT, *(link.source for link in links))
    late = worst(tag, d.compute().source)
    columns = (Column("kv_dtype"), Column("link"), Column("sent_bytes", "B"), Column("smaller", "x"),
               Column("transfer_s", "s", tag), Column("of_prefill", "%", late), Column("link_load", "%", tag),
               Column("verdict", "", late))  # fmt: skip
    values = [
        Value("prompt_tokens", move.prompt, "tokens", Source.EXACT),
        Value("cached_tokens", move.cached, "tokens", Source.EXACT, "already on the decode side"),
        Value("prefill_s", prefill, "s", d.compute().source, "of what is not cached"),
        Value("kv_bytes", whole, "B", Source.EXACT, f"of the whole prompt in {spec.kv_dtype}"),
    ]
    notes = [*spec.notes, "scales of quantized KV are counted: 4-bit KV is 3.2-3.8 times smaller, not 4"]
    return Report(f"prefill to decode: {spec.name}", values, (Table("transfers", columns, rows),), notes)
