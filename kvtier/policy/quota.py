"""Quotas as text: who may have how much of which tier."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvtier.types import SCOPE, Tier, bad

KINDS: Final = {
    "cache": (re.compile(r"[0-9a-f]{1,64}", re.IGNORECASE), "the beginning of an id in hex"),
    "tenant": (re.compile(r"([0-9a-f]{2})+", re.IGNORECASE), "a salt in hex"),
    "scope": (SCOPE, "uid:N or uid:N:LABEL"),
}
"""What a rule may be about: how that is named, for programs and for people."""
TIERS: Final = {"device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}
MOST: Final = 64


class Rule(NamedTuple):
    """Caches that this is about share the limits, in bytes by tier."""

    kind: str
    """cache (the beginning of its id, in hex), tenant (its salt, in hex) or scope (such as uid:1000)."""
    name: str
    limits: Mapping[int, int]

    def fits(self, cache_id: bytes, salt: bytes, scope: str) -> bool:
        """Whether a cache is among them."""
        if self.kind == "cache":
            return cache_id.hex().startswith(self.name)
        return self.name == (salt.hex() if self.kind == "tenant" else scope)


def parse(text: str, size: Callable[[str], int]) -> list[Rule]:
    """The rules of `tenant=6163 host=2GiB disk=20GiB; scope=uid:7 host=1GiB`; the first that fits a cache is its rule.

    Raises bad_request.
    """
    rules = []
    for part in filter(None, (each.strip() for each in text.split(";"))):
        words = [word.partition("=") for word in part.split()]
        (kind, _, name), *rest = words
        if kind not in KINDS or not name:
            raise bad("quotas", f"a rule that begins with one of {', '.join(KINDS)} and a value", part)
        right, called = KINDS[kind]
        if not right.fullmatch(name):
            raise bad("quotas", f"{kind}= and {called}", name)
        limits = {}
        for tier, _, value in rest:
            try:
                limits[int(TIERS[tier])] = size(value)
            except (KeyError, ValueError):
                raise bad("quotas", "device, host or disk and a size, such as host=2GiB", f"{tier}={value}") from None
        if not limits:
            raise bad("quotas", "a limit, such as host=2GiB", part)
        rules.append(Rule(kind, name.lower() if kind != "scope" else name, limits))
    if len(rules) > MOST:
        raise bad("quotas", f"at most {MOST} rules", len(rules))
    return rules
