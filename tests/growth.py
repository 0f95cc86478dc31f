"""Whether what a process has rises with what it does: least squares over samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """The straight line through samples that leaves the least squares."""

    slope: float
    """For each operation."""
    rise: float
    """From the first sample to the last."""
    error: float
    """Standard error of the rise, from how the samples lie around the line: how much of it is chance."""
    mean: float


def line(operations: Sequence[float], values: Sequence[float]) -> Line:
    """Values that were seen after so many operations."""
    at, seen = np.asarray(operations, float), np.asarray(values, float)
    at = at - at.mean()
    slope = float(at @ seen / (at @ at))
    around = seen - seen.mean() - slope * at
    span = float(at[-1] - at[0])
    error = float(np.sqrt(around @ around / (len(at) - 2) / (at @ at)))
    return Line(slope, slope * span, error * span, float(seen.mean()))
