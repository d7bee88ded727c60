"""Two runs' masters, compared by the digests in their update rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.analysis.columns import Table
from pipeline.analysis.exact import compare_exactly
from pipeline.analysis.load import Pair, Run
from pipeline.analysis.master_weights import MastersComparison, compare_masters, compare_masters_of
from pipeline.analysis.parity_words import _masters_sentence

MakeRun = Callable[..., Run]

Rows = Mapping[str, Sequence[float]]


def run_with(make_run: MakeRun, arm: str, updates: Rows) -> Run:
    columns = {name: np.array(values, dtype=np.float64) for name, values in updates.items()}
    return replace(make_run(arm, 1, {"actor/ppo_kl": [0.0]}), updates=Table(columns))


def rows(digests: Sequence[float], **counts: Sequence[float]) -> dict[str, Any]:
    """Two ranks, one row each per optimizer step."""
    updates = len(digests) // 2
    index = np.repeat(np.arange(1.0, updates + 1), 2)
    every = {"masters": [10.0] * len(digests), "masters_digest": list(digests), **counts}
    return {"step": index, "update": index, "rank": np.tile([0.0, 1.0], updates), **every}


def pair_of(baseline: Run, treatment: Run) -> Pair:
    return Pair("s1", baseline, treatment, [])


def test_masters_agree_until_the_first_rank_differs(make_run: MakeRun) -> None:
    baseline = run_with(make_run, "baseline", rows([1, 2, 3, 4, 5, 6]))
    off = {"weights_off_nearest": [2.0, 1.0, 0.0, 1.0, 7.0, 7.0], "weights_off_at_ties": [2.0, 1.0, 0.0, 0.0, 7.0, 7.0]}
    pao = run_with(make_run, "pao", rows([1, 2, 3, 4, 5, 99], **off))
    found = compare_masters(pair_of(baseline, pao))
    assert found is not None
    assert found == MastersComparison(compared_updates=3, same_updates=2, weights=40, differing=4, at_ties=3)
    assert found.ties_share == 0.75
    sentence = _masters_sentence(compare_exactly([pair_of(baseline, pao)], []).masters)
    assert (
        "after the first 2 optimizer steps of every seed; as long as they are, 4 of 40 bf16 weights differ, 75 %"
        in sentence
    )


def test_masters_that_never_agree(make_run: MakeRun) -> None:
    found = compare_masters(
        pair_of(run_with(make_run, "baseline", rows([1, 2])), run_with(make_run, "pao", rows([1, 3])))
    )
    assert found is not None
    assert found == MastersComparison(compared_updates=1, same_updates=0, weights=0, differing=0, at_ties=0)
    assert found.ties_share is None
    assert "differ after the first optimizer step" in _masters_sentence(found)


def test_several_pairs_agree_as_long_as_the_shortest(make_run: MakeRun) -> None:
    baseline = run_with(make_run, "baseline", rows([1, 2, 3, 4]))
    short, long = run_with(make_run, "pao", rows([1, 2, 3, 5])), run_with(make_run, "pao", rows([1, 2, 3, 4]))
    found = compare_masters_of([pair_of(baseline, short), pair_of(baseline, long)])
    assert found is not None
    assert (found.same_updates, found.weights) == (1, 60)


def test_runs_without_digests_are_not_compared(make_run: MakeRun) -> None:
    nothing = run_with(make_run, "baseline", {"step": [1.0], "update": [1.0], "rank": [0.0]})
    assert compare_masters(pair_of(nothing, run_with(make_run, "pao", rows([1, 2])))) is None
    assert compare_masters_of([]) is None
