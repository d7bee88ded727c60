"""From a run's recipe and arm to the overrides of verl's own Hydra configuration (ppo_megatron_trainer)."""

import re
from collections.abc import Iterator
from typing import Any

# Strings that Hydra's grammar takes without quotes, and words that it would take for something else.
_PLAIN_WORD = re.compile(r"[A-Za-z_/.][A-Za-z0-9_./-]*")
_GRAMMAR_WORDS = frozenset({"null", "true", "false", "inf", "nan"})

VERL_CONFIG_MODULE = "verl.trainer.config"
VERL_CONFIG_NAME = "ppo_megatron_trainer"


def verl_overrides(recipe: dict[str, Any], arm: dict[str, Any]) -> list[str]:
    """Command-line overrides in the order in which they apply: recipe, then arm.

    `verl` trees hold keys of verl's schema (a misspelt one is refused by Hydra); `verl_additions` trees hold keys that
    verl passes on without a schema (engine arguments, Megatron's transformer settings).
    """
    return [
        *_flatten(recipe["verl"], ""),
        *_flatten(recipe.get("verl_additions", {}), "++"),
        *_flatten(arm["verl"], ""),
        *_flatten(arm.get("verl_additions", {}), "++"),
    ]


def _flatten(tree: dict[str, Any], prefix: str, path: str = "") -> Iterator[str]:
    for key, value in tree.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            yield from _flatten(value, prefix, name)
        else:
            yield f"{prefix}{name}={_literal(value)}"


def _literal(value: Any) -> str:
    """`value` in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_literal(item) for item in value) + "]"
    if _PLAIN_WORD.fullmatch(value) and value.lower() not in _GRAMMAR_WORDS:
        return value
    # In a quoted string a backslash is only special before a quote (the closing one included).
    return "'" + re.sub(r"(\\*)('|$)", lambda run: run[1] * 2 + ("\\'" if run[2] else ""), value) + "'"
