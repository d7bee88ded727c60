"""Recipe and arm become overrides that Hydra reads back as the same values."""

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.train.verl_overrides import verl_overrides

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=12),
    st.sampled_from(["null", "true", "inf", "NaN", "1", "1e-3", "a,b", "${x}", "it's", "back\\slash", "pkg://a.b", ""]),
)


def _read_back(override: str) -> Any:
    value = OverridesParser.create().parse_override(override).value()
    return getattr(value, "text", value)


@settings(deadline=None)
@given(value=_SCALARS)
def test_every_scalar_comes_back(value: Any) -> None:
    (override,) = verl_overrides({"verl": {"key": value}}, {"verl": {}})
    assert _read_back(override) == value
    assert type(_read_back(override)) is type(value)


@settings(deadline=None)
@given(value=st.lists(st.integers(0, 9), max_size=3))
def test_every_list_comes_back(value: list[int]) -> None:
    (override,) = verl_overrides({"verl": {"key": value}}, {"verl": {}})
    assert _read_back(override) == value


def test_the_arm_comes_last_and_additions_are_marked() -> None:
    recipe = {"verl": {"a": {"b": 1}}, "verl_additions": {"c": {"d": "x"}}}
    assert verl_overrides(recipe, {"verl": {"a": {"b": 2}}}) == ["a.b=1", "++c.d=x", "a.b=2"]


@pytest.mark.parametrize("empty", [{}, []])
def test_empty_containers_are_kept(empty: Any) -> None:
    (override,) = verl_overrides({"verl": {"key": empty}}, {"verl": {}})
    assert _read_back(override) == empty
