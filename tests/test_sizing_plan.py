"""Fit, tiers, trace analysis, hardware file: the planner's answers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sizing.alloc import Engine, Parallel
from kvtier.sizing.analyse import (
    Plan,
    analyse,
    bottleneck,
    device_pool,
    gpus_saved,
    held_share,
    token_bytes,
    trace_report,
)
from kvtier.sizing.curve import Trace
from kvtier.sizing.fit import Load, concurrency, fit_report, pool_of, step_s
from kvtier.sizing.hardware import Hardware, Link, Source, worst
from kvtier.sizing.html import trace_page
from kvtier.sizing.linkfit import Fitted, Measured, Sample, fit_link, replace_tables, sweep_sizes, toml_of
from kvtier.sizing.models import load
from kvtier.sizing.plan import Deployment
from kvtier.sizing.report import show
from kvtier.sizing.tierplan import Asked, tiers_report
from kvtier.sizing.tiers import Flow, Held, Tier, hold, rates, wait_seconds
from kvtier.types import KvtierError

ONE = Parallel()
FAST = Link("fast", 50e9, 50e9, 0.0005, Source.EXACT)
SLOW = Link("slow", 2e9, 1e9, 0.003, Source.EXACT)


def on(model, gpu="H100", par=ONE, hardware=None, **kw):
    h = hardware or Hardware()
    return Deployment(load(model), h, h.gpu(gpu), par, Engine(), **kw)


def test_littles_law_flags_what_does_not_fit():
    """8B on a pool of 53.9 GB: 411K tokens, 47 requests of 8192 + 512; 5 a second at 20 ms need 52.7: over."""
    report = fit_report(on("Llama-3.1-8B"), Load(8192, 512, 5.0, fixed_s=0.0, tpot_s=0.02), 53_900_000_000)
    assert report.get("pool_tokens") == 411_224
    assert report.get("concurrency") == 47
    assert report.get("little_requests") == pytest.approx(52.7, abs=0.1)
    assert report.get("verdict") == "over capacity"
    calm = fit_report(on("Llama-3.1-8B"), Load(8192, 512, 2.0, fixed_s=0.0, tpot_s=0.02), 53_900_000_000)
    assert calm.get("verdict") == "ok"


def test_nothing_fits_beside_weights_that_are_too_large():
    """No tokens rather than fewer than none; and where all of a prompt is cached, its last token is computed."""
    report = fit_report(on("Llama-3.1-405B"), Load(8192, 512, hit=1.0))
    assert (report.get("pool_tokens"), report.get("concurrency")) == (0, 0)
    assert report.get("ttft_s") > 0.01


def test_the_rate_of_prefill_counts_what_is_computed():
    """A hit makes a prompt cheaper, not the GPU faster: later tokens look back at more, so that it is a little less."""
    loads = (Load(8192, 512, hit=share) for share in (0.0, 0.9))
    plain, hit = (fit_report(on("Llama-3.1-8B"), load).get("prefill_tokens_per_s") for load in loads)
    assert plain / 2 < hit < plain


def test_a_running_sequence_needs_gpu_memory():
    """Qwen3-8B at 32,768 tokens needs 4.50 GiB; a pool of 3.58 says no, why, and what would fit."""
    report = fit_report(on("Qwen3-8B"), Load(32_256, 512), int(3.58 * 2**30))
    assert report.get("fits") is False
    assert report.get("request_bytes") == int(4.5 * 2**30)
    assert report.get("max_context_tokens") == int(3.58 * 2**30) // 147456 // 16 * 16
    assert any("must be in GPU memory" in note for note in report.notes)


def test_the_pool_is_what_weights_and_reserves_leave():
    """Memory as nvidia-smi says it, times utilization, less weights of a rank, reserve and activations."""
    pool = pool_of(on("Llama-3.1-8B"))
    parts = dict(pool.parts)
    assert parts["usable"] == int(81559 * 2**20 * 0.9)
    assert parts["weights"] == int(8.03e9 * 2)
    assert pool.bytes == parts["usable"] - parts["weights"] - parts["reserve"] - parts["activations"]
    assert pool.source is Source.ASSUMED
    eight = dict(pool_of(on("Llama-3.1-70B", par=Parallel(8))).parts)
    assert eight["weights"] == -(-int(70.6e9 * 2) // 8)
    assert pool_of(on("Llama-3.1-405B")).bytes < 0
    assert any("no room" in n for n in fit_report(on("Llama-3.1-405B"), Load(1024, 64)).notes)


def test_a_shared_prefix_is_held_once():
    """With 8000 of 8192 prompt tokens in common, many more requests fit."""
    alone = concurrency(on("Llama-3.1-8B"), 53_900_000_000, Load(8192, 512))
    shared = concurrency(on("Llama-3.1-8B"), 53_900_000_000, Load(8192, 512, shared=8000))
    assert shared.at_once == (53_900_000_000 - 8000 * 131072) // (704 * 131072)
    assert shared.at_once > 10 * alone.at_once


def test_a_shared_prefix_shares_no_states_and_no_later_windows():
    """Each request of Qwen3.5-27B has its own states beside its own blocks, each of gpt-oss its own windows."""
    qwen, page = on("Qwen3.5-27B"), 784 * 4096
    state, pool = 48 * page, 53_900_000_000
    got = concurrency(qwen, pool, Load(8192, 512, shared=8000)).at_once
    assert got == (pool - 11 * 16 * page - state) // (2 * 16 * page + state)
    oss = on("gpt-oss-120b")._replace(engine=Engine(16, True, 2048))
    window = (-(-(127 + 2048) // 16) + 1) * 16
    got = concurrency(oss, pool, Load(81920, 5120, shared=80000)).at_once
    assert got == (pool - (80000 + window) * 36864) // ((7040 + window) * 36864)


def test_a_decode_step_reads_what_a_rank_really_has():
    """Every rank reads all of MLA's latent; a token goes through all stages; heads and tokens are dealt out."""

    def requests_s(par, model="DeepSeek-V3"):
        d = on(model, "H200", par)
        return (
            (step_s(d, 3000, 8192) - step_s(d, 2000, 8192)) * d.gpu.hbm_bps * d.hardware.constant("hbm_efficiency")[0]
        )

    latents = 1000 * 8192 * 70272
    assert requests_s(Parallel(8)) == pytest.approx(latents)
    assert requests_s(Parallel(8, 1, 8)) == pytest.approx(latents / 8)
    assert requests_s(Parallel(8, 2)) == pytest.approx(latents / 2)
    assert requests_s(Parallel(8), "Llama-3.1-70B") == pytest.approx(1000 * 8192 * 327680 / 8)
    one, four = (step_s(on("Llama-3.1-8B", par=Parallel(1, n)), 1, 0) for n in (1, 4))
    assert four == one


def test_replicas_multiply_requests_not_bytes():
    """Data parallelism divides nothing of one request and doubles what runs at once."""
    one, two = (fit_report(on("Llama-3.1-8B", replicas=n), Load(8192, 512)) for n in (1, 2))
    assert two.get("request_bytes") == one.get("request_bytes")
    assert two.get("concurrency") == 2 * one.get("concurrency")


def test_tiers_have_the_reference_split_and_retention():
    """Conversation trace on Llama-70B: 1 TiB lasts 127 s at 8.7 GB/s; 750 TB a day are 24 drive writes."""
    tiers = [Tier("device", 419 * 10**9), Tier("host", 2**40, FAST), Tier("disk", 30_720 * 10**9, SLOW, 1.0)]
    new = 8.7e9 / 327680
    held = hold(tiers, Flow(2 * new, new, (0.0, 0.0, 0.0)), 512, 327680, 0, True)
    assert held[1].retention_s == pytest.approx(2**40 / 8.7e9, rel=0.001)
    assert held[1].retention_s == pytest.approx(127, abs=1)
    assert held[2].writes_per_day == pytest.approx(750e12, rel=0.01)
    assert held[2].endurance == pytest.approx(750 / 30.72, rel=0.01)


def test_every_replica_has_a_way_to_host_memory():
    """Twice the replicas bear the same flow with half the load, and one load takes as long."""
    flow = Flow(1000.0, 500.0, (0.0, 500.0))
    one, two = (
        hold([Tier("device", 10**9), Tier("host", 10**9, FAST, links=n)], flow, 64, 131072, 0, True)[1] for n in (1, 2)
    )
    assert (two.read_load, two.write_load) == (one.read_load / 2, one.write_load / 2)
    assert two.wait_s == wait_seconds(two.read_load, FAST.load_s(64 * 131072))


@pytest.mark.parametrize("tokens", [2048, 32_000])
def test_sessions_of_a_tier_are_its_bytes_over_those_of_one(tokens):
    """With the states at a session's resumable points, at least one of them however short it is."""
    tiers = [Tier("device", 10**10), Tier("host", 10**11, FAST)]
    spec = load("Qwen3.5-27B").spec
    report = tiers_report(on("Qwen3.5-27B"), Asked(tiers, 1.0, 8192, 512, tokens, "0,0.1", True, 4096))
    one = tokens * 65536 + max(1, tokens // 4096) * spec.checkpoint
    assert report.get("session_bytes") == one
    (table,) = report.tables
    assert table.rows[1][3] == pytest.approx(10**11 / one, abs=0.1)


def test_a_load_of_a_trace_brings_one_state():
    """However long the hit is: the points between are what a tier stores, not what a request resumes at."""
    trace, d = conversation(), on("Qwen3.5-27B")
    link = Link("l", 1e9, 1e9, 0.0, Source.EXACT)
    a = analyse(trace, d, Plan([Tier("device", 0), Tier("host", 10**13, link)], checkpoint_every=64))
    hit = 21 * 64  # what the last turn of a user repeats
    load = (hit * 65536 + d.model.spec.checkpoint) / 1e9
    assert a.timings[2].p95_s == pytest.approx(0.01 + load + d.compute().prefill_s(d.model.spec, hit, 4 * 64))


@given(st.lists(st.floats(0, 0.3), min_size=1, max_size=3), st.booleans())
def test_flows_balance(hits, exclusive):
    """Exclusive: a tier takes the new tokens and all that it and lower tiers send up. Inclusive: less."""
    flow = Flow(100.0, 100 * (1 - sum(hits)), tuple(100 * h for h in hits))
    got = rates(flow, exclusive)
    assert got[0][1] == pytest.approx(flow.new_tokens + sum(flow.hits[1:]))
    for k in range(1, len(hits)):
        written = flow.new_tokens + sum(flow.hits[k if exclusive else k + 1 :])
        assert got[k] == (flow.hits[k], pytest.approx(written))


def test_a_full_link_queues_for_ever():
    """M/D/1: half load waits half a service, full load without end."""
    assert wait_seconds(0.5, 2.0) == 1.0
    assert wait_seconds(1.0, 2.0) == float("inf")
    assert wait_seconds(0.0, 2.0) == 0.0


def test_the_daemon_counts_its_own_memory():
    """Index, context and catalogue are beside the tiers, and the host's limit is checked."""
    tiers = [Tier("device", 10**10), Tier("host", 64 * 2**30, FAST)]
    asked = Asked(tiers, 1.0, 8192, 512, 32_000, "0.1,0.2", True, 4096, ram=2**36)
    report = tiers_report(on("Llama-3.1-8B"), asked)
    assert report.get("host_memory_needed") == 64 * 2**30 + report.get("daemon_host_bytes")
    assert report.get("daemon_gpu_bytes") > 0
    assert any("do not fit" in note for note in report.notes)
    assert report.get("hit") == pytest.approx(0.3)
    assert report.get("session_bytes") == 32_000 * 131072


@pytest.mark.parametrize("hits", ["0.1", "0.1,0.2,0.3", "a,b", "0.9,0.2", "-0.1,0.2"])
def test_hits_must_match_the_tiers(hits):
    """One ratio a tier, together at most one; the error names the field."""
    asked = Asked([Tier("device", 10**10), Tier("host", 10**11, FAST)], 1.0, 8192, 512, 32_000, hits, True, 0)
    with pytest.raises(KvtierError, match="hits: expected"):
        tiers_report(on("Llama-3.1-8B"), asked)


def test_inclusive_tiers_reach_as_far_as_the_largest():
    """Not as far as the last, which may be smaller."""
    tiers = [Tier("device", 10**10), Tier("host", 10**12, FAST), Tier("disk", 10**11, SLOW)]
    asked = Asked(tiers, 1.0, 8192, 512, 32_000, None, False, 4096)
    assert tiers_report(on("Llama-3.1-8B"), asked).get("distinct_tokens") == 10**12 // (64 * 131072) * 64


def test_a_replicated_byte_takes_its_room_on_every_rank():
    """DeepSeek-V3 at TP 8 keeps a token eight times in GPU memory; 70B's heads are dealt out, and kept once."""
    eight = Parallel(8)
    for model, copies in (("DeepSeek-V3", 8), ("Llama-3.1-70B", 1), ("Qwen3-235B-A22B", 2)):
        d = on(model, par=eight)
        assert held_share(d) * 8 == copies
        held, per_token = Tier("device", 640 * 10**9, copies=held_share(d) * 8), token_bytes(d, 0)
        assert held.holds(64 * per_token) == int(640e9 / copies / (64 * per_token))


def test_a_length_that_is_given_is_that_of_the_whole_trace():
    """Where the first half is not counted, what is counted took half of it, as with the trace's own times."""
    trace, d = conversation(), on("Llama-3.1-8B")
    own = analyse(trace, d, plan(40, 100, warmup=0.5))
    given = analyse(trace, d, plan(40, 100, warmup=0.5, seconds=trace.seconds))
    assert given.seconds == own.seconds
    assert given.flow == own.flow


def conversation(users=20, turns=6, block=64):
    """Users who take turns, each prompt repeating what came before, all after one system prompt."""
    parent, leaf, inputs, times = [-1], [], [], []
    last = [0] * users
    for turn in range(turns):
        for user in range(users):
            for _ in range(4):
                parent.append(last[user])
                last[user] = len(parent) - 1
            leaf.append(last[user])
            inputs.append((1 + 4 * (turn + 1)) * block)
            times.append(float(turn * users + user))
    return Trace("conversation", block, parent, leaf, inputs, [16] * len(leaf), times)


def plan(device, host, **kw):
    per_block = 64 * 131072
    return Plan([Tier("device", device * per_block), Tier("host", host * per_block, FAST)], checkpoint_every=0, **kw)


def test_a_trace_tells_what_more_memory_buys():
    """Room for all users hits all that was seen; room for a few hits little more than the system prompt."""
    trace, d = conversation(), on("Llama-3.1-8B")
    small, large = (analyse(trace, d, plan(40, extra)) for extra in (10, 1000))
    assert sum(h.hit for h in large.held) == pytest.approx(large.curve.ceiling)
    assert large.word == "ceiling"
    assert sum(h.hit for h in small.held) < 0.5 * large.curve.ceiling
    assert small.word in ("capacity", "policy")
    assert small.belady >= sum(h.hit for h in small.held)
    assert gpus_saved(large, d) > gpus_saved(small, d) > 0


def test_each_tier_shortens_the_wait():
    """With a fast link and room, the median TTFT falls from no cache to device to host; overlap is never slower."""
    a = analyse(conversation(), on("Llama-2-7B"), plan(100, 4000))
    none, device, host = a.timings
    assert none.p50_s >= device.p50_s >= host.p50_s
    assert none.p95_s > host.p95_s
    assert all(t.overlapped_p95_s <= t.p95_s for t in a.timings)
    assert none.prefill_s > device.prefill_s > host.prefill_s


def test_loads_slower_than_recomputing_are_counted():
    """A tier that hits move hit rates but not latency: a slow link's loads are billed as losing."""
    tiers = [Tier("device", 0), Tier("host", 10**13, SLOW._replace(read_bps=1e8))]
    a = analyse(conversation(), on("Llama-3.1-8B"), Plan(tiers, checkpoint_every=0))
    assert a.losing[1].tokens == a.curve.hit_tokens(10**9)
    assert a.timings[1].p95_s < a.timings[2].p95_s


def held(read=0.0, write=0.0, endurance=0.0, dwpd=0.0):
    tier = Tier("disk" if dwpd else "host", 1, FAST, dwpd)
    return Held(tier, 1, 1, 0.0, 0.1, 0.0, 0.0, read, write, 0.0, 0.0, 0.0, endurance)


@pytest.mark.parametrize(
    ("tiers", "hit", "belady", "word"),
    [
        ([held(read=0.9)], 0.2, None, "link"),
        ([held(write=0.9)], 0.2, None, "link"),
        ([held(), held(endurance=2.0, dwpd=1.0)], 0.2, None, "write-endurance"),
        ([held(), held(write=0.9, dwpd=1.0)], 0.2, None, "write-endurance"),
        ([held()], 0.39, 0.40, "ceiling"),
        ([held()], 0.2, 0.38, "policy"),
        ([held()], 0.2, 0.22, "capacity"),
        ([held()], 0.2, None, "capacity"),
    ],
)
def test_the_bottleneck_has_one_word(tiers, hit, belady, word):
    """Link, write-endurance, ceiling, policy or capacity: the first that holds hits back."""
    assert bottleneck(tiers, hit, 0.4, belady) == word


def test_the_trace_report_is_whole():
    """Definition, knee, word, GPUs saved, tiers, times, curve and what-if, and a page that loads nothing."""
    d, p = on("Llama-3.1-8B"), plan(40, 100)
    report = trace_report(analyse(conversation(), d, p), d, p)
    out = report.as_json()
    assert {"tiers", "ttft", "curve", "what_if", "sources"} <= out.keys()
    assert out["hit"] == pytest.approx(sum(row["hit"] for row in out["tiers"]))
    assert out["curve"][-1]["hit"] == pytest.approx(out["ceiling"])
    assert out["what_if"][0]["difference"] == 0
    page = trace_page(report, True)
    assert page.count("<svg") == 2
    assert "src=" not in page
    assert "href" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_what_an_allocation_policy_decides_is_not_called_exact():
    """Payloads of configs are exact, engine bytes of sliding models and all hardware are assumed."""
    assert worst(Source.EXACT, Source.MEASURED) is Source.MEASURED
    assert worst(Source.EXACT, Source.ASSUMED, Source.MEASURED) is Source.ASSUMED
    assert worst() is Source.EXACT


def test_a_toml_file_overrides_the_defaults(tmp_path):
    """Measured links, own GPUs, prices and constants; the rest stays as it was."""
    file = tmp_path / "h.toml"
    file.write_text(
        '[link.h2d]\nread = "50GB/s"\nwrite = "40GB/s"\nt0 = "9us"\nsource = "measured"\n'
        '[link.pcie5]\nread = "30GB/s"\n[gpu.Mine]\nmemory = "10GiB"\nhbm = "1TB/s"\nbf16 = 100\n'
        '[gpu.h100]\nmemory = "40GiB"\n'
        "[price]\ndram_gb_month = 1.5\ngpu_hour = { Mine = 2.0 }\n[plan]\nutilization = 0.8\n"
    )
    h = Hardware(file)
    assert h.link("h2d") == Link("h2d", 50e9, 40e9, pytest.approx(9e-6), Source.MEASURED, "")
    assert h.link("pcie5").read_bps == 30e9
    assert h.link("pcie5").write_bps == Hardware().link("pcie5").write_bps
    assert h.gpu("H100").memory == 40 * 2**30  # whatever its case
    assert h.gpu("mine").memory == 10 * 2**30
    assert h.price("dram_gb_month") == (1.5, Source.EXACT)
    assert h.price("nvme_gb_month")[1] is Source.ASSUMED
    assert h.gpu_hour("Mine") == (2.0, Source.EXACT)
    assert h.constant("utilization") == (0.8, Source.EXACT)
    assert h.constant("mfu_moe")[1] is Source.ASSUMED


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[", "hardware"),
        ("[nonsense]\nx = 1", "nonsense"),
        ('[gpu]\nH100 = "big"', "gpu.H100"),
        ("[price]\nram = 1", "price.ram"),
        ('[gpu.New]\nmemory = "1GiB"', "gpu.New.hbm"),
        ('[gpu.New]\nmemory = "1G"\nhbm = "1TB/s"\nbf16 = 1', "gpu.New.memory"),
        ('[gpu.New]\nmemory = "1GiB"\nhbm = "1TB/s"\nbf16 = "x"', "gpu.New.bf16"),
        ('[gpu.New]\nmemory = "1GiB"\nhbm = "1TB/s"\nbf16 = 1\nsource = "told"', "gpu.New.source"),
        ('[gpu.New]\nmemory = "1GiB"\nhbm = "1TB/s"\nbf16 = 0', "gpu.New.bf16"),
        ('[gpu.New]\nmemory = "1GiB"\nhbm = "0TB/s"\nbf16 = 1', "gpu.New.hbm"),
        ("[price]\ngpu_hour = 3", "price.gpu_hour"),
        ('[price]\ngpu_hour = { H100 = "dear" }', "price.gpu_hour.h100"),
        ("[price]\ndram_gb_month = nan", "price.dram_gb_month"),
        ("[plan]\nhbm_efficiency = 0", "plan.hbm_efficiency"),
        ('[gpu.H100]\nmemroy = "10GiB"', "gpu.H100.memroy"),
        ('[link.pcie5]\nraed = "10GB/s"', "link.pcie5.raed"),
    ],
)
def test_a_wrong_override_names_its_field(tmp_path, text, field):
    """Section and key of what is wrong, when it is used at the latest."""
    (tmp_path / "h.toml").write_text(text)

    def use(h):
        return h.price("dram_gb_month"), h.gpu_hour("H100"), h.constant("hbm_efficiency"), h.gpu("New")

    with pytest.raises(KvtierError) as caught:
        use(Hardware(tmp_path / "h.toml"))
    assert caught.value.field == field


def test_links_can_be_written_out():
    """A rate alone, or read, write and start-up time."""
    h = Hardware()
    assert h.link("12GB/s:4GB/s:3ms")[1:4] == (12e9, 4e9, 0.003)
    assert h.link("100Gbps").read_bps == 12.5e9
    assert FAST.effective_bps(25e6) == pytest.approx(25e9)
    with pytest.raises(KvtierError, match="link: expected one of pcie3"):
        h.link("token-ring")
    with pytest.raises(KvtierError, match="link: expected a rate or READ:WRITE:T0"):
        h.link("12GB/s:4GB/s:3ms:1")


def test_every_row_of_the_hardware_table_reads():
    """Each GPU has memory, bandwidth, rates and a link that exists; every link has both directions."""
    h = Hardware()
    for name in h.data["gpu"]:
        gpu = h.gpu(name)
        assert gpu.memory > 2**34
        assert gpu.flops("fp8") >= gpu.bf16_flops > 1e13
        assert h.link(gpu.link).read_bps > 1e9
    assert all(link.write_bps > 0 and link.t0_s > 0 for link in h.links())


@given(st.floats(1e8, 1e12), st.floats(0, 0.01))
def test_a_links_two_numbers_are_found_again(bps, t0):
    """A sweep without noise gives back bandwidth and start-up time, also after being written down."""
    found = fit_link([Sample(n, t0 + n / bps) for n in sweep_sizes(64 << 20)])
    assert found.bytes_per_s == pytest.approx(bps, rel=1e-3)
    assert found.t0_s == pytest.approx(t0, rel=1e-3, abs=1e-9)


def test_noise_does_not_make_a_link_negative():
    """Times that shrink with size still give a positive bandwidth and no negative start-up time."""
    found = fit_link([Sample(1 << 20, 0.002), Sample(1 << 24, 0.001)])
    assert found.bytes_per_s > 0
    assert found.t0_s == 0.0


def test_measuring_again_replaces_only_what_was_measured(tmp_path):
    """Own tables and comments stay, old measurements go, the file still parses."""
    old = '# mine\n[price]\ndram_gb_month = 2.0\n\n[link.disk]\nread = "1GB/s"\n\n[plan]\nutilization = 0.7\n'
    new = toml_of({"disk": Measured(Fitted(3e9, 1e-4), Fitted(2e9, 1e-4), 'a "note"')}, "host")
    file = tmp_path / "h.toml"
    file.write_text(replace_tables(replace_tables(old, new), new))
    h = Hardware(file)
    assert file.read_text().count("[link.disk]") == 1
    assert file.read_text().startswith("# mine")
    assert h.link("disk").read_bps == 3e9
    assert h.link("disk").source is Source.MEASURED
    assert h.constant("utilization")[0] == 0.7


def test_the_device_pool_covers_all_gpus():
    """What one rank has left, on every rank of every replica."""
    d = on("Llama-3.1-8B", par=Parallel(2), replicas=3)
    assert device_pool(d) == pool_of(d).bytes * 6


def test_weights_may_be_given():
    """A size, a precision, or what the checkpoint has; a config nothing can be counted from must say."""
    assert on("Llama-3.1-8B", weights="10GB").weights_bytes() == (10**10, Source.EXACT)
    assert on("Llama-3.1-8B", weights="fp8").weights_bytes()[0] == int(8.03e9)
    with pytest.raises(KvtierError, match="mfu"):
        on("Llama-3.1-8B", mfu=1.5).achieved()
    bare = on("Llama-3.1-8B")
    with pytest.raises(KvtierError, match="weights"):
        bare._replace(model=bare.model._replace(params=0.0)).weights_bytes()


@pytest.mark.parametrize(("dollars", "shown"), [(18_090.4, "$18,090"), (191.23, "$191.2"), (0.03951, "$0.03951")])
def test_dollars_are_as_people_write_them(dollars, shown):
    """Thousands without a power of ten."""
    assert show(dollars, "$") == shown


def test_reports_are_json_with_a_source_for_each_number():
    """Every value and every column has a tag, and infinity becomes null."""
    busy = [Tier("device", 10**10), Tier("host", 10**11, FAST)]
    full = tiers_report(on("Llama-3.1-8B"), Asked(busy, 1e4, 8192, 512, 32_000, "0,0.9", True, 4096)).as_json()
    assert json.loads(json.dumps(full, allow_nan=False))["tiers"][1]["wait_s"] is None
    out = fit_report(on("Llama-3.1-8B"), Load(8192, 512, 5.0), 1).as_json()
    text = json.dumps(out, allow_nan=False)
    assert set(json.loads(text)["sources"]) == set(out) - {"sources", "notes"}
    assert set(out["sources"].values()) <= {"exact", "measured", "assumed"}
