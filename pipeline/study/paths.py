"""Where the project lies, for configurations: `${in_project:.cache/x}` is that path below the project's folder.

Ray's workers start in folders of their own, so a path in a run's configuration must be absolute.
"""

from pathlib import Path

from omegaconf import OmegaConf

PROJECT = Path(__file__).resolve().parents[2]


def in_project(path: str) -> str:
    """`path` below the project's folder, absolute."""
    return str(PROJECT / path)


OmegaConf.register_new_resolver("in_project", in_project, replace=True)
