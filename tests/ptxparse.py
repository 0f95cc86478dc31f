"""PTX text as instructions, for tests/ptx.py."""

from __future__ import annotations

import re
from typing import NamedTuple


class Instruction(NamedTuple):
    """One line: guard (register, wanted value), opcode split at dots, operands."""

    guard: tuple[str, bool] | None
    op: tuple[str, ...]
    args: tuple[str, ...]
    text: str


class Kernel(NamedTuple):
    """One entry: parameter names in order, instructions, labels, shared variables with their offsets."""

    params: list[str]
    body: list[Instruction]
    labels: dict[str, int]
    shared: dict[str, int]
    shared_bytes: int


def parse(text: str) -> dict[str, Kernel]:
    """Every entry of a PTX module."""
    text = re.sub(r"//[^\n]*", "", text)
    entries = re.finditer(r"\.entry\s+(\w+)\s*\((.*?)\)[^{]*\{(.*?)\n\}", text, re.DOTALL)
    return {match[1]: _kernel(match[2], match[3]) for match in entries}


def _kernel(params: str, body: str) -> Kernel:
    names = re.findall(r"(\w+)\s*(?:,|$)", re.sub(r"\s+", " ", params).strip())
    shared, at = {}, 0
    for name, size in re.findall(r"\.shared[^;]*?\s(\w+)\[(\d+)\];", body):
        shared[name], at = at, at + int(size)
    code: list[Instruction] = []
    labels = {}
    body = re.sub(r"\{\s*\.reg [^;]*;([^\n]*;)\s*\}", r"\1", body)  # a scope for a name that nobody else has
    for part in re.split(r"[;\n]\s*", body):
        line = part.strip()
        if not line or line.startswith("."):
            continue
        label = re.match(r"(\$?\w+):\s*(.*)$", line, re.DOTALL)
        if label:
            labels[label[1]] = len(code)
        rest = label[2].strip() if label else line
        if rest:
            code.append(_instruction(rest))
    return Kernel(names, code, labels, shared, at)


def _instruction(line: str) -> Instruction:
    guard = None
    if line.startswith("@"):
        head, line = line.split(None, 1)
        guard = (head.lstrip("@!"), "!" not in head)
    op, rest = (part.strip() for part in re.split(r"\s", line, maxsplit=1)) if re.search(r"\s", line) else (line, "")
    args = tuple(part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest))
    return Instruction(guard, tuple(op.split(".")), args, line)
