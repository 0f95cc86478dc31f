"""vLLM's file-system tier: a file a block, O_DIRECT, no checksum. Its I/O module alone, loaded by path.

Arguments: page bytes, pages a round, seed.
"""

import importlib.util
import mmap
import shutil
import sys
import sysconfig
from pathlib import Path

from disk_files import Files
from lines import folder, serve


class Vllm(Files):
    """Batches of blocks of one buffer."""

    def __init__(self, stack):
        page, pages, seed = map(int, sys.argv[1:4])
        super().__init__(stack, folder(stack) / "kv", page, pages)
        where = Path(sysconfig.get_path("purelib")) / "vllm/v1/kv_offload/tiering/fs/io.py"
        spec = importlib.util.spec_from_file_location("fs_io", where)
        self.io = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.io)
        self.source, self.target = mmap.mmap(-1, page * pages), mmap.mmap(-1, page * pages)
        self.source[:] = seed.to_bytes(8, "little") * (page * pages // 8)
        if not self.io.probe_o_direct(str(self.home)):
            raise OSError("no O_DIRECT here")

    def names(self, share):
        """The files of some pages."""
        return [str(self.home / f"{self.round}" / f"{page:06}") for page in share]

    def store(self, share):
        """Write them."""
        offsets = [page * self.page for page in share]
        self.io.batch_store_block(self.names(share), memoryview(self.source), offsets, self.page)

    def load(self, share):
        """Read them."""
        offsets = [page * self.page for page in share]
        self.io.batch_load_block(self.names(share), memoryview(self.target), offsets, self.page)

    def forget(self, round_):
        """Remove a round's files."""
        shutil.rmtree(self.home / f"{round_}", ignore_errors=True)


serve(Vllm)
