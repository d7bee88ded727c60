"""dashboard.html: every section, the same numbers as the report, whatever a study lacks."""

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml

from pipeline.analysis.conclusions import conclude
from pipeline.analysis.dashboard_curves import in_base64, thinned
from pipeline.analysis.dashboard_page import render_dashboard
from pipeline.analysis.figure_style import arm_style
from pipeline.analysis.pairs import load_study

WriteStudy = Callable[..., Path]
BOTH = ({"arm": "pao"}, {"arm": "baseline"})


def page_of(folder: Path) -> str:
    return render_dashboard(conclude(load_study(folder)))


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="study">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return orjson.loads(found[1])


def words_of(page: str) -> str:
    """Without scripts and styles."""
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def plots_of(page: str) -> dict[str, dict[str, Any]]:
    titles = re.findall("<h3>(.*?)</h3>", words_of(page))
    return dict(zip(titles, data_of(page)["plots"], strict=True))


def series(page: str, title: str) -> dict[str, list[float]]:
    """By arm, of a study with one run per arm."""
    plot = plots_of(page)[title]
    values = np.frombuffer(base64.b64decode(plot["y"]), dtype="<f8")
    arms = [run["arm"] for run in data_of(page)["runs"]]
    return dict(zip(arms, values.reshape(len(arms), -1).tolist(), strict=True))


def test_five_sections_under_the_answer(write_study: WriteStudy) -> None:
    page = page_of(write_study(*BOTH))
    words = words_of(page)
    sections = ["Memory", "Policy drift", "Liveness", "Reward and validation", "Cost"]
    assert [name for name in re.findall("<h2>(.*?)</h2>", words) if name in sections] == sections
    answer = words.index("2.00 bytes per parameter")
    assert answer < words.index("1 of 1 pairs valid") < words.index("<main>")
    for title in ("Ledger: bytes by kind of tensor", "Memory by phase", "Memory by rank", "Policy drift (actor/ppo_kl)",
                  "Clip fraction by mini-batch", "Entropy (actor/entropy)", "Reward (critic/rewards/mean)",
                  "Validation (val-core/made_up/acc/mean@1)", "Time, treatment over baseline"):  # fmt: skip
        assert title in plots_of(page)


def test_every_axis_has_a_unit(write_study: WriteStudy) -> None:
    plots = plots_of(page_of(write_study(*BOTH)))
    assert len(plots) > 20
    assert all(plot["unit"] for plot in plots.values())
    assert {plot["xLabel"] for plot in plots.values() if plot["kind"] == "curve"} == {"step", "optimizer step"}


def test_the_browser_is_asked_for_nothing_from_elsewhere(write_study: WriteStudy) -> None:
    page = page_of(write_study(*BOTH))
    assert re.findall(r'(?:src|href)="([^"#][^"]*)"', words_of(page)) == []
    assert "default-src 'none'" in page
    assert len(page) < 2_000_000


def test_arms_look_as_in_the_figures_with_the_baseline_first(write_study: WriteStudy) -> None:
    arms = data_of(page_of(write_study(*BOTH, {"arm": "baseline_repeat"})))["arms"]
    assert [arm["name"] for arm in arms] == ["baseline", "baseline_repeat", "pao"]
    assert [arm["colour"] for arm in arms] == [arm_style([], arm["name"])[0] for arm in arms]


def test_curves_are_what_the_rows_say(write_study: WriteStudy) -> None:
    def edit(row: dict[str, Any]) -> None:
        row["critic/rewards/mean"] = row["step"] / 3

    curve = series(page_of(write_study({"arm": "baseline", "edit_step": edit})), "Reward (critic/rewards/mean)")
    assert curve["baseline"] == [step / 3 for step in range(1, 9)]


def test_a_treatment_is_compared_with_its_own_baseline(write_study: WriteStudy) -> None:
    runs = [{"arm": arm, "seed": seed} for seed in (1, 2) for arm in ("baseline", "pao")]
    data = data_of(page_of(write_study(*runs)))["runs"]
    for run in data:
        if run["arm"] == "baseline":
            assert run["baseline"] is None
        else:
            assert data[run["baseline"]]["arm"] == "baseline"
            assert data[run["baseline"]]["pair"] == run["pair"]


def test_nan_and_infinity_are_gaps_and_told(write_study: WriteStudy) -> None:
    def edit(row: dict[str, Any]) -> None:
        if row["step"] in (3, 5):
            row["critic/rewards/mean"] = float("nan") if row["step"] == 3 else float("inf")

    page = page_of(write_study({"arm": "baseline"}, {"arm": "pao", "edit_step": edit}))
    curve = series(page, "Reward (critic/rewards/mean)")["pao"]
    assert [step for step, value in enumerate(curve, 1) if np.isnan(value)] == [3, 5]
    assert "NaN or infinite from step 3 on (2 values)" in words_of(page)


def test_what_was_not_measured_is_left_out(write_study: WriteStudy) -> None:
    def edit_step(row: dict[str, Any]) -> None:
        for name in [name for name in row if name != "step"]:
            del row[name]

    def edit_update(row: dict[str, Any]) -> None:
        for name in [name for name in row if name not in ("step", "update", "rank")]:
            del row[name]

    page = page_of(write_study({"arm": "pao", "edit_step": edit_step, "edit_update": edit_update}))
    assert list(plots_of(page)) == ["Ledger: bytes by kind of tensor", "Memory by phase", "Memory by rank"]
    assert "Policy drift" not in words_of(page)


def test_a_study_without_a_valid_pair_shows_its_runs(write_study: WriteStudy) -> None:
    page = page_of(write_study({"arm": "baseline"}, {"arm": "pao", "updates_per_step": 2}))
    assert "no valid pair" in words_of(page)
    assert series(page, "Reward (critic/rewards/mean)").keys() == {"baseline", "pao"}


def test_a_name_cannot_end_the_script(write_study: WriteStudy) -> None:
    folder = write_study({"arm": "baseline"})
    file = next(folder.rglob("config.yaml"))
    config = yaml.safe_load(file.read_text())
    file.write_text(
        yaml.safe_dump({**config, "pair": "</script><blink>", "arm": {**config["arm"], "name": "<blink>&"}})
    )
    page = page_of(folder)
    assert "<blink>" not in page
    assert data_of(page)["runs"][0]["pair"] == "</script><blink>"
    assert data_of(page)["arms"][0]["name"] == "<blink>&"


def test_thinning_loses_no_outlier_and_no_end() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(3, 1003))
    rows[1, 517], rows[2, 518] = 50, -50
    rows[0, :40] = np.nan
    chosen, size = thinned(rows, 100)
    assert {0, 517, 518, 1002} <= set(chosen.tolist())
    assert 50 < len(chosen) <= 100
    assert size * len(chosen) > 1003
    assert np.all(np.diff(chosen) > 0)


def test_short_series_are_whole() -> None:
    chosen, size = thinned(np.zeros((2, 500)), 500)
    assert chosen.tolist() == list(range(500))
    assert size == 1


def test_base64_keeps_every_bit() -> None:
    values = np.array([[0.1, np.nan], [-np.inf, 5e-324]])
    again = np.frombuffer(base64.b64decode(in_base64(values)), dtype="<f8").reshape(2, 2)
    assert np.array_equal(values, again, equal_nan=True)


def test_a_large_study_stays_small(write_study: WriteStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.analysis.dashboard_curves._MOST_NUMBERS", 5000)
    page = page_of(write_study(*({"arm": arm, "steps": 100} for arm in ("baseline", "pao"))))
    numbers = sum(len(plot["y"]) * 3 / 4 / 8 for plot in data_of(page)["plots"] if plot["kind"] == "curve")
    assert numbers <= 5000
    assert "of 400 optimizer steps" in words_of(page)
