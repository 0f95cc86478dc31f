"""What several commands share: a model on GPUs, and how it computes."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvtier.sizing.alloc import Engine, Parallel
from kvtier.sizing.cost import Compute, compute_of
from kvtier.sizing.hardware import Gpu, Hardware, Source
from kvtier.sizing.models import Model
from kvtier.sizing.units import parse_bytes
from kvtier.types import bad

WEIGHT_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "mxfp4": 17 / 32,
                       "nvfp4": 9 / 16, "int4": 17 / 32}  # fmt: skip
"""Bytes a parameter, scales included."""


class Deployment(NamedTuple):
    """A model served by one replica, and how many replicas there are."""

    model: Model
    hardware: Hardware
    gpu: Gpu
    par: Parallel
    engine: Engine
    weights: str = ""
    """Precision of the weights or their size; '' is what the checkpoint has."""
    mfu: float = 0.0
    """Share of the dense rate that prefill reaches; 0 takes the default for dense or mixture models."""
    compute_dtype: str = ""
    replicas: int = 1
    causal: bool = True

    def weights_bytes(self) -> tuple[int, Source]:
        """Bytes of the weights of one replica."""
        if self.weights and self.weights not in WEIGHT_BYTES:
            return parse_bytes(self.weights, "weights"), Source.EXACT
        if not self.weights and self.model.weights_bytes:
            return self.model.weights_bytes, Source.MEASURED
        if not self.model.params:
            raise bad("weights", "their size, for a config that parameters cannot be counted from")
        return int(self.model.params * WEIGHT_BYTES[self.weights or self.model.weights_dtype]), Source.ASSUMED

    def achieved(self) -> float:
        """The share of the dense rate that prefill is planned to reach."""
        if self.mfu:
            if not 0 < self.mfu <= 1:
                raise bad("mfu", "a share between 0 and 1", self.mfu)
            return self.mfu
        return self.hardware.constant("mfu_moe" if self.model.mixture else "mfu_dense")[0]

    def compute(self) -> Compute:
        """The prefill rate of one replica; raises KvtierError where nobody knows the work of a token."""
        if not self.model.active:
            raise bad("hidden_size", "a config that parameters can be counted from", self.model.spec.name)
        native = "fp8" if (self.weights or self.model.weights_dtype) == "fp8" else "bf16"
        dtype = self.compute_dtype or native
        return compute_of(self.model.active, self.gpu, self.par.ranks, self.achieved(), dtype, self.causal)
