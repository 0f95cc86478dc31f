"""An engine whose KV is one VMM chunk: shares it by descriptor over a socket, and says what is in it. By any driver.

Arguments: the socket's descriptor. Each line of it is a command; see `main`.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from pathlib import Path

from kvtier.device.libcuda import LibCuda
from kvtier.types import KvtierError

CHUNK, OFFSET, SIZE = 4 << 20, 8192, 65536


def take(library: LibCuda, size: int) -> int:
    """One chunk of VMM memory that can be shared by descriptor; its address."""
    handle, address = ctypes.c_uint64(), ctypes.c_uint64()
    about = (ctypes.c_uint32 * 8)(1, 1, 1, 0)  # pinned, by descriptor, on a device, the first
    library.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), about, ctypes.c_uint64(0))
    none = ctypes.c_size_t(0)
    library.call(
        "cuMemAddressReserve",
        ctypes.byref(address),
        ctypes.c_size_t(size),
        none,
        ctypes.c_uint64(0),
        ctypes.c_uint64(0),
    )
    library.call("cuMemMap", address, ctypes.c_size_t(size), none, handle, ctypes.c_uint64(0))
    library.call("cuMemRelease", handle)
    access = (ctypes.c_int * 3)(1, 0, 3)
    library.call("cuMemSetAccess", address, ctypes.c_size_t(size), access, ctypes.c_size_t(1))
    return address.value


def write(library: LibCuda, address: int, data: bytes) -> None:
    """Put bytes there."""
    with library.current(0):
        library.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))


def main() -> None:
    """Serve the test."""
    library = LibCuda()
    with library.current(0):
        address = take(library, CHUNK)
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        for line in sock.makefile():
            verb, *arguments = json.loads(line)
            if verb == "share":
                write(library, address + OFFSET, bytes.fromhex(arguments[0]) * SIZE)
                told, fd = library.export(library.uuid(0), address + OFFSET, SIZE)
                answer = [told.allocation, told.offset, told.size, told.chunk]
                socket.send_fds(sock, [json.dumps(answer).encode()], [fd])
                os.close(fd)
            elif verb == "look":
                sock.sendall(json.dumps(library.read(0, address + OFFSET, 4).hex()).encode())
            elif verb == "several":
                try:
                    library.export(library.uuid(0), address + CHUNK - 4096, 8192)
                except KvtierError as exc:
                    sock.sendall(json.dumps([exc.message, len(list(Path("/proc/self/fd").iterdir()))]).encode())


if __name__ == "__main__":
    main()
