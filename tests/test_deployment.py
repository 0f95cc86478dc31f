"""The deployment examples name settings, files and commands that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.config import Config

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "docs" / "deploy"
SETTINGS = (ROOT / "docs" / "configuration.md").read_text()


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda path: path.name)
def test_every_variable_is_a_setting_and_every_path_the_default_one(path: Path) -> None:
    """A misspelt variable would be refused at start; a wrong path would be found by nobody."""
    text = path.read_text()
    for name in set(re.findall(r"KVTIER_\w+", text)) - {"KVTIER_SOCKET"}:
        assert f"`{name}`" in SETTINGS, name
    assert re.search(r"/run/kvtier\b", text)
    assert re.search(r"/var/lib/kvtier\b", text)
    assert "ping" in text


@pytest.mark.parametrize("name", ["sidecar.yaml", "daemonset.yaml"])
def test_a_pod_gives_the_daemon_more_memory_than_its_arena_and_longer_than_its_drain(name: str) -> None:
    """The arena counts against the container; a kill in mid-drain would lose what could have been durable."""
    yaml = pytest.importorskip("yaml", reason="no YAML parser is installed")
    data = yaml.safe_load((DEPLOY / name).read_text())
    pod = data["spec"]["template"]["spec"] if data["kind"] == "DaemonSet" else data["spec"]
    daemon = next(each for each in pod["containers"] if each["name"] == "kvtier")
    told = {each["name"]: each["value"] for each in daemon["env"]}
    arena = int(told["KVTIER_HOST_BYTES"].removesuffix("GiB"))
    assert arena < int(daemon["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert pod.get("hostPID") or pod.get("shareProcessNamespace"), "engines' ends are seen late, before Linux 6.5"
    drain = float(told.get("KVTIER_DRAIN_S", Config().drain_s))
    assert drain < pod.get("terminationGracePeriodSeconds", 30)
    mounted = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]} == mounted
