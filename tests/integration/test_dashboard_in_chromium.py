"""dashboard.html in a real browser, from disk and without network: it draws, tells under the pointer, and zooms."""

import html
import math
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.analyze import analyze

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("dashboard_probe.js")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ENOUGH_PIXELS = 800  # more than axes without labels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)"),
]
Browse = Callable[..., dict[str, Any]]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Analyse a study of these MadeUpRun arguments and use its dashboard; returns what dashboard_probe.js saw."""

    def made_up(*runs: dict[str, Any], width: int = 1200) -> dict[str, Any]:
        generator = runpy.run_path(str(ROOT / "scripts" / "generate_large_study.py"))
        for run in runs:
            generator["write_run"](tmp_path / "made_up", generator["MadeUpRun"](**run))
        analyze(tmp_path / "made_up")
        page = (tmp_path / "made_up" / "dashboard.html").read_text()
        probed = tmp_path / "probed.html"
        probed.write_text(f"{page}\n<script>{PROBE.read_text()}</script>\n")
        return look_at(probed, width, tmp_path / "profile")

    return made_up


def look_at(page: Path, width: int, profile: Path) -> dict[str, Any]:
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    no_network = ["--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"]
    what = [f"--window-size={width},900", "--virtual-time-budget=60000", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *flags, *no_network, *what, f"--user-data-dir={profile}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = re.findall(r"CONSOLE.*?\] ?(\".*)", done.stderr)
    assert [line for line in console if "document idle" not in line] == []
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, console
    return orjson.loads(html.unescape(found[1]))


def two_pairs() -> list[dict[str, Any]]:
    return [
        {"arm": arm, "seed": seed, "steps": 12, "tp": 2, "platform": "cuda"}
        for seed in (1, 2)
        for arm in ("baseline", "baseline_repeat", "pao")
    ]


def assert_all_drawn(seen: dict[str, Any], sections: int = 5) -> None:
    assert len(seen["sections"]) == sections
    for section, pixels in seen["sections"].items():
        assert pixels, section
        assert min(pixels) > ENOUGH_PIXELS, (section, pixels)


def test_every_plot_of_every_section_is_drawn(browse: Browse) -> None:
    seen = browse(*two_pairs())
    assert_all_drawn(seen)
    assert list(seen["sections"]) == ["memory", "policy-drift", "liveness", "reward-and-validation", "cost"]
    assert sum(map(len, seen["sections"].values())) > 20


def test_the_pointer_the_buttons_and_the_zoom_work(browse: Browse) -> None:
    seen = browse(*two_pairs())
    assert re.match(r"step \d+ · reward\n", seen["values"])
    assert [line.split("\t")[1] for line in seen["values"].splitlines()[1:]] == ["baseline", "baseline_repeat", "pao"]
    assert " to " in seen["values"]  # of two runs
    assert "baseline\t" not in seen["withoutBaseline"]
    assert "pao\t" in seen["withoutBaseline"]
    assert "treatment − baseline, reward" in seen["differences"]
    assert re.search(r"baseline_repeat\t0$", seen["differences"], re.MULTILINE)
    assert " to " not in seen["onePair"]
    first, zoomed = seen["stepsAtFirst"], seen["stepsZoomed"]  # of another plot than the one that was dragged in
    assert first[0] < zoomed[0] < zoomed[1] < first[1]
    assert seen["stepsReset"] == first


def test_a_phone_has_no_sideways_scrolling(browse: Browse) -> None:
    seen = browse(*two_pairs(), width=500)  # Chromium's smallest window
    assert_all_drawn(seen)
    assert seen["overflow"] == 0


def not_finite(row: dict[str, Any]) -> None:
    if row["step"] % 2:
        row["critic/rewards/mean"] = math.nan
        row["actor/grad_norm"] = math.inf


def unmeasured(row: dict[str, Any]) -> None:
    for name in [name for name in row if name.startswith(("actor/", "timing_s/", "val-"))]:
        del row[name]


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([{"arm": "pao", "steps": 1, "updates_per_step": 1}], id="one run of one step"),
        pytest.param([{"arm": "baseline"}, {"arm": "pao", "edit_step": not_finite}], id="NaN and infinity"),
        pytest.param([{"arm": "baseline"}, {"arm": "pao", "edit_step": unmeasured}], id="metrics that one run lacks"),
        pytest.param([{"arm": "baseline"}, {"arm": "dead_optimizer"}], id="no valid pair"),
        pytest.param([{"arm": "baseline"}, {"arm": "pao", "steps": 3}], id="runs of different length"),
    ],
)
def test_odd_studies_are_drawn_as_well(browse: Browse, runs: list[dict[str, Any]]) -> None:
    assert_all_drawn(browse(*runs))
