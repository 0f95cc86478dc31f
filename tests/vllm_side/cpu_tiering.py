"""vLLM's tiering on a CPU: TieringOffloadingSpec with a worker that copies with memcpy, where vLLM's needs a GPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """The spec itself is vLLM's; only who copies is other."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """A worker on this rank's slots of the shared region."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, region)
        return self._worker


class MemcpyWorker(OffloadingWorker):
    """Copies when it is told to: a job is over when it was submitted."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._tensors = [t.tensor for t in kv_caches.tensors]
        self._groups = kv_caches.group_data_refs
        self._rows = [region.create_next_worker_view(t.page_size_bytes) for t in kv_caches.tensors]
        self._region = region
        self._over: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Blocks to chunks."""
        for tensor, block, row, chunk, size in self._pairs(src_spec, dst_spec):
            row[chunk, :size] = tensor[block].flatten()[:size]
        self._over.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Chunks to blocks."""
        for tensor, block, row, chunk, size in self._pairs(dst_spec, src_spec):
            tensor[block].view(-1)[:size] = row[chunk, :size]
        self._over.append(TransferResult(job_id, True))
        return True

    def _pairs(self, gpu: Any, cpu: Any) -> Any:
        """(tensor, block, row, chunk, bytes) of every copy of a job."""
        sizes = gpu.group_sizes or [len(gpu.block_ids)]
        at = 0
        for refs, size in zip(self._groups, sizes, strict=True):
            for block, chunk in zip(gpu.block_ids[at : at + size], cpu.block_ids[at : at + size], strict=True):
                for ref in refs:
                    yield self._tensors[ref.tensor_idx], block, self._rows[ref.tensor_idx], chunk, ref.page_size_bytes
            at += size

    def get_finished(self) -> list[TransferResult]:
        """Jobs that are over since the last call."""
        over, self._over = self._over, []
        return over

    def wait(self, job_ids: set[int]) -> None:
        """They are over."""

    def shutdown(self) -> None:
        """Unmap."""
        self._region.cleanup()
