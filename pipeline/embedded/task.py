"""The tiny task: the larger or the smaller of two digits. Its reward, and its parquet files in verl's format.

And what stands for a task where the weights are random: random prompts, and a reward that means nothing.
"""

import hashlib
import random
from pathlib import Path
from typing import Any

import pandas as pd

_TEST_SHARE = 0.1


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """1.0 for the right digit, 0.1 for another digit, 0.0 for anything else. Called by verl's reward loop."""
    answer = solution_str.strip()
    if answer == ground_truth:
        return 1.0
    return 0.1 if len(answer) == 1 and answer.isdigit() else 0.0


def constant_score(*_: Any, **__: Any) -> float:
    """The control's reward: the same for every response, so that no group prefers one."""
    return 0.5


def made_up_score(data_source: str, solution_str: str, *_: Any, **__: Any) -> float:
    """A number in [0, 1) that any change of the response changes: random weights earn no other reward that varies."""
    return int.from_bytes(hashlib.sha256(solution_str.encode()).digest()[:4], "big") / 2**32


def problems() -> list[tuple[str, str]]:
    """All questions with their answers, each once: the rollout seeds by prompt, so a batch may hold none twice."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return [(f"{word} {a} {b}", str(of(a, b))) for word, of in (("max", max), ("min", min)) for a, b in pairs]


def write_parquet(folder: Path) -> None:
    """train.parquet and test.parquet under `folder`, always the same split."""
    shuffled = problems()
    random.Random(0).shuffle(shuffled)
    test_size = int(len(shuffled) * _TEST_SHARE)
    for split, part in (("test", shuffled[:test_size]), ("train", shuffled[test_size:])):
        pd.DataFrame([_row(question, answer, split, i) for i, (question, answer) in enumerate(part)]).to_parquet(
            folder / f"{split}.parquet"
        )


def write_random_prompts(folder: Path, rows: int, characters: int) -> None:
    """train.parquet and test.parquet (a tenth of it): prompts of so many letters, each different, no right answer."""
    chance = random.Random(0)
    for split, size in (("train", rows), ("test", rows // 10)):
        prompts = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=characters)) for _ in range(size)]
        pd.DataFrame([_row(prompt, "", split, i) for i, prompt in enumerate(prompts)]).to_parquet(
            folder / f"{split}.parquet"
        )


def _row(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "pipeline/larger_or_smaller_digit",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }
