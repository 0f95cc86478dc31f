"""Keeps a user's own policy from breaking the store: at its first mistake LRU takes over, and somebody is told."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, Final

from kvtier.policy.base import Policy

ASKED: Final = (
    "gain", "found", "lose", "use", "fall", "split", "join", "lane", "rank", "pick", "spare", "share",
)  # fmt: skip
MOST_SPARED: Final = 1000
"""Victims that may be given another chance in a row, or as many as eight for each of the leaves among them."""

Own = type[Policy[Any]]


def guarded(own: Own, mistaken: Callable[[str, Exception], None]) -> Own:
    """The same policy, with Policy's own answers from its first mistake on; `mistaken` is told of that one.

    `mistaken` is given where it was and what. LRU has a lane of its own, behind the user's: the user's ranks and times
    are of no one order, and a rank that is above all times would never go. What was not used since the mistake stays
    where it is and goes first, so that no eviction has all leaves to move.
    """

    def start(self: Any, tier: int) -> None:
        Policy.__init__(self, tier)  # the user's may do without
        self.mistaken = False
        self.left = 0.0
        self.spared = 0
        self.chances = set()
        try:
            own.__init__(self, tier)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is the user's
            Policy.__init__(self, tier)
            _fail(self, "__init__", exc, mistaken)

    names = [name for name in ASKED if name == "lane" or getattr(own, name) is not getattr(Policy, name)]
    methods = {name: _wrapped(own, name, mistaken) for name in names}
    return type(own.__name__, (own,), {"__init__": start, "lanes": own.lanes + 1, **methods})


def _fail(policy: Any, where: str, exc: Exception, mistaken: Callable[[str, Exception], None]) -> None:
    policy.mistaken, policy.left = True, policy.now
    mistaken(where, exc)


def _wrapped(own: Own, name: str, mistaken: Callable[[str, Exception], None]) -> Callable[..., Any]:
    """A method that asks the user's until one failed."""
    theirs, check = getattr(own, name), _CHECKS.get(name)
    usual = _lru_lane if name == "lane" else getattr(Policy, name)

    @functools.wraps(theirs)
    def method(self: Any, *args: Any) -> Any:
        if not self.mistaken:
            try:
                answer = theirs(self, *args)
                if check is not None:
                    check(self, answer, args)
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is the user's
                _fail(self, name, exc, mistaken)
            else:
                return answer
        return usual(self, *args)

    return method


def _lru_lane(policy: Any, node: Any) -> int:
    """Where a leaf stands after a mistake."""
    lru: int = policy.lanes - 1
    stands: int = (node.queued >> 8 * policy.tier & 255) - 2  # kvtier.index.order notes 0 for none, 1 for the dead
    return stands if 0 <= stands < lru and node.time <= policy.left else lru


def _lane(policy: Any, answer: Any, args: Sequence[Any]) -> None:
    del args
    if not isinstance(answer, Integral) or not 0 <= int(answer) < policy.lanes - 1:
        raise ValueError(f"expected a lane of 0 to {policy.lanes - 2}, got {answer!r}")


def _rank(policy: Any, answer: Any, args: Sequence[Any]) -> None:
    del policy, args
    if not isinstance(answer, Real) or answer != answer:  # noqa: PLR0124 - it is no number then
        raise ValueError(f"expected a number, got {answer!r}")


def _pick(policy: Any, answer: Any, args: Sequence[Any]) -> None:
    _lane(policy, answer, args)
    if args[0][answer] is None:
        raise ValueError(f"expected a lane with a leaf in it, got {answer}")


def _spare(policy: Any, answer: Any, args: Sequence[Any]) -> None:
    if not answer:
        policy.spared = 0
        policy.chances.clear()
        return
    policy.spared += 1
    policy.chances.add(args[0])
    if policy.spared > max(MOST_SPARED, 8 * len(policy.chances)):
        policy.chances.clear()
        raise ValueError("no victim was let go, however often it was asked")


def _share(policy: Any, answer: Any, args: Sequence[Any]) -> None:
    del policy, args
    if not isinstance(answer, Integral) or int(answer) < 1:
        raise ValueError(f"expected a number of pages, at least 1, got {answer!r}")


_CHECKS: Final = {"lane": _lane, "rank": _rank, "pick": _pick, "spare": _spare, "share": _share}
