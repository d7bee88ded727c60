"""Resident memory of this process, from Linux's /proc. Bytes."""

from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): "writing 5 resets the peak resident set size"


def rss_bytes() -> int:
    """Resident set size now."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes() -> int:
    """Highest resident set size since the process began or `reset_peak_rss` was called (VmHWM)."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no VmHWM line: is this Linux?")


def reset_peak_rss() -> None:
    """Start a new peak from the present resident set size."""
    _CLEAR_REFS.write_text(_RESET_PEAK)
