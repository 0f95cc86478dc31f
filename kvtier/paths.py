"""Where the daemon's sockets and state are, by one rule for the daemon, its clients and the operators' tool."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SOCKET_NAME: Final = "kvtierd.sock"
ADMIN_NAME: Final = "admin.sock"
SYSTEM_STATE: Final = Path("/var/lib/kvtier")


def socket_path(env: Mapping[str, str] = os.environ) -> Path:
    """The engine socket: $KVTIER_SOCKET, or in $XDG_RUNTIME_DIR/kvtier, or in /run/kvtier."""
    if env.get("KVTIER_SOCKET"):
        return Path(env["KVTIER_SOCKET"])
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]) / "kvtier" / SOCKET_NAME
    return Path("/run/kvtier") / SOCKET_NAME


def admin_path(engine: Path) -> Path:
    """The admin socket that lies beside an engine socket."""
    return engine.with_name(ADMIN_NAME)


def state_path(env: Mapping[str, str] = os.environ) -> Path:
    """The state folder: systemd's $STATE_DIRECTORY, /var/lib/kvtier for root, else below $XDG_STATE_HOME."""
    if env.get("STATE_DIRECTORY"):
        return Path(env["STATE_DIRECTORY"].split(":")[0])
    if os.geteuid() == 0 and os.access(_existing(SYSTEM_STATE), os.W_OK):
        return SYSTEM_STATE
    home = env.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "kvtier"


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    while not path.exists():
        path = path.parent
    return path
