"""`size seed`: every worked number of the two seed notes, recomputed beside the printed claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from kvtier.sizing.cost import causal_saving, layer_flops, seed_saving
from kvtier.sizing.dtypes import ratio_to_bf16
from kvtier.sizing.hardware import Source
from kvtier.sizing.models import load
from kvtier.sizing.report import Column, Report, Table, Value
from kvtier.sizing.spec import Spec
from kvtier.sizing.units import show_bytes

FLOPS: Final = 5e14
PARAMS: Final = 7e9


VERDICTS: Final = ("exact", "rounded", "unit", "wrong")


class Claim(NamedTuple):
    """One number of the notes."""

    where: str
    claim: str
    printed: str
    exact: float | int
    unit: str
    verdict: str
    """One of VERDICTS; unit is the right number under the wrong unit's name."""
    why: str = ""


def _ms(flops: float) -> float:
    return flops / FLOPS * 1e3


def _send_ms(size: float, bps: float) -> float:
    return size / bps * 1e3


def _specs() -> tuple[Spec, Spec]:
    return load("Llama-2-7B").spec, load("Llama-3.1-70B").spec


def bytes_claims() -> list[Claim]:
    """Sizes of KV."""
    mha, gqa = (int(s.slope) for s in _specs())
    no_cache, saved = 1000 * 1100 * mha, 1000 * 1100 * mha - 1000 * mha - 100000 * mha
    gib = "GiB printed as GB"
    return [
        Claim("000 6", "KV of one token, 7B MHA", "512 KB", mha, "B", "unit", "KiB printed as KB"),
        Claim("000 6", "KV of a 128K context, 7B MHA", "64 GB", 131072 * mha, "B", "unit", f"{gib}; K = 1024"),
        Claim("000 8", "KV of 2048 tokens, 7B MHA", "1 GB", 2048 * mha, "B", "unit", gib),
        Claim("000 10.4", "1000 prompts of 1100 tokens, nothing shared", "577 GB", no_cache, "B", "rounded"),
        Claim("000 10.4", "the shared 1000 tokens once", "0.5 GB", 1000 * mha, "B", "rounded"),
        Claim("000 10.4", "1000 x 100 new tokens", "51 GB", 100000 * mha, "B", "wrong",
              "the value for KB = 1000 beside a 577 that is for KiB"),
        Claim("000 10.4", "with prefix caching", "52 GB", 101000 * mha, "B", "wrong", "0.52 + 52.43 = 52.95, not 52"),
        Claim("000 10.4", "saved", "524 GB", saved, "B", "rounded"),
        Claim("000 10.4", "saved, share", "91 %", saved / no_cache, "%", "rounded"),
        Claim("000 10.4", "batch larger by", "an order of magnitude", no_cache / (101000 * mha), "x", "rounded",
              "where all thousand are resident at once"),
        Claim("000 ex.5", "KV of one token, 70B GQA-8", "320 KB", gqa, "B", "unit", "KiB printed as KB"),
        Claim("000 ex.5", "KV of 8192 tokens, 70B GQA-8", "2.7 GB", 8192 * gqa, "B", "rounded",
              "decimal GB here, binary in 6, 8 and 10.5"),
        Claim("000 ex.5", "the same in 4 bits", "0.67 GB", 8192 * gqa // 4, "B", "rounded",
              f"without scales; with them x{ratio_to_bf16('int4_g128', 128):.3f}"),
        Claim("000 6", "128K requests of 7B on one H100", "one or two", (80e9 - 2 * 6.74e9) / (131072 * mha), "x",
              "wrong", "beside bf16 weights none fits whole"),
    ]  # fmt: skip


def flops_claims() -> list[Claim]:
    """Prefill work and time."""
    one, two, big = 2 * 4096 * PARAMS, 2 * 8192 * PARAMS, 2 * 8192 * 70e9
    return [
        Claim("000 10.1", "cached tokens at h = 0.8 of 4096", "3277", 0.8 * 4096, "tokens", "rounded"),
        Claim("000 10.1", "prefill of 4096 tokens, 7B", "5.7e13", one, "FLOPs", "rounded"),
        Claim("000 10.1", "the same at h = 0.8", "1.1e13", one * 0.2, "FLOPs", "rounded"),
        Claim("000 10.1", "saved", "4.6e13", one * 0.8, "FLOPs", "rounded"),
        Claim("000 10.2", "half of an H100", "500 TFLOPS", 989e12 * 0.5, "FLOPs", "rounded", "up by 1.1 %"),
        Claim("000 10.2", "prefill time", "115 ms", _ms(one), "ms", "rounded"),
        Claim("000 10.2", "prefill time at h = 0.8", "23 ms", _ms(one * 0.2), "ms", "rounded"),
        Claim("000 10.2", "TTFT without the cache", "125 ms", _ms(one) + 10, "ms", "rounded"),
        Claim("000 10.2", "TTFT with it", "33 ms", _ms(one * 0.2) + 10, "ms", "rounded"),
        Claim("000 10.2", "faster end to end", "3.8x", (_ms(one) + 10) / (_ms(one * 0.2) + 10), "x", "rounded"),
        Claim("000 10.3", "prefill at 85 % against 40 % hits", "0.25", (1 - 0.85) / (1 - 0.40), "x", "exact"),
        Claim("000 ex.2", "prefill of 8192 tokens, 7B", "1.15e14", two, "FLOPs", "rounded"),
        Claim("000 ex.2", "prefill time", "230 ms", _ms(two), "ms", "rounded"),
        Claim("000 ex.2", "prefill time at h = 0.9", "23 ms", _ms(two * 0.1), "ms", "rounded"),
        Claim("000 ex.2", "TTFT without the cache", "238 ms", _ms(two) + 8, "ms", "rounded"),
        Claim("000 ex.2", "TTFT with it", "31 ms", _ms(two * 0.1) + 8, "ms", "rounded"),
        Claim("000 ex.2", "faster end to end", "7.7x", (_ms(two) + 8) / (_ms(two * 0.1) + 8), "x", "rounded"),
        Claim("000 ex.5", "prefill of 8192 tokens, 70B", "1.15e15", big, "FLOPs", "rounded"),
        Claim("000 ex.5", "prefill time", "2.3 s", _ms(big) / 1e3, "s", "rounded",
              "140 GB of bf16 weights do not fit the one H100 it assumes"),
        Claim("000 3.2", "saved of one layer by h = 0.8, its own account", "h exactly", _layer_saving(4096, 4096), "%",
              "exact", "true without causality only"),
        Claim("000 3.2", "linear work of a layer over its 8 d^2 L", "1", 24.125 / 8, "x", "wrong",
              "multiply-adds beside FLOPs; what a hit saves does not depend on it"),
        Claim("000 7", "hits from 40 to 85 %", "little more than doubled", 0.85 / 0.40, "x", "exact"),
        Claim("000 11", "fixed cost behind 74.1 % hits and 1.7x TTFT", "not given", (1 - 1.7 * 0.259) / 0.7, "x",
              "rounded", "of the prefill time: fit it, do not assume 10 ms"),
        Claim("000 4.4", "share of tree upkeep", "< 0.3 %", 0.2 / 74.3, "%", "exact"),
    ]  # fmt: skip


def _layer_saving(length: int, d: int) -> float:
    """Part of a layer that a hit of four fifths saves in the seed's account."""
    computed = length // 5
    return 1 - layer_flops(length, computed, d) / layer_flops(length, length, d)


def link_claims() -> list[Claim]:
    """Transfer times."""
    mha, gqa = (int(s.slope) for s in _specs())
    prompt, big = 2048 * mha, 8192 * gqa
    prefill = _ms(2 * 2048 * PARAMS)
    return [
        Claim("000 10.5", "prefill of 2048 tokens", "58 ms", prefill, "ms", "wrong", "57.3: it halved its 115"),
        Claim("000 10.5", "100 Gbit/s", "85 ms", _send_ms(prompt, 12.5e9), "ms", "rounded", "cut off, not rounded: 86"),
        Claim("000 10.5", "400 Gbit/s", "21 ms", _send_ms(prompt, 50e9), "ms", "rounded"),
        Claim("000 10.5", "400 Gbit/s and KV4", "5 ms", _send_ms(prompt / 4, 50e9), "ms", "rounded",
              f"{_send_ms(prompt * ratio_to_bf16('int4_g128', 128), 50e9):.2f} with scales of 128,"
              f" {_send_ms(prompt * ratio_to_bf16('int4_g32', 128), 50e9):.2f} of 32"),
        Claim("000 ex.5", "200 Gbit/s", "107 ms", _send_ms(big, 25e9), "ms", "rounded"),
        Claim("000 ex.5", "200 Gbit/s and KV4", "27 ms", _send_ms(big / 4, 25e9), "ms", "rounded"),
        Claim("000 ex.5", "transfer against prefill", "4 %", _send_ms(big, 25e9) / _ms(2 * 8192 * 70e9), "%", "wrong",
              "4.7 %; 18.7 % at TP 4 behind one NIC"),
        Claim("000 6", "C2C against PCIe 5 x16", "7x", 450 / 64, "x", "rounded",
              "900 GB/s is both directions together: never divide bytes by it"),
    ]  # fmt: skip


def second_note_claims() -> list[Claim]:
    """The engineering note."""
    m, n = 64, 4096
    left = (m * n + m * m) / (n + m) ** 2
    return [
        Claim("003 4.1", "prefill less, n = 4K and m = 64", "30-60 %", 1 - left, "%", "wrong",
              "its own formula gives 98.5 %, its own table 70-81 %: the rest is fixed cost, not FLOPs"),
        Claim("003 6", "ShareGPT TTFT P50, 412 to 380 ms", "8 %", 1 - 380 / 412, "%", "rounded"),
        Claim("003 6", "ShareGPT TTFT P99, 1.8 to 1.2 s", "33 %", 1 - 1.2 / 1.8, "%", "rounded"),
        Claim("003 6", "second turn's prefill, 128 to 38 ms", "3.4x", 128 / 38, "x", "rounded"),
        Claim("003 6", "fifth turn's prefill, 220 to 42 ms", "5.2x", 220 / 42, "x", "rounded"),
        Claim("003 6", "throughput, 342 to 498", "46 %", 498 / 342 - 1, "%", "rounded"),
        Claim("003 6", "memory, 14.2 to 9.1 TB", "36 %", 1 - 9.1 / 14.2, "%", "rounded",
              "the ratio; 14.2 TB is 89 such boxes of 160 GB, which the note never names"),
        Claim("003 6", "GPU seconds a second at 342 qps of 128 ms", "on 2 GPUs", 342 * 0.128, "x", "wrong",
              "43.8 of 2: impossible unless the ms are shared by a batch"),
        Claim("003 1", "prefill grows with the square of length", "always", 24.1 * 4096 / 2, "tokens", "wrong",
              "attention equals the linear part only from here on (7B)"),
    ]  # fmt: skip


def causal_claims(cost: str) -> list[Claim]:
    """What a hit saves, in the seed's account or causally."""
    spec, _ = _specs()
    out = []
    for length in (4096, 8192, 32768, 131072):
        hit = round(0.8 * length)
        value = seed_saving(length, hit) if cost == "seed" else causal_saving(spec, PARAMS, length, hit)
        verdict = "exact" if cost == "seed" else "wrong"
        why = "" if cost == "seed" else "causal attention saves h squared, not h"
        out.append(Claim("000 3.2", f"saved by h = 0.8 of {length}", "80 %", value, "%", verdict, why))
    return out


SECTIONS: Final[tuple[Callable[[], list[Claim]], ...]] = (bytes_claims, flops_claims, link_claims, second_note_claims)


def claims(cost: str = "causal") -> list[Claim]:
    """All of them; `cost` is seed or causal."""
    return [c for section in SECTIONS for c in section()] + causal_claims(cost)


def rows(cost: str = "causal") -> list[dict[str, int | float | str]]:
    """The claims as --json prints them."""
    return [c._asdict() | {"exact": _number(c.exact), "source": Source.EXACT.value} for c in claims(cost)]


def seed_report(cost: str = "causal") -> Report:
    """The claims for people."""
    listed = claims(cost)
    lines = [(c.where, c.claim, c.printed, _shown(c), c.verdict, c.why) for c in listed]
    columns = [Column(k) for k in ("where", "claim", "printed", "exact", "verdict", "why")]
    counts = {v: sum(c.verdict == v for c in listed) for v in VERDICTS}
    values = [Value("model_cost", cost, "", Source.EXACT), *(Value(k, n, "", Source.EXACT) for k, n in counts.items())]
    notes = [
        "bytes count in powers of two, links and FLOPs in powers of ten: only so do the notes' numbers come out",
        "speed-ups and hit rates that the notes quote from papers follow from nothing here and are left out",
    ]
    return Report("the seed notes' worked numbers", values, (Table("rows", columns, lines),), notes)


def _number(x: float) -> int | float:
    return int(x) if x == int(x) else x


def _shown(c: Claim) -> str:
    """The exact value as the note should have printed it."""
    if c.unit == "B":
        return show_bytes(c.exact)
    if c.unit == "%":
        return f"{100 * c.exact:.2f} %"
    return f"{c.exact:,.4g} {c.unit}" if c.exact < 1e6 else f"{c.exact:.5g} {c.unit}"
