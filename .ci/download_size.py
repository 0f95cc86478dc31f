"""Say what a pip installation will download: `download_size.py REPORT`, from `pip install --dry-run --report`."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit


def size_of(url: str) -> int:
    """Bytes behind `url`, or 0 where its server does not say."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).stat().st_size
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as reply:  # noqa: S310
            return int(reply.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0


def main() -> None:
    """Print the sum and the largest files."""
    items = json.loads(Path(sys.argv[1]).read_text())["install"]
    sizes = {f"{i['metadata']['name']} {i['metadata']['version']}": size_of(i["download_info"]["url"]) for i in items}
    unknown = sum(not size for size in sizes.values())
    total = sum(sizes.values()) / 1e6
    rest = f" and {unknown} of unknown size" if unknown else ""
    print(f"torch: about to fetch {len(sizes)} files, {total:,.0f} MB{rest}")
    for name, size in sorted(sizes.items(), key=lambda row: -row[1])[:3]:
        print(f"  {name}: {size / 1e6:,.0f} MB")
    if any(name.startswith("nvidia-") for name in sizes):
        print("  This is a CUDA build. TORCH_INDEX=<URL of an index with CPU builds> saves most of it.")


if __name__ == "__main__":
    main()
