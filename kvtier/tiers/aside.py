"""What is found in the tier's directory and cannot be used: moved out of the way under a new name, not deleted."""

from __future__ import annotations

import contextlib
import logging
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger("kvtier.disk")

KEEP_ASIDE: Final = 3
"""Things of one name set aside that are kept; older ones go."""


def set_aside(path: Path, kind: str) -> Path:
    """Rename it; only the last few of its name are kept. Raises OSError."""
    old = sorted(asides(path), key=_number)
    for gone in old[: 1 - KEEP_ASIDE] if len(old) >= KEEP_ASIDE else []:
        with contextlib.suppress(OSError):
            remove(gone)
    target = path.with_name(f"{path.name}.{kind}-{_number(old[-1]) + 1 if old else 1}")
    return path.rename(target)


def clear_way(path: Path, is_right: Callable[[int], bool]) -> bool:
    """Set aside what is not of the right kind, as `stat` tells it of a mode; whether something was.

    A link is never of the right kind: to follow it would be to write wherever it points.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if is_right(mode):
        return False
    aside = set_aside(path, "foreign")
    log.error("%s is a %s: set aside as %s, the tier begins without it", path, _kind(mode), aside.name)
    return True


def asides(path: Path) -> list[Path]:
    """What was set aside of this name."""
    return list(path.parent.glob(f"{path.name}.*-*"))


def remove(path: Path) -> None:
    """Delete a file, a link (not what it points to) or a folder with all that is in it. Raises OSError."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def _kind(mode: int) -> str:
    names = ((stat.S_ISLNK, "link"), (stat.S_ISDIR, "folder"), (stat.S_ISREG, "file"))
    return next((name for test, name in names if test(mode)), "special file")


def _number(path: Path) -> int:
    tail = path.name.rsplit("-", 1)[-1]
    return int(tail) if tail.isdigit() else 0
