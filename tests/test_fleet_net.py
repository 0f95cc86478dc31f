"""Hosts as network namespaces: slow links, partitions, half-open connections. Pages go under a seal here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("netfleet.py")
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--fork"]


def play(scenario: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a scenario in namespaces of its own."""
    roots = [str(SCRIPT.parent), str(SCRIPT.parent.parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    command = [*UNSHARE, sys.executable, str(SCRIPT), scenario, str(home)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module", autouse=True)
def namespaces(tmp_path_factory) -> None:
    """Skips, and says why, where this machine gives no namespaces or has no iproute2."""
    missing = [tool for tool in ("unshare", "ip", "tc", "mount") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    tried = play("network", tmp_path_factory.mktemp("net"))
    if tried.returncode:
        pytest.skip(f"network namespaces are not allowed here: {tried.stderr.strip().splitlines()[-1]}")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["slow_link", "partition", "half_open"])
def test_hosts_behind_bad_links(tmp_path: Path, scenario: str) -> None:
    """See netfleet.py: at most one deadline and a miss, no slot is lost, and 5 s after the fault all is as before."""
    done = play(scenario, tmp_path)
    logs = "".join(path.read_text()[-2000:] for path in tmp_path.glob("*/kvtierd.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
