"""Who may read what of other hosts: one key for the fleet, one secret per trust scope, and what follows from them.

A file of lines `name secret`: the line `fleet` has the key by which connections are authenticated, every other line
names a trust scope of this host (`uid:1000`, `uid:1000:label`) and the secret that the hosts share which may read it.
A scope without a secret is shared with nobody. The same secret under different scope names on two hosts is one trust
domain, so user ids need not agree.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from pathlib import Path
from typing import Final

from kvtier.identity import CacheSpec, base_id
from kvtier.peer.base import Shared
from kvtier.types import Code, KvtierError, bad

FLEET: Final = "fleet"
MIN_SECRET: Final = 16
KEY_ID_BYTES: Final = 8


def derive(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over length-prefixed parts."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "little") + part for part in parts), hashlib.sha256)


class Mac:
    """HMAC-SHA256 (RFC 2104) under one key, many times: its two blocks are hashed once.

    OpenSSL prepares each anew, which takes far longer than the hashing where megabytes went through the caches between.
    """

    def __init__(self, key: bytes) -> None:
        """`key`: of at most a block."""
        block = key.ljust(hashlib.sha256().block_size, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))

    def of(self, *parts: bytes) -> bytes:
        """Of the parts, one after another."""
        inner, outer = self._inner.copy(), self._outer.copy()
        for part in parts:
            inner.update(part)
        outer.update(inner.digest())
        return outer.digest()


class Secrets:
    """The keys of this host. Never shown, never logged."""

    def __init__(self, fleet: bytes, scopes: dict[str, bytes]) -> None:
        self._fleet = fleet
        self._scopes = scopes
        self._names = {self.key_id(scope): scope for scope in scopes}

    def __repr__(self) -> str:
        return f"Secrets({len(self._scopes)} scopes)"

    def session(self, nonces: tuple[bytes, bytes], names: tuple[str, str]) -> bytes:
        """The key of one connection, from the nonces and the names of who asked and who answered.

        The names keep a host that is asked from passing nonces and proofs on to another one, as if it were the asker.
        """
        return derive(self._fleet, b"kvtier peer session v2", *nonces, *(name.encode() for name in names))

    def key_id(self, scope: str) -> bytes:
        """Names the secret of a scope to peers without telling it."""
        return derive(self._scopes[scope], b"kvtier scope v1")[:KEY_ID_BYTES]

    def scope_of(self, key_id: bytes) -> str | None:
        """This host's scope with that secret."""
        return self._names.get(key_id)

    def proof(self, scope: str, session: bytes, cache: bytes) -> bytes:
        """Shows on one connection, and on no other, that this host holds the secret of a cache."""
        return derive(self._scopes[scope], b"kvtier proof v1", session, cache)

    def shared(self, spec: CacheSpec, scope: str, epoch: int) -> Shared | None:
        """The cache as the hosts with the same secret know it; None where it is not shared.

        Epochs are counted per host and say nothing elsewhere: a cache that was reset is shared no more. (Weights that
        change name themselves in the fingerprint.)
        """
        secret = self._scopes.get(scope)
        if secret is None or epoch:
            return None
        return Shared(spec, scope, derive(secret, b"kvtier cache v1", base_id(spec, "")))


def read(path: Path, *, fleet: bool = True) -> Secrets:
    """The secrets of a file; raises KvtierError for one that others can read or that is no such file.

    `fleet`: there must be a fleet's key; where certificates say who is who there need be none.
    """
    try:
        mode = path.stat().st_mode
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise bad("peers.secrets", f"a readable file ({exc})") from None
    if stat.S_IMODE(mode) & 0o077:
        raise KvtierError(Code.FORBIDDEN, f"{path} can be read by others (chmod 600)", "peers.secrets")
    found: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            name, text = line.split()
            secret = bytes.fromhex(text)
        except ValueError:
            raise bad(f"{path}:{number}", "a name and a secret in hex") from None
        if len(secret) < MIN_SECRET or name in found or secret in found.values():
            raise bad(f"{path}:{number}", f"a new name and a new secret of at least {MIN_SECRET} bytes")
        found[name] = secret
    if fleet and FLEET not in found:
        raise bad(str(path), f"a line `{FLEET} <hex>`")
    key = found.pop(FLEET, b"certificates only")
    return Secrets(key, found)
