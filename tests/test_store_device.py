"""The store's suite again, over a device tier of a few slots: engines read there in place and compute there."""

from __future__ import annotations

import pytest

import storekit
from test_store import *  # noqa: F403 - each of its tests is run once more here

SLOTS = 64 << 10
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, params=storekit.KINDS)
def a_few_slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store of these tests has a device tier."""
    monkeypatch.setattr(storekit, "DEVICE", [SLOTS, storekit.maker(request.param)])
