"""Files of weights for tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np


def safetensors(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A file of weights."""
    head, at = {}, 0
    for name, values in tensors.items():
        head[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    raw = json.dumps(head).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(values.tobytes() for values in tensors.values()))
    return path
