"""Run as a script: becomes the given command, which gets SIGTERM when the process that started it is gone.

Even a killed sweep (SIGKILL, out of memory) then leaves no Ray cluster behind.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(sys.argv[1], sys.argv[1:])
