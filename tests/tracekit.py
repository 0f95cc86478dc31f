"""What tests of replay share: random small traces, and the published ones where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import strategies as st

from kvtier.sizing.curve import Trace

FOLDER = Path(os.environ.get("KVTIER_TRACES") or Path(__file__).resolve().parent.parent.parent / "shared" / "traces")


def published(name: str) -> Path:
    """A published trace; skips the test where it is not there."""
    path = FOLDER / f"{name}.npz.zst"
    if not path.is_file():
        pytest.skip(f"no {path.name} in $KVTIER_TRACES")
    return path


@st.composite
def traces(draw: st.DrawFn, requests: int = 40, nodes: int = 30) -> Trace:
    """A random tree and random leaves of it, a second apart; blocks of 4 tokens."""
    count = draw(st.integers(1, nodes))
    parent = [draw(st.integers(-1, i - 1)) for i in range(count)]
    leaf = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=requests))
    trace = Trace("random", 4, parent, leaf, [0] * len(leaf), [0] * len(leaf), [float(r) for r in range(len(leaf))])
    return trace._replace(input_tokens=[4 * len(trace.path(r)) for r in range(len(leaf))])


def longest(trace: Trace) -> int:
    """Blocks of the longest request: with fewer, a request that runs holds all there is."""
    return max(len(trace.path(r)) for r in range(len(trace.leaf)))
