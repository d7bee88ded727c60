"""Gates: read strictly, explained when wrong, fingerprinted."""

import copy
import hashlib
import re
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.analysis.gates import Gates, Margin, read_gates, window_slice
from pipeline.study.gates_hash import gates_hash


def test_default_gates_cover_what_the_report_promises(gates: Gates) -> None:
    assert {gate.column for gate in gates.metrics.values()} == {
        "critic/rewards/mean",
        "val-core/*/mean@*",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/grad_norm",
        "actor/entropy",
        "response_length/mean",
    }


def _edited(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    edited = copy.deepcopy(raw)
    place = edited
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return edited


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("alhpa",), 0.05, "gates.alhpa: Extra inputs are not permitted"),
        (("alpha",), 0.7, "gates.alpha: Input should be less than 0.5"),
        (("min_pairs",), 1, "gates.min_pairs: Input should be greater than or equal to 2"),
        (("mean_window",), [0.9, 0.5], "gates: mean_window: [0.9, 0.5] is no part of a run; need 0 <= from < to <= 1"),
        (("metrics", "reward", "margin"), {}, "gates.metrics.reward.margin: give either `absolute` or `share`"),
        (
            ("metrics", "reward", "margin"),
            {"absolute": 0.1, "at_least": 0.1},
            "gates.metrics.reward.margin: `at_least` belongs to `share`",
        ),
        (
            ("metrics", "reward", "better"),
            "up",
            "gates.metrics.reward.better: Input should be 'higher', 'lower' or 'neither'",
        ),
    ],
)
def test_mistakes_are_named(raw_gates: dict[str, Any], path: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_gates(_edited(raw_gates, path, value))


def test_every_mistake_is_named_at_once(raw_gates: dict[str, Any]) -> None:
    del raw_gates["alpha"]
    raw_gates["metrics"] = {}
    with pytest.raises(
        ValueError, match=r"gates\.alpha: Field required; gates\.metrics: Dictionary should have at least"
    ):
        read_gates(raw_gates)


@pytest.mark.parametrize(
    ("window", "steps", "expected"),
    [
        ((0.5, 1.0), 8, slice(4, 8)),
        ((0.5, 1.0), 3, slice(1, 3)),
        ((0.5, 1.0), 1, slice(0, 1)),
        ((0.0, 1.0), 5, slice(0, 5)),
        ((0.25, 0.75), 8, slice(2, 6)),
    ],
)
def test_window(window: tuple[float, float], steps: int, expected: slice) -> None:
    assert window_slice(window, steps) == expected


def test_margins() -> None:
    baseline = np.array([1.0, 3.0])
    assert Margin(absolute=0.05).of_pairs(baseline).tolist() == [0.05, 0.05]
    assert Margin(share=0.5).of_pairs(baseline).tolist() == [0.5, 1.5]
    assert Margin(share=0.5, at_least=2.0).of_pairs(baseline).tolist() == [2.0, 2.0]
    assert (
        Margin(share=0.25, at_least=0.001).in_words("nats") == "± 25 % of the baseline's mean size, at least 0.001 nats"
    )


def test_hash_is_that_of_canonical_json() -> None:
    assert (
        gates_hash({"b": 1, "a": [0.5, None, "ä"]}) == hashlib.sha256('{"a":[0.5,null,"ä"],"b":1}'.encode()).hexdigest()
    )
    assert gates_hash({"a": 1, "b": 2}) == gates_hash({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        gates_hash({"alpha": float("nan")})


def test_hash_survives_the_run_folder_and_sees_every_change(raw_gates: dict[str, Any]) -> None:
    before = gates_hash(raw_gates)
    assert gates_hash(yaml.safe_load(yaml.safe_dump(raw_gates))) == before
    assert gates_hash(_edited(raw_gates, ("metrics", "reward", "margin"), {"absolute": 0.051})) != before
    assert gates_hash(_edited(raw_gates, ("min_pairs",), 2)) != before
