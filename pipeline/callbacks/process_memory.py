"""Resident memory of this process, from Linux's /proc. Bytes."""

from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): "writing 5 resets the peak resident set size"
_highest_before_resets = [0]  # bytes; one process, one value


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
    _highest_before_resets[0] = lifetime_peak_rss_bytes()
    _CLEAR_REFS.write_text(_RESET_PEAK)


def lifetime_peak_rss_bytes() -> int:
    """Highest resident set size of the process, whatever was reset since."""
    return max(_highest_before_resets[0], peak_rss_bytes())
