"""What an engine allocates for one sequence: ranks and replicas, block rounding, windows, pages shared with states."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.sizing.spec import CAPPED, Component, Rule, Spec
from kvtier.types import bad


class Parallel(NamedTuple):
    """How one replica of a model is spread. Data parallelism adds replicas and changes nothing of one sequence."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1

    @property
    def ranks(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp


class Engine(NamedTuple):
    """How an engine allocates."""

    block: int = 16
    hybrid: bool = False
    """Whether windows are freed as they pass; without it sliding layers are charged their full length."""
    batched_tokens: int = 8192
    """Tokens of one scheduler step: what a window holds beyond its span while a chunk is computed."""


def check(spec: Spec, par: Parallel) -> None:
    """Refuse a split that engines refuse; raises KvtierError naming the field."""
    for field, n in par._asdict().items():
        if n < 1:
            raise bad(field, "a positive number of ranks", n)
    if par.pp > spec.layers:
        raise bad("pp", f"at most the {spec.layers} layers of {spec.name}", par.pp)
    if par.tp % par.dcp:
        raise bad("dcp", f"a divisor of tp={par.tp}", par.dcp)
    if par.dcp > 1 and any(c.rule in CAPPED for c in spec.components):
        raise bad("dcp", "1, for a model with sliding-window layers", par.dcp)


def doubts(spec: Spec, par: Parallel) -> list[str]:
    """What an engine may refuse of a split that can be counted."""
    if spec.heads % par.tp == 0:
        return []
    return [f"{par.tp} ranks do not divide {spec.heads} query heads: vLLM and SGLang do not start so"]


def head_share(heads: int, tp: int) -> float:
    """The part of a component that one rank holds: whole heads, at least one; all of it where heads is 0."""
    return max(1, -(-heads // tp)) / heads if heads else 1.0


def rank_share(c: Component, par: Parallel) -> float:
    """The part of a component's stored bytes that one rank of a stage has: its heads, of its share of the tokens."""
    split = _token_ways(c, par)
    return head_share(c.heads, par.tp // split) / split


def _token_ways(c: Component, par: Parallel) -> int:
    """Ranks that a component's tokens are dealt out to: states have none, and index keys are replicated under DCP."""
    return par.dcp if c.rule is Rule.LINEAR and c.name != "indexer" else 1


def _rank_bytes(c: Component, par: Parallel) -> int:
    """Bytes of one unit of one layer on one rank."""
    if not c.heads:
        return c.unit_bytes
    local = max(1, -(-c.heads // (par.tp // _token_ways(c, par))))
    return -(-c.unit_bytes * local // c.heads)


def unified_block(spec: Spec, par: Parallel, block: int) -> int:
    """Tokens of an attention block once it has grown to the page of a recurrent state (784 for Qwen3.5-27B)."""
    states = [_rank_bytes(c, par) for c in spec.components if c.rule is Rule.STATE]
    tokens = [_rank_bytes(c, par) for c in spec.components if c.rule is Rule.LINEAR and c.unit_bytes]
    if not states or not tokens:
        return block
    need = -(-_state_page(spec, par) // max(tokens))
    return max(block, -(-need // block) * block)


def _state_page(spec: Spec, par: Parallel) -> int:
    """Bytes of all states of one layer on one rank; components of equal layer count belong together."""
    by_layers: dict[int, int] = {}
    for c in spec.components:
        if c.rule is Rule.STATE:
            by_layers[c.layers] = by_layers.get(c.layers, 0) + _rank_bytes(c, par)
    return max(by_layers.values(), default=0)


def _reserved(c: Component, tokens: int, block: int, engine: Engine) -> int:
    """Tokens that blocks of a capped component cover at the peak."""
    full = -(-tokens // block) * block
    if c.rule is Rule.RING:
        return min(full, -(-c.span // block) * block)
    if not engine.hybrid:
        return full
    if c.rule is Rule.CHUNK:
        return min(full, -(-(c.span + engine.batched_tokens) // block) * block)
    return min(full, (-(-(c.span - 1 + engine.batched_tokens) // block) + 1) * block)


def rank_allocation(spec: Spec, tokens: int, par: Parallel, engine: Engine, shared: int = 0) -> int:
    """Bytes on one rank of the fullest pipeline stage for one sequence.

    With `shared`: what it has alone where whole blocks of so many leading tokens are others' too. Its states are.
    """
    check(spec, par)
    block = unified_block(spec, par, engine.block)
    page = _state_page(spec, par)
    widest = max((_rank_bytes(c, par) for c in spec.components if c.rule is Rule.LINEAR), default=0)
    pad = max(0, block * widest - page) if page else 0
    full, held = -(-tokens // block) * block, shared // block * block
    total = 0
    for c in spec.components:
        layers = -(-c.layers // par.pp)
        unit = _rank_bytes(c, par)
        if c.rule is Rule.LINEAR:
            total += layers * unit * (-(-(full - held) // _token_ways(c, par)))
        elif c.rule in CAPPED:
            total += layers * unit * min(full - held, _reserved(c, tokens, block, engine))
        elif c.rule is Rule.EVERY:
            total += layers * unit * (-(-full // c.span) - held // c.span)
        else:
            total += layers * unit * (c.span if c.rule is Rule.ENCODER else 1)
    states = max((c.layers for c in spec.components if c.rule is Rule.STATE), default=0)
    return total + pad * -(-states // par.pp)


def allocation(spec: Spec, tokens: int, par: Parallel, engine: Engine) -> int:
    """Bytes over all ranks of one replica for one sequence, replicas of KV heads included."""
    if par.pp == 1:
        return rank_allocation(spec, tokens, par, engine) * par.tp
    whole = rank_allocation(spec, tokens, par._replace(pp=1), engine)  # PP splits layers, it adds none
    return whole * par.tp


def max_sequence(spec: Spec, pool: int, par: Parallel, engine: Engine) -> int:
    """The longest sequence whose allocation fits `pool` bytes a rank; 0 when not even one block does."""
    low, high = 0, 1
    while high < 1 << 34 and rank_allocation(spec, high, par, engine) <= pool:
        low, high = high, high * 2
    while high - low > 1:
        mid = (low + high) // 2
        low, high = (mid, high) if rank_allocation(spec, mid, par, engine) <= pool else (low, mid)
    return low
