"""How often does the parity rule err? Simulated studies, judged by the code that judges real ones.

A study has n seed pairs, and per pair a baseline, a treatment and a repeated baseline run. A run's metric is a curve
(geometric from `start` to `end`) times 1 + what the seed does, which the runs of one seed share, + the run's own noise;
both follow AR(1) over the steps and are correlated between metrics. The treatment adds a constant. The default noise is
like the embedded study's (see METRICS); the rule and its margins are those of conf/gates/default.yaml.

    python scripts/simulate_parity.py            # about 4 minutes on 2 cores; writes results/parity_simulation/
    python scripts/simulate_parity.py --studies 200 --noise 0.5 --out /tmp/simulation
"""

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import yaml
from scipy import stats

from pipeline.analysis.gates import Gates, read_gates, window_slice
from pipeline.analysis.load import Study
from pipeline.analysis.pairs import load_study
from pipeline.analysis.statistics import Curves, judge_metrics, judge_study, noise_between

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
FloatArray = npt.NDArray[np.float64]

NULL = "no true difference"
DETERMINISTIC = "no true difference, A/A bit-identical"
HEAVY_TAILS = "no true difference, heavy tails (t, 3 degrees of freedom)"
QUIET = "no true difference, a third of the noise"
ONE_AT_MARGIN = "reward off by its margin, the others not at all"
QUIET_AT_MARGIN = "reward off by its margin, a third of the noise"
ALL_AT_MARGIN = "every metric off by its margin"
AT_MARGIN_TIMES = 5
"""These rows take so many times the studies: the test's size is alpha right at the margin, so chance must be small."""
NOISE_LEVELS = (1.0, 1 / 3)
"""As in the embedded study, whose steps have 64 samples, and less, as with nine times the samples."""
SHIFTED = "reward"
"""The metric whose true difference the power curve varies; the other metrics do not differ."""
CURVE = "power curve"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Okabe and Ito's: told apart by the colour-blind."""
CURVE_OFFSETS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True)
class MetricModel:
    """One metric of one run."""

    start: float
    end: float
    seed_sd: float
    """Spread of one step between seeds, shared by the runs of a seed: what its data and samples do."""
    noise_sd: float
    """Spread of one step of one run; the difference of two runs has sqrt(2) times that."""
    every: int = 1
    """Measured at every so many steps, and at the last."""
    resolution: float = 0.0
    """Values are multiples of it (a score over 64 prompts: 1/64); 0: any value."""


# What pao against baseline shows in the embedded study (8 steps, 5 seeds; --measure prints it), rounded up. There a
# repeated baseline is bit-identical, so the noise is what rounding ties become in a closed loop; autocorrelation found:
# 0 to 0.4. No validation there: this one is a score over 64 prompts, twice as noisy as the reward.
METRICS = {
    "reward": MetricModel(0.38, 0.76, 0.10, 0.01),
    "validation": MetricModel(0.76, 0.76, 0.10, 0.02, every=5, resolution=1 / 64),
    "ppo_kl": MetricModel(0.010, 0.0076, 1.10, 0.21),
    "clip_fraction": MetricModel(0.126, 0.018, 0.86, 0.31),
    "grad_norm": MetricModel(2.9, 3.2, 0.69, 0.15),
    "entropy": MetricModel(1.46, 0.46, 0.18, 0.007),
    "response_length": MetricModel(2.0, 2.0, 0.01, 0.003),
}


@dataclass(frozen=True)
class Scenario:
    """What is true in the simulated world."""

    pairs: int
    offsets: tuple[tuple[str, float], ...] = ()
    """(metric, treatment effect in margins)."""
    steps: int = 8
    autocorrelation: float = 0.5
    correlation: float = 0.3
    noise: float = 1.0
    repeats_exactly: bool = False
    tail_df: float | None = None
    """Degrees of freedom of the noise's t distribution; None: normal."""


@cache
def expected_curve(name: str, steps: int) -> FloatArray:
    """A metric's mean at each step, without a treatment effect."""
    return np.geomspace(METRICS[name].start, METRICS[name].end, steps)


def effects(scenario: Scenario, gates: Gates) -> dict[str, float]:
    """The treatment's true effect on each gated metric, in the metric's unit."""
    offsets = dict(scenario.offsets)
    return {name: offsets.get(name, 0.0) * true_margin(name, gates, scenario) for name in gates.metrics}


def simulate_curves(scenario: Scenario, effects: dict[str, float], random: np.random.Generator) -> list[Curves]:
    """One study's curves, in the order of `effects`."""
    names = list(effects)
    # (baseline, treatment, repeat) x pairs x metrics x steps
    noise = _noise((3, scenario.pairs, len(names), scenario.steps), scenario, random)
    seeds = _noise((1, *noise.shape[1:]), scenario, random)[0]
    curves: list[Curves] = []
    for i, name in enumerate(names):
        model = METRICS[name]
        factors = 1 + model.seed_sd * seeds[:, i] + model.noise_sd * scenario.noise * noise[:, :, i]
        runs = expected_curve(name, scenario.steps) * factors
        runs[1] += effects[name]
        if scenario.repeats_exactly:
            runs[2] = runs[0]
        if model.resolution:
            runs = np.round(runs / model.resolution) * model.resolution
        step = np.arange(1, scenario.steps + 1)
        runs[:, :, (step % model.every != 0) & (step != scenario.steps)] = np.nan
        curves.append(Curves(runs[0], runs[1], noise_between(runs[2] - runs[0], runs[0])))
    return curves


def true_margin(name: str, gates: Gates, scenario: Scenario) -> float:
    """The margin if the baseline's mean absolute value were known: what "at the margin" means."""
    model = METRICS[name]
    window = window_slice(gates.mean_window, scenario.steps)
    curve = expected_curve(name, scenario.steps)[window]
    spread = math.hypot(model.seed_sd, model.noise_sd * scenario.noise)  # around 1, in shares of the curve
    size = curve.mean() * stats.foldnorm.mean(1 / spread, scale=spread)
    return float(gates.metrics[name].margin.of_pairs(np.array([size]))[0])


def _noise(shape: tuple[int, int, int, int], scenario: Scenario, random: np.random.Generator) -> FloatArray:
    """Stationary AR(1) over the last axis with unit variance; one common factor correlates the metrics (axis 2)."""

    def draw(size: tuple[int, ...]) -> FloatArray:
        if scenario.tail_df is None:
            return random.standard_normal(size)
        return random.standard_t(scenario.tail_df, size) / math.sqrt(scenario.tail_df / (scenario.tail_df - 2))

    common = draw((shape[0], shape[1], 1, shape[3]))
    fresh = math.sqrt(scenario.correlation) * common + math.sqrt(1 - scenario.correlation) * draw(shape)
    noise = np.empty(shape)
    noise[..., 0] = fresh[..., 0]
    phi = scenario.autocorrelation
    for step in range(1, shape[3]):
        noise[..., step] = phi * noise[..., step - 1] + math.sqrt(1 - phi**2) * fresh[..., step]
    return noise


@dataclass(frozen=True)
class Rates:
    """Shares of the simulated studies."""

    studies: int
    different: float
    equivalent: float
    inconclusive: float
    equivalent_metric: dict[str, float]
    """Per metric: how often it alone was found equivalent."""

    def error(self, share: float) -> float:
        """Monte Carlo standard error of a share."""
        return math.sqrt(share * (1 - share) / self.studies)


def simulate(scenario: Scenario, gates: Gates, studies: int, seed: Sequence[int]) -> Rates:
    """Judge `studies` made-up studies."""
    random = np.random.default_rng(list(seed))
    counts = {"different": 0, "equivalent": 0, "inconclusive": 0}
    metric_counts = dict.fromkeys(gates.metrics, 0)
    margins = [gate.margin for gate in gates.metrics.values()]
    true_effects = effects(scenario, gates)
    for _ in range(studies):
        curves = simulate_curves(scenario, true_effects, random)
        verdicts = judge_metrics(list(zip(curves, margins, strict=True)), gates)
        counts[judge_study(verdicts)] += 1
        for name, verdict in zip(gates.metrics, verdicts, strict=True):
            metric_counts[name] += verdict.outcome == "equivalent"
    return Rates(
        studies,
        counts["different"] / studies,
        counts["equivalent"] / studies,
        counts["inconclusive"] / studies,
        {name: count / studies for name, count in metric_counts.items()},
    )


def scenarios(base: Scenario, gates: Gates) -> dict[str, Scenario]:
    """The table's rows for one number of pairs."""
    everything = tuple((name, 1.0) for name in gates.metrics)
    return {
        NULL: base,
        DETERMINISTIC: replace(base, repeats_exactly=True),
        HEAVY_TAILS: replace(base, tail_df=3.0),
        QUIET: replace(base, noise=NOISE_LEVELS[1] * base.noise),
        ONE_AT_MARGIN: replace(base, offsets=((SHIFTED, 1.0),)),
        QUIET_AT_MARGIN: replace(base, noise=NOISE_LEVELS[1] * base.noise, offsets=((SHIFTED, 1.0),)),
        ALL_AT_MARGIN: replace(base, offsets=everything),
    }


def measure(study: Study, gates: Gates) -> dict[str, tuple[MetricModel, float]]:
    """METRICS, and the noise's autocorrelation, as the valid pairs of a study's first treatment arm show them.

    Spreads are shares of the baseline's mean absolute value in the mean window, which is also `end`. What one seed
    cannot show is NaN.
    """
    pairs = [pair for pair in study.pairs if pair.valid and pair.treatment.arm == study.treatments[0]]
    if not pairs:
        raise SystemExit(f"{study.folder} has no valid pair of the baseline and {study.treatments[0]} to measure")
    found: dict[str, tuple[MetricModel, float]] = {}
    for name, gate in gates.metrics.items():
        baseline = np.array([pair.baseline.metric(gate.column) for pair in pairs])
        treatment = np.array([pair.treatment.metric(gate.column) for pair in pairs])
        window = window_slice(gates.mean_window, baseline.shape[1])
        noise = (treatment - baseline)[:, window] / math.sqrt(2)
        if not np.isfinite(noise).all():
            continue
        size = float(np.abs(baseline[:, window]).mean())
        seed_sd = float(baseline[:, window].var(axis=0, ddof=1).mean() ** 0.5) / size if len(pairs) > 1 else math.nan
        spread = float((noise**2).mean() ** 0.5) / size
        lagged = float((noise[:, 1:] * noise[:, :-1]).mean() / (noise**2).mean()) if noise.any() else math.nan
        found[name] = MetricModel(float(baseline[:, 0].mean()), size, seed_sd, spread), lagged
    return found


def read_default_gates() -> Gates:
    return read_gates(yaml.safe_load((ROOT / "conf/gates/default.yaml").read_text()))


def table(rows: dict[tuple[str, int], Rates]) -> str:
    """Markdown: shares in percent with Monte Carlo standard errors, a row per true state and number of pairs."""
    lines = ["| true state | pairs | different | equivalent | inconclusive |", "|---|---|---|---|---|"]
    for (name, pairs), rates in rows.items():
        shares = (rates.different, rates.equivalent, rates.inconclusive)
        lines.append(f"| {name} | {pairs} | {' | '.join(_percent(share, rates) for share in shares)} |")
    return "\n".join(lines)


def metric_table(rows: dict[tuple[str, int], Rates], gates: Gates) -> str:
    """Markdown: how often each metric alone was found equivalent while off by its margin, by number of pairs."""
    found = {pairs: rates for (name, pairs), rates in rows.items() if name == ALL_AT_MARGIN}
    lines = [f"| metric | {' | '.join(f'{pairs} pairs' for pairs in found)} |", f"|---|{'---|' * len(found)}"]
    for metric in gates.metrics:
        shares = [_percent(rates.equivalent_metric[metric], rates) for rates in found.values()]
        lines.append(f"| {metric} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _percent(share: float, rates: Rates) -> str:
    return f"{100 * share:.1f} ± {100 * rates.error(share):.1f} %"


def _largest(rows: dict[tuple[str, int], Rates], names: Sequence[str], verdict: str) -> str:
    found = [rates for (name, _), rates in rows.items() if name in names]
    largest = max(found, key=lambda rates: getattr(rates, verdict))
    return _percent(getattr(largest, verdict), largest)


def _power(rows: dict[tuple[str, int], Rates], state: str) -> str:
    found = {pairs: rates.equivalent for (name, pairs), rates in rows.items() if name == state}
    return ", ".join(
        f"{100 * share:.0f} % with {pairs} seeds{' (expect `inconclusive`)' if share < 0.5 else ''}"
        for pairs, share in found.items()
    )


def report(options: argparse.Namespace, gates: Gates, rows: dict[tuple[str, int], Rates]) -> str:
    """table.md: the table, what it says, and the assumptions."""
    models = "\n".join(
        f"| {name} | {model.start:g} to {model.end:g} | {100 * model.seed_sd:g} % |"
        f" {100 * model.noise_sd * options.noise:g} % |"
        f" {gates.metrics[name].margin.in_words(gates.metrics[name].unit)} |"
        for name, model in METRICS.items()
    )
    return f"""# How often the parity rule errs

Made by `python scripts/simulate_parity.py` (its options change every assumption): {options.studies} simulated studies
per row ({AT_MARGIN_TIMES * options.studies} where the reward is off by its margin), judged by the code that judges real
ones (`pipeline/analysis/statistics.py`) with `conf/gates/default.yaml`. Shares with their Monte Carlo standard errors.

{table(rows)}

* `different` where nothing differs: at most {_largest(rows, (NULL, DETERMINISTIC, HEAVY_TAILS, QUIET), "different")}.
  Promised, over all metrics together: {100 * gates.alpha:g} %.
* `equivalent` where the reward is off by its margin: at most
  {_largest(rows, (ONE_AT_MARGIN, QUIET_AT_MARGIN), "equivalent")}. Promised: {100 * gates.alpha:g} %, which a test that
  wastes nothing reaches right at the margin; beyond it the share falls.
* `equivalent` where nothing differs: {_power(rows, NULL)}.
  With a third of the noise: {_power(rows, QUIET)}.

![Probability of each verdict against the true difference, by number of seeds](power.png)

Bands: 95 % Monte Carlo intervals, {options.curve_studies} studies per point. Dotted line: {100 * gates.alpha:g} %.

How often a metric that is off by its margin is found equivalent when looked at alone, which bounds the study's verdict
whatever the other metrics do (the test's size right at the margin is {100 * gates.alpha:g} %; chance scatters the
shares around it):

{metric_table(rows, gates)}

Assumed: {options.steps} steps, noise AR(1) with {options.autocorrelation:g} from step to step and correlated between
metrics with {options.correlation:g}; one repeated baseline per seed. Spreads are shares of the metric's curve.

| metric | baseline, first to last step | spread of a step between seeds | a run's own noise in a step | margin |
|---|---|---|---|---|
{models}
"""


def draw_power(curves: dict[tuple[float, int], list[tuple[float, Rates]]], gates: Gates, path: Path) -> None:
    """Probability of each verdict against the true difference: a row per noise level, a line per number of pairs."""
    verdicts = ("equivalent", "different")
    figure, axes = plt.subplots(len(NOISE_LEVELS), 2, figsize=(9, 6.4), sharex=True, sharey=True, layout="constrained")
    numbers = sorted({pairs for _, pairs in curves})
    styles = dict(zip(numbers, itertools.cycle(zip(COLOURS, "os^D", strict=True))))
    for (level, pairs), points in curves.items():
        offsets = [offset for offset, _ in points]
        colour, marker = styles[pairs]
        for axis, verdict in zip(axes[NOISE_LEVELS.index(level)], verdicts, strict=True):
            shares = np.array([getattr(rates, verdict) for _, rates in points])
            errors = np.array([1.96 * rates.error(getattr(rates, verdict)) for _, rates in points])
            axis.plot(offsets, shares, color=colour, marker=marker, markersize=5, label=f"{pairs} seeds")
            axis.fill_between(offsets, shares - errors, shares + errors, color=colour, alpha=0.2, linewidth=0)
    for (row, level), (column, verdict) in itertools.product(enumerate(NOISE_LEVELS), enumerate(verdicts)):
        axis = axes[row][column]
        axis.axhline(gates.alpha, color="black", linewidth=0.8, linestyle=":")
        axis.axvline(1, color="black", linewidth=0.8, linestyle="--")
        noise = "the embedded study's noise" if level == 1 else f"1/{1 / level:g} of that noise"
        axis.set_title(f"declared {verdict}: {noise}", fontsize=11)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
        if column == 0:
            axis.set_ylabel("share of studies")
            axis.text(1.06, 0.93, "margin", fontsize=9)
        if row == len(NOISE_LEVELS) - 1:
            axis.set_xlabel("true difference of the reward, in margins")
    axes[0][0].legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _job(job: tuple[Scenario, Gates, int, tuple[int, ...]]) -> Rates:
    scenario, gates, studies, seed = job
    return simulate(scenario, gates, studies, seed)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Scenario(pairs=3)
    parser.add_argument(
        "--measure", type=Path, metavar="STUDY", help="print what METRICS would be for a study's run folders, and stop"
    )
    parser.add_argument("--studies", type=int, default=2000, help="per row of the table (default: %(default)s)")
    parser.add_argument("--curve-studies", type=int, default=400, help="per point of the figure (default: %(default)s)")
    parser.add_argument("--pairs", type=int, nargs="+", default=[3, 5, 8], help="seed pairs (default: 3 5 8)")
    parser.add_argument("--steps", type=int, default=default.steps, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--autocorrelation",
        type=float,
        default=default.autocorrelation,
        help="of a run's noise from step to step (default: %(default)s)",
    )
    parser.add_argument(
        "--correlation", type=float, default=default.correlation, help="between metrics (default: %(default)s)"
    )
    parser.add_argument(
        "--noise", type=float, default=default.noise, help="noise in multiples of METRICS' (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=4221, help="of the random numbers (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/parity_simulation")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    gates = read_default_gates()
    if options.measure:
        for name, (model, autocorrelation) in measure(load_study(options.measure), gates).items():
            print(f"{name}: {model}, autocorrelation {autocorrelation:.2f}")
        return
    jobs: dict[tuple[str, int, float], tuple[Scenario, Gates, int, tuple[int, ...]]] = {}
    for pairs in options.pairs:
        base = Scenario(
            pairs,
            steps=options.steps,
            autocorrelation=options.autocorrelation,
            correlation=options.correlation,
            noise=options.noise,
        )
        for number, (name, scenario) in enumerate(scenarios(base, gates).items()):
            studies = options.studies * (AT_MARGIN_TIMES if name in (ONE_AT_MARGIN, QUIET_AT_MARGIN) else 1)
            jobs[name, pairs, 0.0] = (scenario, gates, studies, (options.seed, pairs, number))
        for level, (number, offset) in itertools.product(NOISE_LEVELS, enumerate(CURVE_OFFSETS)):
            shifted = replace(base, offsets=((SHIFTED, offset),), noise=level * base.noise)
            seed = (options.seed, pairs, 100 + number, NOISE_LEVELS.index(level))
            jobs[f"{CURVE} {level:.3g}", pairs, offset] = (shifted, gates, options.curve_studies, seed)
    with ProcessPoolExecutor(options.workers) as pool:
        found = dict(zip(jobs, pool.map(_job, jobs.values()), strict=True))

    names = dict.fromkeys(name for name, _, _ in jobs if not name.startswith(CURVE))
    rows = {(name, pairs): found[name, pairs, 0.0] for name in names for pairs in options.pairs}
    curves = {
        (level, pairs): [(offset, found[f"{CURVE} {level:.3g}", pairs, offset]) for offset in CURVE_OFFSETS]
        for level in NOISE_LEVELS
        for pairs in options.pairs
    }
    write(options, gates, rows, curves)
    print(table(rows))


def write(
    options: argparse.Namespace,
    gates: Gates,
    rows: dict[tuple[str, int], Rates],
    curves: dict[tuple[float, int], list[tuple[float, Rates]]],
) -> None:
    """table.json (every number), table.md and power.png."""
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "workers", "measure")}
    record: dict[str, Any] = {
        "settings": settings,
        "gates": gates.model_dump(mode="json"),
        "metrics": {name: asdict(model) for name, model in METRICS.items()},
        "table": [{"true_state": name, "pairs": pairs, **asdict(rates)} for (name, pairs), rates in rows.items()],
        "power": [
            {"noise": level, "pairs": pairs, "reward_offset_in_margins": offset, **asdict(rates)}
            for (level, pairs), points in curves.items()
            for offset, rates in points
        ],
    }
    (options.out / "table.json").write_text(json.dumps(record, indent=1) + "\n")
    draw_power(curves, gates, options.out / "power.png")
    (options.out / "table.md").write_text(report(options, gates, rows))


if __name__ == "__main__":
    main()
