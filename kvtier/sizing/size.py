"""`size model`: three byte counts of one model, each under its own name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtier.sizing.alloc import Engine, Parallel, allocation, check, doubts, rank_allocation, unified_block
from kvtier.sizing.hardware import Source
from kvtier.sizing.models import Model
from kvtier.sizing.report import Column, Report, Table, Value
from kvtier.sizing.spec import Rule, Spec, stored
from kvtier.types import bad

DEPTHS = (4096, 32768, 131072)


class Ask(NamedTuple):
    """What is asked of one model."""

    tokens: int = 131072
    par: Parallel = Parallel()
    engine: Engine = Engine()
    page: int = 64
    checkpoint_every: int = 0


def certainty(model: Model) -> Source:
    """Exact where the config itself, or a copy of it, is behind the number."""
    return Source.EXACT if model.sure in ("high", "config") else Source.ASSUMED


def size_report(model: Model, ask: Ask) -> Report:
    """Live payload, engine allocation and stored payload of a sequence of `ask.tokens` tokens."""
    spec = model.spec
    check(spec, ask.par)
    payload = certainty(model)
    engine_source = payload if spec.plain else Source.ASSUMED
    kept = stored(spec, ask.tokens, ask.page, ask.checkpoint_every)
    exact = spec.slope
    values = [
        Value("model", spec.name, "", Source.EXACT),
        Value("kv_dtype", spec.kv_dtype, "", Source.EXACT),
        Value("tokens", ask.tokens, "tokens", Source.EXACT),
        Value("bytes_per_token", int(exact), "B/token", payload, _fractional(spec)),
        Value("fixed_bytes", spec.fixed, "B", payload, "full windows, recurrent state, encoder entries"),
        Value("bytes_at_tokens", spec.payload(ask.tokens), "B", payload, "live payload: one copy, nothing padded"),
        Value("engine_bytes_per_token", _engine_slope(spec, ask, allocation), "B/token", engine_source,
              _policy(spec, ask)),
        Value("engine_rank_bytes_per_token", _engine_slope(spec, ask, rank_allocation), "B/token", engine_source,
              "on the fullest rank"),
        Value("engine_bytes_at_tokens", allocation(spec, ask.tokens, ask.par, ask.engine), "B", engine_source,
              f"engine allocation over {ask.par.ranks} rank(s)"),
        Value("engine_rank_bytes_at_tokens", rank_allocation(spec, ask.tokens, ask.par, ask.engine), "B", engine_source,
              "on the fullest rank"),
        Value("engine_block_tokens", unified_block(spec, ask.par, ask.engine.block), "tokens", engine_source),
        Value("stored_bytes_at_tokens", kept.bytes, "B", payload, f"in a tier: {kept.tokens:,} tokens in whole pages, "
              f"{kept.checkpoints} resumable point(s), one copy for all ranks"),
        Value("stored_tokens", kept.tokens, "tokens", Source.EXACT),
        Value("checkpoint_bytes", spec.checkpoint, "B", payload, "one more resumable point"),
    ]  # fmt: skip
    notes = [*spec.notes, *doubts(spec, ask.par), f"source: {model.source}; sure: {model.sure}"]
    return Report(f"KV cache of {spec.name}", values, (_components(spec, payload), _depths(model, ask)), notes)


def _fractional(spec: Spec) -> str:
    exact = spec.slope
    return f"exactly {exact}: some entries stand for several tokens" if exact.denominator != 1 else ""


def _engine_slope(spec: Spec, ask: Ask, taken: Callable[[Spec, int, Parallel, Engine], int]) -> int:
    """Bytes a token far out, where windows are full."""
    block = unified_block(spec, ask.par, ask.engine.block)
    far = 1 << 24
    far -= far % block
    span = 64 * block
    two = taken(spec, far + span, ask.par, ask.engine) - taken(spec, far, ask.par, ask.engine)
    return two // span


def _policy(spec: Spec, ask: Ask) -> str:
    """What decides the engine's number."""
    if any(c.rule in (Rule.WINDOW, Rule.CHUNK) for c in spec.components):
        if ask.engine.hybrid:
            return "windows freed as they pass (--hybrid)"
        return "sliding layers charged their full length; --hybrid for engines that free them"
    return ""


def _components(spec: Spec, source: Source) -> Table:
    rows = [(c.name, c.rule.value, c.layers, c.unit_bytes, c.heads or None, c.span or None) for c in spec.components]
    columns = (Column("component"), Column("rule"), Column("layers", "", source), Column("unit_bytes", "B", source),
               Column("heads", "", source), Column("span", "tokens", source))  # fmt: skip
    return Table("components", columns, rows)


def _depths(model: Model, ask: Ask) -> Table:
    spec = model.spec
    depths: Sequence[int] = sorted({*DEPTHS, ask.tokens, *([spec.max_tokens] if spec.max_tokens else [])})
    rows = [
        (
            n,
            spec.payload(n),
            allocation(spec, n, ask.par, ask.engine),
            stored(spec, n, ask.page, ask.checkpoint_every).bytes,
        )
        for n in depths
    ]
    engine = certainty(model) if spec.plain else Source.ASSUMED
    columns = (Column("tokens", "tokens"), Column("payload", "B", certainty(model)), Column("engine", "B", engine),
               Column("stored", "B", certainty(model)))  # fmt: skip
    return Table("depths", columns, rows)


class Observation(NamedTuple):
    """What an engine logged: a pool, and the tokens it said fit at some maximum length."""

    max_len: int
    pool: int
    tokens: int


def fit_line(seen: Sequence[Observation]) -> tuple[float, float]:
    """(bytes a token, bytes a sequence) that best explain several logged pools: pool/tokens = slope + fixed/max_len.

    Raises KvtierError with fewer than two different maximum lengths.
    """
    if len({o.max_len for o in seen}) < 2:
        raise bad("observed", "two or more logs with different maximum lengths", len(seen))
    xs = [1 / o.max_len for o in seen]
    ys = [o.pool / o.tokens for o in seen]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    fixed = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)
    return mean_y - fixed * mean_x, fixed


def logged(observation: Observation) -> tuple[float, float]:
    """(bytes a token, concurrency) behind 'GPU KV cache size: X tokens, maximum concurrency for Y tokens: Z x'."""
    return observation.pool / observation.tokens, observation.tokens / observation.max_len
