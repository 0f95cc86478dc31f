"""What the daemon counts, as Prometheus metrics. Labels have few values, all known beforehand.

`python -m kvtier.metrics` prints docs/metrics.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.output import show

Data = Mapping[str, Any]
Samples = Mapping[str, float]
"""Value by label value; the key of a metric without a label is empty."""


class Shown(NamedTuple):
    """One metric: how it is called and where its value is in the daemon's numbers."""

    name: str
    kind: type[CounterMetricFamily | GaugeMetricFamily]
    help: str
    label: str
    read: Callable[[Data], Samples]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _count(name: str) -> Callable[[Data], Samples]:
    """One counter of the store."""
    return lambda data: {"": data["counters"].get(name, 0)}


def _by(prefix: str, suffix: str = "") -> Callable[[Data], Samples]:
    """Counters that share a prefix, by the rest of their names."""
    return lambda data: {
        name[len(prefix) : len(name) - len(suffix)]: value
        for name, value in data["counters"].items()
        if name.startswith(prefix) and name.endswith(suffix)
    }


def _top(name: str) -> Callable[[Data], Samples]:
    """One number of the whole."""
    return lambda data: {"": data[name]}


def _tiers(field: str) -> Callable[[Data], Samples]:
    """One number of each tier that has it."""
    return lambda data: {name: tier[field] for name, tier in data["tiers"].items() if field in tier}


def _disk(field: str) -> Callable[[Data], Samples]:
    """One number of the disk tier, where there is one."""
    return lambda data: {"": data["tiers"].get("disk", {}).get(field, 0)}


def _pages_of_peers(data: Data) -> Samples:
    """Pages that went between hosts, by way."""
    ways = {"loaded": "pages_loaded_peer", "served": "pages_served_peer", "pushed": "pages_pushed_peer"}
    return {way: data["counters"].get(name, 0) for way, name in {**ways, "taken": "pages_taken_peer"}.items()}


def _hit_tokens(data: Data) -> float:
    return sum(_by("tokens_hit_")(data).values())


C: Final = CounterMetricFamily
G: Final = GaugeMetricFamily

METRICS: Final = (
    Shown("kvtier_requests", C, "Prompts that were matched, each once.", "", _count("requests")),
    Shown("kvtier_requests_hit", C, "Prompts of which at least one page was cached.", "", _count("requests_hit")),
    Shown("kvtier_tokens_asked", C, "Tokens in whole pages of those prompts.", "", _count("tokens_asked")),
    Shown("kvtier_tokens_hit", C, "Tokens served, by the fastest tier that had them.", "tier", _by("tokens_hit_")),
    Shown("kvtier_tokens_missed", C, "Tokens not served: absent, evicted, lost, pending (being computed), "
          "rule (a window or state is missing).", "reason", _by("tokens_missed_")),
    Shown("kvtier_keys_asked", C, "Opaque keys asked for, polls included.", "", _count("keys_asked")),
    Shown("kvtier_keys_hit", C, "Opaque keys that were there, by tier.", "tier", _by("keys_hit_")),
    Shown("kvtier_hit_ratio", G, "Tokens served of tokens asked since the start; for a window use the rates of both.",
          "", lambda d: {"": _ratio(_hit_tokens(d), d["counters"].get("tokens_asked", 0))}),
    Shown("kvtier_matched_prefix_tokens", G, "Average matched prefix in tokens since the start.",
          "", lambda d: {"": _ratio(_hit_tokens(d), d["counters"].get("requests", 0))}),
    Shown("kvtier_evicted_pages", C, "Pages that left a tier for want of room.", "tier", _by("pages_evicted_")),
    Shown("kvtier_lost_unsaved_pages", C, "Pages evicted from memory that no other tier had.", "",
          _count("pages_lost_unsaved")),
    Shown("kvtier_moved_bytes", C, "Bytes moved, as from_to.", "direction", _by("bytes_")),
    Shown("kvtier_moving_seconds", C, "Seconds during which some transfer of a direction ran: moved bytes over it is "
          "what a tier really brings.", "direction",
          lambda d: {name: micro / 1e6 for name, micro in _by("busy_us_")(d).items()}),
    Shown("kvtier_relocated_pages", C, "Pages moved within a tier to empty a slab.", "", _count("pages_relocated")),
    Shown("kvtier_disk_written_pages", C, "Pages made durable.", "", _count("pages_written_disk")),
    Shown("kvtier_disk_refused_pages", C, "Pages that the disk tier did not take, by reason.", "reason",
          _by("refused_disk_")),
    Shown("kvtier_lost_copies", C, "Copies that were not what was stored or could not be read, as tier_reason.", "copy",
          lambda d: {k: v for k, v in d["counters"].items() if k.startswith(("host_", "device_"))}
          | {f"disk_{reason}": count for reason, count in _by("load_")(d).items()}),
    Shown("kvtier_loads_no_space", C, "Items not loaded for want of room in host.", "", _count("loads_no_space")),
    Shown("kvtier_checksum_failures", C, "Items and records whose bytes did not check out.", "tier",
          lambda d: {"disk": _disk("checksum_failures")(d)[""]}
          | {tier: d["counters"].get(f"{tier}_checksum", 0) for tier in ("host", "device")}),
    Shown("kvtier_scrubbed_bytes", C, "Bytes re-read and checked in the background.", "", _count("scrubbed_bytes")),
    Shown("kvtier_cut_pages", C, "Pages forgotten because a page before them was lost.", "", _count("pages_cut")),
    Shown("kvtier_disk_io_errors", C, "Failed reads and writes of the disk tier.", "",
          lambda d: {"": _disk("io_errors")(d)[""] + _disk("write_errors")(d)[""]}),
    Shown("kvtier_disk_sick", G, "1 while writes to the disk tier fail.", "",
          lambda d: {"": float(bool(d["tiers"].get("disk", {}).get("sick")))}),
    Shown("kvtier_disk_parked_bytes", G, "Bytes of disk.bytes that the file system has no room for; 0 where none is "
          "known.", "", lambda d: {"": float(d["tiers"].get("disk", {}).get("parked_bytes", 0))}),
    Shown("kvtier_device_sick", G, "1 while a device tier that is configured cannot be used: no driver, no room, "
          "failed.", "", lambda d: {"": float(bool(d["tiers"].get("device", {}).get("sick")))}),
    Shown("kvtier_tier_used_bytes", G, "Bytes in use.", "tier", _tiers("used_bytes")),
    Shown("kvtier_tier_free_bytes", G, "Bytes free.", "tier", _tiers("free_bytes")),
    Shown("kvtier_queue_depth", G, "What waits: jobs in worker threads (mover_jobs), pages on their way to disk "
          "(disk_pages), items being loaded (loads), paths to be pushed to their homes (pushes), "
          "whether pages are given to new homes (repairs), "
          "commits that wait for a parent (reservations_waiting), requests in flight (requests).", "queue",
          lambda d: d["queues"] | {"requests": d["server"]["requests_in_flight"]}),
    Shown("kvtier_peers_up", G, "Peers that answer.", "", lambda d: {"": sum(row["up"] for row in d["peers"])}),
    Shown("kvtier_peer_pages", C, "Pages from and to other hosts: loaded (fetched here), served (sent to who asked), "
          "pushed (sent to their homes), taken (pushed here).", "way", _pages_of_peers),
    Shown("kvtier_peer_events", C, "What happened with peers: asked, hits, misses, refused, failures, down, restarts, "
          "busy, late (this host stood still until it was too late), checksum, mismatch and torn (not what was stored "
          "or asked for, or not all of it: a miss), packed (answers), unwanted (items that came with an offer and were "
          "there already, or refused), repairs, push_*.", "event", _by("peer_")),
    Shown("kvtier_refused", C, "Requests refused, in whole or part, by error code.", "code",
          lambda d: d["server"]["refused"]),
    Shown("kvtier_leases", G, "Leases that engines hold.", "", _top("leases")),
    Shown("kvtier_reservations", G, "Reservations that engines hold.", "", _top("reservations")),
    Shown("kvtier_held_bytes", G, "Host bytes in leases and reservations.", "", _top("held_bytes")),
    Shown("kvtier_instances", G, "Attached engines.", "", _top("instances")),
    Shown("kvtier_connections", G, "Open connections.", "", lambda d: {"": d["server"]["connections"]}),
    Shown("kvtier_caches", G, "Caches known.", "", _top("caches")),
    Shown("kvtier_pages", G, "Pages known, in whatever tier.", "", _top("pages")),
    Shown("kvtier_nodes", G, "Nodes of the trees.", "", _top("nodes")),
    Shown("kvtier_checks", C, "Times that the daemon checked its invariants, by itself and when asked to.", "",
          _top("checks")),
    Shown("kvtier_broken_invariants", G, "Invariants that the latest check found broken; the log names them. Anything "
          "but 0 is a bug.", "", lambda d: {"": d["checked"].get("broken", 0)}),
    Shown("kvtier_checked_timestamp_seconds", G, "When the latest check ended, as Unix time; 0 before the first.", "",
          lambda d: {"": d["checked"].get("at", 0)}),
    Shown("kvtier_uptime_seconds", G, "Seconds since the start.", "", _top("uptime_s")),
    Shown("kvtier_resident_bytes", G, "Resident memory of the daemon, arenas included.", "", _top("rss_bytes")),
    Shown(
        "kvtier_python_blocks", G,
        "Blocks that the daemon's Python objects take: a leak shows here, and not what is free but scattered.",
        "", _top("python_blocks"),
    ),
)  # fmt: skip

LATENCY: Final = "kvtier_request_seconds"
LATENCY_HELP: Final = "Seconds from a request's last byte to its reply, by verb."
UP: Final = "kvtier_up"
UP_HELP: Final = "1 when the serving loop gave these numbers; 0 when it did not answer."
VERSION: Final = "kvtier_build_info"
VERSION_HELP: Final = "Always 1; the version is the label."


BATCHES: Final = "kvtier_eviction_batch_pages"
BATCHES_HELP: Final = "Pages that left a tier at once to make room."


def _histogram(name: str, text: str, label: str, bounds: list[float], rows: Mapping[str, tuple[list[int], float]]
               ) -> HistogramMetricFamily:  # fmt: skip
    """Buckets and sum by label value."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, (counts, total) in sorted(rows.items()):
        below = itertools.accumulate(counts)
        buckets = [(bound, float(count)) for bound, count in zip([*map(str, bounds), "+Inf"], below, strict=True)]
        family.add_metric([value], buckets, total)
    return family


def _latency(server: Data) -> HistogramMetricFamily:
    """Latency per verb."""
    rows = {verb: (row["buckets"], row["seconds"]) for verb, row in server["verbs"].items()}
    return _histogram(LATENCY, LATENCY_HELP, "verb", server["bounds_s"], rows)


def _batches(found: Data) -> HistogramMetricFamily:
    """Sizes of eviction batches per tier."""
    rows = {tier: (row["buckets"], row["pages"]) for tier, row in found["tiers"].items()}
    return _histogram(BATCHES, BATCHES_HELP, "tier", found["bounds"], rows)


def families(data: Data | None) -> Iterator[Metric]:
    """Every metric; without numbers only that the daemon is down."""
    yield GaugeMetricFamily(UP, UP_HELP, 1 if data else 0)
    if not data:
        return
    info = GaugeMetricFamily(VERSION, VERSION_HELP, labels=["version"])
    info.add_metric([data["version"]], 1)
    yield info
    for shown in METRICS:
        family = shown.kind(shown.name, shown.help, labels=[shown.label] if shown.label else None)
        for value, number in sorted(shown.read(data).items()):
            family.add_metric([value] if shown.label else [], number)
        yield family
    yield _batches(data["eviction_batches"])
    yield _latency(data["server"])


class _Once(Collector):
    """One answer of the daemon."""

    def __init__(self, data: Data | None) -> None:
        self._data = data

    def collect(self) -> Iterator[Metric]:
        """Every metric."""
        return families(self._data)


def render(data: Data | None) -> bytes:
    """The text that is scraped; `data` is the reply to wire.Metrics, None where there was none."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(data))
    return generate_latest(registry)


def names() -> list[tuple[str, str, str, str]]:
    """(name as scraped, kind, label, help) of every metric."""
    rows = [(UP, "gauge", "", UP_HELP), (VERSION, "gauge", "version", VERSION_HELP)]
    for shown in METRICS:
        counter = shown.kind is CounterMetricFamily
        rows.append((shown.name + "_total" * counter, "counter" if counter else "gauge", shown.label, shown.help))
    return [*rows, (BATCHES, "histogram", "tier", BATCHES_HELP), (LATENCY, "histogram", "verb", LATENCY_HELP)]


def document() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m kvtier.metrics`; do not edit.",
        "",
        "`http://127.0.0.1:9477/metrics` (`http.port`), in the Prometheus text format. No label carries a name that an",
        "engine chose. `/healthz`: 200 while the serving loop answers and engines can connect, else 503 and why.",
        "",
        "| metric | kind | label | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{name}` | {kind} | {label and f'`{label}`'} | {text} |" for name, kind, label, text in names()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    show("kvtier.metrics", document())
