"""`size fit`: does a model with its requests fit on these GPUs, how many at once, how long a context."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.sizing.alloc import allocation, doubts, max_sequence, rank_allocation, rank_share
from kvtier.sizing.hardware import Source, worst
from kvtier.sizing.plan import Deployment
from kvtier.sizing.report import Report, Value
from kvtier.sizing.units import show_bytes


class Load(NamedTuple):
    """What comes in: tokens of a prompt and an answer, requests a second, tokens that all prompts share."""

    prompt: int
    answer: int
    rate: float = 0.0
    shared: int = 0
    hit: float = 0.0
    """Part of the prompt that is found in a cache."""
    fixed_s: float = 0.01
    """Time to first token that no cache shortens."""
    tpot_s: float = 0.0
    """Given time for each further token; 0 takes the planned one."""


class Pool(NamedTuple):
    """GPU memory left for KV on one rank."""

    bytes: int
    source: Source
    parts: tuple[tuple[str, int], ...]


def pool_of(d: Deployment, given: int = 0) -> Pool:
    """Memory a rank has for KV after weights, activations and what CUDA keeps; `given` bytes override it."""
    if given:
        return Pool(given, Source.EXACT, ())
    utilization, source = d.hardware.constant("utilization")
    weights, weights_source = d.weights_bytes()
    reserve, reserve_source = d.hardware.constant("reserve_tp1" if d.par.ranks == 1 else "reserve_tpn")
    activations, activation_source = d.hardware.constant("activations_moe" if d.model.mixture else "activations")
    usable = int(d.gpu.memory * utilization)
    share = -(-weights // d.par.ranks)
    parts = (("usable", usable), ("weights", share), ("reserve", int(reserve)), ("activations", int(activations)))
    left = usable - share - int(reserve) - int(activations)
    tag = worst(d.gpu.source, source, weights_source, reserve_source, activation_source)
    return Pool(left, tag, parts)


class Concurrency(NamedTuple):
    """How many requests of one load a pool holds."""

    at_once: int
    tokens: int


def concurrency(d: Deployment, pool: int, load: Load) -> Concurrency:
    """Requests that can be admitted together, a shared prefix held once; per replica."""
    length = load.prompt + load.answer
    whole = rank_allocation(d.model.spec, length, d.par, d.engine)
    shared = rank_allocation(d.model.spec, load.shared, d.par, d.engine) if load.shared else 0
    each = max(1, rank_allocation(d.model.spec, length, d.par, d.engine, load.shared))
    at_once = max(0, (pool - shared) // each)
    slope = max(1.0, whole / length)
    return Concurrency(at_once, max(0, int(pool / slope)))


def step_s(d: Deployment, batch: float, length: float) -> float:
    """Seconds of one decode step: each rank reads its weights and its part of the batch's KV once from memory.

    A token goes through the pipeline's stages one after the other, each of which has a part of the batch meanwhile.
    """
    efficiency = d.hardware.constant("hbm_efficiency")[0]
    weights = d.weights_bytes()[0] / d.par.tp
    if d.model.mixture:  # each token of the batch reads its own experts until all are read
        weights *= min(1.0, max(1.0, batch) * d.model.active / d.model.params)
    spec = d.model.spec
    one = sum(c.layer_bytes() * c.units(int(length)) * rank_share(c, d.par) for c in spec.components)
    kv = batch * one / d.par.pp
    return (weights + kv) / (d.gpu.hbm_bps * efficiency)


def ttft_s(d: Deployment, load: Load) -> float:
    """Time to the first token without queueing, a hit's part not computed."""
    prefix = _found(load)
    return load.fixed_s + d.compute().prefill_s(d.model.spec, prefix, load.prompt - prefix)


def _found(load: Load) -> int:
    """Tokens of a prompt that are found: an engine always computes the last one."""
    return min(int(load.prompt * load.hit), load.prompt - 1)


def fit_report(d: Deployment, load: Load, given_pool: int = 0) -> Report:
    """Pool, concurrency, Little's law and the longest context."""
    spec = d.model.spec
    pool = pool_of(d, given_pool)
    length = load.prompt + load.answer
    fits = concurrency(d, pool.bytes, load)
    longest = max_sequence(spec, pool.bytes, d.par, d.engine) if pool.bytes > 0 else 0
    longest = min(longest, spec.max_tokens) if spec.max_tokens else longest
    one = rank_allocation(spec, length, d.par, d.engine)
    ttft = ttft_s(d, load)
    batch = max(1.0, fits.at_once)
    tpot = load.tpot_s or step_s(d, batch, load.prompt + load.answer / 2)
    compute = d.compute().source
    rate = (load.prompt - _found(load)) / max(1e-12, ttft - load.fixed_s)
    values = [
        *(Value(f"rank_{name}_bytes", size, "B", pool.source) for name, size in pool.parts),
        Value("pool_bytes", pool.bytes, "B", pool.source, "KV pool of one rank"),
        Value("pool_tokens", fits.tokens, "tokens", pool.source, f"at the mean of a request of {length:,} tokens"),
        Value("request_bytes", allocation(spec, length, d.par, d.engine), "B", Source.EXACT, "all ranks of a replica"),
        Value("fits", one <= pool.bytes, "", pool.source, "one request of this length in the pool"),
        Value("concurrency", fits.at_once * d.replicas, "", pool.source, f"{d.replicas} replica(s)"),
        Value("max_context_tokens", longest, "tokens", pool.source),
        Value("ttft_s", ttft, "s", worst(compute, Source.ASSUMED), "no queueing"),
        Value("tpot_s", tpot, "s", Source.EXACT if load.tpot_s else Source.ASSUMED, f"at a batch of {batch:,.0f}"),
        Value("prefill_tokens_per_s", rate * d.replicas, "tokens", compute, "computed, of all replicas"),
    ]
    notes = _notes(d, pool, one, length)
    if load.rate:
        values += _little(load, d, fits, ttft, tpot)
    return Report(f"{spec.name} on {d.replicas} x {d.par.ranks} {d.gpu.name}", values, (), notes)


def _utilization(d: Deployment, load: Load, requests: float) -> float:
    """Share of a GPU's memory that weights, reserves and the KV of so many requests take."""
    parts = dict(pool_of(d).parts)
    kept = parts["weights"] + parts["reserve"] + parts["activations"]
    each = rank_allocation(d.model.spec, load.prompt + load.answer, d.par, d.engine, load.shared)
    shared = rank_allocation(d.model.spec, load.shared, d.par, d.engine) if load.shared else 0
    return (kept + shared + requests / d.replicas * each) / d.gpu.memory


def _little(load: Load, d: Deployment, fits: Concurrency, ttft: float, tpot: float) -> list[Value]:
    """N = rate x time in the system, against what fits; prefill's own limit beside it."""
    resident = load.rate * (ttft + load.answer * tpot)
    prefill = (ttft - load.fixed_s) * load.rate / d.replicas
    most = fits.at_once * d.replicas
    verdict = "over capacity" if resident > most or prefill > 1 else "ok"
    return [
        Value("little_requests", resident, "", Source.ASSUMED, "rate x (TTFT + answer x TPOT), in the system at once"),
        Value(
            "little_load", resident / most if most else float("inf"), "%", Source.ASSUMED, "of the admitted requests"
        ),
        Value(
            "utilization_needed",
            _utilization(d, load, resident),
            "%",
            Source.ASSUMED,
            "of GPU memory, to admit all of them",
        ),
        Value("prefill_load", prefill, "%", Source.ASSUMED, "of the replicas' time spent in prefill"),
        Value("verdict", verdict, "", Source.ASSUMED),
    ]


def _notes(d: Deployment, pool: Pool, one: int, length: int) -> list[str]:
    notes = [*d.model.spec.notes, *doubts(d.model.spec, d.par)]
    if pool.bytes <= 0:
        notes.append("the weights leave no room for KV: more ranks, smaller weights, or a larger GPU")
    elif one > pool.bytes:
        notes.append(
            f"one request of {length:,} tokens needs {show_bytes(one)} on a rank, {show_bytes(pool.bytes)} is there: "
            "lower tiers hold what is not running, but a running sequence's KV must be in GPU memory"
        )
    return notes
