"""A peer that holds the fleet's key and misbehaves: it claims to have every page, and sends what its mode says."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Self

import numpy as np
import xxhash
from msgspec.structs import replace

from engineproc import content
from kvtier.peer import frames
from kvtier.peer.base import Pick
from kvtier.peer.items import echo, items_of
from kvtier.peer.pipe import Pipe
from kvtier.peer.secrets import Secrets
from kvtier.peer.terms import Terms

MODES = ("bytes", "sums", "echo", "picks", "length", "short", "hang", "garbage", "close", "more")
"""What is wrong with what it sends: the bytes, the checksums, the path, other items, more bytes, half the bytes and the
end of the connection, half of them and silence, no frame at all, nothing, more pages than were asked about."""


MUTE = "mute"
"""It answers everything but Find."""


class Liar:
    """Listens on loopback in a thread of its own; a context manager."""

    def __init__(self, secrets: Secrets, port: int, mode: str) -> None:
        self.mode = mode
        self.fetches = 0
        self._secrets = secrets
        self._sock = socket.create_server(("127.0.0.1", port))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._tasks: set[asyncio.Task] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()
        self._sock.close()

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        self._sock.setblocking(False)
        accepting = asyncio.create_task(self._accept())
        await self._stop.wait()
        for task in (accepting, *self._tasks):
            task.cancel()
        await asyncio.gather(accepting, *self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(self._sock)
            pipe = Pipe(sock)
            task = asyncio.create_task(self._serve(pipe))
            task.add_done_callback(lambda _, pipe=pipe: pipe.close())  # also of one that never began
            self._tasks.add(task)

    async def _serve(self, pipe: Pipe) -> None:
        try:
            await pipe.answer(Terms("z", self._secrets), b"liar" * 2)
            while True:
                message = await pipe.receive(frames.Message)
                if isinstance(message, frames.Use):
                    self.spec = message.spec
                    await pipe.send(frames.Done())
                elif isinstance(message, frames.Find) and self.mode == MUTE:
                    await asyncio.sleep(3600)
                elif isinstance(message, frames.Find):
                    self.find = message
                    pages = len(message.keys) // self.spec.stride
                    found = frames.Found(pages + (self.mode == "more"))
                    if message.picks and self.mode != "more":
                        await self._lie(pipe, message.picks, found)
                    else:
                        await pipe.send(found)
                elif isinstance(message, frames.Fetch):
                    await self._lie(pipe, message.picks)
                else:
                    await pipe.send(frames.Wanted() if isinstance(message, frames.Offer) else frames.Done())
        except (OSError, EOFError):
            pass
        finally:
            pipe.close()

    async def _lie(self, pipe: Pipe, picks: tuple[Pick, ...], found: frames.Found | None = None) -> None:
        """Answer a Fetch, or a Find that fetches too."""
        self.fetches += 1
        mode, find, stride = self.mode, self.find, self.spec.stride
        items = items_of(self.spec, picks, len(find.keys) // stride)
        pages = [content(find.keys[: (page + 1) * stride]).reshape(-1) for _, page in items]
        sums = [xxhash.xxh3_64_intdigest(page) for page in pages]
        size = sum(page.nbytes for page in pages)
        if mode == "garbage":
            await self._loop.sock_sendall(pipe.stream.sock, bytes(range(256)) * 64)
            return
        if mode == "close":
            raise EOFError
        if mode == "bytes":
            pages[-1] = pages[-1] ^ np.uint8(1)
        load = frames.Load(
            picks[:-1] if mode == "picks" else picks,
            np.array([value ^ (mode == "sums") for value in sums], "<u8").tobytes(),
            size + (mode == "length"),
            echo(find.cache, find.keys[:stride] if mode == "echo" else find.keys),
        )
        await pipe.send(load if found is None else replace(found, load=load))
        data = b"".join(page.tobytes() for page in pages)
        if mode in {"short", "hang"}:
            await self._loop.sock_sendall(pipe.stream.sock, data[: len(data) // 2])
            if mode == "short":
                raise EOFError
            await asyncio.sleep(3600)
        await self._loop.sock_sendall(pipe.stream.sock, data)
