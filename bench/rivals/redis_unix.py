"""Redis on a Unix socket, spoken to directly: faster than its Python client. Arguments: page bytes, pages, seed."""

import socket
import sys

import numpy as np
from lines import daemon, folder, median_us, seconds, serve, wait_for

MEMORY = 1 << 30


def command(*parts):
    """A command as the server reads it."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


class Redis:
    """Values by key, one round trip each: pipelining large values only fills buffers."""

    def __init__(self, stack):
        page, pages, seed = map(int, sys.argv[1:4])
        path = folder(stack) / "redis.sock"
        flags = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--maxmemory", str(MEMORY)]
        daemon(stack, ["redis-server", *flags, "--maxmemory-policy", "allkeys-lru"])
        wait_for(path.exists)
        self.socket = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.socket.connect(str(path))
        self.random = np.random.default_rng(seed)
        self.source = self.random.integers(0, 256, (pages, page), np.uint8)
        self.target = np.zeros_like(self.source)
        self.put()

    def line(self):
        """One line of a reply."""
        got = b""
        while not got.endswith(b"\r\n"):
            got += self.socket.recv(1)
        return got

    def put(self):
        """Seconds to set a round of pages under new keys."""
        self.keys = [self.random.bytes(16) for _ in self.source]
        return seconds(self._put)

    def _put(self):
        for key, page in zip(self.keys, self.source, strict=True):
            self.socket.sendall(b"*3\r\n$3\r\nSET\r\n$16\r\n%s\r\n$%d\r\n" % (key, page.nbytes))
            self.socket.sendall(page)
            self.socket.sendall(b"\r\n")
            if self.line() != b"+OK\r\n":
                raise ValueError("SET failed")

    def get(self):
        """Seconds to get them back; the bytes are compared."""
        self.target[:] = 0
        took = seconds(self._get)
        if not np.array_equal(self.source, self.target):
            raise ValueError("got other bytes back")
        return took

    def _get(self):
        for key, page in zip(self.keys, self.target, strict=True):
            self.socket.sendall(command(b"GET", key))
            if self.line() != b"$%d\r\n" % page.nbytes:
                raise ValueError("GET missed")
            view = memoryview(page)
            while view:
                view = view[self.socket.recv_into(view) :]
            self.line()

    def lookup(self, pages, calls):
        """Microseconds to ask for so many keys that are there."""
        ask = command(b"EXISTS", *self.keys[:pages])

        def exists():
            self.socket.sendall(ask)
            if self.line() != b":%d\r\n" % pages:
                raise ValueError("keys are missing")

        return median_us([exists] * calls)


serve(Redis)
