"""The one-pass curve equals replay, at every capacity, on any trace."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.sizing.curve import Trace, hit_curve, knee, sample_capacities
from kvtier.sizing.replay import belady_hits, leaf_first_hits, lru_hits
from kvtier.sizing.tiers import split_hits
from kvtier.sizing.traces import coarse, load_trace

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"


@st.composite
def traces(draw, requests=40, nodes=30):
    """A random tree and random leaves of it, prompts sometimes ending inside a block."""
    n = draw(st.integers(1, nodes))
    parent = [draw(st.integers(-1, i - 1)) for i in range(n)]
    leaf = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=requests))
    trace = Trace("random", 4, parent, leaf, [0] * len(leaf), [0] * len(leaf), [0.0] * len(leaf))
    inputs = [4 * len(trace.path(r)) - draw(st.integers(0, 1)) for r in range(len(leaf))]
    return trace._replace(input_tokens=inputs)


@given(traces(), st.integers(0, 40))
@settings(max_examples=300)
def test_the_curve_equals_brute_replay(trace, blocks):
    """Hits of the curve at any capacity are those of an LRU cache replayed at it."""
    curve = hit_curve(trace)
    assert curve.hits[min(blocks, len(curve.hits) - 1)] == lru_hits(trace, blocks)


@given(traces(), st.integers(0, 40), st.integers(1, 6))
@settings(max_examples=300)
def test_models_that_resume_at_some_points_alone_hit_no_more_than_the_last_of_them(trace, blocks, step):
    """At any capacity, request by request, the curve is a replay in which what is beyond that point is a miss."""
    curve = hit_curve(trace, [blocks], step=step)
    found = curve.hits[min(blocks, len(curve.hits) - 1)]
    assert found == lru_hits(trace, blocks, step) == sum(curve.per_request[0])
    assert all(each % step == 0 for each in curve.per_request[0])
    assert found <= step * belady_hits(coarse(trace, step), -(-blocks // step)), "no policy hits more"


@given(traces(20, 15), st.integers(1, 20))
def test_touching_leaves_first_is_leaf_first_eviction(trace, blocks):
    """Plain LRU with that order of touches evicts what a radix tree evicts that may only drop leaves."""
    assert lru_hits(trace, blocks) == leaf_first_hits(trace, blocks)


@given(traces(), st.integers(1, 40))
def test_no_policy_beats_belady_and_belady_not_the_ceiling(trace, blocks):
    """LRU <= Belady <= an unbounded cache, and Belady needs no block without its parent."""
    curve = hit_curve(trace)
    bound = belady_hits(trace, blocks)
    assert lru_hits(trace, blocks) <= bound <= curve.hits[-1]


@given(traces())
def test_the_curve_is_monotone_and_ends_at_the_reuse(trace):
    """More room never hits less, nothing hits nothing, and unbounded hits are the references seen before."""
    curve = hit_curve(trace)
    assert list(curve.hits) == sorted(curve.hits)
    assert curve.hits[0] == 0
    seen, again = set(), 0
    for r in range(len(trace.leaf)):
        path = trace.path(r)
        again += sum(b in seen for b in path[: trace.input_tokens[r] // 4])
        seen |= set(path)
    assert curve.hits[-1] == again
    assert curve.unique == len(seen)


@given(traces(), st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_an_exclusive_split_sums_to_the_curve(trace, blocks):
    """The tiers' hits add up to the hits of one cache as large as all; inclusive to the largest."""
    curve = hit_curve(trace)
    assert sum(split_hits(curve, blocks, True)) == pytest.approx(curve.ratio(sum(blocks)))
    assert sum(split_hits(curve, blocks, False)) == pytest.approx(curve.ratio(max(blocks)))
    assert min(split_hits(curve, blocks, True)) >= 0


@given(traces(), st.lists(st.integers(0, 20), min_size=1, max_size=3))
def test_hits_of_each_request_sum_to_the_curve(trace, capacities):
    """Per-request hits, asked for at some capacities, add up to the curve there."""
    curve = hit_curve(trace, capacities)
    for capacity, row in zip(capacities, curve.per_request, strict=True):
        assert sum(row) == curve.hits[min(capacity, len(curve.hits) - 1)]


@given(traces())
def test_warm_up_leaves_out_counts_not_cache(trace):
    """The second half alone counts, with what the first half left in the cache."""
    whole, half = hit_curve(trace), hit_curve(trace, warmup=0.5)
    cut = int(len(trace.leaf) * 0.5)
    first = hit_curve(trace._replace(leaf=trace.leaf[:cut], input_tokens=trace.input_tokens[:cut]))
    assert half.hits[-1] == whole.hits[-1] - first.hits[-1]
    assert half.requests == len(trace.leaf) - cut


@given(traces(), st.integers(1, 3))
def test_coarse_blocks_hit_no_more(trace, blocks):
    """Taking several blocks as one keeps paths consistent and cannot find more tokens."""
    fine, thick = hit_curve(trace), hit_curve(coarse(trace, blocks))
    assert thick.hit_tokens(len(thick.hits)) <= fine.hit_tokens(len(fine.hits))
    assert thick.tokens == fine.tokens


def test_the_knee_is_where_the_curve_bends():
    """Two blocks asked for again and again, a long tail that is not: the knee is at two."""
    leaf = [1] * 50 + [2, 3, 4, 5, 6, 7, 8, 9] + [2]
    trace = Trace("bend", 4, [-1, 0, *[-1] * 8], leaf, [8] * len(leaf), [0] * len(leaf), [0.0] * len(leaf))
    curve = hit_curve(trace)
    assert knee(curve) == 2
    assert curve.needed(curve.ratio(2)) == 2
    assert sample_capacities(curve)[-1] == curve.needed(curve.ceiling)


@pytest.mark.parametrize(
    ("name", "ratios", "ceiling", "unique", "references"),
    [
        ("mooncake_conversation", {1000: 0.0454, 10_000: 0.2157, 50_000: 0.3615, 100_000: 0.371}, 0.374, 182_790,
         288_500),
        ("mooncake_synthetic", {}, 0.651, 43_924, 121_877),
    ],
)  # fmt: skip
def test_published_traces_have_the_reference_curve(name, ratios, ceiling, unique, references):
    """The reference hit ratios within 0.1 point, and equality with brute replay to the block."""
    path = TRACES / f"{name}.npz.zst"
    if not path.is_file():
        pytest.skip(f"no {path.name} in ../shared/traces")
    trace = load_trace([path])
    curve = hit_curve(trace)
    assert (curve.unique, curve.references) == (unique, references)
    assert curve.ceiling == pytest.approx(ceiling, abs=1e-3)
    for blocks, ratio in ratios.items():
        assert curve.ratio(blocks) == pytest.approx(ratio, abs=1e-3)
    for blocks in (1000, 20_000):
        assert curve.hits[blocks] == lru_hits(trace, blocks)


def test_the_last_half_matches_the_other_simulator():
    """Last half of the conversation trace: within 0.1 point of kvcache-simulator 0.1.3 at six capacities."""
    path = TRACES / "mooncake_conversation.npz.zst"
    if not path.is_file():
        pytest.skip(f"no {path.name} in ../shared/traces")
    curve = hit_curve(load_trace([path]), warmup=0.5)
    theirs = {998: 0.047, 2995: 0.067, 9996: 0.220, 29_996: 0.344, 49_996: 0.377, 100_000: 0.392}
    assert {c: curve.ratio(c) for c in theirs} == pytest.approx(theirs, abs=1e-3)
