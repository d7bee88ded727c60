"""Policy drift per mini-batch: what verl's engine returns before verl averages it over the mini-batches of a step."""

from typing import Any

# verl's key in the engine's metrics -> column of updates.jsonl
_COLUMNS = {
    "actor/ppo_kl": "ppo_kl",
    "actor/pg_clipfrac": "pg_clipfrac",
    "actor/pg_loss": "pg_loss",
    "kl_loss": "kl_loss",
}


def mini_batch_drift(metrics: dict[str, Any]) -> dict[str, float]:
    """This rank's value for one mini-batch of each column that verl returned, aggregated as verl says (mean or sum).

    metrics: the engine's `outputs["metrics"]`: one value or verl Metric per micro-batch. Empty on ranks without
    outputs (not the last pipeline stage, not the first tensor rank): those have no columns, not zeros.
    """
    return {column: _aggregate(metrics[key]) for key, column in _COLUMNS.items() if key in metrics}


def _aggregate(value: Any) -> float:
    from verl.utils.metric import Metric

    if isinstance(value, list):
        if all(isinstance(item, Metric) for item in value):
            total = Metric(value[0].aggregation)
            for item in value:
                total.extend(item)
            return float(total.aggregate())
        raise TypeError(f"verl returned a list of {type(value[0]).__name__}; a Metric per micro-batch was expected")
    return float(value.aggregate())
