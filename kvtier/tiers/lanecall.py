"""One call in a lane, of whose end the tier's owner hears."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from kvtier.tiers.commits import code_of
from kvtier.types import Code

Done = Callable[[str], None]


class LaneCall:
    """A job; `ended` is posted to the owner with an error code, or an empty string."""

    def __init__(self, call: Callable[[], None], post: Callable[..., Any], ended: Done) -> None:
        self._call = call
        self._post = post
        self._ended = ended

    def run(self) -> None:
        """Make the call."""
        error = ""
        try:
            self._call()
        except OSError as caught:
            error = code_of(caught)
        self._tell(error)

    def drop(self) -> None:
        """The tier closes."""
        self._tell(Code.CLOSING.value)

    def _tell(self, error: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._post(self._ended, error)
