"""What a run ran on: versions, git state, hardware, stand-ins."""

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

import psutil

from pipeline.study.records import Environment

COMMIT_VARIABLE = "PIPELINE_COMMIT"
"""Tells the project's commit where git cannot: on a host that the project was copied to."""

_PACKAGES = (
    "verl",
    "megatron-core",
    "mbridge",
    "torch",
    "transformer-engine",
    "sglang",
    "ray",
    "transformers",
    "tensordict",
    "TransferQueue",
    "wandb",
    "hydra-core",
    "numpy",
)
_OPTIMIZER_STAND_IN = "optimizer kernel: a PyTorch reference of TransformerEngine's FusedAdam"
_STAND_INS = [
    _OPTIMIZER_STAND_IN,
    "rollout engine: a Hugging Face server in place of SGLang",
    "layers: megatron-core's local layers in place of TransformerEngine's",
    "attention: PyTorch's scaled_dot_product_attention in place of TransformerEngine's",
]


def find_environment(verl_platform: str, *, optimizer_alone: bool = False) -> Environment:
    """Look around in this process.

    verl_platform: "cpu" (stand-ins in place) or anything else (a GPU, none).
    optimizer_alone: as in the optimizer probe: no rollout, and layers that are the same on a GPU.
    """
    on_cpu = verl_platform.lower() == "cpu"
    stand_ins = [_OPTIMIZER_STAND_IN] if optimizer_alone else list(_STAND_INS)
    return Environment(
        platform=cast(Literal["cpu", "cuda"], "cpu" if on_cpu else "cuda"),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        git=git_state(Path(__file__).parents[2]),
        hardware={
            "machine": _machine(),
            "processor": _processor(),
            "cores": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 1024**3, 2),
            "gpus": [] if on_cpu else gpus(),
        },
        stand_ins=stand_ins if on_cpu else [],
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(checkout: Path) -> dict[str, Any]:
    """commit as COMMIT_VARIABLE tells it; else commit and dirty of the checkout; nothing where it is none."""
    if commit := os.environ.get(COMMIT_VARIABLE):
        return {"commit": commit}

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        # results/ is where studies are written, some of them over files that the repository keeps.
        changed = git("status", "--porcelain", "--", ".", ":(exclude)results")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {}  # not a checkout (an installed copy), or no git


def _machine() -> str:
    """Tells machines of one kind apart, and one from itself after a restart; says nothing else of it."""
    return hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).hexdigest()[:12]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def gpus() -> list[dict[str, Any]]:
    """name and memory_gib of each. Raises pynvml.NVMLError where there is no NVIDIA driver."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [
        {
            "name": pynvml.nvmlDeviceGetName(handle),
            "memory_gib": round(float(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / 1024**3, 2),
        }
        for handle in handles
    ]
