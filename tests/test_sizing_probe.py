"""`kvtierctl probe` measures real memory, disk and sockets, and writes what the planner reads."""

import errno
import json
import socketserver
import sys
import threading
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from kvtier.probe import LANES, Sweep, measure, pinned
from kvtier.sizing.__main__ import main
from kvtier.sizing.hardware import Hardware, Source
from kvtier.types import KvtierError

QUICK = Sweep(1 << 20, 0.001)


class Echo(socketserver.BaseRequestHandler):
    """Sends back what it gets."""

    def handle(self):
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


class Rude(socketserver.BaseRequestHandler):
    """Hangs up."""

    def handle(self):
        self.request.recv(10)


@pytest.fixture
def serve():
    """Starts a service on loopback and gives its address."""
    running = []

    def start(handler):
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        running.append((server, thread))
        return f"127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


def test_what_probe_writes_is_what_the_planner_reads(tmp_path, serve):
    """Memory, disk, loopback and a peer come back as measured links with the bandwidths of the report."""
    target = tmp_path / "deep" / "hardware.toml"
    report = measure(tmp_path, serve(Echo), QUICK, target)
    rows = {row["link"]: row for row in report.as_json()["links"]}
    hardware = Hardware(target)
    assert rows.keys() >= {"memcpy", "disk", "loopback", "peer"}
    for name, row in rows.items():
        link = hardware.link(name)
        assert link.source is Source.MEASURED
        assert link.read_bps == pytest.approx(row["read_bytes_per_s"], rel=1e-3)
        assert link.write_bps == pytest.approx(row["write_bytes_per_s"], rel=1e-3)
    assert f"{LANES} at a time" in rows["disk"]["note"]


def test_probing_leaves_nothing_behind(tmp_path):
    """The scratch file is gone, and a dry run writes no file."""
    measure(tmp_path, None, QUICK, None)
    assert list(tmp_path.iterdir()) == []


def test_probing_again_keeps_what_a_person_wrote(tmp_path):
    """Prices and comments stay, measured links are replaced."""
    target = tmp_path / "hardware.toml"
    target.write_text("# ours\n[price]\ndram_gb_month = 1.25\n")
    for _ in range(2):
        measure(tmp_path, None, QUICK, target)
    text = target.read_text()
    assert text.startswith("# ours")
    assert text.count("[link.disk]") == 1
    assert Hardware(target).price("dram_gb_month") == (1.25, Source.EXACT)


@pytest.mark.parametrize("peer", ["nonsense", "host:", ":80", "127.0.0.1:1"])
def test_a_peer_that_is_not_there_is_named(tmp_path, peer):
    """`peer`, and what was expected of it."""
    with pytest.raises(KvtierError, match="peer: expected"):
        measure(tmp_path, peer, QUICK, None)


def test_a_peer_that_does_not_echo_is_named(tmp_path, serve):
    """Hanging up in the middle is a refusal, not a hang or a traceback."""
    with pytest.raises(KvtierError, match="peer: expected an echo service that sends back all"):
        measure(tmp_path, serve(Rude), QUICK, None)


def test_what_cannot_be_written_is_named_and_nothing_is_lost(tmp_path, monkeypatch):
    """A folder that is none, a disk without room for the file to measure, and for the table that a person wrote."""
    with pytest.raises(KvtierError, match=r"disk: expected a folder that can be written to"):
        measure(tmp_path / "gone", None, QUICK, None)
    (tmp_path / "file").write_text("")
    with pytest.raises(KvtierError, match=r"write: expected a file that can be written"):
        measure(tmp_path, None, QUICK, tmp_path / "file" / "h.toml")
    mine = tmp_path / "h.toml"
    mine.write_text("[price]\ndram_gb_month = 1.5\n")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(KvtierError, match=r"disk: .*No space left"):
            measure(tmp_path, None, QUICK, None)
    (tmp_path / "h.toml.part").symlink_to("/dev/full")
    with pytest.raises(KvtierError, match=r"write: .*No space left"):
        measure(tmp_path, None, QUICK, mine)
    assert mine.read_text() == "[price]\ndram_gb_month = 1.5\n"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "h.toml"}


def test_too_small_a_sweep_is_refused(tmp_path):
    """Less than a MiB tells nothing about bandwidth."""
    with pytest.raises(KvtierError, match="size: expected at least 1MiB"):
        measure(tmp_path, None, Sweep(4096), None)


def test_the_command_writes_where_it_is_told(tmp_path, monkeypatch):
    """`probe --write FILE --json` prints the links and names the file."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["probe", "--write", "mine.toml", "--size", "1MiB", "--each", "1ms", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["written"] == "mine.toml"
    assert (tmp_path / "mine.toml").is_file()


def test_a_gpu_without_room_costs_no_other_link(tmp_path, monkeypatch):
    """An engine has all of its memory: that is said, and everything else is measured."""

    def full(size):
        raise MemoryError(f"Out of memory allocating {size} bytes")

    cuda = SimpleNamespace(runtime=None, alloc_pinned_memory=bytearray, alloc=full)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(is_available=lambda: True, cuda=cuda, __spec__=True))
    found = measure(tmp_path, None, QUICK, None)
    assert any("Out of memory" in note for note in found.notes)
    assert {row[0] for row in found.tables[0].rows} == {"memcpy", "disk", "loopback"}


@pytest.mark.gpu
def test_pinned_copies_are_measured_both_ways():
    """With a GPU, both directions of the host link come back as one link."""
    copies = pinned(QUICK)
    if copies is None:
        pytest.skip("no GPU, or no cupy")
    assert copies.read.bytes_per_s > 1e9
    assert copies.write.bytes_per_s > 1e9
