"""Names that are the same in the run folder, the Ray submission and W&B."""

import re
from typing import Any

_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_.+-]+")
_STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_study_name(name: str) -> str:
    """Return `name` when it can be a folder's name; raise ValueError, saying what is allowed, otherwise."""
    if not _STUDY_NAME.fullmatch(name):
        raise ValueError(
            f"study_name={name!r} cannot name a folder: use letters, digits, '_', '-' and '.', "
            "starting with a letter or digit (for example study_name=pao_lr_sweep)"
        )
    return name


def swept_suffix(swept: dict[str, Any]) -> str:
    """`{"recipe.lr": 0.001}` -> "-lr0.001": the last part of each key and its value, in the order of the keys."""
    return "".join(f"-{key.rsplit('.', 1)[-1]}{value}" for key, value in sorted(swept.items()))


def pair_id(prefix: str, seed: int, swept: dict[str, Any]) -> str:
    """The run id without its arm: `grpo-qwen2_7b-1n8g-tp4pp2-s1` (prefix is the recipe's `run_prefix`)."""
    return _safe(f"{prefix}-s{seed}{swept_suffix(swept)}")


def run_id(prefix: str, arm: str, seed: int, swept: dict[str, Any]) -> str:
    """Readable and stable: `grpo-qwen2_7b-1n8g-tp4pp2-pao-s1`, with swept values behind it."""
    return _safe(f"{prefix}-{arm}-s{seed}{swept_suffix(swept)}")


def _safe(text: str) -> str:
    return _NOT_ALLOWED.sub("_", text)
