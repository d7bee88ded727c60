"""Model, tokenizer and data that the project makes itself, on first use."""

import hashlib
import logging
import os
import shutil
from pathlib import Path

import psutil
import torch
import transformers

from pipeline.embedded import random_model, task, tiny_model, tokenizer

_log = logging.getLogger(__name__)


def make_assets(folder: Path, size: str | None = None) -> None:
    """Model, tokenizer and parquet files under `folder`, unless they are there.

    Made again where the makers (modules of this package, torch, transformers) or the size have changed. size: a name of
    tiny_model.SIZES (a model that knows a task) or random_model.SHAPES (random weights); None: the smallest.
    """
    size = size or tiny_model.SMALLEST
    makers, made_by = f"{_makers()} size {size}", folder / "made_by"
    if made_by.exists() and made_by.read_text() == makers:
        return
    _log.warning("making the model (%s) and its data in %s", size, folder)
    _remove_unfinished(folder)
    work = folder.with_name(f"{folder.name}.{os.getpid()}")
    work.mkdir(parents=True)
    maker = random_model if size in random_model.SHAPES else tiny_model
    maker.make(work, size)
    (work / "made_by").write_text(makers)
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)


def _remove_unfinished(folder: Path) -> None:
    """What a maker left that was stopped on the way; a model of real size takes 15 GB."""
    for work in folder.parent.glob(f"{folder.name}.*"):
        maker = work.name.removeprefix(f"{folder.name}.")
        if maker.isdecimal() and not psutil.pid_exists(int(maker)):
            shutil.rmtree(work)


def _makers() -> str:
    sources = b"".join(
        Path(module).read_bytes()
        for module in (tiny_model.__file__, random_model.__file__, tokenizer.__file__, task.__file__)
    )
    return f"{hashlib.sha256(sources).hexdigest()} torch {torch.__version__} transformers {transformers.__version__}"
