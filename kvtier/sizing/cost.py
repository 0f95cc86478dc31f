"""What prefill costs: linear and attention FLOPs, with the causal saving of a hit and the seed's simpler account."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.sizing.hardware import Gpu, Source
from kvtier.sizing.spec import Rule, Spec


def _pairs(prefix: int, suffix: int, reach: int, chunked: bool) -> float:
    """Query-key pairs of `suffix` tokens after `prefix`, each looking back at most `reach` tokens (0: at all).

    Or, `chunked`, to the beginning of its own `reach` tokens.
    """

    def from_empty(n: int) -> float:
        if chunked:
            return n // reach * reach * reach / 2 + (n % reach) ** 2 / 2
        if reach and n > reach:
            return reach * n - reach * reach / 2
        return n * n / 2

    return from_empty(prefix + suffix) - from_empty(prefix)


def attention_flops(spec: Spec, prefix: int, suffix: int) -> float:
    """FLOPs of softmax attention for `suffix` tokens after `prefix`: QK and PV are two each a pair and width."""
    total = 0.0
    for c in spec.components:
        if c.score_dim:
            thin = c.span if c.rule is Rule.EVERY else 1
            chunked = c.rule is Rule.CHUNK
            pairs = c.span * suffix if c.rule is Rule.ENCODER else _pairs(prefix, suffix, c.reach, chunked) / thin
            total += 4 * c.layers * c.score_dim * pairs
    return total


def prefill_flops(spec: Spec, active: float, prefix: int, suffix: int) -> float:
    """FLOPs to compute `suffix` tokens whose `prefix` is cached: 2 a parameter and token, plus attention."""
    return 2 * active * suffix + attention_flops(spec, prefix, suffix)


def causal_saving(spec: Spec, active: float, tokens: int, hit: int) -> float:
    """Part of prefill that a hit of `hit` of `tokens` saves: (1-a)h + a*h^2, a the attention share of the whole."""
    whole = prefill_flops(spec, active, 0, tokens)
    return 1 - prefill_flops(spec, active, hit, tokens - hit) / whole if whole else 0.0


def seed_saving(tokens: int, hit: int) -> float:
    """The seed's account, in which attention is not causal and all terms save the same part."""
    return hit / tokens if tokens else 0.0


def layer_flops(length: int, computed: int, d: int) -> int:
    """The seed's per-layer account: 4 * computed * length * d + 8 * d^2 * computed."""
    return 4 * computed * length * d + 8 * d * d * computed


class Compute(NamedTuple):
    """What prefills: one replica."""

    active: float
    flops: float
    """Achieved FLOP/s of the whole replica."""
    source: Source
    causal: bool = True

    def prefill_s(self, spec: Spec, prefix: int, suffix: int) -> float:
        """Seconds to compute `suffix` tokens after a cached `prefix`."""
        if not self.causal:
            return 2 * self.active * suffix / self.flops
        return prefill_flops(spec, self.active, prefix, suffix) / self.flops


def compute_of(active: float, gpu: Gpu, gpus: int, mfu: float, dtype: str, causal: bool = True) -> Compute:
    """The compute of `gpus` GPUs at the given share of their dense rate."""
    return Compute(active, gpu.flops(dtype) * gpus * mfu, Source.ASSUMED, causal)
