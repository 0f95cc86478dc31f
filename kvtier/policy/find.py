"""Policies by name or by path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvtier.policy.base import Policy
from kvtier.policy.guard import guarded
from kvtier.sources import names, source
from kvtier.types import KvtierError, bad

DEFAULT: Final = "heat"
MOST_LANES: Final = 64


class Found(NamedTuple):
    """A policy that can be asked for."""

    name: str
    path: str
    summary: str


def of_a_user(name: str) -> bool:
    """Whether this is the path of somebody's own policy."""
    return name.endswith(".py") or "/" in name


def path_of(name: str) -> Path:
    """The file of a policy: one that ships with kvtier by name, any other by path. Raises bad_request."""
    if of_a_user(name):
        path = Path(name)
        if not path.is_file():
            raise bad("policy", "the path of a file", name)
        return path
    try:
        return source("policies", f"{name}.py")
    except KvtierError:
        known = ", ".join(found.name for found in every())
        raise bad("policy", f"one of {known}, or the path of a file", name) from None


def load(name: str) -> type[Policy[Any]]:
    """The policy of that name or path. Raises bad_request where there is none, or the file is not one."""
    path = path_of(name)
    stem = f"kvtier.policies.{path.stem}"
    spec = importlib.util.spec_from_file_location(stem, path)
    if spec is None or spec.loader is None:
        raise bad("policy", "a Python file", name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        raise bad("policy", f"a file that can be imported ({type(exc).__name__}: {exc})", name) from exc
    found = [
        each
        for label, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, Policy) and each.__module__ == stem and not label.startswith("_")
    ]
    if len(found) != 1:
        raise bad("policy", f"a file with one class derived from Policy, not {len(found)}", name)
    policy: type[Policy[Any]] = found[0]
    if not isinstance(policy.lanes, int) or not 1 <= policy.lanes <= MOST_LANES:
        raise bad("policy", f"a policy of 1 to {MOST_LANES} lanes, not {policy.lanes!r}", name)
    return policy


def serving(name: str, mistaken: Callable[[str, Exception], None]) -> type[Policy[Any]]:
    """The same to be served by: a user's own is watched, and `mistaken` told of the first mistake of each object."""
    return guarded(load(name), mistaken) if of_a_user(name) else load(name)


def every() -> list[Found]:
    """The policies that ship with kvtier, by name."""
    files = [source("policies", name) for name in names("policies") if name.endswith(".py")]
    return [Found(file.stem, str(file), summary_of(file)) for file in files]


def summary_of(path: Path) -> str:
    """The first line of a policy's docstring."""
    line = path.read_text().lstrip("\"'").split("\n", 1)[0]
    return line.rstrip("\"'").removeprefix(f"{path.stem}: ")
