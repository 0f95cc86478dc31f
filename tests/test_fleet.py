"""Daemons that are each other's peers, as processes on loopback: hits across hosts, and hosts that die or hang."""

from __future__ import annotations

from pathlib import Path

from fleetkit import Fleet, Host, until

PATHS = [[100 * n + page for page in range(5)] for n in range(1, 13)]
"""Twelve prompts without a common page: every host is home of some."""


def stored(host: Host) -> None:
    """All prompts computed on one host, and pushed to their homes."""
    for path in PATHS:
        assert host.put(path) == len(path)
    until(host.settled)


def test_pages_computed_on_one_host_are_served_on_another_bit_exact(tmp_path: Path) -> None:
    """With one copy a page each, an engine on any host gets every page that another host computed."""
    with Fleet(tmp_path, replicas=1) as hosts:
        stored(hosts["a"])
        assert hosts["a"].count("pages_pushed_peer") > 0
        for name in "bc":
            assert [hosts[name].get(path) for path in PATHS] == [len(path) for path in PATHS]
            assert hosts[name].count("pages_loaded_peer") > 0
            hosts[name].sound()


def test_with_two_copies_no_single_lost_host_loses_a_page(tmp_path: Path) -> None:
    """R=2: after kill -9 of the host that computed everything, every page is served by the others."""
    with Fleet(tmp_path, replicas=2) as hosts:
        stored(hosts["a"])
        hosts["a"].daemon.kill()
        for name in "bc":
            assert [hosts[name].get(path) for path in PATHS] == [len(path) for path in PATHS]
            hosts[name].sound()
