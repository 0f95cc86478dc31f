"""The deployment examples name settings, files and commands that there are."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvtier import config
from kvtier.config import Config

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "docs" / "deploy"
SHM = "/dev/shm"
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


def objects(name: str) -> list[dict[str, Any]]:
    """What a file would make."""
    yaml = pytest.importorskip("yaml", reason="no YAML parser is installed")
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pods(name: str) -> list[dict[str, Any]]:
    """The specs of its pods."""
    made = objects(name)
    return [each["spec"]["template"]["spec"] if each["kind"] == "DaemonSet" else each["spec"] for each in made]


def container(name: str, which: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A container, and its pod."""
    return next((each, pod) for pod in pods(name) for each in pod["containers"] if each["name"] == which)


def told(made: dict[str, Any]) -> dict[str, str]:
    """A container's environment."""
    return {each["name"]: each["value"] for each in made["env"]}


def gib(text: str) -> int:
    """A size in GiB."""
    return int(text.removesuffix("B").removesuffix("Gi"))


EXAMPLES = pytest.mark.parametrize("name", ["sidecar.yaml", "daemonset.yaml"])


@EXAMPLES
def test_a_pod_gives_the_daemon_more_memory_than_its_arena_and_longer_than_its_drain(name: str) -> None:
    """The arena counts against the container; a kill in mid-drain would lose what could have been durable."""
    daemon, pod = container(name, "kvtier")
    assert gib(told(daemon)["KVTIER_HOST_BYTES"]) < gib(daemon["resources"]["limits"]["memory"])
    drain = float(told(daemon).get("KVTIER_DRAIN_S", Config().drain_s))
    assert drain < pod.get("terminationGracePeriodSeconds", 30)
    for each in pods(name):
        mounted = {mount["name"] for made in each["containers"] for mount in made["volumeMounts"]}
        assert mounted == {volume["name"] for volume in each["volumes"]}


@EXAMPLES
def test_the_settings_are_ones_that_the_daemon_takes(name: str) -> None:
    """All of them together, by its own reader."""
    made = config.load(env=told(container(name, "kvtier")[0]))
    assert made.device.bytes == 8 << 30
    assert made.device.which == "cuda:0"


@EXAMPLES
def test_engine_and_daemon_have_what_cuda_ipc_needs(name: str) -> None:
    """The same GPUs by the same runtime, one IPC namespace and one /dev/shm, pids that differ, one user, one socket."""
    (engine, its), (daemon, ours) = container(name, "engine"), container(name, "kvtier")
    assert engine["resources"]["limits"]["nvidia.com/gpu"] >= 1
    assert "nvidia.com/gpu" not in daemon["resources"]["limits"], "a second one would be another GPU"
    assert told(daemon)["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert "compute" in told(daemon)["NVIDIA_DRIVER_CAPABILITIES"].split(",")
    assert ours["runtimeClassName"] == "nvidia"
    if its == ours:
        assert ours["shareProcessNamespace"], "both would be process 1"
        mounts = [
            mount["name"] for made in (engine, daemon) for mount in made["volumeMounts"] if mount["mountPath"] == SHM
        ]
        assert len(mounts) == 2
        assert mounts[0] == mounts[1]
        (volume,) = [each for each in ours["volumes"] if each["name"] in mounts]
        assert volume["emptyDir"]["medium"] == "Memory"
    else:
        for pod in (its, ours):
            assert pod["hostIPC"] and pod["hostPID"]  # noqa: PT018 - one thing: the node's namespaces
    assert its["securityContext"]["runAsUser"] == ours["securityContext"]["runAsUser"]
    assert told(engine)["KVTIER_SOCKET"].startswith("/run/kvtier/")


def test_the_image_is_built_with_the_extras_that_are_asked_for(tmp_path: Path) -> None:
    """The recipe's own line, in a shell whose pip says what it was told; the examples' tag is such an extra."""
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r'^ARG EXTRAS=""$', text, re.MULTILINE)
    (line,) = re.findall(r"^RUN (pip install [^&]*/tmp/[^&]*) &&", text, re.MULTILINE)
    (tmp_path / "kvtier-1.0-py3-none-any.whl").touch()
    (tmp_path / "pip").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (tmp_path / "pip").chmod(0o755)
    line = line.replace("/tmp/", f"{tmp_path}/")
    for extras in ("", "cuda12", "cuda13,events"):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EXTRAS": extras}
        said = subprocess.run(["sh", "-ec", line], env=env, check=True, capture_output=True, text=True).stdout
        wanted = f"[{extras}]" if extras else ""
        assert said.splitlines()[-1] == f"{tmp_path}/kvtier-1.0-py3-none-any.whl{wanted}"
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"EXTRAS(?:=|: )([a-z0-9]+)", text)) == {"cuda12"} <= known.keys()
    assert set(re.findall(r"cuda12,(\w+),(\w+)", text)[0]) <= known.keys()
    assert {container(name, "kvtier")[0]["image"] for name in ("sidecar.yaml", "daemonset.yaml")} == {"kvtier:cuda12"}
