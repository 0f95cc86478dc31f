"""Mooncake Store as the store that a fleet shares: nodes that die or stall, an engine that hangs, and daemons."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from engines import tokens
from fleetkit import Host, write_secrets
from fleetkit import until as waited
from kvtier.config import load
from kvtier.demo.daemon import Daemon
from kvtier.peer.depot import Depot
from kvtier.peer.mooncake import TRAYS, MooncakeShelf
from kvtier.peer.mooncake_child import Setup
from kvtier.peer.secrets import read
from kvtier.types import KvtierError
from peerkit import SCOPE, SPEC, fetched, given_soon, setup_of, watched
from sharedkit import Mooncake, needs_mooncake
from storekit import until

DEADLINE_S = 0.5
PATHS = [tokens(*range(100 * n, 100 * n + 5)) for n in range(1, 31)]
PAGES = [list(range(100 * n, 100 * n + 5)) for n in range(1, 7)]


def shared_by(home: Path, cluster: Mooncake, replicas: int = 1) -> Depot:
    """The tier on a cluster."""
    setup = setup_of(cluster)
    setup.replicas = replicas
    secrets = read(write_secrets(home / "secrets", [SCOPE]))
    return Depot(MooncakeShelf(setup, deadline_s=DEADLINE_S), secrets, deadline_s=DEADLINE_S)


async def served(tier: Depot, shared: object) -> list[int]:
    """Pages of every path that come."""
    return [await fetched(tier, shared, path) for path in PATHS]


@needs_mooncake
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_node_costs_its_share_and_never_more_than_misses(tmp_path: Path, number: int) -> None:
    """Of two nodes one is killed, or stalls: what it had is a miss, whatever the master says; nothing wrong comes."""
    with Mooncake(tmp_path, nodes=2) as cluster:
        tier = shared_by(tmp_path, cluster)
        async with watched(tier, cluster, tier._secrets) as far:
            for path in PATHS:
                await given_soon(tier, far.shared, path)
            assert await served(tier, far.shared) == [5] * len(PATHS)
            cluster.nodes[1].signal(number)
            left = await served(tier, far.shared)
            assert sum(left) < 5 * len(PATHS), "it had a share"
            assert tier.counts["peer_checksum"] == tier.counts["peer_mismatch"] == 0
            cluster.nodes[1].signal(signal.SIGCONT) if number == signal.SIGSTOP else cluster.nodes[1].kill()
            await until(tier.answers)
            for path in PATHS:
                await given_soon(tier, far.shared, path)
            cluster.kill()
            cluster.nodes[0].kill()
            assert await served(tier, far.shared) == [0] * len(PATHS), "master and node are gone"
            if number == signal.SIGSTOP:
                cluster.nodes[1].kill()
            cluster.start()
            await until(tier.answers)
            await given_soon(tier, far.shared, PATHS[0])
            assert await fetched(tier, far.shared, PATHS[0]) == 5
            assert sorted(tier.shelf._trays) == list(range(TRAYS))


@needs_mooncake
@pytest.mark.slow
async def test_an_engine_that_hangs_is_replaced_and_no_memory_stays_taken(tmp_path: Path) -> None:
    """The process with the engine is stopped: calls end at their deadline; after some it is killed, another serves."""
    with Mooncake(tmp_path) as cluster:
        tier = shared_by(tmp_path, cluster)
        async with watched(tier, cluster, tier._secrets) as far:
            await given_soon(tier, far.shared, PATHS[0])
            (source,) = await tier.find(far.shared, PATHS[0], 0)
            child = tier.shelf._child.process
            os.kill(child.pid, signal.SIGSTOP)
            assert await tier.find(far.shared, PATHS[1], 0) == []
            assert not tier.answers()
            await until(lambda: child.poll() is not None, timeout_s=60)
            await until(tier.answers, timeout_s=60)
            assert tier.shelf._child.process.pid != child.pid
            assert await fetched(tier, far.shared, PATHS[0]) == 5
            source.close()
            os.kill(tier.shelf._child.process.pid, signal.SIGKILL)
            await until(lambda: not tier.answers())
            await until(tier.answers, timeout_s=60)
            assert await fetched(tier, far.shared, PATHS[0]) == 5
            assert sorted(tier.shelf._trays) == list(range(TRAYS))
            await until(lambda: tier.shelf._lost == 0)


@needs_mooncake
@pytest.mark.slow
async def test_with_two_copies_a_page_has_two(tmp_path: Path) -> None:
    """`peers.replicas` is what Mooncake is asked for: with two nodes every value has two copies in the end."""
    with Mooncake(tmp_path, nodes=2) as cluster:
        tier = shared_by(tmp_path, cluster, replicas=2)
        async with watched(tier, cluster, tier._secrets) as far:
            for path in PATHS:
                await given_soon(tier, far.shared, path)
            cluster.nodes[1].kill()
            for _ in range(300):  # for a while the master still names copies that are gone
                if await served(tier, far.shared) == [5] * len(PATHS):
                    return
                await asyncio.sleep(0.1)
            pytest.fail("some page had one copy only")


@needs_mooncake
@pytest.mark.slow
def test_daemons_that_share_a_mooncake_store_serve_each_others_pages(tmp_path: Path) -> None:
    """What one computes another serves bit exact; nothing is left taken; both end in time."""
    with Mooncake(tmp_path) as cluster, ExitStack() as stack:
        secrets = write_secrets(tmp_path / "secrets", [f"uid:{os.getuid()}"])
        hosts = []
        for name in "ab":
            (tmp_path / name).mkdir()
            flags = [
                "--peers-backend=mooncake", f"--peers-mooncake-master={cluster.master}", f"--peers-secrets={secrets}",
                "--peers-deadline-ms=1000",
            ]  # fmt: skip
            hosts.append(Host(name, Daemon(tmp_path / name, host="64MiB", disk="0", flags=flags)))
            stack.callback(hosts[-1].close)
            hosts[-1].start()
        a, b = hosts
        for host in hosts:
            waited(lambda host=host: host.up() == {f"mooncake {cluster.master}"})
        for pages in PAGES:
            assert a.put(pages) == 5
        waited(a.settled)
        assert [b.get(pages) for pages in PAGES] == [5] * 6
        assert b.count("pages_loaded_peer") == 30
        for host in hosts:
            host.emptied()
            host.client.close()
            host.client = None
            assert host.daemon.stop() == 0


async def test_without_an_engine_or_a_master_it_is_down_and_nothing_is_asked(tmp_path: Path) -> None:
    """Whatever keeps the child from coming up, the tier says why, serves misses, and ends."""
    secrets = read(write_secrets(tmp_path / "secrets", [SCOPE]))
    setup = Setup("127.0.0.1:9", "P2PHANDSHAKE", "tcp", "", 1)
    tier = Depot(MooncakeShelf(setup, deadline_s=DEADLINE_S, counts=Counter()), secrets, deadline_s=DEADLINE_S)
    tier.start()
    try:
        await until(lambda: tier.status()[0]["why"] != "not asked yet", timeout_s=60)
        shared = tier.shared(SPEC, SCOPE, 0)
        assert not tier.answers()
        assert not tier.worth(shared, PATHS[0], 0)
        assert await tier.find(shared, PATHS[0], 0) == []
        assert await tier.offer("mooncake", shared, PATHS[0], ()) is None
    finally:
        await tier.close()


@pytest.mark.parametrize(
    ("flags", "named"),
    [({"master": "10.0.0.1:50051"}, "peers.mooncake.exposed"), ({"master": ""}, "peers.mooncake.master")],
)
def test_settings_that_cannot_be_served_are_refused_by_name(flags: dict[str, str], named: str) -> None:
    """Off loopback without saying that one knows what that means, no master."""
    values = {"peers.backend": "mooncake", "peers.secrets": "s"} | {f"peers.mooncake.{k}": v for k, v in flags.items()}
    with pytest.raises(KvtierError) as refused:
        load(None, {}, values)
    assert refused.value.field == named
