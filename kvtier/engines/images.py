"""Images of a prompt: what page keys must say of them, as their placeholder tokens are all alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import torch

from kvtier.identity import EXTRA_BYTES
from kvtier.types import bad

INPUTS: Final = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes")
"""Arguments of `generate` that say what the images are."""
TYPES: Final = "mm_token_type_ids"
"""Says which tokens are placeholders, as the tokens do."""


def placeholder(config: Any) -> int | None:
    """The token that stands for a part of an image; None for models that see none."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(token := getattr(config, name, None), int):
            return token
    return None


def forget_positions(model: Any) -> None:
    """Let a model compute where tokens after images are: some keep that of the last prompt for the next one."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


class Images:
    """The images of one sequence. Each is wholly in the cache that a request begins with, or not at all."""

    def __init__(self, token: int | None, ids: Any, given: Mapping[str, Any]) -> None:
        """`ids`: [tokens]; `given`: tensors of INPUTS and TYPES. Raises bad_request where they do not go together."""
        spots = [] if token is None else (ids == token).nonzero().view(-1).tolist()
        types = given.get(TYPES)
        self._inputs = {name: given[name] for name in INPUTS if given.get(name) is not None}
        if types is not None and not self._inputs and bool(types.any()):
            raise bad(TYPES, "0 where there are no images", types)
        if types is not None and self._inputs and types[0, -len(ids) :].nonzero().view(-1).tolist() != spots:
            raise bad(TYPES, "1 for the tokens of images and 0 for others", types)
        if self._inputs and not spots:
            raise bad("input_ids", f"placeholders ({token}) for the images", next(iter(self._inputs)))
        self._runs = _runs(spots) if self._inputs else []
        self._parts = _parts(self._inputs, [end - start for start, end in self._runs])
        if self._parts is None:  # nobody knows which part of the input is which image's: they are one
            self._runs, self._parts = [(spots[0], spots[-1] + 1)], [self._inputs]
        self._digests = [_digest(part) for part in self._parts]

    def extras(self, page_tokens: int) -> dict[int, bytes]:
        """Digests of the pages that hold placeholders: of the images there and where each begins."""
        found: dict[int, Any] = {}
        for (start, end), digest in zip(self._runs, self._digests, strict=True):
            for page in range(start // page_tokens, (end - 1) // page_tokens + 1):
                found.setdefault(page, hashlib.sha256()).update(digest + start.to_bytes(8, "little"))
        return {page: sha.digest()[:EXTRA_BYTES] for page, sha in found.items()}

    def fits(self, columns: int) -> int:
        """The most columns, up to so many, after which a request can go on: not within an image.

        Models that place tokens by a grid of all images take all images or none.
        """
        whole = "image_grid_thw" in self._inputs
        runs = [(self._runs[0][0], self._runs[-1][1])] if whole and self._runs else self._runs
        return min([columns, *(start for start, end in runs if start < columns < end)])

    def rest(self, columns: int) -> dict[str, Any]:
        """What `generate` is to be given of the images where so many columns are there."""
        assert self._parts is not None
        left = [part for (start, _), part in zip(self._runs, self._parts, strict=True) if start >= columns]
        if len(left) == len(self._parts):
            return dict(self._inputs)
        if "image_grid_thw" in self._inputs:
            return {"image_grid_thw": self._inputs["image_grid_thw"]}  # says where the tokens after them are
        axis = _axis(self._inputs)
        return {name: torch.cat([part[name] for part in left], axis) for name in left[0]} if left else {}


def _runs(spots: list[int]) -> list[tuple[int, int]]:
    """Stretches [start, end) of placeholders that follow each other."""
    cuts = [at for at, (before, after) in enumerate(pairwise(spots), 1) if after != before + 1]
    return [(spots[lo], spots[hi - 1] + 1) for lo, hi in pairwise([0, *cuts, len(spots)])]


def _axis(inputs: Mapping[str, Any]) -> int:
    """The axis that counts images: the second where the first is that of a batch."""
    return int("pixel_values" in inputs and inputs["pixel_values"].ndim == 5)


def _parts(inputs: Mapping[str, Any], lengths: list[int]) -> list[dict[str, Any]] | None:
    """What belongs to each stretch of placeholders, of such lengths; None where that cannot be told for sure.

    It can where each image surely has as many tokens as its stretch: those of a grid in proportion to it, and those
    of tensors of one shape equally many.
    """
    if not inputs:
        return []
    if (grid := inputs.get("image_grid_thw")) is not None:
        sizes = grid.prod(-1).tolist()
        alike = [size * lengths[0] for size in sizes] == [length * sizes[0] for length in lengths]
        if not alike or sum(sizes) != len(inputs["pixel_values"]) or len(inputs) != 2:
            return None
        pixels = inputs["pixel_values"].split(sizes)
        return [{"pixel_values": part, "image_grid_thw": row} for part, row in zip(pixels, grid, strict=True)]
    axis = _axis(inputs)
    shapes = {tuple(tensor.shape[: axis + 1]) for tensor in inputs.values()}
    if shapes != {(1, len(lengths))[1 - axis :]} or len(set(lengths)) > 1 or "image_sizes" in inputs:
        return None
    split = {name: tensor.split(1, axis) for name, tensor in inputs.items()}
    return [{name: rows[number] for name, rows in split.items()} for number in range(len(lengths))]


def _digest(part: Mapping[str, Any]) -> bytes:
    """SHA-256 of the names, types, shapes and bytes of tensors."""
    sha = hashlib.sha256()
    for name, tensor in sorted(part.items()):
        raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)} {len(raw)};".encode()
        sha.update(head)
        sha.update(raw.data)
    return sha.digest()
