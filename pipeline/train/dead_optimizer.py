"""The positive control `dead_optimizer`: the precision-aware optimizer as megatron-core 0.13.0 and 0.13.1 built it."""

import functools
from collections.abc import Callable
from typing import Any

# What megatron-core 0.13.1 left out where the main parameters are fp32. Without the first, FusedAdam reads `.grad`,
# which is None, and skips every parameter; without the others it makes no master weights.
_LEFT_OUT = ("use_decoupled_grad", "master_weights", "master_weight_dtype")


@functools.cache
def install() -> None:
    """Let megatron-core build FusedAdam without decoupled gradients and master weights; later calls do nothing.

    Works with TransformerEngine's FusedAdam and with the reference alike: the class that megatron-core would use is
    looked up whenever an optimizer is built, and only its arguments are changed. Arms without the precision-aware
    optimizer pass none of those arguments and stay healthy.
    """
    import megatron.core.optimizer as optimizer

    build = optimizer._get_megatron_optimizer_based_on_param_groups

    @functools.wraps(build)
    def build_dead(*args: Any, **kwargs: Any) -> Any:
        adam = optimizer.Adam
        optimizer.Adam = _without_left_out(adam)
        try:
            return build(*args, **kwargs)
        finally:
            optimizer.Adam = adam

    optimizer._get_megatron_optimizer_based_on_param_groups = build_dead


def _without_left_out(adam: Callable[..., Any]) -> Callable[..., Any]:
    def build_adam(**kwargs: Any) -> Any:
        return adam(**{name: value for name, value in kwargs.items() if name not in _LEFT_OUT})

    return build_adam
