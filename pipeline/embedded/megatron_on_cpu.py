"""Runs unmodified megatron-core 0.16 on host memory. Runtime patches only; no installed file is edited."""

import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version
from torch.overrides import TorchFunctionMode

from pipeline.embedded.fused_adam import FusedAdam

# What megatron-core is told when it asks whether TransformerEngine can do something: the version FusedAdam refers to.
TE_VERSION = Version("2.12.0")
_HOST = torch.device("cpu")


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _CudaMeansCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made in host memory, and host tensors give their type as torch.cuda.*Tensor."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # megatron-core sorts parameters by type(): 'torch.cuda.BFloat16Tensor' and its like.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _HOST, *args[2:])
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _HOST}
        return func(*args, **kwargs)


_in_this_thread = threading.local()


@contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """Within it, and in the thread that entered it, torch's device "cuda" is host memory. May be entered again."""
    if getattr(_in_this_thread, "redirected", False):
        yield
        return
    _in_this_thread.redirected = True
    try:
        with _CudaMeansCpu():
            yield
    finally:
        _in_this_thread.redirected = False


@functools.cache
def install() -> None:
    """Patch torch.cuda and megatron-core in this process; calls after the first do nothing.

    Both arms get the reference FusedAdam, as both get TransformerEngine's on a GPU.
    """
    _patch_torch_cuda()
    with warnings.catch_warnings():
        # "Transformer Engine and Apex are not installed. Falling back to Torch optimizers." It does not.
        warnings.simplefilter("ignore")
        import megatron.core.optimizer as optimizer
        from megatron.core.optimizer import distrib_optimizer, optimizer_config
        from megatron.core.tensor_parallel import random

    # The CUDA generators of the RNG tracker. Looked up on torch at each call, so that what forks the RNG finds them.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, *args, **kwargs: torch.set_rng_state(new_state)

    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = FusedAdam
    # These two say that `step` lives in the parameter groups, as in TransformerEngine.
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_TE_OPTIMIZER = True
    optimizer.is_te_min_version = optimizer_config.is_te_min_version = _is_te_min_version

    check = optimizer_config.OptimizerConfig.__post_init__

    @functools.wraps(check)
    def check_with_te(config: Any) -> None:
        with _te_importable():
            check(config)

    setattr(optimizer_config.OptimizerConfig, "__post_init__", check_with_te)  # noqa: B010  pyright minds its signature


def _patch_torch_cuda() -> None:
    replacements: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _HOST,
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda new_state, *args, **kwargs: torch.set_rng_state(new_state),
        "manual_seed": torch.manual_seed,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _is_te_min_version(version: str, check_equality: bool = True) -> bool:
    return Version(version) <= TE_VERSION if check_equality else Version(version) < TE_VERSION


@contextmanager
def _te_importable() -> Iterator[None]:
    """Let `from transformer_engine.pytorch.optimizers import FusedAdam` find the reference.

    OptimizerConfig imports it only to look at its signature. For longer than that call the stub must not stay: other
    libraries take its presence for the real thing.
    """
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    stubs = {name: types.ModuleType(name) for name in names}
    vars(stubs[names[-1]])["FusedAdam"] = FusedAdam
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
