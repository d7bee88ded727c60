"""Resolvers for configurations.

`${in_project:.cache/x}` is that path below the project's folder: Ray's workers start in folders of their own, so a path
in a run's configuration must be absolute. `${shared_by:16,${recipe.n_workers}}` is each worker's part of a whole.
"""

from pathlib import Path

from omegaconf import OmegaConf

PROJECT = Path(__file__).resolve().parents[2]


def in_project(path: str) -> str:
    """`path` below the project's folder, absolute."""
    return str(PROJECT / path)


def shared_by(whole: int, workers: int) -> int:
    """`whole` // `workers`."""
    return whole // workers


OmegaConf.register_new_resolver("in_project", in_project, replace=True)
OmegaConf.register_new_resolver("shared_by", shared_by, replace=True)
