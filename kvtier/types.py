"""Vocabulary shared by every part: tiers, groups, page states, errors. Imports nothing of kvtier."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Final

PAGE_ALIGN: Final = 4096
"""Slots and disk cells are multiples of this many bytes (O_DIRECT and mmap granularity)."""

NO_COPY: Final = -1
"""The handle that says: this tier holds no copy of this page."""

RUN_PAGES: Final = 64
"""At most this many consecutive pages are written, evicted or loaded as one run."""


SCOPE: Final = re.compile(r"uid:\d{1,10}(:.+)?", re.DOTALL)
"""What a trust scope is called: by its user, and by the label that engines gave."""


class Tier(enum.IntEnum):
    """Where a copy of a page can live, fastest first."""

    DEVICE = 0
    HOST = 1
    PEER = 2
    DISK = 3


class Kind(enum.StrEnum):
    """The rule by which a group of layers keeps KV."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


class Presence(enum.IntEnum):
    """What `exists` says of one key."""

    MISS = 0
    PENDING = 1
    DEVICE = 2
    HOST = 3
    PEER = 4
    DISK = 5


class Code(enum.StrEnum):
    """Why a request was refused; the wire carries the value."""

    BAD_REQUEST = "bad_request"  # a field is wrong: the message names it and what was expected
    UNKNOWN = "unknown"  # a handle, lease, reservation, region or cache that is not (or no longer) yours
    VERSION = "version"  # protocol or format version not spoken here
    NO_SPACE = "no_space"  # no room could be made before the deadline
    OVER_CAP = "over_cap"  # the instance holds as much as it may
    BUSY = "busy"  # a bounded queue is full
    CANCELLED = "cancelled"  # drained: no byte moves any more
    IO = "io"  # a tier failed
    CLOSING = "closing"  # the daemon is draining
    FORBIDDEN = "forbidden"  # verb not allowed on this socket or to this scope
    INTERNAL = "internal"  # a bug: logged with its traceback


class KvtierError(Exception):
    """A refusal with a code and a sentence; `field` names the input that was wrong, if one was."""

    def __init__(self, code: Code, message: str, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field

    def data(self) -> dict[str, str]:
        """As a plain tree, for programs."""
        return {"code": self.code.value, "message": self.message, "field": self.field}

    def __str__(self) -> str:
        """The sentence, prefixed with the field it is about."""
        return f"{self.field}: {self.message}" if self.field else self.message


class Changed(Exception):  # noqa: N818 - no error: sums of what changed between two looks say nothing
    """What was being checked, step by step, changed between two steps."""


def bad(field: str, expected: str, got: object = None) -> KvtierError:
    """A bad_request error naming the field and what was expected of it."""
    tail = "" if got is None else f", got {got!r:.100}"
    return KvtierError(Code.BAD_REQUEST, f"expected {expected}{tail}", field)


def align_up(n: int, to: int = PAGE_ALIGN) -> int:
    """The smallest multiple of `to` that is >= n."""
    return -(-n // to) * to


def stretches(row: Iterable[int], nothing: int = NO_COPY) -> list[tuple[int, int]]:
    """[begin, end) of the positions in a row that follow each other and do not hold `nothing`."""
    out: list[tuple[int, int]] = []
    for at, value in enumerate(row):
        if value == nothing:
            continue
        if out and out[-1][1] == at:
            out[-1] = (out[-1][0], at + 1)
        else:
            out.append((at, at + 1))
    return out
