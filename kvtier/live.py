"""Settings that change while the daemon runs: by SIGHUP from their sources, or by an operator's Set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvtier import wire
from kvtier.config import LIVE, Config, settings, size, value_of, with_values
from kvtier.policy.quota import parse
from kvtier.server import Server
from kvtier.store import Store
from kvtier.types import KvtierError, bad

_log = logging.getLogger("kvtier.daemon")


class Live:
    """The settings in effect, and what applies them."""

    def __init__(self, config: Config, again: Callable[[], Config], store: Store, server: Server) -> None:
        """`again` reads the settings from their sources; serves wire.Set of `store` from now on."""
        self.config = config
        self._again = again
        self._apply: Mapping[str, Callable[[Any], None]] = {
            "caps.instance": store.cap,
            "caps.connections": server.limit_connections,
            "drain_s": lambda _: None,
            "quotas": lambda text: store.limit(parse(text, size)),
            "log_level": lambda level: logging.getLogger().setLevel(level.upper()),
        }
        assert self._apply.keys() == LIVE
        store.admin = {**store.admin, wire.Set: self.set}

    def reload(self) -> None:
        """SIGHUP: apply what can change; log what changed, what waits for a restart, and what is wrong."""
        try:
            fresh = self._again()
        except KvtierError as exc:
            _log.error("settings are not read again: %s", exc)
            return
        changed = [name for name, _ in settings() if value_of(fresh, name) != value_of(self.config, name)]
        late = [name for name in changed if name not in LIVE]
        now = {name: str(value_of(fresh, name)) for name in changed if name in LIVE}
        self._change(now)
        _log.warning("settings read again; applied: %s; after a restart: %s", _list(now), _list(late))

    def set(self, msg: wire.Set) -> wire.Info:
        """Apply all of the values or none; replies every live setting."""
        for name in msg.values:
            if name in dict(settings()) and name not in LIVE:
                raise bad(name, f"a setting that changes without a restart ({_list(sorted(LIVE))})")
        self._change(msg.values)
        return wire.Info({"settings": {name: value_of(self.config, name) for name in sorted(LIVE)}})

    def _change(self, values: Mapping[str, str]) -> None:
        """Take other values of live settings; raises bad_request before anything changed."""
        fresh = with_values(self.config, values)
        for name in values:
            self._apply[name](value_of(fresh, name))
        self.config = fresh


def _list(names: Any) -> str:
    return ", ".join(names) or "none"
