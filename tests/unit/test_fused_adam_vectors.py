"""The reference FusedAdam against TransformerEngine's, by golden vectors recorded on a GPU.

What is stated here: moments are bit-equal (fp32, bf16 and fp16), masters differ by at most so many units in the last
place, because the GPU's reciprocal and square root are approximations. scripts/record_fused_adam_vectors.py records.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.embedded.fused_adam import FusedAdam

ROOT = Path(__file__).parents[2]


def load_recorder() -> Any:
    spec = importlib.util.spec_from_file_location("recorder", ROOT / "scripts" / "record_fused_adam_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recorder"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


recorder = load_recorder()

# Largest difference of masters from TransformerEngine 2.12 on an H200 in up to 20 steps, as measured, in units in the
# last place of max(|start|, |master|, lr): what the GPU's approximate reciprocal and square root leave. The moments are
# bit-equal.
MOST_ULPS = dict.fromkeys(recorder.CASES, 4.5) | {
    "fp32, low lr": 1.0,
    "remainders, low lr": 1.0,
    "bf16 moments, low lr": 1.0,
}
# L2 regularisation puts the parameters, and so their last places, into the moments.
MOMENTS_FOLLOW_MASTERS = {"fp32, L2"}

Recording = dict[str, Any]


@pytest.fixture(scope="module")
def rehearsal() -> Recording:
    """What the reference does."""
    return recorder.record(FusedAdam, "cpu", {"implementation": "reference"})


@pytest.fixture(scope="module")
def vectors() -> Recording:
    """What TransformerEngine did."""
    if not recorder.VECTORS.exists():
        pytest.skip(
            f"{recorder.VECTORS.relative_to(ROOT)} is not there: run scripts/record_fused_adam_vectors.py on a GPU "
            "with TransformerEngine 2.12"
        )
    with np.load(recorder.VECTORS) as content:
        return dict(content)


@pytest.fixture(scope="module", params=["reference", "TransformerEngine"])
def recording(request: pytest.FixtureRequest) -> Recording:
    return request.getfixturevalue("rehearsal" if request.param == "reference" else "vectors")


def masters(recording: Recording, name: str) -> Any:
    return recorder.masters_of(recorder.CASES[name], recording, name)


# -- TransformerEngine ------------------------------------------------------------------------------------------------


def test_vectors_are_transformer_engine_s_from_these_inputs(vectors: Recording) -> None:
    versions = json.loads(str(vectors["versions"]))
    assert versions["implementation"] == "transformer_engine"
    assert versions["transformer_engine"].startswith("2.12.")
    start, gradients = recorder.make_inputs()
    np.testing.assert_array_equal(vectors["start"].view(np.int32), start.view(np.int32))
    np.testing.assert_array_equal(vectors["gradients"].view(np.int32), gradients.view(np.int32))


@pytest.mark.parametrize("name", recorder.CASES)
def test_reference_agrees_with_transformer_engine(rehearsal: Recording, vectors: Recording, name: str) -> None:
    difference = recorder.compare(rehearsal, vectors, name)
    if name not in MOMENTS_FOLLOW_MASTERS:
        assert difference.moments == 0
    assert difference.ulps <= MOST_ULPS[name]
    assert difference.misrounded == 0


# -- what holds for both ----------------------------------------------------------------------------------------------


def test_recording_is_small(recording: Recording, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "vectors.npz", **recording)
    assert (tmp_path / "vectors.npz").stat().st_size < 300_000


@pytest.mark.parametrize("name", ["masters", "remainders", "remainders, low lr"])
def test_masters_without_gradient_and_decay_stay_at_their_ties(recording: Recording, name: str) -> None:
    idle = ~recording["gradients"].any(axis=0)
    assert idle.sum() == 32
    start = recording["start"][idle].view(np.int32)
    assert ((start & 0xFFFF) == 0x8000).sum() == 16
    for master in masters(recording, name)[:, idle]:
        np.testing.assert_array_equal(master.view(np.int32), start)


def test_ties_round_away_from_zero_with_remainders_and_to_even_with_masters(recording: Recording) -> None:
    start = recording["start"].view(np.int32)
    ties = ~recording["gradients"].any(axis=0) & ((start & 0xFFFF) == 0x8000)
    high = start[ties] >> 16
    np.testing.assert_array_equal(recording["remainders/param"][-1][ties], (high + 1).astype(np.int16))
    np.testing.assert_array_equal(recording["masters/param"][-1][ties], (high + high % 2).astype(np.int16))
    assert set(high % 2) == {0, 1}


def test_remainders_carry_the_fp32_masters_bit_for_bit(recording: Recording) -> None:
    for with_remainders, with_masters in (("remainders", "masters"), ("remainders, decay", "masters, decay")):
        left, right = masters(recording, with_remainders), masters(recording, with_masters)
        assert not recorder.differing(left, right).any()


def test_a_nan_master_hides_behind_a_weight_of_minus_zero(recording: Recording) -> None:
    is_nan = np.isnan(masters(recording, "remainders")[-1])
    assert is_nan.sum() >= 12
    assert set(recording["remainders/param"][-1][is_nan]) == {-(2**15)}
    assert set(recording["remainders/master_param"][-1][is_nan]) == {-1}
    # With fp32 masters the weight is NaN, for all to see.
    weights = torch.from_numpy(recording["masters/param"][-1][is_nan]).view(torch.bfloat16)
    assert weights.isnan().all()


def test_subnormal_weights_become_zero(recording: Recording) -> None:
    start = recording["start"]
    subnormal = (start != 0) & (np.abs(start) < np.finfo(np.float32).tiny)
    unmoved = subnormal & (np.abs(recording["gradients"][0]) < np.finfo(np.float32).tiny)
    assert unmoved.sum() >= 2
    for name in ("fp32", "remainders"):
        first = masters(recording, name)[0][unmoved]
        assert not first.any()
        np.testing.assert_array_equal(np.signbit(first), np.signbit(start[unmoved]))


# -- the comparison is able to fail -----------------------------------------------------------------------------------


def changed(recording: Recording, key: str, index: Any, value: Any) -> Recording:
    array = recording[key].copy()
    array[index] = value
    return {**recording, key: array}


def test_comparison_finds_one_changed_bit_of_a_moment(rehearsal: Recording) -> None:
    old = rehearsal["bf16 moments/exp_avg"][2, 5]
    other = changed(rehearsal, "bf16 moments/exp_avg", (2, 5), old ^ 1)
    assert recorder.compare(rehearsal, other, "bf16 moments").moments == 1


@pytest.mark.parametrize("name", ["fp32", "masters", "remainders"])
def test_comparison_measures_masters(rehearsal: Recording, name: str) -> None:
    key = "fp32/param" if name == "fp32" else f"{name}/master_param"
    assert recorder.compare(rehearsal, rehearsal, name).masters == 0
    # A master larger than lr and larger than where it started, so that its own last place is the unit.
    master = np.abs(masters(rehearsal, name)[2, : recorder.ORDINARY])
    index = int(np.argmax((master > np.abs(rehearsal["start"][: recorder.ORDINARY])) & (master > 1e-2)))
    if name == "remainders":
        off = rehearsal[key][2, index] + 3
    else:
        off = (rehearsal[key][2, index].view(np.int32) + 3).view(np.float32)
    difference = recorder.compare(changed(rehearsal, key, (2, index), off), rehearsal, name)
    assert (difference.masters, difference.ulps, difference.ordinary_ulps) == (1, 3.0, 3.0)


def test_comparison_counts_a_lost_nan_as_infinitely_wrong(rehearsal: Recording) -> None:
    nan = int(np.argmax(np.isnan(rehearsal["fp32/param"][2])))
    other = changed(rehearsal, "fp32/param", (2, nan), 1.0)
    assert recorder.compare(other, rehearsal, "fp32").ulps == np.inf
    assert recorder.compare(rehearsal, other, "fp32").ulps == np.inf


def test_comparison_finds_weights_that_masters_do_not_round_to(rehearsal: Recording) -> None:
    other = changed(rehearsal, "masters/param", (0, 3), rehearsal["masters/param"][0, 3] + 1)
    assert recorder.compare(rehearsal, other, "masters").misrounded == 1


def test_recorder_runs_as_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rehearsal: Recording
) -> None:
    out = tmp_path / "new" / "vectors.npz"
    monkeypatch.setattr(sys, "argv", ["record", "--implementation", "reference", "--out", str(out)])
    recorder.main()
    with np.load(out) as content:
        assert set(content) == set(rehearsal)
        assert json.loads(str(content["versions"]))["torch"] == torch.__version__
        for key in set(content) - {"versions"}:
            np.testing.assert_array_equal(content[key], rehearsal[key])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + len(recorder.CASES)
