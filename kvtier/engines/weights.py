"""Digest of a model as it lies on disk, for engines that load weights out of the adapter's sight."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from kvtier.engines.volatile import VOLATILE
from kvtier.types import bad

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES: Final = 16
"""Pieces read of each tensor of a safetensors file."""
SAMPLE_BYTES: Final = 256
STEP: Final = 1 << 20
"""Other files: a piece is read in each of so many bytes, and at least PIECES of them: small files nearly whole."""
PIECES: Final = 4096
CHUNK: Final = 16 << 20
HEADER_MAX: Final = 256 << 20


def weights_digest(model: str, config: Mapping[str, Any], *settings: object, exact: bool = False) -> bytes:
    """32 bytes over a folder or file of weights, the effective configuration, and what else changes the weights.

    A spread sample of every tensor's bytes, or with `exact` all of them; the two never give the same digest. Raises
    bad_request where `model` is not a folder or file of weights here.
    """
    digest = hashlib.sha256(b"kvtier weights exact" if exact else b"kvtier weights sample")
    effective = {name: value for name, value in config.items() if name not in VOLATILE}
    _add(digest, json.dumps(effective, sort_keys=True, default=str).encode())
    _add(digest, json.dumps([str(setting) for setting in settings]).encode())
    found = list(weight_files(Path(model)))
    if not found:
        raise bad("model", f"a local folder or file with weights ({', '.join(WEIGHTS)})", model)
    for path in found:
        _add(digest, path.name.encode())
        _add(digest, whole(path) if exact else sample(path))
    return digest.digest()


def local_weights(model: str, revision: str | None, where: str | None = None, *, modelscope: bool = False) -> str:
    """The folder or file on this host that holds a model's weights; raises bad_request where there is none.

    `where`: the hub's cache that the engine downloads to, where it has one of its own. `modelscope`: names are not the
    hub's, so that what its cache has under this one is another model's.
    """
    if Path(model).exists():
        return model
    if modelscope:
        raise bad("model", "a folder with weights, or `fingerprint` in the configuration, with ModelScope", model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - comes with every engine that takes such names

    try:
        return str(snapshot_download(model, revision=revision, cache_dir=where, local_files_only=True))
    except Exception as exc:  # whatever the hub's client says
        raise bad("model", "weights on this host, or `fingerprint` in the configuration", f"{model} ({exc})") from exc


def config_of(model: str) -> dict[str, Any]:
    """The configuration beside a folder's weights; empty where they are a file that has its own inside."""
    path = Path(model) / "config.json"
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def weight_files(place: Path) -> Iterator[Path]:
    """Files of weights, in order of their names."""
    if place.is_file():
        yield place
    elif place.is_dir():
        yield from sorted(path for path in place.iterdir() if path.suffix in WEIGHTS)


def whole(path: Path) -> bytes:
    """Digest of every byte of a file."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            state.update(piece)
    return state.digest()


def sample(path: Path) -> bytes:
    """Digest of a file's size and a spread sample of its bytes: of each tensor, where it says where they lie."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        state.update(struct.pack("<Q", size))
        spans = _tensors(file, size) if path.suffix == ".safetensors" else [(0, size, max(PIECES, size // STEP))]
        for begin, end, count in spans:
            for at in range(begin, end, max(SAMPLE_BYTES, (end - begin) // count)):
                file.seek(at)
                state.update(file.read(min(SAMPLE_BYTES, end - at)))
    return state.digest()


def _tensors(file: BinaryIO, size: int) -> list[tuple[int, int, int]]:
    """(begin, end, samples) of the header, which is read whole, and of each tensor."""
    file.seek(0)
    raw = file.read(8)
    length = int.from_bytes(raw, "little")
    if len(raw) < 8 or length > min(size - 8, HEADER_MAX):
        raise bad("model", "safetensors files with a header", file.name)
    head = file.read(length)
    offsets = [entry["data_offsets"] for name, entry in json.loads(head).items() if name != "__metadata__"]
    data = 8 + length
    spans = [(data + lo, data + hi, SAMPLES) for lo, hi in sorted(offsets)]
    return [(0, data, max(1, data // SAMPLE_BYTES)), *spans]


def _add(digest: Any, field: bytes) -> None:
    """Append a length-prefixed field."""
    digest.update(struct.pack("<Q", len(field)) + field)
