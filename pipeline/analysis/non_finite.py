"""NaN and infinities where training was measured (not in times, throughputs or memory readings)."""

from pipeline.analysis.columns import NonFinite
from pipeline.analysis.load import Run

_TRAINING = ("actor/", "critic/", "rewards/", "response_length/", "training/", "rollout_corr/", "val-")
_TRAINING_UPDATE_FIELDS = ("grad_norm", "ppo_kl", "pg_clipfrac", "pg_loss", "kl_loss", "entropy", "lr", "liveness")


def non_finite_metrics(run: Run) -> list[NonFinite]:
    """The training metrics that were measured as NaN or infinite, earliest first."""
    found = [item for item in run.updates.non_finite if item.metric in _TRAINING_UPDATE_FIELDS]
    found += [item for item in run.steps.non_finite if item.metric.startswith(_TRAINING)]
    return sorted(found, key=lambda item: item.first_step)
