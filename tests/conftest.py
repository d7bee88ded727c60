"""Order and skipping, for every test."""

import importlib.util

import pytest
from hypothesis import settings

# A busy machine makes a single example slow; that is no fault of the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; a test that needs a GPU skips where there is none."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU that torch can use"))
