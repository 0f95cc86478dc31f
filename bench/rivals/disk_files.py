"""What the file-per-block stores share: threads, a cold page cache, and durability equal to kvtier's."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lines import seconds

THREADS = 4
_libc = ctypes.CDLL(None, use_errno=True)


class Files:
    """Stores `pages` pages a round in files under `home`, with four threads; subclasses say how."""

    def __init__(self, stack, home, page, pages):
        self.home, self.page, self.pages, self.round = home, page, pages, 0
        self.home.mkdir(parents=True, exist_ok=True)
        self.pool = stack.enter_context(ThreadPoolExecutor(THREADS))

    def put(self):
        """Seconds until a round of new pages is on the device: they sync nothing, so the file system is synced here."""
        self.forget(self.round)
        self.round += 1
        return seconds(lambda: (self.share(self.store), self.sync()))

    def get(self):
        """Seconds to read the round back, none of it from the page cache."""
        self.chill()
        return seconds(lambda: self.share(self.load))

    def share(self, call):
        """Call for every page number, split over the threads."""
        shares = [range(first, self.pages, THREADS) for first in range(THREADS)]
        for done in [self.pool.submit(call, list(share)) for share in shares]:
            done.result()

    def sync(self):
        """Syncfs."""
        fd = os.open(self.home, os.O_RDONLY)
        try:
            if _libc.syncfs(fd):
                raise OSError(ctypes.get_errno(), "syncfs")
        finally:
            os.close(fd)

    def chill(self):
        """Drop the files from the page cache."""
        for path in Path(self.home).rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
