"""Sizing: how much KV a model keeps, where it fits, what tiers of it are worth. Pure: arithmetic on its arguments.

`python -m kvtier.sizing` and `kvtierctl size` print it; every number is tagged exact, measured or assumed.
"""

from kvtier.sizing.alloc import Engine, Parallel, allocation, rank_allocation
from kvtier.sizing.curve import Curve, Trace, hit_curve
from kvtier.sizing.families import Reading, read_config
from kvtier.sizing.hardware import Hardware, Link, Source
from kvtier.sizing.models import Model, load
from kvtier.sizing.spec import Component, Rule, Spec, stored

__all__ = [
    "Component",
    "Curve",
    "Engine",
    "Hardware",
    "Link",
    "Model",
    "Parallel",
    "Reading",
    "Rule",
    "Source",
    "Spec",
    "Trace",
    "allocation",
    "hit_curve",
    "load",
    "rank_allocation",
    "read_config",
    "stored",
]
