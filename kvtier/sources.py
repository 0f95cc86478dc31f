"""Files that ship with kvtier but live beside it in a checkout: CUDA sources and policies."""

from __future__ import annotations

from pathlib import Path

from kvtier.types import bad


def source(folder: str, name: str) -> Path:
    """The file `name` of `folder` ("cuda" or "policies"): in the installed package, else beside it.

    A wheel carries the folders inside the package; a checkout or an editable install has them next to it.
    Raises bad_request when neither place has the file, or when `name` leaves the folder.
    """
    if Path(name).name != name:
        raise bad("name", f"a file name in {folder}/", name)
    package = Path(__file__).resolve().parent
    for path in (package / folder / name, package.parent / folder / name):
        if path.is_file():
            return path
    raise bad("name", f"one of {', '.join(names(folder)) or 'no files'} in {folder}/", name)


def names(folder: str) -> list[str]:
    """The file names that `source` can find in `folder`, sorted."""
    package = Path(__file__).resolve().parent
    found = (path for home in (package, package.parent) for path in (home / folder).glob("*") if path.is_file())
    return sorted({path.name for path in found if not path.name.startswith((".", "_"))})
