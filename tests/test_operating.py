"""The operating guide, the alerts and the board name what there is: metrics, labels, verbs, settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import kvtier
from kvtier.ctl import main
from kvtier.types import Code

DOCS = Path(__file__).resolve().parent.parent / "docs"
GUIDE = (DOCS / "operating.md").read_text()
METRICS = dict(re.findall(r"^\| `(kvtier_\w+)` \| (\w+) ", (DOCS / "metrics.md").read_text(), re.MULTILINE))
LABELS = dict(
    re.findall(r"^\| `(kvtier_\w+)` \| \w+ \| (?:`(\w+)`)? ", (DOCS / "metrics.md").read_text(), re.MULTILINE)
)


def named(text: str) -> set[str]:
    """Metric names in an expression."""
    return set(re.findall(r"kvtier_\w+", text))


def exists(name: str) -> bool:
    """Whether a series of that name is exported."""
    return name in METRICS or METRICS.get(name.removesuffix("_bucket")) == "histogram"


def rules() -> list[dict]:
    """The alerts."""
    yaml = pytest.importorskip("yaml", reason="no YAML parser is installed")
    return yaml.safe_load((DOCS / "monitoring" / "alerts.yml").read_text())["groups"][0]["rules"]


def test_alerts_ask_for_metrics_that_exist_and_each_is_explained() -> None:
    """A rule over a misspelt name never fires; an alert nobody can read is noise."""
    for rule in rules():
        assert named(rule["expr"]), rule
        assert all(map(exists, named(rule["expr"]))), rule["expr"]
        assert f"### {rule['alert']}\n" in GUIDE, rule["alert"]
        assert rule["annotations"]["summary"]
    assert set(re.findall(r"^### (\w+)$", GUIDE, re.MULTILINE)) == {rule["alert"] for rule in rules()}


def test_labels_in_alerts_and_board_are_those_of_their_metrics() -> None:
    """A selector by a label that a metric lacks selects nothing."""
    board = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) > 10
    for expr in [*asked, *(rule["expr"] for rule in rules())]:
        assert all(map(exists, named(expr))), expr
        for name, inside in re.findall(r"(kvtier_\w+)\{([^}]*)\}", expr):
            for label in re.findall(r"(\w+)=", inside):
                assert label in {"instance", LABELS.get(name.removesuffix("_bucket"))}, (label, expr)


def test_the_guide_names_verbs_and_settings_that_exist() -> None:
    """Every `kvtierctl verb` and `section.key` in it."""
    settings = (DOCS / "configuration.md").read_text()
    for verb in re.findall(r"kvtierctl ([a-z]+)", GUIDE):
        assert main.get_command(None, verb) is not None, verb  # type: ignore[arg-type]
    for key in re.findall(r"`([a-z]+\.[a-z_]+)`", GUIDE):
        assert f"`{key}`" in settings, key
    for link in re.findall(r"\]\(([^)]+)\)", GUIDE):
        inside = link.removeprefix("../kvtier/")  # of the package, which may be installed elsewhere
        assert (DOCS / link if inside == link else Path(kvtier.__file__).parent / inside).exists(), link


def test_every_alarm_of_a_tier_has_an_alert_and_a_row() -> None:
    """Each metric that says sick or broken is asked for by an alert, and its name is no other's."""
    asked = set().union(*(named(rule["expr"]) for rule in rules()))
    assert {name for name in METRICS if name.endswith("_sick") or "broken" in name} <= asked


def test_every_code_of_a_refusal_says_what_to_do() -> None:
    """In the protocol for who writes engines, in the guide for who runs them; neither has a code that there is not."""
    for text in (GUIDE, (DOCS / "protocol.md").read_text()):
        held = re.findall(r"^\| code \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
        assert sorted(re.findall(r"^\| `(\w+)` \|", held[0], re.MULTILINE)) == sorted(Code)


def test_every_fault_has_a_written_outcome_and_a_test() -> None:
    """docs/failures.md has one row for each test of tests/test_faults.py; the files that it names are there."""
    text = (DOCS / "failures.md").read_text()
    tests = Path(__file__).parent / "test_faults.py"
    held = re.findall(r"^def (test_\w+)", tests.read_text(), re.MULTILINE)
    assert sorted(re.findall(r"\| `(test_\w+)` \|$", text, re.MULTILINE)) == sorted(held)
    for name in re.findall(r"`tests/(\w+\.py)`", text):
        assert (tests.parent / name).exists(), name


def test_the_security_model_names_tests_that_there_are() -> None:
    """What docs/security.md says to be guarded is guarded by a test of that name."""
    held = {
        name
        for path in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "security.md").read_text()))
    assert named
    assert named <= held
