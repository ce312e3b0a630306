"""Memory of a rank: limits, high-water marks, and the errors by which its end shows. Loads torch on GPUs alone."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from verifier.platform import Tier

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|std::bad_alloc|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cannot allocate memory",
    re.IGNORECASE,
)
"""Texts of Python, C++, torch's allocators, CUDA, cuBLAS, NCCL and the kernel when memory has run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeaks:
    """High-water marks of one rank, bytes.

    Source:
        torch.cuda.max_memory_allocated and max_memory_reserved; VmHWM in proc(5).
    """

    peak: int
    """Allocated tensors on a GPU; resident memory, shared libraries included, on a CPU."""
    reserved: int
    """Memory that the GPU's allocator held, or the same as `peak` on a CPU."""

    def text(self) -> str:
        """Both in GiB, the second where it differs."""
        held = "" if self.reserved == self.peak else f" ({self.reserved / 2**30:.2f} GiB reserved)"
        return f"{self.peak / 2**30:.2f} GiB{held}"


def limit_memory(limit_gib: float, tier: Tier) -> None:
    """Limit what this process may take: private writable memory on a CPU, its GPU's allocator on a GPU.

    Raises:
        MemoryError: it has taken more already.

    Source:
        RLIMIT_DATA in getrlimit(2); torch.cuda.set_per_process_memory_fraction.
    """
    limit = int(limit_gib * 2**30)
    if tier == "cpu":
        if (held := _status("VmData")) >= limit:
            raise MemoryError(
                f"a rank maps {held / 2**30:.2f} GiB before its first step, the limit is {limit_gib:g} GiB"
            )
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return
    import torch

    _, whole = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole))


def peaks(tier: Tier) -> MemoryPeaks:
    """Return the high-water marks of this process so far."""
    if tier == "cuda":
        import torch

        return MemoryPeaks(peak=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved())
    resident = _status("VmHWM")
    return MemoryPeaks(peak=resident, reserved=resident)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None, "Linux has this line for every process"
    return int(found[1]) * 1024


def is_out_of_memory(text: str) -> bool:
    """Tell whether an error, as "Kind: message" or the end of a log, says that memory has run out."""
    return _OUT_OF_MEMORY.search(text) is not None


def kills_of_kernel() -> int:
    """Return the number of processes that the kernel has killed for want of memory since this machine started."""
    found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), flags=re.MULTILINE)
    return int(found[1]) if found is not None else 0
