"""The daemon's settings: defaults, then a TOML file, then KVTIER_* variables, then flags.

`python -m kvtier.config` prints docs/configuration.md.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import os
import re
import tomllib
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from kvtier.fleet import Events, Peers
from kvtier.output import show
from kvtier.paths import admin_path, socket_path, state_path
from kvtier.policy.find import DEFAULT, path_of
from kvtier.policy.quota import parse
from kvtier.types import bad

SYSTEM_FILE: Final = Path("/etc/kvtier/kvtierd.toml")
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(i?)(B?)", re.IGNORECASE)
PATHS: Final = ("KVTIER_CONFIG", "KVTIER_SOCKET")
"""Variables that are no settings."""
NEAR: Final = 0.8
"""A variable that is so alike to one of ours is meant to be it."""
_SERVICE: Final = "_SERVICE_HOST"
"""Kubernetes tells every pod the host of each service, and its ports: of one called kvtier, in variables like ours."""
LIVE: Final = frozenset({"caps.instance", "caps.connections", "drain_s", "log_level", "quotas"})
"""Settings that a running daemon takes: by SIGHUP from its sources, or by `kvtierctl set`."""
LEAST: Final = 1 << 20
"""Bytes of a tier: less is a number without its unit."""
MOST_PATH: Final = 107
"""Bytes of a Unix socket's path."""
MOST_DISK: Final = 1 << 50
"""What is known of the disk tier's slabs is a list, made at the start."""
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class Sockets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the daemon listens."""

    path: str = ""
    """Engine socket; empty: $KVTIER_SOCKET, or in $XDG_RUNTIME_DIR/kvtier, or in /run/kvtier."""
    admin: str = ""
    """Admin socket; empty: admin.sock beside the engine socket."""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host tier."""

    bytes: int = -1
    """Memory for pages; -1: 1 GiB, or an eighth of what this process may use; 0: none, and token caches are misses."""
    slab_bytes: int = 64 << 20
    """Memory is given to caches in pieces of this size."""
    high_water: float = 0.99
    """Where more than this share of a full tier is used, pages are evicted before their room is needed; 1: never."""
    prefault: bool = True
    """Keep the whole budget backed by memory, so that it cannot fail later."""


class DeviceTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device tier."""

    bytes: int = 0
    """GPU memory for pages, taken at the start and shared with the engines that ask; 0: no device tier."""
    which: str = "cuda:0"
    """`cuda:N`: the GPU of that number; `cpu`: host memory in a GPU's place, to try things out."""


class Disk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The disk tier."""

    path: str = ""
    """Its folder; empty: `disk` in the state folder."""
    bytes: int = 4 << 30
    """Room for pages; 0: no disk tier."""
    compress: bool = False
    """Pack pages (byte planes, zstd) where that saves a fifth; costs a core some 0.3 GB/s of writes and loads."""


class Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics and health over HTTP, on 127.0.0.1 only."""

    port: int = 9477
    """Where /metrics and /healthz are served; 0: nowhere. A port that is taken is logged and tried again."""


class Otel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of requests for OpenTelemetry."""

    endpoint: str = ""
    """OTLP/HTTP receiver that gets spans of requests, such as http://127.0.0.1:4318; empty: none are made."""
    share: float = 0.01
    """Of the requests, chosen at random."""

    def check(self) -> None:
        """Raise bad_request for what cannot be served."""
        try:
            parts = urllib.parse.urlsplit(self.endpoint)
            right = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:  # brackets or a port that are none
            right = False
        if self.endpoint and not right:
            raise bad("otel.endpoint", "an http or https URL, or nothing", self.endpoint)
        if not 0 < self.share <= 1:
            raise bad("otel.share", "a share in (0, 1]", self.share)


class Caps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds on engines."""

    instance: float = 0.5
    """Share of the host tier that one engine may hold in leases and reservations."""
    connections: int = 4096
    """Open connections."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings."""

    socket: Sockets = Sockets()
    host: Host = Host()
    device: DeviceTier = DeviceTier()
    disk: Disk = Disk()
    caps: Caps = Caps()
    http: Http = Http()
    otel: Otel = Otel()
    policy: str = DEFAULT
    """Which pages go first: a name of `kvtierctl policies`, or the path of a file of your own."""
    quotas: str = ""
    """Who may have how much: `tenant=6163 device=1GiB host=2GiB disk=9GiB; scope=uid:7 host=1GiB; cache=3fa8 disk=1GB`.

    The tenant is a salt in hex, the cache the beginning of an id; the first rule that fits a cache is its rule, and all
    caches of a rule share its limits. Whoever is at a limit makes room among its own pages.
    """
    peers: Peers = Peers()
    events: Events = Events()
    drain_s: float = 10.0
    """Seconds within which the daemon ends after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""

    @property
    def engine_socket(self) -> Path:
        """Where engines connect."""
        return Path(self.socket.path) if self.socket.path else socket_path()

    @property
    def admin_socket(self) -> Path:
        """Where operators connect."""
        return Path(self.socket.admin) if self.socket.admin else admin_path(self.engine_socket)

    @property
    def disk_path(self) -> Path:
        """Folder of the disk tier."""
        return Path(self.disk.path) if self.disk.path else state_path() / "disk"

    def check(self) -> None:
        """Raise bad_request naming the first setting that cannot be served."""
        for name, path in (("socket.path", self.engine_socket), ("socket.admin", self.admin_socket)):
            if len(os.fsencode(path)) > MOST_PATH:
                raise bad(name, f"a path of at most {MOST_PATH} bytes", str(path))
        if self.engine_socket == self.admin_socket:
            raise bad("socket.admin", "another path than socket.path", str(self.admin_socket))
        if self.host.bytes < LEAST and self.host.bytes not in (-1, 0):
            raise bad("host.bytes", "-1, 0 or a size of at least 1 MiB", self.host.bytes)
        if self.device.bytes < 0:
            raise bad("device.bytes", "0 or a size", self.device.bytes)
        if not re.fullmatch(r"cpu|cuda:\d{1,2}", self.device.which):
            raise bad("device.which", "cpu or cuda:N", self.device.which)
        if self.host.slab_bytes < LEAST:
            raise bad("host.slab_bytes", "at least 1 MiB", self.host.slab_bytes)
        if not 0.5 <= self.host.high_water <= 1:
            raise bad("host.high_water", "a share in [0.5, 1]", self.host.high_water)
        path_of(self.policy)
        parse(self.quotas, size)
        if self.disk.bytes and not LEAST <= self.disk.bytes <= MOST_DISK:
            raise bad("disk.bytes", "0 or a size from 1 MiB to 1 PiB", self.disk.bytes)
        if not 0 < self.caps.instance <= 1:
            raise bad("caps.instance", "a share in (0, 1]", self.caps.instance)
        if not 1 <= self.caps.connections <= 1 << 20:
            raise bad("caps.connections", "1..1048576", self.caps.connections)
        if not 0 <= self.http.port < 1 << 16:
            raise bad("http.port", "0..65535", self.http.port)
        self.otel.check()
        self.peers.check()
        self.events.check()
        if not 0 <= self.drain_s <= 3600:
            raise bad("drain_s", "0..3600 seconds", self.drain_s)


def settings(kind: type[msgspec.Struct] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting's dotted name and type."""
    for field in msgspec.structs.fields(kind):
        name = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from settings(field.type, f"{name}.")
        else:
            yield name, field.type


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return "KVTIER_" + name.upper().replace(".", "_")


def strangers(env: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with variables that begin like ours and name no setting, a sentence each.

    Raises bad_request for one that is nearly ours, as a file's key is refused: it would be ignored without a word.
    """
    known = {name.removeprefix("KVTIER_") for name in (*PATHS, *(variable(name) for name, _ in settings()))}
    services = [name.removesuffix(_SERVICE) for name in env if name.endswith(_SERVICE)]
    links = tuple(f"{service}_{what}" for service in services for what in ("SERVICE_", "PORT"))
    out = []
    for name in sorted(name for name in env if name.startswith("KVTIER_") and not name.startswith(links)):
        if (bare := name.removeprefix("KVTIER_")) in known:
            continue
        if near := difflib.get_close_matches(bare, known, 1, NEAR):
            raise bad(name, f"the variable of a setting; the nearest is KVTIER_{near[0]}")
        out.append(f"{name} is no variable of kvtier's, and is ignored")
    return out


def size(text: str) -> int:
    """Bytes of a size as people write it: 4096, 64MiB or 64M (2^20 each), 64MB (1e6). Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    base: int = (1000 if match[4] and not match[3] else 1024) ** _POWERS[match[2].upper()]
    return int(match[1]) * base


def load(
    file: Path | None = None, env: Mapping[str, str] = os.environ, flags: Mapping[str, str] | None = None
) -> Config:
    """The settings in effect; later sources win. Raises KvtierError naming the setting that is wrong.

    `file` defaults to $KVTIER_CONFIG, then to /etc/kvtier/kvtierd.toml where that exists. `flags` has dotted names.
    """
    strangers(env)
    merged = dict(_flat(_read(file or _default_file(env))))
    merged |= {name: env[variable(name)] for name, _ in settings() if variable(name) in env}
    merged |= flags or {}
    return _build(merged)


def with_values(config: Config, values: Mapping[str, str]) -> Config:
    """The same settings with other values for some. Raises KvtierError naming the setting that is wrong."""
    return _build({name: value_of(config, name) for name, _ in settings()} | dict(values))


def _build(merged: Mapping[str, Any]) -> Config:
    """Checked settings from dotted names and values. Raises KvtierError naming the setting that is wrong."""
    names = dict(settings())
    tree: dict[str, Any] = {}
    for name, value in merged.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.0)
            raise bad(name, f"a known setting; the nearest is {near[0]}")
        *tables, leaf = name.split(".")
        table = tree
        for part in tables:
            table = table.setdefault(part, {})
        table[leaf] = _sized(name, value)
    try:
        config = msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as exc:
        what, _, where = str(exc).partition(" - at `$.")
        name = where.rstrip("`")
        if allowed := get_args(names.get(name)):
            raise bad(name, f"one of {', '.join(allowed)}", merged.get(name)) from None
        raise bad(name or "settings", what.removeprefix("Expected ")) from None
    config.check()
    return config


def _default_file(env: Mapping[str, str]) -> Path | None:
    """The file that is read when none is named."""
    if env.get("KVTIER_CONFIG"):
        return Path(env["KVTIER_CONFIG"])
    return SYSTEM_FILE if SYSTEM_FILE.exists() else None


def _read(file: Path | None) -> dict[str, Any]:
    """The tables of a TOML file."""
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError) as exc:
        raise bad(str(file), f"a readable TOML file ({exc})") from None


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of a tree of tables."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _sized(name: str, value: Any) -> Any:
    """Sizes may be written with a unit."""
    if not name.endswith("bytes") or not isinstance(value, str) or value.strip() == "-1":
        return value
    try:
        return size(value)
    except ValueError:
        raise bad(name, "a size such as 4096, 64MiB or 8GiB", value) from None


def value_of(config: Config, name: str) -> Any:
    """The value of a setting by its dotted name."""
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


def documents(kind: type[msgspec.Struct] = Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted name, default, what it means) of every setting, read from the classes above."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            assert isinstance(text.value, ast.Constant)
            texts[field.target.id] = " ".join(str(text.value.value).split())
    for struct in msgspec.structs.fields(kind):
        if isinstance(struct.type, type) and issubclass(struct.type, msgspec.Struct):
            yield from documents(struct.type, f"{prefix}{struct.name}.")
        else:
            yield prefix + struct.name, struct.default, texts[struct.name]


def document() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Generated by `python -m kvtier.config`; do not edit.",
        "",
        "One TOML file: `--config`, else `$KVTIER_CONFIG`, else `/etc/kvtier/kvtierd.toml` where it exists. A variable",
        "wins over the file, a flag over both. A key that is not known is refused with the nearest name, and so is",
        "a `KVTIER_*` variable that is nearly one of these; others are ignored, and named in the log. Sizes are bytes,",
        'or text with a unit: `"64GiB"` and `"64G"` are powers of 1024, `"64GB"` is 64e9. `kvtierd --check-config`',
        "prints what is in effect and starts nothing.",
        "",
        "SIGHUP reads the same sources again and applies the live settings; the log names those that wait for a",
        "restart. `kvtierctl set` changes a live setting until the next SIGHUP or restart.",
        "",
        "| key | default | variable | flag | live | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for name, default, text in documents():
        value = msgspec.json.encode(default).decode()
        live = "yes" if name in LIVE else ""
        lines.append(
            f"| `{name}` | `{value}` | `{variable(name)}` | `{flag(name)}` | {live} | {text.replace('|', '/')} |"
        )
    return "\n".join(lines) + "\n"


def flag(name: str) -> str:
    """The command line flag of a setting."""
    return "--" + name.replace(".", "-").replace("_", "-")


if __name__ == "__main__":
    show("kvtier.config", document())
