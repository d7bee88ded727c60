"""The rule errs as rarely as promised: a small version of scripts/simulate_parity.py (its results are committed)."""

from types import ModuleType

import numpy as np
import pytest

from pipeline.analysis.gates import Gates
from pipeline.analysis.statistics import judge_metrics

STUDIES = 300


def test_noise_has_unit_variance_and_the_autocorrelation_asked_for(simulation: ModuleType, gates: Gates) -> None:
    scenario = simulation.Scenario(pairs=500, steps=6, autocorrelation=0.6)
    noise = simulation._noise((3, 500, 2, 6), scenario, np.random.default_rng(1))
    assert noise.var() == pytest.approx(1, abs=0.05)
    assert np.corrcoef(noise[..., 2].ravel(), noise[..., 3].ravel())[0, 1] == pytest.approx(0.6, abs=0.05)
    assert np.corrcoef(noise[:, :, 0].ravel(), noise[:, :, 1].ravel())[0, 1] == pytest.approx(0.3, abs=0.05)


def test_an_offset_is_the_true_difference(simulation: ModuleType, gates: Gates) -> None:
    scenario = simulation.Scenario(pairs=4000, offsets=(("reward", 2.0),))
    curves = simulation.simulate_curves(scenario, simulation.effects(scenario, gates), np.random.default_rng(2))[0]
    assert (curves.treatment - curves.baseline).mean() == pytest.approx(2 * 0.05, abs=0.003)
    assert simulation.true_margin("reward", gates, scenario) == 0.05


def test_the_true_margin_is_what_many_pairs_show(simulation: ModuleType, gates: Gates) -> None:
    scenario = simulation.Scenario(pairs=4000)
    curves = simulation.simulate_curves(scenario, simulation.effects(scenario, gates), np.random.default_rng(2))
    verdicts = judge_metrics([(c, gate.margin) for c, gate in zip(curves, gates.metrics.values(), strict=True)], gates)
    for name, verdict in zip(gates.metrics, verdicts, strict=True):
        assert simulation.true_margin(name, gates, scenario) == pytest.approx(verdict.margin, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [3, 5, 8])
def test_error_rates(simulation: ModuleType, gates: Gates, pairs: int) -> None:
    """At most 5 %, with room for 4 Monte Carlo standard errors of 300 studies (1.26 % each)."""
    rows = simulation.scenarios(simulation.Scenario(pairs), gates)
    bound = 0.05 + 4 * (0.05 * 0.95 / STUDIES) ** 0.5
    null = simulation.simulate(rows[simulation.NULL], gates, STUDIES, (1, pairs))
    assert null.different <= bound
    assert null.different + null.equivalent + null.inconclusive == pytest.approx(1)
    at_margin = simulation.simulate(rows[simulation.ALL_AT_MARGIN], gates, STUDIES, (2, pairs))
    assert max(at_margin.equivalent_metric.values()) <= bound
    assert at_margin.equivalent == 0


@pytest.mark.slow
def test_power_grows_with_pairs_and_with_the_difference(simulation: ModuleType, gates: Gates) -> None:
    def rates(pairs: int, offset: float, noise: float) -> tuple[float, float]:
        scenario = simulation.Scenario(pairs, offsets=(("reward", offset),), noise=noise)
        found = simulation.simulate(scenario, gates, 100, (3, pairs, int(10 * offset)))
        return found.equivalent, found.different

    assert rates(8, 0.0, 1 / 3)[0] > rates(3, 0.0, 1 / 3)[0] + 0.5
    assert rates(8, 2.0, 5)[1] > 0.8 > rates(3, 2.0, 5)[1] + 0.2
