"""Prefill work, break-even, transfer: the reference tables and the laws behind them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sizing.alloc import Engine, Parallel
from kvtier.sizing.breakeven import (
    NEVER,
    best_cut,
    breakeven_report,
    judge,
    load_seconds,
    loaded_bytes,
    min_prefix,
    rank_bytes,
    required_bps,
    retention_s,
    ttft_with,
)
from kvtier.sizing.cost import attention_flops, causal_saving, prefill_flops, seed_saving
from kvtier.sizing.families import Reading
from kvtier.sizing.hardware import Hardware, Link, Source
from kvtier.sizing.models import load, table
from kvtier.sizing.plan import Deployment
from kvtier.sizing.transfer import Move, sent_bytes, transfer_report
from kvtier.types import KvtierError

HARDWARE = Hardware()
SPECS = [load(row["name"]).spec for row in table()]


def on(model, gpu="H100", tp=1, mfu=0.5, dtype="bf16", **kw):
    return Deployment(load(model), HARDWARE, HARDWARE.gpu(gpu), Parallel(tp), Engine(), "", mfu, dtype, **kw)


CASES = {
    "Llama-2-7B": (on("Llama-2-7B"), (35279, 31643, 22406, 10337), (18.50, 16.59, 11.75, 5.42)),
    "Llama-3.1-8B": (on("Llama-3.1-8B"), (29795, 27159, 20061, 9808), (3.91, 3.56, 2.63, 1.29)),
    "Llama-3.3-70B": (on("Llama-3.3-70B", tp=4), (13757, 13027, 10747, 6322), (4.51, 4.27, 3.52, 2.07)),
    "DeepSeek-V3": (on("DeepSeek-V3", "H200", 8, 0.35, "fp8"), (70038, 58657, 35549, 13802), (4.92, 4.12, 2.50, 0.97)),
    "gpt-oss-120b": (on("gpt-oss-120b", mfu=0.3), (28252, 26008, 19738, 10048), None),
    "Qwen3.5-397B-A17B": (on("Qwen3.5-397B-A17B", "H200", 8, 0.3), (68793, 65909, 56443, 35848), None),
}  # fmt: skip
DEPTHS = (2048, 8192, 32768, 131072)


@pytest.mark.parametrize("name", CASES)
def test_prefill_rates_and_break_even_match_the_reference(name):
    """Tokens a second and BW* at four lengths, within 0.6 % (the reference leaves sliding layers' attention out)."""
    d, rates, widths = CASES[name]
    got = [n / d.compute().prefill_s(d.model.spec, 0, n) for n in DEPTHS]
    assert got == pytest.approx(rates, rel=0.006)
    if widths:
        assert [required_bps(d, n) / 1e9 for n in DEPTHS] == pytest.approx(widths, rel=0.006)


def test_break_even_counts_what_a_tier_really_sends():
    """A hybrid's BW* includes its state, a sliding model's only its windows, not all its layers."""
    qwen, oss = CASES["Qwen3.5-397B-A17B"][0], CASES["gpt-oss-120b"][0]
    assert loaded_bytes(qwen.model.spec, 8192) == 8192 * 30720 + qwen.model.spec.fixed
    assert loaded_bytes(oss.model.spec, 8192) == 8192 * 36864 + oss.model.spec.fixed
    assert required_bps(oss, 8192) < oss.model.spec.full_slope * 8192 / oss.compute().prefill_s(oss.model.spec, 0, 8192)


def test_loads_take_the_reference_times():
    """8K tokens over the links of the reference table: milliseconds, and who wins."""
    llama, v3 = CASES["Llama-2-7B"][0], CASES["DeepSeek-V3"][0]
    link = {name: Link(name, bps, bps, t0, Source.EXACT) for name, bps, t0 in (
        ("pcie4", 25e9, 0.0005), ("pcie5", 55e9, 0.0005), ("c2c", 345e9, 0.0003), ("100g", 11.5e9, 0.002),
        ("lmdb", 2e9, 0.003))}  # fmt: skip
    ms = {name: 1e3 * load_seconds(llama, one, 8192, False) for name, one in link.items()}
    assert ms == pytest.approx({"pcie4": 172.3, "pcie5": 78.6, "c2c": 12.7, "100g": 375, "lmdb": 2150}, rel=0.005)
    assert judge(llama, link["pcie5"], 8192).wins
    assert not judge(llama, link["100g"], 8192).wins
    assert 1e3 * load_seconds(v3, link["pcie5"], 8192, True) == pytest.approx(11.0, rel=0.005)
    assert min_prefix(llama, link["pcie5"]) == pytest.approx(28, abs=1)
    assert min_prefix(llama, link["pcie4"]) == pytest.approx(80, abs=2)


def test_a_2_gb_reader_loses_or_barely_breaks_even_everywhere():
    """The LMDB-like reader is under BW* of the dense models and at best even for the others at 8K."""
    reader = HARDWARE.link("lmdb")
    for name in ("Llama-2-7B", "Llama-3.1-8B", "Llama-3.3-70B", "DeepSeek-V3"):
        assert not judge(CASES[name][0], reader, 8192).wins


def test_each_rank_loads_its_own_heads():
    """GQA divides over ranks, MLA's latent does not, few heads divide only as far as they go."""
    assert rank_bytes(CASES["Llama-3.3-70B"][0], 8192) == 8192 * 327680 // 4
    assert rank_bytes(CASES["DeepSeek-V3"][0], 8192) == 8192 * 70272
    assert rank_bytes(on("Qwen3-235B-A22B", tp=8), 64) == 64 * 192512 // 4


def test_context_parallel_ranks_load_their_own_tokens():
    """With DCP 8 a rank loads an eighth of the latents, but all index keys."""
    d = CASES["DeepSeek-V3"][0]
    assert rank_bytes(d._replace(par=d.par._replace(dcp=8)), 8192) == 8192 * 70272 // 8
    d = on("DeepSeek-V3.2", tp=8)
    assert rank_bytes(d._replace(par=d.par._replace(dcp=8)), 8192) == 8192 * 61 * (1152 // 8 + 132)


def test_a_chunk_looks_back_to_its_own_beginning():
    """Two chunks of Llama 4 take twice the attention of one in its chunked layers, not three times."""
    spec = load("Llama-4-Scout").spec
    (chunked,) = [c for c in spec.components if c.name == "chunk"]
    only = spec._replace(components=(chunked,))
    assert attention_flops(only, 0, 2 * 8192) == 2 * attention_flops(only, 0, 8192)
    assert attention_flops(only, 8192, 100) == attention_flops(only, 0, 100)


def test_causal_saving_has_the_reference_values():
    """A hit of four fifths saves 78.9 % at 4K and 68.6 % at 128K, not 80 %."""
    spec = load("Llama-2-7B").spec
    got = [causal_saving(spec, 7e9, n, round(0.8 * n)) for n in (4096, 8192, 32768, 131072)]
    assert got == pytest.approx([0.789, 0.779, 0.739, 0.686], abs=0.001)
    assert seed_saving(4096, 3277) == pytest.approx(0.8, abs=1e-4)
    share = [attention_flops(spec, 0, n) / (2 * 7e9 * n) for n in (4096, 8192, 32768, 131072)]
    assert share == pytest.approx([0.077, 0.15, 0.61, 2.45], rel=0.03)


@given(st.sampled_from(SPECS), st.integers(2, 200_000), st.data())
def test_a_causal_hit_saves_at_most_its_share(spec, n, data):
    """Causal saving <= h: the tail that is left is the dearer part."""
    hit = data.draw(st.integers(0, n))
    assert causal_saving(spec, 7e9, n, hit) <= seed_saving(n, hit) + 1e-9


@given(st.sampled_from(SPECS), st.integers(1, 100_000), st.integers(1, 100_000))
def test_prefill_in_two_parts_is_prefill_in_one(spec, a, b):
    """Work for a prefix and for the rest after it adds up to the work for both."""
    parts = prefill_flops(spec, 7e9, 0, a) + prefill_flops(spec, 7e9, a, b)
    assert parts == pytest.approx(prefill_flops(spec, 7e9, 0, a + b), rel=1e-9)


def test_the_seeds_account_is_linear():
    """--model-cost seed: 2LN at the achieved rate, 114.69 ms for 4096 tokens of 7B at 5e14."""
    d = on("Llama-2-7B", causal=False)
    assert d.compute().prefill_s(d.model.spec, 0, 4096) == pytest.approx(2 * 6.74e9 * 4096 / (989e12 * 0.5))
    assert d.compute().prefill_s(d.model.spec, 100_000, 4096) == d.compute().prefill_s(d.model.spec, 0, 4096)


@given(st.integers(64, 65536), st.floats(1e9, 400e9), st.floats(0, 0.01))
def test_loading_wins_from_the_minimum_prefix_on(n, bps, t0):
    """Below the minimum prefix recomputing wins or ties, at it loading wins; never means never up to there."""
    d = CASES["Llama-3.1-8B"][0]
    link = Link("x", bps, bps, t0, Source.EXACT)
    least = min_prefix(d, link)
    if least == NEVER:
        assert not judge(d, link, n).wins
    else:
        assert judge(d, link, int(least)).wins
        assert int(least) == 1 or not judge(d, link, int(least) - 1).wins


def test_overlap_is_between_the_longer_part_and_the_sum():
    """max(load, compute) <= overlapped <= load + compute <= never loading at all, where loading wins."""
    d = CASES["Llama-3.1-8B"][0]
    for load_s in (0.001, 0.05, 0.3):
        t = ttft_with(d, load_s, 8192, 512, 0.01)
        own = d.compute().prefill_s(d.model.spec, 8192, 512)
        assert 0.01 + max(load_s, own) <= t.overlapped_s <= t.serial_s == pytest.approx(0.01 + load_s + own)
        assert t.none_s == pytest.approx(0.01 + d.compute().prefill_s(d.model.spec, 0, 8704))


@pytest.mark.parametrize(
    ("model", "layers"),
    [("Qwen3.5-27B", 64), ("DeepSeek-V3.2", 61), ("DeepSeek-V4-Flash", 43), ("Whisper-large-v3", 32)],
)
def test_what_overlap_leaves_is_a_layers_share(model, layers):
    """A layer that keeps a state, an index key or compressed entries beside its KV is one layer."""
    d = on(model)
    own = d.compute().prefill_s(d.model.spec, 8192, 512)
    assert ttft_with(d, own, 8192, 512, 0.0).overlapped_s == pytest.approx(own * (1 + 1 / layers))


def test_a_latent_takes_its_place_on_every_gpu():
    """DeepSeek-V3 at TP 8 pays for eight copies in GPU memory; 70B's heads are dealt out, and kept once."""
    prices = HARDWARE.gpu_hour("H200")[0] / HARDWARE.gpu("H200").memory * 1e9 * 730
    for model, copies in (("DeepSeek-V3", 8), ("Llama-3.1-70B", 1)):
        d = on(model, "H200", 8)
        kept = breakeven_report(d, 8192, 512, [(HARDWARE.link("pcie5"), True)], 0.01).get("worth_keeping_hbm_s")
        assert kept == pytest.approx(retention_s(d, 8192, prices * copies, HARDWARE.gpu_hour("H200")[0]))


def test_work_that_nobody_can_count_is_refused(tmp_path):
    """Rather than a prefill of attention alone: a config without a hidden size says nothing of its weights."""
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(KvtierError, match="hidden_size: expected a config that parameters can be counted from"):
        on(str(tmp_path)).compute()


def test_the_best_cut_beats_both_extremes():
    """Computing the head while the tail streams in is no slower than loading all or computing all."""
    d = CASES["Llama-2-7B"][0]
    for name in ("pcie4", "100gbe", "nvme4"):
        link = HARDWARE.link(name)
        head, both = best_cut(d, link, 8192)
        assert both <= min(load_seconds(d, link, 8192, False), d.compute().prefill_s(d.model.spec, 0, 8192))
        assert 0 < head < 8192


def test_keeping_pays_as_long_as_the_reference_says():
    """Llama-2-7B: 57 s in DRAM, 28 min on NVMe; DeepSeek-V3 35 min in DRAM (linear work only)."""
    d = on("Llama-2-7B", causal=False)
    assert retention_s(d, 8192, 3.0, 4.5) == pytest.approx(57, rel=0.01)
    assert retention_s(d, 8192, 0.10, 4.5) / 60 == pytest.approx(28, rel=0.02)
    v3 = on("DeepSeek-V3", "H200", 8, 0.35, "fp8", causal=False)
    assert retention_s(v3, 8192, 3.0, 5.75) / 60 == pytest.approx(35, rel=0.02)
    assert retention_s(d, 8192, 0.0, 4.5) == NEVER


def test_the_report_ranks_links_by_verdict():
    """PCIe wins and 100 GbE loses for Llama-2-7B at 8K; BW* lies between them."""
    d = CASES["Llama-2-7B"][0]
    links = [(HARDWARE.link("pcie5"), True), (HARDWARE.link("100gbe"), False)]
    out = breakeven_report(d, 8192, 512, links, 0.01).as_json()
    assert [row["verdict"] for row in out["links"]] == ["load", "recompute"]
    assert out["links"][1]["read_bytes_per_s"] < out["required_bytes_per_s"] < out["links"][0]["read_bytes_per_s"]
    assert out["sources"]["required_bytes_per_s"] == "assumed"


def test_transfers_take_the_seeds_times():
    """2048 tokens of 7B: 85.9 ms at 100 Gbit/s, a bottleneck; 21.5 at 400; 5.7 with 4 bits and their scales."""
    d = on("Llama-2-7B", causal=False)
    links = [HARDWARE.link("12.5GB/s"), HARDWARE.link("400Gbps")]
    rows = transfer_report(d, Move(2048), links, ("", "int4_g128")).as_json()["transfers"]
    assert [1e3 * r["transfer_s"] for r in rows] == pytest.approx([85.899, 21.475, 22.817, 5.704], rel=1e-3)
    assert rows[0]["verdict"] == "bottleneck"
    assert rows[0]["sent_bytes"] == 2**30


def test_other_precisions_are_read_as_the_model_was(tmp_path):
    """An upper bound stays one, and draft layers are counted, in every precision that is compared."""
    config = {"model_type": "brand_new", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, how in ((str(tmp_path), Reading(assume_full=True)), ("DeepSeek-V3", Reading(draft=True))):
        d = on("Llama-2-7B")._replace(model=load(name, how))
        whole, half = transfer_report(d, Move(2048), [HARDWARE.link("100gbe")], ("", "fp8")).as_json()["transfers"]
        assert whole["sent_bytes"] == 2 * half["sent_bytes"]


def test_a_cached_prefix_is_not_sent():
    """What the decode side holds costs neither compute nor bytes."""
    d = on("Llama-2-7B")
    (row,) = transfer_report(d, Move(2048, 1024, 5.0), [HARDWARE.link("100Gbps")], ("",)).as_json()["transfers"]
    assert row["sent_bytes"] == 2**29
    assert row["link_load"] == pytest.approx(5 * 2**29 / 12.5e9)


def test_states_and_windows_are_sent_whatever_is_cached():
    """A state is that of the last token, a window the last tokens; what lies before is at the decode side."""
    qwen, oss = on("Qwen3.5-27B"), on("gpt-oss-120b")
    state = qwen.model.spec.fixed
    assert sent_bytes(qwen.model.spec, Move(8192)) == 8192 * 65536 + state
    assert sent_bytes(qwen.model.spec, Move(8192, 7168)) == 1024 * 65536 + state
    assert sent_bytes(oss.model.spec, Move(8192, 7168)) == (1024 + 128) * 36864
    assert sent_bytes(oss.model.spec, Move(8192, 8092)) == (100 + 100) * 36864
