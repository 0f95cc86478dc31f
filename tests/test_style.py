"""Shape of the code: sizes, import direction, and a folder that must stay without a package file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvtier"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}

pytestmark = pytest.mark.skipif(not FILES, reason="style is read from a checkout")

LAYERS = (
    {"types", "linux"},
    {"identity", "paths", "sources", "numa", "turns", "waits", "output"},
    {"heat"},
    {"index", "policy", "route", "wire", "sizing", "codec", "quant"},
    {"tiers", "device", "handshake"},
    {"mover"},
    {"peer", "events"},
    {"store"},
    {"server"},
    {"daemon"},
)
"""Parts from the bottom up: a part imports from lower rows and from its own part, never from above or beside."""

SUBPARTS = {
    "radix": "index", "keyed": "index", "groups": "index", "leaves": "index",
    "limits": "tiers", "units": "types", "frames": "wire", "archive": "wire",
    "config": "daemon", "companions": "daemon", "live": "daemon", "fleet": "daemon", "depots": "daemon",
}  # fmt: skip
"""Modules that belong to a part without being named like it."""

CLIENT_MAY = {"types", "identity", "wire"}
PURE = {"types", "identity", "index", "heat", "policy", "route", "wire", "sizing", "codec", "quant"}
IMPURE_LIBRARIES = {"asyncio", "cupy", "lmdb", "aiohttp", "socket", "threading", "time", "random"}
"""What a module that must be replayable from its arguments alone has no business with."""


def imports_of(path: Path) -> set[str]:
    """Full names of the modules that a file imports at run time or for types, `kvtier` ones resolved to modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            deeper = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = deeper & MODULES.keys()
            found |= modules or {node.module}
    return found


def part_of(module: str) -> str:
    """The part that a kvtier module belongs to: the first name after kvtier, through SUBPARTS."""
    first = [*module.split("."), ""][1]
    return SUBPARTS.get(first, first)


def layer_of(part: str) -> int:
    """The row of a part in LAYERS, or -1 for parts that the rule is silent about (command line, client, demo)."""
    return next((n for n, row in enumerate(LAYERS) if part in row), -1)


def functions() -> list[tuple[int, str]]:
    """(lines without the docstring, where) of every function of the package."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                doc = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
                found.append((node.end_lineno - node.lineno + 1 - doc, f"{path.relative_to(ROOT)}:{node.name}"))
    return sorted(found)


def test_no_module_is_longer_than_400_lines():
    """A file owns one idea; past 400 lines it owns two."""
    long = {str(path.relative_to(ROOT)): n for path in FILES if (n := len(path.read_text().splitlines())) > 400}
    exempt = {"kvtier/wire.py"}  # the protocol as data, read as one list
    assert not {name: n for name, n in long.items() if name not in exempt}


def test_functions_stay_short():
    """Nine of ten functions fit in 25 lines and ninety-nine of a hundred in 60."""
    sizes = functions()
    assert sizes[len(sizes) * 9 // 10][0] <= 25, sizes[-len(sizes) // 10 :]
    assert sizes[len(sizes) * 99 // 100][0] <= 60, sizes[-5:]


def test_cuda_folder_has_no_init_file():
    """With cuda/__init__.py a checkout would shadow NVIDIA's `cuda` namespace and break `import cupy`."""
    assert not (ROOT / "cuda" / "__init__.py").exists()


def test_imports_point_one_way():
    """No part imports from a part above or beside it."""
    wrong = []
    for module, path in MODULES.items():
        mine = part_of(module)
        level = layer_of(mine)
        for target in imports_of(path):
            other = part_of(target) if target.startswith("kvtier.") else ""
            above = layer_of(other)
            if level >= 0 and other and other != mine and not 0 <= above < level:
                wrong.append(f"{module} -> {target}")
    assert not wrong


def test_client_needs_only_types_identity_and_wire():
    """An engine process that links the client loads no part of the daemon."""
    seen: set[str] = set()
    todo = [name for name in MODULES if part_of(name) == "client"]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [target for target in imports_of(MODULES[name]) if target in MODULES and target != "kvtier"]
    daemon_parts = {"store", "mover", "server", "daemon", "index", "policy", "heat"}
    assert not {name for name in seen if part_of(name) in daemon_parts}
    assert not {lib for name in seen for lib in imports_of(MODULES[name]) if lib.split(".")[0] in {"lmdb", "aiohttp"}}


def test_pure_modules_do_no_input_or_output():
    """Index, heat, policy, wire, sizing and codec can be replayed from their arguments."""
    wrong = [
        f"{module} -> {target}"
        for module, path in MODULES.items()
        if part_of(module) in PURE
        for target in imports_of(path)
        if target.split(".")[0] in IMPURE_LIBRARIES
    ]
    assert not wrong


def test_cupy_is_imported_in_one_place():
    """Only kvtier/device/cuda.py imports cupy; everything else runs without it."""
    users = {name for name, path in MODULES.items() if any(lib.split(".")[0] == "cupy" for lib in imports_of(path))}
    assert users == {"kvtier.device.cuda"}


def test_every_test_states_its_claim():
    """Each test function has a docstring: the sentence that fails when it fails."""
    silent = [
        f"{path.name}:{node.name}"
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert not silent
