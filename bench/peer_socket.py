"""The limit of bench_peer.py: the other end of a plain blocking socket, in a process of its own.

Each request is a size (u64) and a way: `g`, and so many bytes come back; `p`, and so many bytes follow, acknowledged
with one byte.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

REQUEST = struct.Struct("<Qc")
MOST = 64 << 20


class Plain:
    """This end."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get(self, view: memoryview) -> None:
        """Receive into the view."""
        self.sock.sendall(REQUEST.pack(len(view), b"g"))
        fill(self.sock, view)

    def put(self, view: memoryview) -> None:
        """Send the view's bytes and wait until they are there."""
        self.sock.sendall(REQUEST.pack(len(view), b"p"))
        self.sock.sendall(view)
        assert self.sock.recv(1)


def fill(sock: socket.socket, view: memoryview) -> None:
    """Receive exactly the view's bytes."""
    at = 0
    while at < len(view):
        at += sock.recv_into(view[at:])


def serve() -> None:
    """Answer one connection after another; prints the port."""
    data = memoryview(np.ones(MOST, np.uint8)).cast("B")
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = memoryview(bytearray(REQUEST.size))
    while sock.recv_into(head, REQUEST.size, socket.MSG_WAITALL):
        size, way = REQUEST.unpack(head)
        if way == b"g":
            sock.sendall(data[:size])
        else:
            fill(sock, data[:size])
            sock.sendall(b"k")


@contextlib.contextmanager
def plain() -> Iterator[Plain]:
    """A connection to the other end in a process of its own."""
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        one = Plain(int(process.stdout.readline()))
        try:
            yield one
        finally:
            one.sock.close()


if __name__ == "__main__":
    serve()
