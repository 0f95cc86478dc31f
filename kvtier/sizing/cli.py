"""`kvtierctl size` and `kvtierctl probe`: the planner's commands."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click

from kvtier.sizing import analyse as analysis
from kvtier.sizing.breakeven import breakeven_report
from kvtier.sizing.fit import Load, fit_report
from kvtier.sizing.hardware import Hardware, Link, Source
from kvtier.sizing.models import load, table
from kvtier.sizing.options import (
    BYTES,
    COUNT,
    NUMBER,
    RATE,
    SECONDS,
    SOME,
    TOKENS,
    Share,
    answers,
    default_hardware,
    deployment,
    hardware_option,
    memory_limit,
    model_options,
    pick_link,
    place_options,
    reading,
    split,
    split_options,
)
from kvtier.sizing.report import Column, Report, Table, Value
from kvtier.sizing.seed import rows, seed_report
from kvtier.sizing.size import Ask, Observation, fit_line, logged, size_report
from kvtier.sizing.tierplan import Asked, tiers_report
from kvtier.sizing.tiers import Tier
from kvtier.sizing.transfer import Move, transfer_report
from kvtier.sizing.units import parse_bytes, parse_some
from kvtier.types import KvtierError, bad

_HELP = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=_HELP)
def size() -> None:
    """Work out memory, bandwidth and capacity; every number is tagged exact, measured or assumed."""


def _observed(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[Observation]:
    """MAXLEN:POOL:TOKENS of each log."""
    out = []
    for text in values:
        parts = text.split(":")
        if len(parts) != 3:
            raise click.BadParameter(f"expected MAXLEN:POOL:TOKENS such as 32768:6.51GiB:42656, got {text!r}")
        try:
            out.append(Observation(parse_some(parts[0]), parse_bytes(parts[1]), parse_some(parts[2])))
        except KvtierError as exc:
            raise click.BadParameter(str(exc)) from None
    return out


@size.command("model")
@click.argument("model", required=False)
@click.option("--list", "list_models", is_flag=True, help="Names of the built-in table.")
@click.option("--tokens", type=SOME, default="128Ki", show_default=True, help="Length of the sequence.")
@click.option("--page", default=64, show_default=True, help="Tokens of a page in the tiers.")
@click.option("--checkpoint-every", type=TOKENS, default=0, help="Distance of resumable points  [one, at the end]")
@click.option("--observed", multiple=True, callback=_observed, help="MAXLEN:POOL:TOKENS from an engine's log.")
@model_options
@split_options
@answers
def model_command(model: str | None, list_models: bool, tokens: int, page: int, checkpoint_every: int,
                  observed: list[Observation], **o: Any) -> Report:  # fmt: skip
    """Bytes that a sequence keeps: live payload, engine allocation, stored payload.

    MODEL is a config.json, a folder with one, or a name of the built-in table.
    """
    if list_models or model is None:
        return _list()
    par, engine = split(o)
    found = load(model, reading(o))
    report = size_report(found, Ask(tokens, par, engine, page, checkpoint_every))
    return _against(report, observed) if observed else report


def _list() -> Report:
    rows = [
        (r["name"], ", ".join(r.get("aliases", ())), r["params_b"], r["active_b"], r["sure"], r["source"])
        for r in table()
    ]
    columns = [Column(k) for k in ("name", "aliases", "params_b", "active_b", "sure", "source")]
    return Report("built-in models", [], (Table("models", columns, rows),))


def _against(report: Report, observed: list[Observation]) -> Report:
    """The report with what an engine's log says beside it."""
    rows = [(o.max_len, o.pool, o.tokens, *logged(o)) for o in observed]
    seen = Source.MEASURED
    columns = [Column("max_len", "tokens"), Column("pool", "B", seen), Column("tokens", "tokens", seen),
               Column("bytes_per_token", "B/token", seen), Column("concurrency", "x", seen)]  # fmt: skip
    values = list(report.values)
    if len(observed) > 1:
        slope, fixed = fit_line(observed)
        values += [Value("fitted_bytes_per_token", slope, "B/token", seen, "pool/tokens = slope + fixed/max_len"),
                   Value("fitted_fixed_bytes", fixed, "B", seen, "a sequence, before its first token")]  # fmt: skip
    last = observed[-1]
    own = report.get("engine_rank_bytes_per_token")
    if own:
        values.append(
            Value(
                "planned_tokens",
                last.pool // own,
                "tokens",
                Source.EXACT,
                f"of {last.pool:,} bytes at the engine's bytes a token",
            )
        )
    notes = [
        *report.notes,
        "a log's 'KV cache size' is its concurrency x its maximum length: the two agree only at that length",
    ]
    return report._replace(values=values, tables=(Table("observed", columns, rows), *report.tables), notes=notes)


@size.command("fit")
@click.argument("model")
@click.option("--in", "prompt", type=SOME, default="8192", show_default=True, help="Tokens of a prompt.")
@click.option("--out", "answer", type=TOKENS, default="512", show_default=True, help="Tokens of an answer.")
@click.option("--rate", type=NUMBER, default=0.0, help="Requests a second: Little's law.")
@click.option("--shared", type=TOKENS, default=0, help="Tokens that all prompts begin with.")
@click.option("--hit", type=Share(0, 1), default=0.0, help="Part of a prompt found in a cache.")
@click.option("--pool", type=BYTES, default=0, help="KV pool of a GPU, as the engine logs it.")
@click.option("--fixed", "fixed_s", type=SECONDS, default="10ms", show_default=True, help="TTFT no cache shortens.")
@click.option("--tpot", "tpot_s", type=SECONDS, default=0.0, help="Time a further token  [planned]")
@model_options
@split_options
@place_options
@hardware_option
@answers
def fit_command(model: str, prompt: int, answer: int, rate: float, shared: int, hit: float, pool: int,
                fixed_s: float, tpot_s: float, **o: Any) -> Report:  # fmt: skip
    """Weights and KV on GPUs: pool, concurrency, Little's law, longest context."""
    if shared > prompt:
        raise bad("shared", f"at most the prompt of {prompt}", shared)
    return fit_report(deployment(model, o), Load(prompt, answer, rate, shared, hit, fixed_s, tpot_s), pool)


@size.command("breakeven")
@click.argument("model")
@click.option("--tokens", type=SOME, default="8192", show_default=True, help="Length of the prefix.")
@click.option("--suffix", type=TOKENS, default="512", show_default=True, help="New tokens after it.")
@click.option("--price", "prices", multiple=True, help="gpu=$/h, dram=, nvme=, object=$/GB and month.")
@click.option("--link", "links", multiple=True, help="A link by name or rate (55GB/s or READ:WRITE:T0)  [all known]")
@click.option("--fixed", "fixed_s", type=SECONDS, default="10ms", show_default=True, help="TTFT no cache shortens.")
@model_options
@split_options
@place_options
@hardware_option
@answers
def breakeven_command(model: str, tokens: int, suffix: int, prices: tuple[str, ...], links: tuple[str, ...],
                      fixed_s: float, **o: Any) -> Report:  # fmt: skip
    """Load a prefix or compute it again: BW*, minimum prefix, TTFT, and how long keeping it pays."""
    d = deployment(model, o)
    for price in prices:
        d.hardware.set_price(price)
    chosen = [d.hardware.link(name) for name in links] or d.hardware.links()
    return breakeven_report(d, tokens, suffix, [(link, _per_rank(link)) for link in chosen], fixed_s)


def _per_rank(link: Link) -> bool:
    """Whether every GPU has a link of this kind to itself."""
    return link.name.startswith(("pcie", "c2c", "h2d"))


@size.command("transfer")
@click.argument("model")
@click.option("--tokens", type=SOME, default="2048", show_default=True, help="Tokens of a prompt.")
@click.option("--cached", type=TOKENS, default=0, help="Tokens that the decode side holds already.")
@click.option("--rate", type=NUMBER, default=0.0, help="Requests a second.")
@click.option("--nics", type=COUNT, default=1, show_default=True, help="Links that carry one request side by side.")
@click.option("--link", "links", multiple=True, default=("100gbe", "400gbe"), show_default=True, help="Links.")
@click.option(
    "--quantized", multiple=True, default=("fp8", "int4_g128"), show_default=True, help="KV precisions to compare."
)
@model_options
@split_options
@place_options
@hardware_option
@answers
def transfer_command(model: str, tokens: int, cached: int, rate: float, nics: int, links: tuple[str, ...],
                     quantized: tuple[str, ...], **o: Any) -> Report:  # fmt: skip
    """Prefill here, decode there: what the KV between them costs."""
    if cached >= tokens:
        raise bad("cached", f"less than the prompt of {tokens}", cached)
    d = deployment(model, o)
    return transfer_report(d, Move(tokens, cached, rate, nics), [d.hardware.link(n) for n in links], ("", *quantized))


def tier_options(command: Any) -> Any:
    """Sizes and links of the tiers."""
    options = [
        click.option("--device", type=BYTES, help="KV pool of all GPUs together  [what fits beside the weights]"),
        click.option("--host", type=BYTES, default=0, help="Host memory for KV."),
        click.option("--peer", type=BYTES, default=0, help="Other hosts' memory."),
        click.option("--disk", type=BYTES, default=0, help="Disk."),
        click.option("--host-link", help="Link to host memory  [the GPU's]"),
        click.option("--peer-link", help="Link to peers  [measured, else 100gbe]"),
        click.option("--disk-link", help="Link to disk  [measured, else nvme4]"),
        click.option("--dwpd", type=NUMBER, help="Writes of the whole disk a day that its rating allows."),
        click.option("--inclusive", is_flag=True, help="Lower tiers hold copies of upper ones (write-through)."),
        click.option(
            "--checkpoint-every", type=TOKENS, default="4096", show_default=True, help="Distance of resumable points."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _tiers(o: dict[str, Any], model: str) -> tuple[list[Tier], Any]:
    """(the tiers that have room, the deployment)."""
    d = deployment(model, o)
    h: Hardware = d.hardware
    device = o["device"] if o["device"] is not None else analysis.device_pool(d)
    rated = o["dwpd"] if o["dwpd"] is not None else h.constant("endurance_dwpd")[0]
    host = pick_link(h, o["host_link"], "h2d", d.gpu.link)
    share = analysis.held_share(d)
    tiers = [
        Tier("device", device, copies=share * d.par.ranks),
        Tier("host", o["host"], host._replace(read_bps=host.read_bps / share, write_bps=host.write_bps / share),
             links=d.replicas),
        Tier("peer", o["peer"], pick_link(h, o["peer_link"], "peer", "100gbe")),
        Tier("disk", o["disk"], pick_link(h, o["disk_link"], "disk", "nvme4"), rated),
    ]  # fmt: skip
    return [t for t in tiers if t.bytes or t.name == "device"], d


@size.command("tiers")
@click.argument("model")
@click.option("--rate", type=NUMBER, default=1.0, show_default=True, help="Requests a second.")
@click.option("--in", "prompt", type=SOME, default="8192", show_default=True, help="Tokens of a prompt.")
@click.option("--out", "answer", type=TOKENS, default="512", show_default=True, help="Tokens of an answer.")
@click.option("--session", type=SOME, default="32k", show_default=True, help="Tokens of a session.")
@click.option("--hits", help="Hit ratio of each tier, such as 0.06,0.14,0.17,0.01.")
@click.option(
    "--trace", "traces", multiple=True, type=click.Path(path_type=Path, exists=True), help="Take the hits from a trace."
)
@click.option("--copy", "copy_bps", type=RATE, help="Copy bandwidth of host memory  [measured]")
@click.option("--ram", type=BYTES, help="Memory of the host  [this one's, or its cgroup's limit]")
@tier_options
@model_options
@split_options
@place_options
@hardware_option
@answers
def tiers_command(model: str, rate: float, prompt: int, answer: int, session: int, hits: str | None,
                  traces: tuple[Path, ...], copy_bps: float | None, ram: int | None, **o: Any) -> Report:  # fmt: skip
    """What each tier holds and for how long, what its link and its flash must bear, what the daemon itself takes."""
    tiers, d = _tiers(o, model)
    if copy_bps is None:
        copy_bps = d.hardware.link("memcpy").read_bps if "memcpy" in d.hardware.data["link"] else 0.0
    limit = memory_limit() if ram is None else ram
    asked = Asked(tiers, rate, prompt, answer, session, hits, not o["inclusive"], o["checkpoint_every"], copy_bps,
                  limit, ram is None)  # fmt: skip
    return tiers_report(d, asked, traces)


@size.command("trace")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--model", required=True, help="A config.json, a folder with one, or a name of the built-in table.")
@click.option("--warmup", type=Share(0, 0.99), default=0.0, help="Part of the requests that only warm the cache.")
@click.option("--coarsen", type=click.IntRange(1), default=1, show_default=True, help="Take so many blocks as one.")
@click.option("--limit", type=click.IntRange(0), default=0, help="Read only the first requests.")
@click.option("--duration", type=SECONDS, default=0.0, help="Length of the trace  [its own times]")
@click.option("--fixed", "fixed_s", type=SECONDS, default="10ms", show_default=True, help="TTFT no cache shortens.")
@click.option("--no-belady", is_flag=True, help="Leave out the bound on all policies.")
@click.option(
    "--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with plots, self-contained."
)
@tier_options
@model_options
@split_options
@place_options
@hardware_option
@answers
def trace_command(files: tuple[Path, ...], model: str, warmup: float, coarsen: int, limit: int, duration: float,
                  fixed_s: float, no_belady: bool, page: Path | None, **o: Any) -> Report:  # fmt: skip
    """The hit curve of a recorded workload, and what tiers of given sizes would make of it.

    FILES: an npz trace (plain or .zst), Mooncake JSON lines, or LMCache lookup-hash JSON lines (also a folder).
    """
    from kvtier.sizing.html import trace_page  # noqa: PLC0415
    from kvtier.sizing.traces import coarse, load_trace  # noqa: PLC0415

    tiers, d = _tiers(o, model)
    plan = analysis.Plan(tiers, not o["inclusive"], warmup, fixed_s, duration, o["checkpoint_every"], not no_belady)
    report = analysis.trace_report(analysis.analyse(coarse(load_trace(files, limit), coarsen), d, plan), d, plan)
    if page is not None:
        try:
            page.write_text(trace_page(report, plan.exclusive))
        except OSError as exc:
            raise bad("html", f"a file that can be written ({exc.strerror})", str(page)) from None
    return report


@size.command("seed")
@click.option("--model-cost", type=click.Choice(["seed", "causal"]), default="causal", show_default=True,
              help="What a hit saves: the seed notes' account, or causal attention.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def seed_command(model_cost: str, as_json: bool) -> None:
    """Every worked number of the two seed notes beside the printed claim, and where it is rounded or wrong."""
    import json  # noqa: PLC0415

    from kvtier.sizing.options import render  # noqa: PLC0415

    if as_json:
        click.echo(json.dumps(rows(model_cost)))
    else:
        render(seed_report(model_cost))


@click.command("probe", context_settings=_HELP)
@click.option("--write", "target", type=click.Path(path_type=Path, dir_okay=False),
              help="TOML file  [kvtier/hardware.toml in $XDG_CONFIG_HOME or ~/.config]")  # fmt: skip
@click.option("--disk", type=click.Path(path_type=Path, file_okay=False, exists=True), default=".", show_default=True,
              help="Folder on the disk to measure.")  # fmt: skip
@click.option("--peer", help="HOST:PORT of an echo service on another host.")
@click.option("--size", "most", type=BYTES, default="64MiB", show_default=True, help="Largest transfer of a sweep.")
@click.option("--each", type=SECONDS, default="150ms", show_default=True, help="Time spent on each size.")
@click.option("--dry-run", is_flag=True, help="Measure and print, write nothing.")
@answers
def probe(target: Path | None, disk: Path, peer: str | None, most: int, each: float, dry_run: bool) -> Report:
    """Measure this host (memory, disk, loopback, a peer, pinned copies where there is a GPU) into a TOML file.

    The other commands read that file in place of their defaults.
    """
    measuring = importlib.import_module("kvtier.probe")  # clocks and sockets stay out of the arithmetic
    report: Report = measuring.measure(
        disk, peer, measuring.Sweep(most, each), None if dry_run else target or default_hardware()
    )
    return report


__all__ = ["probe", "size"]
