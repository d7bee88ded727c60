"""Memory of one rank by phase, GiB, each reading named after its source.

On a GPU: torch's allocator ("allocated", "reserved") and the whole device as NVML sees it ("device", which includes
the rollout engine and other processes). On the host: this process's resident set ("rss").
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import psutil
import torch

from pipeline.callbacks.process_memory import peak_rss_bytes, reset_peak_rss, rss_bytes

GIB = 1024**3


class MemoryReader(Protocol):
    """Reads one source and resets its peak."""

    @property
    def source(self) -> Literal["rss", "allocated"]: ...

    def total_bytes(self) -> int: ...

    def now_bytes(self) -> int: ...

    def peak_bytes(self) -> int: ...

    def reset_peak(self) -> None: ...

    def extra_gib(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class HostMemory:
    """Resident set of this process."""

    source: Literal["rss"] = "rss"

    def total_bytes(self) -> int:
        return psutil.virtual_memory().total

    def now_bytes(self) -> int:
        return rss_bytes()

    def peak_bytes(self) -> int:
        return peak_rss_bytes()

    def reset_peak(self) -> None:
        reset_peak_rss()

    def extra_gib(self) -> dict[str, float]:
        return {}


class CudaMemory:
    """torch's caching allocator on the current device, NVML for the device as a whole.

    verl logs torch's peaks as peaks of the whole run ("perf/max_memory_allocated_gb"). Resetting them for each phase
    must not change that, so torch's two functions answer with the highest value before any reset from here on.
    """

    source: Literal["allocated"] = "allocated"

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._peaks = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
        self._highest = [0, 0]
        torch.cuda.max_memory_allocated = lambda device=None: max(self._highest[0], self._peaks[0](device))
        torch.cuda.max_memory_reserved = lambda device=None: max(self._highest[1], self._peaks[1](device))

    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def now_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        return self._peaks[0]()

    def reset_peak(self) -> None:
        self._highest = [max(old, peak()) for old, peak in zip(self._highest, self._peaks, strict=True)]
        torch.cuda.reset_peak_memory_stats()

    def extra_gib(self) -> dict[str, float]:
        return {
            "reserved_after_update_gib": torch.cuda.memory_reserved() / GIB,
            "device_after_update_gib": float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) / GIB,
        }


def reader_for(device_type: str) -> MemoryReader:
    """The reader for torch's device type: "cpu" or "cuda"."""
    return HostMemory() if device_type == "cpu" else CudaMemory()


class PhaseMemory:
    """Peaks by phase: between updates (log-probabilities, weight sync), forward/backward, the optimizer step."""

    def __init__(self, reader: MemoryReader) -> None:
        self._reader = reader
        self._row: dict[str, float] = {}

    def begin_update(self) -> None:
        self._row = {f"{self._reader.source}_peak_before_update_gib": self._reader.peak_bytes() / GIB}
        self._reader.reset_peak()

    def begin_optimizer_step(self) -> None:
        self._row[f"{self._reader.source}_peak_forward_backward_gib"] = self._reader.peak_bytes() / GIB
        self._reader.reset_peak()

    def end_optimizer_step(self) -> dict[str, float]:
        """The update's row: the peaks and what is held now. GiB."""
        source = self._reader.source
        self._row[f"{source}_peak_optimizer_step_gib"] = self._reader.peak_bytes() / GIB
        self._row[f"{source}_after_update_gib"] = self._reader.now_bytes() / GIB
        self._reader.reset_peak()
        return {**self._row, **self._reader.extra_gib()}
