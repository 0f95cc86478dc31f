"""Which processes are attached to which instance, and what returns as they let go. Owned by the loop thread.

A session is one connection of one process, and what tells processes apart here: a process may have several clients, and
to a daemon in another pid namespace the kernel says pid 0 of all of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from kvtier import wire
from kvtier.store.commits import Commits
from kvtier.store.instance import Instance, Process
from kvtier.store.keyed import Keys
from kvtier.store.parts import Parts
from kvtier.store.regions import Regions
from kvtier.store.vram import Vram
from kvtier.types import Code, KvtierError, bad


class Attached:
    """Sessions as the server reports them, and what each of them shares with the daemon."""

    def __init__(self, parts: Parts, cap: float, version: str) -> None:
        """`cap`: the share of the host arena that one instance may hold."""
        self.parts = parts
        self.cap(cap)
        self.version = version
        self.keys = Keys(parts)
        self.commits = Commits(parts)
        self.regions = Regions(parts, self.keys, self.commits)
        self.closing = False
        self.run = secrets.token_bytes(16)

    def cap(self, share: float) -> None:
        """The share of host that an instance may hold, from now on; what is held beyond it stays."""
        vram = self.parts.vram
        self.cap_bytes = int(self.parts.host.budget_bytes * share)
        self.device_cap = int(vram.tier.budget_bytes * share) if vram is not None else 0
        for instance in self.parts.instances.values():
            instance.cap_bytes, instance.device_cap = self.cap_bytes, self.device_cap

    def join(
        self, hello: wire.Hello, peer: Any, notify: Callable[[wire.Message], None]
    ) -> tuple[Process, wire.Welcome, list[int]]:
        """A process joins its instance; returns it, the reply, and the arenas' fds to pass along."""
        if self.closing:
            raise KvtierError(Code.CLOSING, "the daemon is draining")
        if hello.version != wire.VERSION:
            raise KvtierError(Code.VERSION, f"expected protocol version {wire.VERSION}, got {hello.version}", "version")
        instance = self._instance(hello.instance, hello.scope, peer)
        arenas = self.parts.arenas(instance.scope)
        process = Process(next(self.parts.numbers), instance, peer, notify, events=hello.events)
        instance.processes.add(process)
        self.parts.instances[instance.scope, instance.name] = instance
        welcome = wire.Welcome(
            wire.VERSION,
            f"kvtierd {self.version}",
            instance.scope,
            tuple(wire.ArenaInfo(a.number, a.bytes) for a in arenas),
            self.cap_bytes,
            self.cap_bytes,
            run=self.run,
        )
        return process, welcome, [a.fd for a in arenas]

    def _instance(self, name: str, scope: str, peer: Any) -> Instance:
        """The instance of that name in the peer's scope, made on first use."""
        if not 1 <= len(name) <= wire.MAX_NAME:
            raise bad("instance", f"1..{wire.MAX_NAME} characters", name)
        if len(scope) > wire.MAX_NAME:
            raise bad("scope", f"at most {wire.MAX_NAME} characters", scope)
        full = f"uid:{peer.uid}" + (f":{scope}" if scope else "")
        return self.parts.instances.get((full, name)) or Instance(name, full, self.cap_bytes, self.device_cap)

    def _owner(self, msg: wire.Register | wire.RegisterKv, peer: Any, process: Process | None) -> Process:
        """Whose end frees what is registered: the session that speaks. Raises unknown, bad_request."""
        instance = self._instance(msg.instance, msg.scope, peer)
        owner = process or instance.only(peer.pid)
        if owner.instance is not instance or owner.left:
            raise KvtierError(Code.UNKNOWN, f"that session is not one of instance {msg.instance} any more", "session")
        return owner

    def leave(self, process: Process, clean: bool) -> None:
        """Its connection closed, and its regions go: with Bye it is gone at once, else when its pidfd says so."""
        process.left = True
        self.regions.owner_gone(process)
        if clean:
            self.gone(process)

    def ended(self, process: Process) -> None:
        """A process has ended, of which requests may be in flight still: those that wait for no more than that go."""
        process.ended.set()

    def gone(self, process: Process, by: Process | None = None) -> None:
        """A process touches no slot any more; with the last one everything of its instance returns.

        `by`: the later session of the same client that said so, where it did not end.
        """
        instance = process.instance
        if process not in instance.processes:
            return
        instance.processes.discard(process)
        if not instance.processes:
            instance.gone = True
            self.parts.instances.pop((instance.scope, instance.name), None)
            self.parts.patience.stir()  # what it waits for itself ends
            instance.paths.clear()
            self.commits.let_go(list(instance.reservations.values()))
            self._drop_leases(instance, next(self.parts.numbers))
            instance.writers.clear()  # they have the instance: nobody collects cycles
            self.parts.prune()
            return
        if instance.processes == {by}:
            # It lost its connection and came back, and no other is left to whom what it held may have been handed.
            assert by is not None
            self.commits.give_up([res for number, res in instance.reservations.items() if number < by.born])
            self._drop_leases(instance, by.born)
        self.commits.process_gone(process)

    def unheard(self, process: Process, numbers: list[int]) -> None:
        """What was given in replies that never came: nobody knows of it, so it returns."""
        instance = process.instance
        for number in numbers:
            lease, res = instance.leases.pop(number, None), instance.reservations.get(number)
            if lease is not None:
                self.keys.drop(instance, lease)
            if res is not None:
                self.commits.let_go([res])

    def _drop_leases(self, instance: Instance, before: int) -> None:
        """Take back leases with lower numbers."""
        for number in [number for number in instance.leases if number < before]:
            self.keys.drop(instance, instance.leases.pop(number))

    def register(self, msg: wire.Register, fd: int, peer: Any, process: Process | None = None) -> wire.Registered:
        """An attached process shares memory of its own; None: its client does not say which session it is."""
        return self.regions.register(self._owner(msg, peer, process), msg, fd)

    async def register_kv(
        self, msg: wire.RegisterKv, fds: Sequence[int], peer: Any, process: Process | None = None
    ) -> wire.Registered:
        """An attached process shares its own paged KV in device memory."""
        return await self.regions.kv.register(self._owner(msg, peer, process), msg, fds)

    async def map_device(self, msg: wire.MapDevice, peer: Any) -> tuple[wire.DeviceMapped, int]:
        """Tell a process of an attached instance how to map the device's memory; the descriptor stays the store's."""
        instance = self._instance(msg.instance, msg.scope, peer)
        if not instance.processes:
            raise KvtierError(Code.UNKNOWN, f"no instance {msg.instance} is attached: send hello first", "instance")
        return await self._device().map(instance.scope)

    def use_device(self, process: Process, msg: wire.UseDevice) -> wire.Ok:
        """A process shows that it maps the device's memory."""
        return self._device().use(process, msg)

    def _device(self) -> Vram:
        """The device tier; raises unknown."""
        if self.parts.vram is None:
            raise KvtierError(Code.UNKNOWN, "no device tier is configured here", "device")
        return self.parts.vram
