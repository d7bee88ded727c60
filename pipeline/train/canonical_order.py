"""A verl replay buffer that hands out batches in an order of their content.

verl's batches come in order of arrival, so mini-batches differ from run to run; at step 1 that alone moves metrics
hundreds of times more than PAO does.
"""

from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

_POLL_SECONDS = 0.1  # verl's default of 2 s is a large part of a tiny model's step


class CanonicalOrder(ReplayBuffer):
    """Sorts each training batch by (prompt tokens, response tokens)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "poll_interval": _POLL_SECONDS})

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if partition_id == "train":
            data = tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["prompts", "responses"])
            content = [
                (prompt.tolist(), response.tolist())
                for prompt, response in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)
            ]
            batch.reorder(sorted(range(len(content)), key=lambda index: content[index]))
        return batch, metrics
