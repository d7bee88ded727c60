"""The sections that every dashboard has, and their curves: dashboard.html and the W&B workspace show the same."""

from collections.abc import Iterable

from pipeline.analysis.curves import CLIP_FRACTION, GRAD_NORM, LIVENESS, MEMORY, PPO_KL, REWARD, Curve

_VALIDATION_CURVES = 4


def curves_by_section(step_metrics: Iterable[str]) -> dict[str, list[Curve]]:
    """step_metrics: the names that the study's runs have in steps.jsonl; the data decides what validation is called."""
    return {
        "Memory": [
            MEMORY,
            _peak("optimizer step", "optimizer_step"),
            _peak("forward and backward", "forward_backward"),
            Curve("Whole device by NVML, largest rank", "GiB", ("device_after_update_gib",), "largest"),
        ],
        "Policy drift": [
            PPO_KL,
            CLIP_FRACTION,
            Curve("ppo_kl of each mini-batch", PPO_KL.unit, ("ppo_kl",), "mean"),
            Curve("Clip fraction of each mini-batch", CLIP_FRACTION.unit, ("pg_clipfrac",), "mean"),
            Curve("Entropy (actor/entropy)", "nats per token", ("actor/entropy",)),
            Curve("Rollout against actor (training/rollout_probs_diff_mean)", "mean difference of probabilities",
                  ("training/rollout_probs_diff_mean",)),
        ],
        "Liveness": [
            LIVENESS,
            Curve("Tensors left as they were, worst rank", "tensors", ("tensors_still",), "largest"),
            GRAD_NORM,
            Curve("Learning rate (actor/lr)", "learning rate", ("actor/lr",)),
        ],
        "Reward and validation": [
            REWARD,
            *_validation(step_metrics),
            Curve("Reward spread within groups (rewards/within_group_std_mean)", "mean standard deviation",
                  ("rewards/within_group_std_mean",)),
            Curve("Response length (response_length/mean)", "tokens", ("response_length/mean",)),
        ],
        "Cost": [
            Curve("Whole step (timing_s/step)", "seconds", ("timing_s/step",)),
            Curve("Optimizer step, slowest rank", "seconds", ("time_optimizer_step_s",), "largest"),
            Curve("Update of the actor (timing_s/update_actor)", "seconds", ("timing_s/update_actor",)),
            Curve("Rollout (timing_s/gen)", "seconds", ("timing_s/gen",)),
            Curve("Throughput (perf/throughput)", "tokens per second and GPU", ("perf/throughput",)),
        ],
    }  # fmt: skip


def _peak(words: str, phase: str) -> Curve:
    names = (f"allocated_peak_{phase}_gib", f"rss_peak_{phase}_gib")
    return Curve(f"Peak in {words}, largest rank", "GiB", names, "largest")


def _validation(step_metrics: Iterable[str]) -> list[Curve]:
    names = sorted({name for name in step_metrics if name.startswith("val-")})
    core = [name for name in names if name.startswith("val-core/")]
    return [Curve(f"Validation ({name})", "score", (name,)) for name in (core or names)[:_VALIDATION_CURVES]]
