"""At which columns of a request the recurrent state is taken, to be kept as state points of its path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvtier.engines.states import States, Taken

FIRST_PAGES: Final = 8
"""Points lie so many pages from the root, twice as many, and so on: who parts between two loses half at most."""


class Points(StoppingCriteria):  # type: ignore[misc] # transformers is not there when types are checked
    """The state points of one request: what was taken, by column.

    A prefill stops at the last whole page that leaves a token to compute, where other paths part from this one, and at
    depths that double. An answer's last whole page is noticed while it is generated.
    """

    def __init__(self, states: States, cache: Any, page_tokens: int, pads: Sequence[int]) -> None:
        """`pads`: columns of padding of each row. Rows whose pages end at different columns have no points."""
        self.taken: dict[int, Taken] = {}
        self._states = states
        self._cache = cache
        self._page_tokens = page_tokens
        self._pads = pads
        self._answer = 0
        """The latest column of the answer that was taken."""

    @staticmethod
    def possible(page_tokens: int, pads: Sequence[int]) -> bool:
        """Whether the rows' pages end at the same columns."""
        return len({pad % page_tokens for pad in pads}) == 1

    def stops(self, loaded: int, columns: int, known: Sequence[int]) -> list[int]:
        """Where the prefill of `columns` columns stops, of which `loaded` are there; `known`: pages of each row."""
        size, pad = self._page_tokens, self._pads[0]
        last = (columns - 1 - pad) // size
        depths, depth = [last], FIRST_PAGES
        while depth < last:
            depths.append(depth)
            depth *= 2
        found = {pad + pages * size for pages in depths}
        found |= {mine + pages * size for mine, pages in zip(self._pads, known, strict=True)}
        return sorted(column for column in found if max(loaded, *self._pads) < column <= pad + last * size)

    def take(self, column: int) -> None:
        """The cache has seen so many columns."""
        self.taken[column] = self._states.take(self._cache)

    def watch(self, criteria: Any) -> Any:
        """Criteria of a `generate` that also notice the answer's last whole page."""
        return StoppingCriteriaList([*(criteria or ()), self])

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """After each token: never stops it."""
        del scores, kwargs
        column = input_ids.shape[1] - 1  # the last token is not computed yet
        if column > max(self._pads) and (column - self._pads[0]) % self._page_tokens == 0 and column not in self.taken:
            self.taken.pop(self._answer, None)
            self._answer = column
            self.take(column)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def items(self, row: int) -> dict[int, Any]:
        """The state items of one row by the page that they end."""
        pad = self._pads[row]
        return {
            (column - pad) // self._page_tokens - 1: self._states.pack(taken, row)
            for column, taken in self.taken.items()
        }
