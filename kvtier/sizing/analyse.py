"""`size trace`: what a recorded workload would gain from tiers of given sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from kvtier.sizing.alloc import rank_share
from kvtier.sizing.breakeven import loaded_bytes
from kvtier.sizing.curve import Curve, Trace, hit_curve, knee, sample_capacities
from kvtier.sizing.fit import pool_of
from kvtier.sizing.hardware import Source
from kvtier.sizing.plan import Deployment
from kvtier.sizing.replay import belady_hits
from kvtier.sizing.report import Column, Report, Table, Value
from kvtier.sizing.spec import resume_tokens, stored, stored_slope
from kvtier.sizing.tiers import Flow, Held, Tier, hold, split_hits
from kvtier.sizing.traces import coarse
from kvtier.sizing.transfer import Move, sent_bytes
from kvtier.types import bad

NEAR_CEILING = 0.95
BUSY = 0.8
FAR = 1 << 17
"""Tokens of a sequence in which what grows outweighs what does not."""


class Plan(NamedTuple):
    """Tiers, how they share, and how the trace is read."""

    tiers: Sequence[Tier]
    exclusive: bool = True
    warmup: float = 0.0
    fixed_s: float = 0.01
    seconds: float = 0.0
    """Length of the trace where its own times are wrong or missing."""
    checkpoint_every: int = 4096
    belady: bool = True


class Timing(NamedTuple):
    """Times to first token over all requests, with the tiers down to one of them."""

    name: str
    p50_s: float
    p95_s: float
    overlapped_p50_s: float
    overlapped_p95_s: float
    prefill_s: float
    """Replica seconds of prefill in the whole trace."""


class Losing(NamedTuple):
    """Loads that take longer than computing the same tokens again."""

    requests: int
    tokens: int
    bytes: int


class Analysis(NamedTuple):
    """All that the report is made of."""

    trace: Trace
    curve: Curve
    token_bytes: float
    seconds: float
    held: list[Held]
    flow: Flow
    timings: list[Timing]
    losing: list[Losing]
    belady: float | None
    word: str


def device_pool(d: Deployment) -> int:
    """KV pool of all GPUs of all replicas together, what the weights leave."""
    return max(0, pool_of(d).bytes) * d.par.ranks * d.replicas


def held_share(d: Deployment) -> float:
    """The part of a sequence's KV that each rank has, and loads over its own link; all of a latent."""
    spec = d.model.spec
    sizes = {c: loaded_bytes(spec._replace(components=(c,)), FAR) for c in spec.components}
    whole = sum(sizes.values())
    return sum(size * rank_share(c, d.par) for c, size in sizes.items()) / whole / d.par.pp if whole else 1.0


def token_bytes(d: Deployment, every: int) -> float:
    """Bytes in a tier for each token, resumable points included; raises bad_request where that is nothing."""
    size = stored_slope(d.model.spec, every)
    if size <= 0:
        raise bad("checkpoint-every", "a distance in tokens, for a model that keeps nothing a token", every)
    return size


def analyse(trace: Trace, d: Deployment, plan: Plan) -> Analysis:
    """Curve, split, flows, times and the word for what holds hits back."""
    per_token = token_bytes(d, plan.checkpoint_every)
    blocks = [t.holds(per_token * trace.block_tokens) for t in plan.tiers]
    reaches = list(accumulate(blocks)) if plan.exclusive else list(accumulate(blocks, max))
    step = -(-resume_tokens(d.model.spec, plan.checkpoint_every) // trace.block_tokens) or 1
    curve = hit_curve(trace, reaches, plan.warmup, step)
    seconds = (plan.seconds or trace.seconds) * (1 - plan.warmup) or 1.0
    hits = split_hits(curve, blocks, plan.exclusive)
    prompt = curve.tokens / seconds
    flow = Flow(prompt, prompt * (1 - sum(hits)), tuple(h * prompt for h in hits))
    session = stored(d.model.spec, curve.tokens // max(1, curve.requests), trace.block_tokens,
                     plan.checkpoint_every).bytes  # fmt: skip
    held = hold(plan.tiers, flow, trace.block_tokens, per_token, session, plan.exclusive)
    timings, losing = _times(trace, d, plan, curve)
    bound = None
    if plan.belady and plan.warmup == 0:
        whole = coarse(trace, step)  # what nobody can resume at needs no room
        bound = belady_hits(whole, -(-reaches[-1] // step)) * whole.block_tokens / curve.tokens
    word = bottleneck(held, sum(hits), curve.ceiling, bound)
    return Analysis(trace, curve, per_token, seconds, held, flow, timings, losing, bound, word)


def bottleneck(held: Sequence[Held], hit: float, ceiling: float, belady: float | None) -> str:
    """What to change first: link, write-endurance, ceiling, policy or capacity."""
    flash = [h for h in held if h.tier.drive_writes_per_day]
    if any(h.read_load > BUSY for h in held) or any(h.write_load > BUSY for h in held if h not in flash):
        return "link"
    if any(h.endurance > 1 or h.write_load > BUSY for h in flash):
        return "write-endurance"
    if hit >= NEAR_CEILING * ceiling:
        return "ceiling"
    if belady is not None and belady - hit > (ceiling - hit) / 2:
        return "policy"
    return "capacity"


class _Clock:
    """Prefill and load times of one deployment."""

    def __init__(self, d: Deployment, plan: Plan) -> None:
        self.compute = d.compute()
        self.spec = d.model.spec
        self.links = [t.link for t in plan.tiers]
        self.sizes: dict[tuple[int, int], int] = {}

    def loaded(self, had: int, hit: int) -> int:
        """Bytes of a hit's tokens after the first `had`: of windows and states the one point that it resumes at."""
        key = had, hit
        if key not in self.sizes:
            self.sizes[key] = sent_bytes(self.spec, Move(hit, had)) if hit > had else 0
        return self.sizes[key]

    def load_s(self, tier: int, size: int) -> float:
        """Seconds to bring so many bytes from a tier."""
        link = self.links[tier]
        return link.load_s(size) if link and size else 0.0


def _times(trace: Trace, d: Deployment, plan: Plan, curve: Curve) -> tuple[list[Timing], list[Losing]]:
    """Times to first token without a cache and with ever more tiers; loads that lose, per tier."""
    clock = _Clock(d, plan)
    first = len(trace.leaf) - curve.requests
    whole = [clock.compute.prefill_s(clock.spec, 0, n) for n in trace.input_tokens[first:]]
    out = [_timing("none", plan.fixed_s, whole, whole, sum(whole))]
    loads = [0.0] * curve.requests
    losing = []
    before = [0] * curve.requests
    for k, tier in enumerate(plan.tiers):
        serial, overlapped = [], []
        prefill = 0.0
        lost = [0, 0, 0]
        upto = curve.per_request[k][first:]
        for r, hit_blocks in enumerate(upto):
            hit, had = hit_blocks * trace.block_tokens, before[r]
            size = clock.loaded(had, hit)
            seconds = clock.load_s(k, size)
            if seconds > clock.compute.prefill_s(clock.spec, had, hit - had):
                lost = [lost[0] + 1, lost[1] + hit - had, lost[2] + size]
            loads[r] += seconds
            own = clock.compute.prefill_s(clock.spec, hit, max(0, trace.input_tokens[first + r] - hit))
            prefill += own
            serial.append(loads[r] + own)
            overlapped.append(max(loads[r], own) + min(loads[r], own) / clock.spec.layers)
            before[r] = hit
        out.append(_timing(tier.name, plan.fixed_s, serial, overlapped, prefill))
        losing.append(Losing(*lost))
    return out, losing


def _timing(name: str, fixed_s: float, serial: list[float], overlapped: list[float], prefill: float) -> Timing:
    at = [sorted(serial), sorted(overlapped)]
    a, b, c, d = (fixed_s + (xs[min(len(xs) - 1, int(q * len(xs)))] if xs else 0.0) for xs in at for q in (0.5, 0.95))
    return Timing(name, a, b, c, d, prefill)


def gpus_saved(a: Analysis, d: Deployment) -> float:
    """GPUs that prefill needs less of, on average over the trace."""
    return (a.timings[0].prefill_s - a.timings[-1].prefill_s) * d.par.ranks / a.seconds


def trace_report(a: Analysis, d: Deployment, plan: Plan) -> Report:
    """The analysis as values and tables."""
    curve, block = a.curve, a.curve.block_tokens * a.token_bytes
    total = sum(h.hit for h in a.held)
    bend = knee(curve)
    gpu_hour, _ = d.hardware.gpu_hour(d.gpu.name)
    saved = gpus_saved(a, d)
    values = [
        Value("definition", _definition(plan, resume_tokens(d.model.spec, plan.checkpoint_every)), "", Source.EXACT),
        Value("requests", curve.requests, "", Source.EXACT),
        Value("prompt_tokens", curve.tokens, "tokens", Source.EXACT),
        Value("block_references", curve.references, "", Source.EXACT),
        Value("unique_blocks", curve.unique, "", Source.EXACT),
        Value("asked_once", curve.once / max(1, curve.unique), "%", Source.EXACT, "blocks of a single request"),
        Value("seconds", a.seconds, "s", Source.EXACT),
        Value("bytes_per_token", a.token_bytes, "B/token", Source.ASSUMED if d.model.spec.checkpoint else Source.EXACT),
        Value("hit", total, "%", Source.EXACT, "all tiers together"),
        Value("ceiling", curve.ceiling, "%", Source.EXACT, "a cache that never evicts"),
        Value("belady", a.belady, "%", Source.EXACT, "what no policy of this capacity exceeds"),
        Value("knee_bytes", int(bend * block), "B", Source.EXACT,
              f"{curve.ratio(bend):.1%} hits; beyond it each GiB buys less than the mean"),
        Value("bottleneck", a.word, "", Source.ASSUMED),
        Value("insert_bytes_per_s", a.flow.new_tokens * a.token_bytes, "B/s", Source.ASSUMED, "new KV of prompts"),
        Value("prefill_replica_s_saved", a.timings[0].prefill_s - a.timings[-1].prefill_s, "s", Source.ASSUMED),
        Value("gpus_saved", saved, "", Source.ASSUMED, "prefill GPUs on average"),
        Value("prefill_speedup_limit", 1 / (1 - total) if total < 1 else float("inf"), "x", Source.EXACT, "1/(1-h)"),
    ]  # fmt: skip
    if gpu_hour:
        values.append(
            Value("dollars_saved_per_month", saved * gpu_hour * 730, "$", Source.ASSUMED, f"at {gpu_hour:g} $/h a GPU")
        )
    notes = [*d.model.spec.notes, "times leave queueing out; the mean wait on each link is in the tier table"]
    tables = (_tier_table(a), _timing_table(a), curve_table(curve, block), _what_if(a, plan))
    return Report(f"{a.trace.name} on {d.model.spec.name}, {d.par.ranks} x {d.gpu.name}", values, tables, notes)


def _definition(plan: Plan, resumes: int) -> str:
    skipped = f", first {plan.warmup:.0%} of requests not counted" if plan.warmup else ""
    sharing = "exclusive tiers (capacities add)" if plan.exclusive else "inclusive tiers (write-through)"
    counted = "prompt tokens found / prompt tokens, longest prefix, last part of a block is a miss"
    apart = f", resumed at each {resumes:,} tokens" if resumes else ""
    return f"{counted}{apart}{skipped}; leaf-first LRU, {sharing}"


def tier_columns(link: Source) -> list[Column]:
    """Columns of a table of tiers."""
    return [
        Column("tier"), Column("bytes", "B"), Column("tokens", "tokens"), Column("sessions"), Column("hit", "%"),
        Column("read_bytes_per_s", "B/s"), Column("write_bytes_per_s", "B/s"), Column("read_load", "%", link),
        Column("write_load", "%", link), Column("wait_s", "s", link), Column("retention_s", "s"),
        Column("writes_bytes_per_day", "B"), Column("endurance", "x", Source.ASSUMED),
        Column("link"), Column("link_read_bytes_per_s", "B/s", link), Column("link_write_bytes_per_s", "B/s", link),
    ]  # fmt: skip


def tier_row(h: Held) -> tuple[int | float | str | None, ...]:
    """One tier's row under `tier_columns`."""
    link = h.tier.link
    linked = link is not None
    ways = (link.name, link.read_bps, link.write_bps) if link else (None, None, None)
    return (
        h.tier.name, h.tier.bytes, h.tokens, round(h.sessions, 1), h.hit, h.read_bps, h.write_bps,
        h.read_load if linked else None, h.write_load if linked else None, h.wait_s if linked else None, h.retention_s,
        h.writes_per_day, h.endurance or None, *ways,
    )  # fmt: skip


def _tier_table(a: Analysis) -> Table:
    columns = [*tier_columns(Source.ASSUMED), Column("losing_loads"), Column("losing_bytes", "B", Source.ASSUMED)]
    rows = [(*tier_row(h), lost.requests, lost.bytes) for h, lost in zip(a.held, a.losing, strict=True)]
    return Table("tiers", columns, rows)


def _timing_table(a: Analysis) -> Table:
    columns = [Column("down_to"), *(Column(k, "s", Source.ASSUMED) for k in Timing._fields[1:])]
    return Table("ttft", columns, [tuple(t) for t in a.timings])


def curve_table(curve: Curve, block_bytes: float) -> Table:
    """Capacity against hits."""
    rows = [(c, int(c * block_bytes), curve.ratio(c)) for c in sample_capacities(curve)]
    return Table("curve", (Column("blocks"), Column("bytes", "B"), Column("hit", "%")), rows)


def _what_if(a: Analysis, plan: Plan) -> Table:
    """What other choices would do to the hits of all tiers together."""
    per_block = a.curve.block_tokens * a.token_bytes
    sizes = [t.bytes / t.copies for t in plan.tiers]
    lower = min(1, len(sizes) - 1)

    def total(sizes: Sequence[float], exclusive: bool, shrink: float = 1.0) -> float:
        return sum(split_hits(a.curve, [int(s / (per_block * shrink)) for s in sizes], exclusive))

    def grown(extra: float) -> list[float]:
        return [s + extra / plan.tiers[lower].copies * (i == lower) for i, s in enumerate(sizes)]

    name = plan.tiers[lower].name
    now = total(sizes, plan.exclusive)
    cases = [
        ("as planned", now),
        ("exclusive", total(sizes, True)),
        ("inclusive", total(sizes, False)),
        ("KV of half the bytes (fp8)", total(sizes, plan.exclusive, 0.5)),
        (f"+64 GiB {name}", total(grown(64 * 2**30), plan.exclusive)),
        (f"{name} twice as large", total(grown(plan.tiers[lower].bytes), plan.exclusive)),
        (f"no {plan.tiers[-1].name}", total(sizes[:-1], plan.exclusive) if len(sizes) > 1 else 0.0),
    ]
    rows = [(name, hit, hit - now) for name, hit in cases]
    return Table("what_if", (Column("change"), Column("hit", "%"), Column("difference", "%")), rows)
