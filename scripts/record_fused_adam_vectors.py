#!/usr/bin/env python3
"""Record what TransformerEngine's FusedAdam does, as golden vectors for the reference FusedAdam.

On a host with a GPU, torch and TransformerEngine 2.12, from this repository's root:

    python scripts/record_fused_adam_vectors.py

writes tests/unit/data/fused_adam_te_2_12.npz and prints how far the reference is from it, case by case.
tests/unit/test_fused_adam_vectors.py compares ever after, without a GPU. `--implementation reference` records the
reference itself: a rehearsal of the recorder and its format.

The file holds `versions` (JSON), `start` (fp32 master weights, one tensor), `gradients` (fp32, [step, element]) and for
each case and kind of tensor `<case>/<kind>`: [recorded step, element], bf16 as int16 bit patterns.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.embedded import fused_adam as reference  # noqa: E402  the path above comes first

VECTORS = ROOT / "tests" / "unit" / "data" / "fused_adam_te_2_12.npz"
STEPS = 20
RECORDED_STEPS = (1, 2, 20)
BETAS = (0.9, 0.999)

Array = npt.NDArray[Any]
Recording = dict[str, Any]
"""The content of the file: name -> array."""


@dataclass(frozen=True)
class Case:
    """One optimizer setting. `masters`: "none" for fp32 parameters, "fp32" or "remainders" beside bf16 ones."""

    masters: str
    lr: float = 1e-3
    weight_decay: float = 0.0
    moments: torch.dtype = torch.float32
    gradients: torch.dtype = torch.float32
    adam_w_mode: bool = True
    bias_correction: bool = True
    ordinary_only: bool = False
    """Leave out the special elements: fp16 moments have one scale for the tensor, which a NaN would spoil."""


CASES = {
    "fp32": Case("none", weight_decay=0.1),
    "fp32, low lr": Case("none", lr=1e-6),
    "fp32, L2": Case("none", weight_decay=0.1, adam_w_mode=False),
    "fp32, no bias correction": Case("none", bias_correction=False),
    "masters": Case("fp32"),
    "masters, decay": Case("fp32", weight_decay=0.1),
    "remainders": Case("remainders"),
    "remainders, decay": Case("remainders", weight_decay=0.1),
    "remainders, low lr": Case("remainders", lr=1e-6),
    "bf16 moments": Case("remainders", moments=torch.bfloat16, weight_decay=0.1),
    "bf16 moments, low lr": Case("remainders", moments=torch.bfloat16, lr=1e-6),
    "bf16 moments and gradients": Case("remainders", moments=torch.bfloat16, gradients=torch.bfloat16),
    "fp16 moments": Case("remainders", moments=torch.float16, ordinary_only=True),
}

# -- inputs -----------------------------------------------------------------------------------------------------------

ORDINARY = 448


def make_inputs() -> tuple[Array, Array]:
    """Start weights [element] and gradients [step, element], fp32: ordinary elements first, then the special ones."""
    generator = np.random.default_rng(20251121)

    def normal(*shape: int) -> Array:
        return generator.standard_normal(shape).astype(np.float32)

    blocks: list[tuple[Array, Array]] = []
    # Ordinary: weights of a trained model's size, gradients over six decades.
    sizes = (10.0 ** generator.uniform(-6, 0, ORDINARY)).astype(np.float32)
    blocks.append((normal(ORDINARY) * np.float32(0.02), normal(STEPS, ORDINARY) * sizes))
    # At and beside ties of the remainder split; without gradient and decay they must stay what they are.
    high = normal(32).view(np.int32) & ~0xFFFF
    low = np.resize(np.array([0x8000, 0x8000, 0x7FFF, 0x8001], dtype=np.int32), 32)
    blocks.append(((high | low).view(np.float32), np.zeros((STEPS, 32), np.float32)))
    # Subnormal and nearly subnormal weights and gradients; gradients whose squares are.
    smallest = np.float32(2.0**-126)
    edge = np.array([smallest / 2, -smallest / 2, smallest, -smallest, smallest * 3, 1e-30, 0.0, -0.0], np.float32)
    tiny_gradients = np.array([smallest / 4, smallest, 1e-36, 1e-23, 1e-20, 1e-18], np.float32)
    signs = np.where(generator.random((STEPS, 48)) < 0.5, np.float32(-1), np.float32(1))
    blocks.append((np.tile(edge, 6), signs * np.repeat(tiny_gradients, 8)))
    # Gradients whose squares overflow.
    huge = (10.0 ** np.linspace(17, 38, 16)).astype(np.float32)
    blocks.append((normal(16), signs[:, :16] * huge))
    # Infinite and NaN: at the second step only, and at every step.
    bad = np.resize(np.array([np.inf, -np.inf, np.nan], np.float32), 12)
    non_finite = normal(STEPS, 12)
    non_finite[1, :6] = bad[:6]
    non_finite[:, 6:] = bad[6:]
    blocks.append((normal(12), non_finite))
    return np.concatenate([start for start, _ in blocks]), np.concatenate([grads for _, grads in blocks], axis=1)


# -- recording --------------------------------------------------------------------------------------------------------


def run_case(case: Case, adam: Callable[..., Any], device: str, start: Array, gradients: Array) -> dict[str, Array]:
    """Run all steps; kind -> [recorded step, element]."""
    if case.ordinary_only:
        start, gradients = start[:ORDINARY], gradients[:, :ORDINARY]
    master = torch.from_numpy(start.copy())
    has_masters, remainders = case.masters != "none", case.masters == "remainders"
    weight, remainder = reference.split_master(master)
    first = master if not has_masters else weight if remainders else master.bfloat16()
    param = torch.nn.Parameter(first.to(device))
    optimizer = adam(
        [param],
        lr=case.lr,
        betas=BETAS,
        eps=1e-8,
        weight_decay=case.weight_decay,
        bias_correction=case.bias_correction,
        adam_w_mode=case.adam_w_mode,
        master_weights=has_masters,
        use_decoupled_grad=True,
        store_param_remainders=remainders,
        exp_avg_dtype=case.moments,
        exp_avg_sq_dtype=case.moments,
    )
    optimizer.initialize_state(param, remainders)
    if has_masters:
        # Masters with low halves of their own, not those of a fresh start from bf16 weights.
        optimizer.state[param]["master_param"].copy_((remainder if remainders else master).to(device))
    recorded: dict[str, list[Array]] = {}
    for step in range(1, STEPS + 1):
        grad = torch.from_numpy(gradients[step - 1]).to(device=device, dtype=case.gradients)
        vars(param)["decoupled_grad"] = grad
        optimizer.step()
        if step in RECORDED_STEPS:
            for kind, tensor in {"param": param.detach(), **optimizer.state[param]}.items():
                recorded.setdefault(kind, []).append(to_numpy(tensor))
    return {kind: np.stack(arrays) for kind, arrays in recorded.items()}


def to_numpy(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def record(adam: Callable[..., Any], device: str, versions: dict[str, str]) -> Recording:
    """Every case."""
    start, gradients = make_inputs()
    content: Recording = {"versions": np.array(json.dumps(versions)), "start": start, "gradients": gradients}
    for name, case in CASES.items():
        for kind, values in run_case(case, adam, device, start, gradients).items():
            content[f"{name}/{kind}"] = values
    return content


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How two recordings of one case differ."""

    moments: int
    """Elements of both moments, over the recorded steps, whose bits differ (all NaN count as one)."""
    masters: int
    """The same of the fp32 masters."""
    ulps: float
    """The largest difference of masters, in units in the last place of the largest of: the master at the start, the
    master, lr. The last two because an update of lr's size cannot be more exact than its own last place."""
    ordinary_ulps: float
    """The same over ordinary elements."""
    misrounded: int
    """bf16 weights beside fp32 masters that are not those masters rounded to nearest, ties to even."""


def masters_of(case: Case, content: Recording, name: str) -> Array:
    """The fp32 masters [recorded step, element] of a recording."""
    if case.masters == "none":
        return content[f"{name}/param"]
    stored = content[f"{name}/master_param"]
    if case.masters == "fp32":
        return stored
    weights = torch.from_numpy(content[f"{name}/param"]).view(torch.bfloat16)
    return reference.join_master(weights, torch.from_numpy(stored)).numpy()


def differing(left: Array, right: Array, is_bf16: bool = False) -> Array:
    """Where bits differ. NaN is NaN, whatever its bits."""
    values = [torch.from_numpy(side) for side in (left, right)]
    if is_bf16:
        values = [side.view(torch.bfloat16) for side in values]
    bits = [side.view({2: torch.int16, 4: torch.int32}[side.element_size()]) for side in values]
    both_nan = values[0].isnan() & values[1].isnan()
    return ((bits[0] != bits[1]) & ~both_nan).numpy()


def compare(found: Recording, expected: Recording, name: str) -> Difference:
    """Compare a case of two recordings made from the same inputs."""
    case = CASES[name]
    is_bf16 = case.moments == torch.bfloat16
    moments = sum(
        int(differing(found[f"{name}/{kind}"], expected[f"{name}/{kind}"], is_bf16).sum())
        for kind in ("exp_avg", "exp_avg_sq")
    )
    left, right = (masters_of(case, content, name) for content in (found, expected))
    different = differing(left, right)
    start = expected["start"][: left.shape[1]]
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.maximum(np.maximum(np.abs(start), np.abs(right)), np.float32(case.lr))
        ulps = np.abs(left.astype(np.float64) - right.astype(np.float64)) / np.spacing(size)
    # A NaN or an infinity on one side only is as wrong as can be.
    ulps = np.where(different, np.where(np.isfinite(ulps), ulps, np.inf), 0.0)
    misrounded = 0
    if case.masters == "fp32":
        rounded = to_numpy(torch.from_numpy(right).bfloat16())
        misrounded = int(differing(rounded, expected[f"{name}/param"], is_bf16=True).sum())
    return Difference(moments, int(different.sum()), ulps.max(), ulps[:, :ORDINARY].max(), misrounded)


def table(found: Recording, expected: Recording) -> str:
    """All cases, one line each."""
    lines = [f"{'case':28} moments differ  masters differ  largest, ulp  ordinary, ulp  misrounded"]
    for name in CASES:
        difference = compare(found, expected, name)
        lines.append(
            f"{name:28} {difference.moments:14d}  {difference.masters:14d}  {difference.ulps:12.2f}  "
            f"{difference.ordinary_ulps:13.2f}  {difference.misrounded:10d}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--implementation", choices=("te", "reference"), default="te")
    parser.add_argument("--out", type=Path, default=VECTORS, help="default: %(default)s")
    arguments = parser.parse_args()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    rehearsal = record(reference.FusedAdam, "cpu", {**versions, "implementation": "reference"})
    content = rehearsal
    if arguments.implementation == "te":
        import transformer_engine  # pyright: ignore[reportMissingImports]
        from transformer_engine.pytorch.optimizers import FusedAdam  # pyright: ignore[reportMissingImports]

        versions.update(
            implementation="transformer_engine",
            transformer_engine=transformer_engine.__version__,
            cuda=str(torch.version.cuda),
            device=torch.cuda.get_device_name(),
        )
        content = record(FusedAdam, "cuda", versions)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, **content)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes, {json.loads(str(content['versions']))}")
    print("The reference against it:")
    print(table(rehearsal, content))


if __name__ == "__main__":
    main()
