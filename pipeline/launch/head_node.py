"""Run as a script: a Ray head node, alive until SIGTERM or until the process that started it is gone.

Not `ray start --head --block`: that adds an autoscaler monitor and a Ray client server which nobody here uses (a third
of the start-up's CPU time), and takes the whole cluster down when the latter needs more than 30 s on a busy machine.
Not `ray.init`: its dashboard agent always listens on port 52365, so that a host could hold one cluster only.
"""

import ctypes
import json
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _end(*_: object) -> None:
    """While Ray starts; then it has a handler of its own. Its processes end when this one exits in order."""
    sys.exit(0)


def visible_gpus() -> int:
    """How many GPUs CUDA would show to a process started here."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([device for device in chosen.split(",") if device.strip()])
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    return pynvml.nvmlDeviceGetCount()


def head_node_arguments(asked: dict[str, Any]) -> dict[str, Any]:
    """asked: of `LocalCluster`; null stands for what the machine has."""
    found = {"num_cpus": os.cpu_count, "num_gpus": visible_gpus}
    return {name: found[name]() if value is None and name in found else value for name, value in asked.items()}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    if sys.platform == "linux":
        # Even a killed sweep (SIGKILL, out of memory) leaves no Ray cluster behind.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    from ray.cluster_utils import Cluster

    Cluster(initialize_head=True, head_node_args=head_node_arguments(json.loads(sys.argv[1])))
    while True:
        signal.pause()
