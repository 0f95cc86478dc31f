"""Settings: the reference, any file at all, and what a running daemon takes."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import wire
from kvtier.config import LIVE, Config, document, documents, load, settings, value_of
from kvtier.control.call import Admin
from kvtier.demo.daemon import Daemon
from kvtier.paths import socket_path
from kvtier.types import Code, KvtierError

DOC = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
DEADLINE = 20.0
NAMES = [name for name, _ in settings()]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
TABLES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


@pytest.mark.skipif(not DOC.exists(), reason="read from a checkout")
def test_the_reference_is_what_the_code_says_and_names_every_key():
    """docs/configuration.md is generated and up to date; each key says what it means."""
    text = DOC.read_text()
    assert text == document()
    assert all(f"`{name}`" in text for name in NAMES)
    assert all(len(meaning) > 10 for _, _, meaning in documents())


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_as_a_file_give_settings_or_a_named_refusal(tmp_path_factory, raw):
    """A file that is no settings file is a bad_request, whatever it is."""
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(raw)
    try:
        assert isinstance(load(file, {}), Config)
    except KvtierError as exc:
        assert exc.code is Code.BAD_REQUEST
        assert exc.field


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=12), TABLES, max_size=4))
def test_any_values_give_checked_settings_or_a_named_refusal(values):
    """Whatever a key is given, nothing but settings in range or a bad_request comes out."""
    try:
        config = load(None, {}, values)
    except KvtierError as exc:
        assert exc.code is Code.BAD_REQUEST
    else:
        config.check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("otel.endpoint", "http://[::1"),
        ("otel.endpoint", "http://127.0.0.1:99999"),
        ("otel.endpoint", "http://127.0.0.1:otlp"),
        ("otel.endpoint", "ftp://127.0.0.1"),
        ("disk.bytes", "2000T"),
        ("disk.bytes", "64"),
        ("host.bytes", "64"),
        ("socket.path", "/tmp/" + "x" * 103),
        ("socket.admin", "/tmp/" + "x" * 103),
        ("socket.admin", str(socket_path())),
        ("events.publish", "tcp://127.0.0.1:99999"),
        ("events.publish", "tcp://127.0.0.1:0"),
        ("events.publish", "ipc://"),
    ],
)
def test_what_could_not_be_served_is_refused_by_its_name(name, value):
    """Not by an error of Python's, nor by memory that runs out at the start."""
    with pytest.raises(KvtierError, match=rf"{name}: expected"):
        load(None, {}, {name: value})


def set_live(daemon: Daemon, **values: str) -> dict[str, object]:
    """What the daemon says to Set."""
    with Admin(daemon.socket.with_name("admin.sock"), DEADLINE) as admin:
        named = {name.replace("__", "."): value for name, value in values.items()}
        return admin.ask(wire.Set(named), wire.Info).data["settings"]


def test_live_settings_are_set_all_or_none(daemon):
    """A wrong one, an unknown one and one that needs a restart refuse the whole request by name."""
    assert set_live(daemon).keys() == LIVE
    assert set_live(daemon, caps__instance="0.25", log_level="debug")["caps.instance"] == 0.25
    for values in ({"caps__instance": "7"}, {"caps__instans": "0.5"}, {"host__bytes": "1GiB"}, {"log_level": "loud"}):
        with pytest.raises(KvtierError) as caught:
            set_live(daemon, drain_s="1", **values)
        assert caught.value.code is Code.BAD_REQUEST
        assert caught.value.field == next(iter(values)).replace("__", ".")
    assert set_live(daemon)["drain_s"] == 10.0


def test_a_word_that_is_none_of_the_allowed_ones_is_refused_with_the_list():
    """People see what they may say."""
    with pytest.raises(KvtierError, match="expected one of debug, info, warning, error, got 'loud'") as caught:
        load(None, {}, {"log_level": "loud"})
    assert caught.value.field == "log_level"


def test_a_lower_cap_holds_for_engines_that_are_attached(daemon):
    """Their next lease or reservation meets the new bound."""
    set_live(daemon, caps__instance="0.1")
    with Admin(daemon.socket.with_name("admin.sock"), DEADLINE) as admin:
        from kvtier.client import Client

        with Client(daemon.socket, instance="e") as client:
            assert client.ping()
            set_live(daemon, caps__instance="0.05")
            (engine,) = admin.ask(wire.Status(), wire.Info).data["instances"]
    assert engine["cap_bytes"] == int((128 << 20) * 0.05)


def test_a_connection_cap_is_met_at_once(daemon):
    """One connection too many is told busy."""
    with Admin(daemon.socket.with_name("admin.sock"), DEADLINE) as admin:
        admin.ask(wire.Set({"caps.connections": "1"}), wire.Info)
        with socket.socket(socket.AF_UNIX) as late:
            late.settimeout(DEADLINE)
            late.connect(str(daemon.socket))
            assert b"busy" in late.recv(1000)
        admin.ask(wire.Set({"caps.connections": "100"}), wire.Info)


def logged(daemon: Daemon, text: str) -> str:
    """The log line with that text, once it is there."""
    end = time.monotonic() + DEADLINE
    while text not in daemon.log.read_text():
        assert time.monotonic() < end, daemon.log.read_text()
        time.sleep(0.02)
    return next(line for line in daemon.log.read_text().splitlines() if text in line)


def test_sighup_applies_what_can_change_and_names_what_cannot(tmp_path):
    """And a file that became wrong changes nothing."""
    file = tmp_path / "kvtierd.toml"
    file.write_text("drain_s = 7\n")
    with Daemon(tmp_path, host="16MiB", disk="0", flags=[f"--config={file}"]) as daemon:
        file.write_text("drain_s = 8\n[host]\nslab_bytes = '32MiB'\n[caps]\ninstance = 0.125\n")
        os.kill(daemon.pid, signal.SIGHUP)
        line = logged(daemon, "settings read again")
        assert "applied: caps.instance, drain_s; after a restart: host.slab_bytes" in line
        assert set_live(daemon)["caps.instance"] == 0.125
        file.write_text("drane_s = 8\n")
        os.kill(daemon.pid, signal.SIGHUP)
        assert "drain_s" in logged(daemon, "settings are not read again")
        assert set_live(daemon)["drain_s"] == 8.0
        assert daemon.stop() == 0


def test_every_setting_is_read_by_its_dotted_name():
    """Defaults are found where the names say."""
    assert all(value_of(Config(), name) == default for name, default, _ in documents())
