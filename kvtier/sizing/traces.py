"""Request traces from files: npz (plain or in zstd), Mooncake JSON lines, LMCache lookup-hash JSON lines."""

from __future__ import annotations

import ast
import gzip
import importlib
import io
import json
import math
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from kvtier.sizing.curve import Trace
from kvtier.types import bad

_ELEMENTS: Final = {"torch.float32": 4, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
_CODES: Final = {"|i1": "b", "<i2": "h", "<i4": "i", "<i8": "q", "|u1": "B", "<u4": "I"}


def load_trace(paths: Iterable[Path], limit: int = 0) -> Trace:
    """The requests of one npz file, or of JSON-lines files in the order given; `limit` keeps the first ones.

    Raises KvtierError naming the field and the line that is wrong.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    if not files:
        raise bad("trace", "a .npz, .npz.zst or .jsonl file, or a folder of .jsonl files")
    if ".npz" in files[0].name:
        return _from_npz(files[0], limit)
    trees = _Tree(files[0].name)
    for file in files:
        for number, line in _lines(file):
            if line.strip():
                trees.add(_parsed(line, f"{file.name}:{number}"), f"{file.name}:{number}")
            if limit and len(trees.leaf) >= limit:
                return trees.trace()
    return trees.trace()


def _open(path: Path) -> bytes:
    """The bytes of a file, unpacked where its name says zst."""
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise bad("trace", f"a readable file ({exc.strerror})", str(path)) from None
    if path.suffix == ".zst":
        zstd = importlib.import_module("zstandard")
        try:
            with zstd.ZstdDecompressor().stream_reader(io.BytesIO(raw)) as stream:
                return bytes(stream.read())
        except zstd.ZstdError as exc:
            raise bad("trace", f"zstd data ({exc})", str(path)) from None
    try:
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as exc:
        raise bad("trace", f"gzip data ({exc})", str(path)) from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    return enumerate(_open(path).decode("utf-8", "replace").splitlines(), 1)


def _parsed(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as exc:
        raise bad(where, f"a JSON object ({exc})") from None
    if not isinstance(record, dict):
        raise bad(where, "a JSON object", record)
    return record


class _Tree:
    """Requests as they come in, each id a node under its parent: equal ids under other parents are other blocks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.block = 0
        self.token_bytes = 0
        self.nodes: dict[tuple[int, Any], int] = {}
        self.parent = array("l")
        self.leaf: list[int] = []
        self.input: list[int] = []
        self.output: list[int] = []
        self.time: list[float] = []

    def add(self, record: Mapping[str, Any], where: str) -> None:
        """One request in either form."""
        lookup = "chunk_hashes" in record
        ids = record.get("chunk_hashes" if lookup else "hash_ids")
        if not isinstance(ids, list):
            raise bad(f"{where} hash_ids", "a list, or chunk_hashes in a lookup log", ids)
        block = _count(record, "chunk_size" if lookup else "block_size", where, 0 if lookup else 512)
        if self.block and block != self.block:
            raise bad(f"{where} block_size", f"{self.block} as on the lines before", block)
        self.block = block
        node = -1
        for block_id in ids:
            if not isinstance(block_id, (int, str)):
                raise bad(f"{where} hash_ids", "numbers or text", block_id)
            key = (node, block_id)
            found = self.nodes.get(key)
            if found is None:
                found = self.nodes[key] = len(self.parent)
                self.parent.append(node)
            node = found
        self.leaf.append(node)
        self.input.append(_count(record, "seq_len" if lookup else "input_length", where, len(ids) * block))
        self.output.append(_count(record, "output_length", where, 0, least=0))
        stamp = record.get("timestamp") or 0.0
        if not isinstance(stamp, (int, float)) or not math.isfinite(stamp):
            raise bad(f"{where} timestamp", "a number", stamp)
        self.time.append(stamp if lookup else stamp / 1000)
        if lookup and not self.token_bytes:
            self.token_bytes = _logged_bytes(record, where) // block

    def trace(self) -> Trace:
        """All of them."""
        if not self.leaf:
            raise bad("trace", "at least one request", self.name)
        return Trace(
            self.name, self.block, self.parent, self.leaf, self.input, self.output, self.time, self.token_bytes
        )


def _count(record: Mapping[str, Any], field: str, where: str, default: int, least: int = 1) -> int:
    value = record.get(field, default)
    if value is None and not least:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < (0 if field == "seq_len" else least):
        raise bad(f"{where} {field}", "a positive integer" if least else "a count", value)
    return value


def _logged_bytes(record: Mapping[str, Any], where: str) -> int:
    """Bytes of a chunk from the shapes and dtypes of a lookup log; fp8 names have one byte."""
    total = 0
    try:
        for shape, dtype in zip(record.get("shapes") or [], record.get("dtypes") or [], strict=False):
            size = _ELEMENTS.get(str(dtype).removeprefix("torch."), 1 if "float8" in str(dtype) else 2)
            total += size * math.prod(map(int, shape))
    except (TypeError, ValueError):
        raise bad(f"{where} shapes", "a list of shapes, each a list of numbers", record.get("shapes")) from None
    return total


def _from_npz(path: Path, limit: int) -> Trace:
    """A tree trace: see shared/traces for the arrays."""
    try:
        with zipfile.ZipFile(io.BytesIO(_open(path))) as archive:
            arrays = {name.removesuffix(".npy"): _npy(archive.read(name), name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as exc:
        raise bad("trace", f"an npz archive ({exc})", str(path)) from None
    for field in ("dpar", "leaf", "inp", "bs"):
        if field not in arrays:
            raise bad(f"{path.name} {field}", "an array of that name")
    parent = array("l", (i - 1 - d for i, d in enumerate(arrays["dpar"])))
    if any(p < -1 or p >= i for i, p in enumerate(parent)):
        raise bad(f"{path.name} dpar", "parents that come before their children")
    n = min(limit or len(arrays["leaf"]), len(arrays["leaf"]))
    zeros = array("q", bytes(8 * n))
    _check_requests(path.name, arrays, len(parent), n)
    times = accumulate(arrays.get("dt_ms", zeros)[:n])
    return Trace(path.name, int(arrays["bs"][0]), parent, arrays["leaf"][:n], arrays["inp"][:n],
                 arrays.get("out", zeros)[:n], [t / 1000 for t in times])  # fmt: skip


def _check_requests(name: str, arrays: Mapping[str, array[int]], blocks: int, n: int) -> None:
    """Raise bad_request unless there are requests, of blocks that there are, each with its length."""
    if not n:
        raise bad("trace", "at least one request", name)
    if len(arrays["bs"]) < 1 or arrays["bs"][0] < 1:
        raise bad(f"{name} bs", "the tokens of a block", list(arrays["bs"][:1]))
    if not all(-1 <= leaf < blocks for leaf in arrays["leaf"][:n]):
        raise bad(f"{name} leaf", f"-1..{blocks - 1}, the number of each request's last block")
    for field in ("inp", "out", "dt_ms"):
        held = arrays.get(field)
        if held is None:
            continue
        if len(held) < n:
            raise bad(f"{name} {field}", f"{n} numbers", len(held))
        # Only time may go back: recordings of many sessions one after the other begin anew with each.
        if field != "dt_ms" and min(held[:n]) < 0:
            raise bad(f"{name} {field}", "numbers of 0 or more", min(held[:n]))


def _npy(raw: bytes, name: str) -> array[int]:
    """A one-dimensional (or scalar) integer array of numpy's own file format, versions 1 and 2."""
    if raw[:6] != b"\x93NUMPY":
        raise bad(name, "a .npy file")
    wide = raw[6] > 1
    start = 12 if wide else 10
    length = int.from_bytes(raw[8:start], "little")
    try:
        kind = str(ast.literal_eval(raw[start : start + length].decode("latin-1"))["descr"])
    except (SyntaxError, ValueError, TypeError, LookupError):
        raise bad(name, "a .npy file with its header") from None
    code = _CODES.get(kind)
    if code is None:
        raise bad(name, f"one of {', '.join(_CODES)}", kind)
    out = array(code)
    try:
        out.frombytes(raw[start + length :])
    except ValueError:
        raise bad(name, f"whole numbers of {out.itemsize} bytes", len(raw)) from None
    return out


def coarse(trace: Trace, blocks: int) -> Trace:
    """The trace with `blocks` blocks as one; what is left of a path below a whole one falls away."""
    if blocks == 1:
        return trace
    depth = array("l")
    above = array("l")  # the deepest whole coarse block at or above each node, -1 for none
    parent = array("l")
    for up in trace.parent:
        level = depth[up] + 1 if up >= 0 else 1
        over = above[up] if up >= 0 else -1
        depth.append(level)
        if level % blocks == 0:
            parent.append(over)
            over = len(parent) - 1
        above.append(over)
    leaf = [above[b] if b >= 0 else -1 for b in trace.leaf]
    return trace._replace(block_tokens=trace.block_tokens * blocks, parent=parent, leaf=leaf)
