"""TLS on a connection that is used from the loop and from worker threads in turn, both ends showing certificates.

An ssl socket can be waited for in a thread only, so the records are made and read in memory and moved by whoever has
the connection.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Final

from kvtier.types import Code, KvtierError, bad

CHUNK: Final = 256 << 10

_log = logging.getLogger("kvtier.peer")


class Certs:
    """This host's certificate and key, and the CA that signs every host's; files, read again when they change."""

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        """Raises bad_request for files that cannot be used."""
        self._files = (cert, key, ca)
        self._read: tuple[int, ...] = ()
        self._why = ""
        """What is wrong with the files, while those that were read before go on."""
        self._contexts = self._load()

    def _load(self) -> dict[bool, ssl.SSLContext]:
        """A context for connecting and one for being connected to."""
        cert, key, ca = self._files
        found = {}
        try:
            times = self._times()
            for server in (False, True):
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.check_hostname = False  # see expect_name: one rule for both ends
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(ca)
                context.load_cert_chain(cert, key)
                found[server] = context
        except OSError as exc:  # ssl.SSLError is one
            raise bad("peers.tls_cert", f"a certificate, its key and a CA that can be read ({exc})") from None
        self._read = times
        return found

    def _times(self) -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in self._files)

    def channel(self, *, server: bool) -> Channel:
        """For one connection."""
        try:
            if self._times() != self._read:
                self._contexts = self._load()
                _log.info("certificates were read again")
            self._why = ""
        except (OSError, KvtierError) as exc:  # perhaps in the middle of a change
            if str(exc) != self._why:
                _log.warning("certificates are not read again, those that were go on: %s", exc)
            self._why = str(exc)
        return Channel(self._contexts[server], server=server)


class Channel:
    """One end of a TLS connection. Raises ssl.SSLError (an OSError), EOFError."""

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)

    def names(self) -> set[str]:
        """DNS names that the other end's certificate is made out to, in small letters."""
        shown = self._tls.getpeercert() or {}
        return {str(name[1]).lower() for name in shown.get("subjectAltName", ()) if name[0] == "DNS"}

    def shake(self) -> bool:
        """A step of the handshake; whether it is over. What is `pending` is to be sent after each step."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def pending(self) -> bytes:
        """Records to send."""
        return self._out.read()

    def seal(self, data: bytes | memoryview) -> bytes:
        """The records of some bytes, and any that were pending."""
        if len(data):
            self._tls.write(data)
        return self._out.read()

    def arrived(self, data: bytes) -> None:
        """Records, or parts of them; nothing when the connection has ended. Raises EOFError."""
        if not data:
            raise EOFError("the peer closed the connection")
        self._in.write(data)

    def open(self, view: memoryview) -> int:
        """Bytes that are there, up to the view's end; 0: more records are needed. Raises EOFError."""
        at = 0
        while at < len(view):
            try:
                got = self._tls.read(len(view) - at, view[at:])
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                raise EOFError("the peer closed the connection") from None
            if not got:
                raise EOFError("the peer closed the connection")
            at += int(got)
        return at


def expect_name(channel: Channel, name: str) -> None:
    """Raise forbidden unless the other end's certificate is made out to the name that it goes by, and no pattern of it.

    A pattern would let all that have such a certificate, of whatever service, pass for each host.
    """
    if name.lower() not in channel.names():
        raise KvtierError(Code.FORBIDDEN, "the peer's certificate is not made out to its name")
