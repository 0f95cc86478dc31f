"""Engine allocation and stored payload: ranks, blocks, windows, shared pages, resumable points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sizing.alloc import Engine, Parallel, allocation, head_share, max_sequence, rank_allocation, unified_block
from kvtier.sizing.models import load, table
from kvtier.sizing.size import Observation, fit_line, logged
from kvtier.sizing.spec import Rule, stored, stored_slope
from kvtier.sizing.units import parse_bytes
from kvtier.types import KvtierError

SPECS = [load(row["name"]).spec for row in table()]
ONE = Parallel()
specs = st.sampled_from(SPECS)
tokens = st.integers(0, 300_000)


@given(
    specs,
    tokens,
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 16, 64]),
    st.booleans(),
)
def test_payload_is_at_most_the_allocation(spec, n, tp, pp, block, hybrid):
    """Padding, replicas and reserves only add; a rank holds no more than all of them."""
    par, engine = Parallel(tp, pp), Engine(block, hybrid)
    whole = allocation(spec, n, par, engine)
    assert spec.payload(n) <= whole
    assert whole <= rank_allocation(spec, n, par, engine) * par.ranks


@given(specs, tokens, tokens)
def test_more_tokens_never_take_less(spec, a, b):
    """Payload, allocation and stored payload are monotone in length."""
    low, high = min(a, b), max(a, b)
    assert spec.payload(low) <= spec.payload(high)
    assert allocation(spec, low, ONE, Engine()) <= allocation(spec, high, ONE, Engine())
    assert stored(spec, low).bytes <= stored(spec, high).bytes


@given(specs, tokens, st.sampled_from([16, 64, 256]), st.sampled_from([0, 64, 784, 4096]))
def test_stored_payload_lies_between_one_point_and_all(spec, n, page, every):
    """Never less than the prefix itself with one resumable point, never more than with one a page."""
    kept = stored(spec, n, page, every)
    least, most = stored(spec, n, page), stored(spec, n, page, page)
    assert kept.tokens == n // page * page
    assert least.bytes <= kept.bytes <= most.bytes or every < page
    assert least.bytes >= (spec.payload(kept.tokens) if kept.tokens else 0)


@pytest.mark.parametrize("every", [64, 1024, 4096, 1 << 17])
def test_bytes_a_token_are_what_is_stored_in_the_long_run(every):
    """Also where resumable points are closer than a window or a chunk is long: Llama 4 with the default of 4096."""
    n = 1 << 24
    for spec in SPECS:
        assert stored_slope(spec, every) == pytest.approx(stored(spec, n, 64, every).bytes / n, rel=0.001)
        assert stored_slope(spec) == float(spec.slope)


@pytest.mark.parametrize(("page", "kept"), [(16, 992), (64, 960), (256, 768), (512, 512)])
def test_reusable_tokens_are_whole_pages(page, kept):
    """Of 1000 tokens whole pages are reusable, begun blocks are allocated."""
    spec = load("Llama-3.1-8B").spec
    assert stored(spec, 1000, page).tokens == kept
    assert allocation(spec, 1000, ONE, Engine(page)) == -(-1000 // page) * page * 131072


def test_few_kv_heads_are_replicated_over_ranks():
    """MLA at TP 8 is allocated eight times, Qwen3-235B twice, Qwen3.5-397B four times; a tier stores one copy."""
    eight = Parallel(8)
    for name, factor in (("DeepSeek-V3", 8), ("Qwen3-235B-A22B", 2), ("Llama-3.1-70B", 1)):
        spec = load(name).spec
        assert allocation(spec, 16, eight, Engine()) == factor * 16 * spec.slope
        assert stored(spec, 64).bytes == 64 * spec.slope
    assert allocation(load("DeepSeek-V3").spec, 16, eight, Engine()) // 16 == 562_176
    assert [8 * head_share(heads, 8) for heads in (0, 2, 4, 8)] == [8, 4, 2, 1]


def test_context_parallelism_divides_tokens():
    """DCP undoes MLA's replication, and shards heads over the rest; index keys stay whole; windows refuse."""
    mla, gqa, dsa = (load(n).spec for n in ("DeepSeek-V3", "Qwen3-235B-A22B", "DeepSeek-V3.2"))
    assert allocation(mla, 1024, Parallel(8, 1, 8), Engine()) == 1024 * mla.slope
    assert allocation(gqa, 1024, Parallel(8, 1, 2), Engine()) == 1024 * gqa.slope
    assert allocation(dsa, 1024, Parallel(8, 1, 8), Engine()) == 1024 * (61 * 1152 + 8 * 61 * 132)
    with pytest.raises(KvtierError, match="dcp: expected 1"):
        allocation(load("gpt-oss-120b").spec, 1024, Parallel(8, 1, 2), Engine())
    with pytest.raises(KvtierError, match="dcp: expected a divisor of tp=8"):
        allocation(mla, 1024, Parallel(8, 1, 3), Engine())
    with pytest.raises(KvtierError, match="tp: expected a positive"):
        allocation(mla, 1024, Parallel(0), Engine())


def test_states_have_no_tokens_for_context_parallelism_to_deal_out():
    """Their heads are divided by all tensor-parallel ranks, as without it."""
    spec = load("Qwen3.5-27B").spec
    states = spec._replace(components=tuple(c for c in spec.components if c.rule is Rule.STATE))
    assert rank_allocation(states, 1, Parallel(4, 1, 4), Engine()) == rank_allocation(states, 1, Parallel(4), Engine())


def test_pipeline_stages_divide_layers_and_add_none():
    """PP 4 leaves the total alone; the fullest of four stages of 61 layers has 16."""
    spec = load("DeepSeek-V3").spec
    assert allocation(spec, 1024, Parallel(1, 4), Engine()) == 1024 * spec.slope
    assert rank_allocation(spec, 1024, Parallel(1, 4), Engine()) == 1024 * 16 * 1152


def test_engines_without_window_groups_charge_full_length():
    """gpt-oss-120b: 73,728 bytes a token against 36,864 live; gpt-oss-20b 48, Gemma 3 496, Gemma 4 880 KiB."""
    for name, kib in (("gpt-oss-120b", 72), ("gpt-oss-20b", 48), ("Gemma-3-27B", 496), ("Gemma-4-31B", 880)):
        assert load(name).spec.full_slope == kib * 1024
        assert allocation(load(name).spec, 131072, ONE, Engine()) == 131072 * kib * 1024


def test_engines_with_window_groups_reserve_a_step_beyond_the_window():
    """ceil((W - 1 + batched) / block) + 1 blocks; a chunk reserves ceil((C + batched) / block)."""
    oss, llama4 = load("gpt-oss-120b").spec, load("Llama-4-Scout").spec
    engine = Engine(16, True, 2048)
    assert allocation(oss, 131072, ONE, engine) == 131072 * 36864 + (-(-(127 + 2048) // 16) + 1) * 16 * 36864
    assert allocation(llama4, 131072, ONE, engine) == 131072 * 49152 + (8192 + 2048) * 147456


def test_an_attention_block_grows_to_a_state_page():
    """Qwen3.5-27B: 3,207,168 bytes of state a layer over 4,096 a token gives blocks of 784 tokens."""
    spec = load("Qwen3.5-27B").spec
    assert unified_block(spec, ONE, 16) == 784
    page = 784 * 4096
    assert allocation(spec, 1, ONE, Engine()) == 784 * 65536 + 48 * page
    assert unified_block(load("Llama-3.1-8B").spec, ONE, 16) == 16


def test_vllm_logged_pools_are_met():
    """Qwen3-14B: 6.51 GiB hold 42,656 tokens; gpt-oss-120b: 5.38 GiB hold 78,384; both within 0.1 %."""
    qwen, oss = load("Qwen3-14B").spec, load("gpt-oss-120b").spec
    assert parse_bytes("6.51GiB") / float(qwen.slope) == pytest.approx(42_656, rel=1e-3)
    assert parse_bytes("5.38GiB") / float(oss.full_slope) == pytest.approx(78_384, rel=1e-3)
    assert load("Qwen3-8B").spec.payload(32_768) == parse_bytes("4.5GiB")
    per_token, times = logged(Observation(32_768, parse_bytes("6.51GiB"), 42_656))
    assert per_token == pytest.approx(163_840, rel=1e-3)
    assert round(times, 2) == 1.30


def test_two_parameters_are_found_from_logs():
    """Pools that shrink with the maximum length are explained by bytes a token and bytes a sequence."""
    pool = 10**10
    seen = [Observation(n, pool, round(pool / (3300 + 3.2e9 / n))) for n in (32768, 131072, 1048576)]
    slope, fixed = fit_line(seen)
    assert slope == pytest.approx(3300, rel=0.01)
    assert fixed == pytest.approx(3.2e9, rel=0.01)
    with pytest.raises(KvtierError, match="observed"):
        fit_line(seen[:1])


def test_the_longest_sequence_is_the_last_that_fits():
    """One token more does not fit."""
    for name in ("Llama-3.1-8B", "gpt-oss-120b", "Qwen3.5-27B"):
        spec = load(name).spec
        n = max_sequence(spec, 10**10, ONE, Engine())
        assert rank_allocation(spec, n, ONE, Engine()) <= 10**10 < rank_allocation(spec, n + 1, ONE, Engine())
    assert max_sequence(load("Llama-3.1-8B").spec, 1000, ONE, Engine()) == 0


def test_what_resumable_points_cost():
    """A point a block of Qwen3.5-27B costs 2.9 times the KV itself; one of gpt-oss equals 128 tokens."""
    spec = load("Qwen3.5-27B").spec
    dense = stored(spec, 32768, 64, 784)
    assert dense.checkpoints == 41
    assert dense.bytes == 32768 * 65536 + 41 * spec.checkpoint
    assert 41 * spec.checkpoint / (32768 * 65536) == pytest.approx(2.94, abs=0.01)
    assert stored(spec, 32768).bytes == 32768 * 65536 + spec.checkpoint
    oss = load("gpt-oss-120b").spec
    assert oss.checkpoint == 128 * oss.slope == parse_bytes("4.5MiB")
    assert stored(oss, 32768, 64, 64).bytes == 32768 * oss.full_slope


def test_nothing_is_stored_of_less_than_a_page():
    """63 tokens at 64 a page leave nothing in a tier."""
    for spec in SPECS:
        assert stored(spec, 63) == (0, 0, 0)
    with pytest.raises(KvtierError, match="page"):
        stored(SPECS[0], 100, 0)
