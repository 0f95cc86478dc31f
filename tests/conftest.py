"""Fixtures that several tests share: a real daemon in a process of its own, and checks that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hfkit import Place
from kvtier.demo.daemon import Daemon

SETTLE_S = 5.0
"""Descriptors and threads that are being closed get so long to go."""


def open_files() -> dict[str, str]:
    """Descriptors of this process and what they stand for."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[link.name] = str(link.readlink())
        except OSError:
            continue  # the descriptor of this very listing
    return found


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """The test closes every descriptor and ends every thread that it began."""
    gc.collect()
    files, threads = open_files(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        left = {name: where for name, where in open_files().items() if files.get(name) != where}
        alive = [thread for thread in threading.enumerate() if thread not in threads]
        if not left and not alive:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: descriptors {left}, threads {alive}")
        time.sleep(0.02)


@contextlib.contextmanager
def running_in(home: Path) -> Iterator[Daemon]:
    """A kvtierd process with a small host tier and a disk tier, which must end well when asked to."""
    with Daemon(home, host="128MiB", disk="256MiB") as running:
        yield running
        if running.running:
            assert running.stop() == 0, running.log.read_text()[-2000:]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """See running_in."""
    with running_in(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all tests of a module that ask it for what it refuses, which leaves it as it was."""
    with running_in(tmp_path_factory.mktemp("standing")) as running:
        yield running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for the tests of a module that leave it alone."""
    with Daemon(tmp_path_factory.mktemp("shared"), host="256MiB", disk="256MiB") as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
def place(shared: Daemon, request: pytest.FixtureRequest) -> Place:
    """The shared daemon, empty as far as this test can see."""
    return Place(shared.socket, request.node.name.encode())


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Two busy cores shared with the daemon: more threads of torch only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
