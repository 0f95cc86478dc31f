"""What one sequence keeps, as components with rules; live payload, engine allocation and stored payload from them."""

from __future__ import annotations

import enum
from fractions import Fraction
from typing import Final, NamedTuple

from kvtier.types import bad


class Rule(enum.StrEnum):
    """How many units a component keeps of S tokens."""

    LINEAR = "linear"  # every token
    WINDOW = "window"  # the last `span` tokens
    CHUNK = "chunk"  # the running chunk of `span` tokens
    RING = "ring"  # the last `span` tokens, and no engine keeps more
    EVERY = "every"  # one entry for each complete run of `span` tokens
    STATE = "state"  # one recurrent state, whatever S is
    ENCODER = "encoder"  # one entry for each of `span` encoder positions, once a request
    SCRATCH = "scratch"  # state that an engine allocates and nobody stores


CAPPED: Final = (Rule.WINDOW, Rule.CHUNK, Rule.RING)
FIXED: Final = (Rule.STATE, Rule.ENCODER)


class Component(NamedTuple):
    """Layers that keep the same thing by the same rule, at TP 1."""

    name: str
    rule: Rule
    layers: int
    unit_bytes: int
    """Bytes of one unit (token, entry, state, encoder position) of one layer, all heads."""
    heads: int = 0
    """KV heads that tensor parallelism divides; 0: every rank holds the whole."""
    span: int = 0
    score_dim: int = 0
    """Query heads x mean of key and value width: what attention multiplies for each pair of tokens."""
    reach: int = 0
    """Keys that a query looks at, at most; 0: all before it."""

    def units(self, tokens: int) -> int:
        """Units kept live of `tokens` tokens."""
        if self.rule in CAPPED:
            return min(tokens, self.span)
        return {Rule.EVERY: tokens // max(1, self.span), Rule.STATE: 1, Rule.ENCODER: self.span,
                Rule.SCRATCH: 0}.get(self.rule, tokens)  # fmt: skip

    def layer_bytes(self) -> int:
        """Bytes of one unit over all layers."""
        return self.layers * self.unit_bytes


class Spec(NamedTuple):
    """One model's cache in one precision."""

    name: str
    kv_dtype: str
    components: tuple[Component, ...]
    max_tokens: int = 0
    notes: tuple[str, ...] = ()
    bound: bool = False
    """Whether this is an upper bound for an architecture that is not known."""
    layers: int = 1
    """Decoder layers: the steps that a load can overlap with computing."""
    heads: int = 0
    """Query heads; 0 where the config names none."""

    @property
    def slope(self) -> Fraction:
        """Bytes that each further token adds in the long run (live payload)."""
        grows = (c for c in self.components if c.rule in (Rule.LINEAR, Rule.EVERY))
        return sum((Fraction(c.layer_bytes(), c.span or 1) for c in grows), Fraction(0))

    @property
    def full_slope(self) -> Fraction:
        """The same where windows and chunks are charged their full length."""
        return self.slope + sum(c.layer_bytes() for c in self.components if c.rule in (Rule.WINDOW, Rule.CHUNK))

    @property
    def fixed(self) -> int:
        """Bytes that stop growing: full windows, recurrent state, encoder entries."""
        return sum(c.layer_bytes() * c.units(c.span) for c in self.components if c.rule in (*CAPPED, *FIXED))

    @property
    def checkpoint(self) -> int:
        """Bytes that let a request resume at one more point: its windows and its states."""
        return sum(c.layer_bytes() * c.units(c.span) for c in self.components if c.rule in (*CAPPED, Rule.STATE))

    @property
    def plain(self) -> bool:
        """Whether every layer keeps every token, so that allocation policy leaves no doubt."""
        return all(c.rule is Rule.LINEAR for c in self.components)

    def payload(self, tokens: int) -> int:
        """Live bytes of one sequence of `tokens` tokens: one copy, nothing padded."""
        return sum(c.layer_bytes() * c.units(tokens) for c in self.components)


class Stored(NamedTuple):
    """What a tier keeps of one prefix."""

    tokens: int
    bytes: int
    checkpoints: int


def stored(spec: Spec, tokens: int, page: int = 64, every: int = 0) -> Stored:
    """Bytes in a tier for a prefix: whole pages, windows and states only at resumable points.

    `every` is the distance in tokens between resumable points; 0 keeps one, at the end of the prefix.
    Always one copy, however many ranks the engine has.
    """
    if page <= 0:
        raise bad("page", "a positive number of tokens", page)
    kept = tokens // page * page
    points = max(1, kept // every) if every else 1
    total = 0
    for c in spec.components:
        units = c.units(kept)
        if c.rule in CAPPED:
            window = min(kept, -(-c.span // page) * page)
            units = min(kept, window * points)
        elif c.rule is Rule.STATE:
            units = points if kept else 0
        elif c.rule is Rule.ENCODER and not kept:
            units = 0
        total += c.layer_bytes() * units
    return Stored(kept, total, points if kept else 0)


def stored_slope(spec: Spec, every: int = 0) -> float:
    """Bytes in a tier for each token in the long run, with a resumable point each `every` tokens; 0: none.

    Points that are closer than a window is long share its pages.
    """
    total = float(spec.slope)
    for c in spec.components if every else ():
        if c.rule in CAPPED:
            total += c.layer_bytes() * min(1.0, c.span / every)
        elif c.rule is Rule.STATE:
            total += c.layer_bytes() / every
    return total


def resume_tokens(spec: Spec, every: int) -> int:
    """Tokens from one point where a request can resume to the next: `every` where states or windows are kept there.

    0: at any token. Points that are closer than a window is long leave no gap in it.
    """
    apart = any(c.rule is Rule.STATE or (c.rule in CAPPED and c.span < every) for c in spec.components)
    return every if apart else 0
