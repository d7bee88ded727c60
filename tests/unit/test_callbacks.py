"""What callbacks write: rows, failures, memory by phase."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.callbacks import process_memory
from pipeline.callbacks.failure import recording_failure
from pipeline.callbacks.memory import HostMemory, PhaseMemory
from pipeline.callbacks.monitors import FileMonitor, numbers
from pipeline.study import json_lines
from pipeline.study.run_folder import RUN_FOLDER_VARIABLE, RunFolder

_NUMBERS = st.one_of(st.integers(-(2**53), 2**53), st.floats())


@given(row=st.dictionaries(st.text(max_size=8), _NUMBERS, max_size=5))
def test_rows_come_back_with_non_finite_values(row: dict[str, float]) -> None:
    back = json_lines.loads(json_lines.dumps(row))
    assert back.keys() == row.keys()
    for key, value in row.items():
        assert back[key] == value or (math.isnan(value) and math.isnan(back[key]))


def test_steps_keep_verls_names_and_numbers_only(tmp_path: Path) -> None:
    FileMonitor(RunFolder(tmp_path)).log(3, numbers({"actor/ppo_kl": math.nan, "note": "text"}))
    (row,) = json_lines.read_rows(RunFolder(tmp_path).steps_file)
    assert isinstance(row, dict)
    assert row["step"] == 3
    assert math.isnan(row["actor/ppo_kl"])
    assert "note" not in row


def test_the_first_failure_stays_and_the_error_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match="first"), recording_failure("rank 1", 1):
        raise ValueError("first\nsecond line")
    with pytest.raises(RuntimeError), recording_failure("trainer"):
        raise RuntimeError("a consequence")
    failure = json_lines.loads(RunFolder(tmp_path).failure_file.read_bytes())
    assert (failure["where"], failure["rank"], failure["error"]) == ("rank 1", 1, "ValueError: first")
    assert "second line" in failure["traceback"]


def test_a_phase_peak_is_seen_and_the_lifetime_peak_survives_resets() -> None:
    size = 64 * 1024**2
    memory = PhaseMemory(HostMemory())
    memory.begin_update()
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    memory.begin_optimizer_step()
    del block
    before = process_memory.rss_bytes()
    row = memory.end_optimizer_step()
    assert row["rss_peak_forward_backward_gib"] - row["rss_after_update_gib"] > 0.8 * size / 1024**3
    assert process_memory.lifetime_peak_rss_bytes() - before > 0.8 * size
