"""Replay through the real store: equal to brute force on small traces, to the published figures on real ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.ctl import main
from kvtier.replay.bound import belady
from kvtier.replay.drive import replay
from kvtier.replay.trace import Mix, read, segments
from kvtier.sizing.curve import Trace
from kvtier.sizing.replay import belady_hits, leaf_first_hits, lru_hits
from kvtier.types import KvtierError, Tier
from tracekit import longest, published, traces

TABLE = {
    "mooncake_conversation": {
        "1%": (5.35, 25.12),
        "5%": (19.96, 37.36),
        "10%": (28.44, 37.36),
        "25%": (36.04, 37.36),
        "50%": (37.03, 37.36),
        "100%": (37.36, 37.36),
    },
    "mooncake_synthetic": {
        "1%": (3.88, 18.89),
        "5%": (15.96, 40.30),
        "10%": (26.73, 51.56),
        "25%": (45.22, 63.74),
        "50%": (59.96, 65.12),
        "100%": (65.12, 65.12),
    },
    "kvct_claudecode": {
        "0.5%": (34.02, 59.93),
        "1%": (66.55, 80.96),
        "2%": (89.09, 92.85),
        "5%": (95.12, 96.06),
        "10%": (96.06, 96.06),
    },
}
"""Published token hit ratios of LRU and Belady, in percent, by capacity in percent of the unique blocks."""


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(traces(), st.integers(0, 20))
def test_lru_equals_brute_force(trace, spare):
    """The store evicts what an LRU stack evicts, and what eviction of the oldest leaf evicts, block for block."""
    pages = longest(trace) + spare
    outcome = asyncio.run(replay(segments(trace), "lru", [pages]))
    hits = sum(outcome.hit_tokens.values()) // trace.block_tokens
    assert hits == lru_hits(trace, pages) == leaf_first_hits(trace, pages)


@settings(max_examples=200, deadline=None)
@given(traces(), st.integers(1, 40))
def test_belady_equals_brute_force(trace, pages):
    """The bound over segments is the bound over blocks."""
    ratio = belady(segments(trace), pages)
    assert ratio * sum(trace.input_tokens) == pytest.approx(4 * belady_hits(trace, pages))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TABLE)
def test_published_traces_give_the_published_ratios(name):
    """LRU and Belady within 0.1 point at every capacity of the table."""
    requests = read([published(name)], Mix())
    for text, (lru, best) in TABLE[name].items():
        pages = int(requests.blocks * float(text.rstrip("%")) / 100)
        outcome = asyncio.run(replay(requests, "lru", [pages]))
        assert 100 * outcome.ratio == pytest.approx(lru, abs=0.1), text
        assert 100 * belady(requests, pages) == pytest.approx(best, abs=0.1), text


def test_a_published_trace_gives_the_published_ratios():
    """The smallest of them at one capacity, in every run of the suite."""
    requests = read([published("mooncake_synthetic")], Mix())
    outcome = asyncio.run(replay(requests, "lru", [requests.blocks // 20]))
    assert 100 * outcome.ratio == pytest.approx(15.96, abs=0.1)
    assert 100 * belady(requests, requests.blocks // 20) == pytest.approx(40.30, abs=0.1)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(traces(20, 15), st.integers(0, 4))
def test_a_lower_tier_serves_what_the_upper_one_lost(trace, spare):
    """With a disk that holds everything nothing is missed twice, whatever host holds; hits count once."""
    pages = longest(trace) + spare
    outcome = asyncio.run(replay(segments(trace), "lru", [pages, 4 * len(trace.parent) + 64]))
    assert sum(outcome.hit_tokens.values()) // trace.block_tokens == lru_hits(trace, len(trace.parent))
    assert outcome.hit_tokens[Tier.HOST] // trace.block_tokens <= lru_hits(trace, len(trace.parent))


@pytest.mark.parametrize("pages", [100, 97])
def test_the_disks_capacity_is_exact(pages):
    """Nothing goes as long as all fits: not for want of a whole slab, nor for a reserve."""
    trace = Trace("once", 1, [-1] * pages, [*range(pages)] * 2, [1] * 2 * pages, [0] * 2 * pages, [0.0] * 2 * pages)
    outcome = asyncio.run(replay(segments(trace), "lru", [4, pages]))
    assert sum(outcome.hit_tokens.values()) == pages


def mooncake(path: Path) -> Path:
    """Three requests: a cold one, the same again, a branch of it."""
    rows = [(0, [1, 2, 3], 1500), (1000, [1, 2, 3], 1536), (2500, [1, 2, 9], 1536)]
    lines = [
        json.dumps({"timestamp": at, "input_length": tokens, "output_length": 7, "hash_ids": ids})
        for at, ids, tokens in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def lookups(path: Path) -> Path:
    """The same as an engine's lookup log, with the bytes of a token."""
    rows = [(0.0, ["a", "b", "c"], 768), (1.0, ["a", "b", "c"], 768), (2.5, ["a", "b", "z"], 800)]
    lines = [
        json.dumps(
            {
                "timestamp": at, "chunk_hashes": ids, "chunk_size": 256, "seq_len": tokens,
                "shapes": [[2, 4, 256, 8]], "dtypes": ["torch.bfloat16"],
            }
        )
        for at, ids, tokens in rows
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def ctl(*args: str) -> list | dict:
    """Kvtierctl replay --json."""
    result = CliRunner().invoke(main, ["replay", *args, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_mooncake_json_lines(tmp_path):
    """Two of three blocks were there at the branch, all at the repetition; the cold start counts as a miss."""
    data = ctl(str(mooncake(tmp_path / "m.jsonl")), "--policy", "lru", "--capacity", "100%")
    assert data["requests"] == 3
    assert data["tokens"] == 1500 + 1536 + 1536
    assert data["hit_ratio"] == pytest.approx((3 + 2) * 512 / data["tokens"])
    assert data["belady_hit_ratio"] == pytest.approx(data["hit_ratio"])


def test_lookup_logs(tmp_path):
    """Chunks of 256 tokens, and sizes that the log itself tells."""
    data = ctl(str(lookups(tmp_path / "l.jsonl")), "--capacity", "100%")
    assert data["hit_ratio"] == pytest.approx((3 + 2) * 256 / (768 + 768 + 800))
    assert data["page_bytes"] == 2 * 4 * 256 * 8 * 2
    assert data["bytes_moved"] == 4 * data["page_bytes"]


def test_an_npz_trace(tmp_path):
    """Blocks as parents, requests as leaves."""
    import numpy as np

    path = tmp_path / "t.npz"
    arrays = {"dpar": [0, 0, 0, 1], "leaf": [2, 2, 3], "inp": [1500, 1536, 1536], "out": [0, 0, 0], "dt_ms": [0, 5, 5]}
    np.savez(path, bs=np.array([512]), **{name: np.array(values, "<i8") for name, values in arrays.items()})
    data = ctl(str(path), "--capacity", "4")
    assert data["hit_ratio"] == pytest.approx((3 + 2) * 512 / (1500 + 1536 + 1536))
    assert data["capacity_pages"] == 4


def test_a_share_is_of_what_is_replayed(tmp_path):
    """Where --limit cuts a trace short, blocks that no request names any more are not counted; whatever the format."""
    import numpy as np

    path = tmp_path / "t.npz"
    arrays = {"dpar": [0, 0, 0, 1], "leaf": [0, 2, 3], "inp": [5, 1536, 1536], "out": [0, 0, 0], "dt_ms": [0, 5, 5]}
    np.savez(path, bs=np.array([512]), **{name: np.array(values, "<i8") for name, values in arrays.items()})
    first = ctl(str(path), "--capacity", "100%", "--limit", "2")
    lines = ctl(str(mooncake(tmp_path / "m.jsonl")), "--capacity", "100%", "--limit", "2")
    assert first["requests"] == lines["requests"] == 2
    assert first["capacity_pages"] < ctl(str(path), "--capacity", "100%")["capacity_pages"]
    assert lines["capacity_pages"] == 3


def test_several_capacities_give_a_list(tmp_path):
    """In the order asked for, whether by comma or by repeating; one gives an object."""
    path = str(mooncake(tmp_path / "m.jsonl"))
    several = ctl(path, "--capacity", "3,75%", "--capacity", "3+16")
    assert [each["capacity"] for each in several] == ["3", "75%", "3+16"]
    assert list(several[2]["tiers"]) == ["host", "disk"]
    assert isinstance(ctl(path, "--capacity", "3"), dict)


def test_several_policies_give_a_list(tmp_path):
    """Each at every capacity; `all` is every policy that ships."""
    path = str(mooncake(tmp_path / "m.jsonl"))
    two = ctl(path, "--policy", "lru", "--policy", "arc", "--capacity", "3,4")
    assert [(each["policy"], each["capacity"]) for each in two] == [
        ("lru", "3"),
        ("arc", "3"),
        ("lru", "4"),
        ("arc", "4"),
    ]
    assert two[0]["belady_hit_ratio"] == two[1]["belady_hit_ratio"]
    assert {each["policy"] for each in ctl(path, "--policy", "all", "--capacity", "3")} >= {"heat", "lru", "tlru"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--capacity", "many"], "capacity"),
        (["--capacity", "1GiB"], "token-bytes"),
        (["--policy", "none-such", "--capacity", "3"], "lru"),
        (["--warmup", "150%", "--capacity", "3"], "warmup"),
        (["--capacity", "3+16+16"], "host and on disk"),
        (["--capacity", "3+4"], "16 blocks on disk"),
        (["--capacity", "1G", "--token-bytes", "1"], "capacity"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, args, said):
    """One line on stderr names the option and what would do."""
    result = CliRunner().invoke(main, ["replay", str(mooncake(tmp_path / "m.jsonl")), *args])
    assert result.exit_code == 1
    assert said in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("option", ["--limit", "--block", "--seed", "--sessions", "--hours", "--token-bytes"])
def test_numbers_below_nothing_are_refused(tmp_path, option):
    """As wrong usage, by the option's name."""
    result = CliRunner().invoke(main, ["replay", str(mooncake(tmp_path / "m.jsonl")), option, "-1"])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def test_sizes_are_what_they_say_and_more_than_all_is_all(tmp_path):
    """A GB is 10^9 bytes as in `size`, a GiB 2^30; what is larger than the trace needs no memory for it."""
    path = str(mooncake(tmp_path / "m.jsonl"))
    decimal, binary, all_of_it, huge = ctl(path, "--capacity", "4GB,4GiB,4,900000GB", "--token-bytes", str(1 << 21))
    assert (decimal["capacity_pages"], binary["capacity_pages"]) == (3, 4)
    assert huge["hit_ratio"] == all_of_it["hit_ratio"] == binary["hit_ratio"]
    absurd = ctl(path, "--capacity", "9" * 400, "--capacity", "9" * 400 + "%")
    assert [each["hit_ratio"] for each in absurd] == [all_of_it["hit_ratio"]] * 2


def test_a_broken_line_is_named(tmp_path):
    """The file, the line and the field."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n{"hash_ids": 7}\n')
    with pytest.raises(KvtierError, match=r"bad\.jsonl:2 hash_ids"):
        read([path], Mix())
