"""Where a study comes from: hardware, versions, the settings of each arm, and the command that makes it again."""

import re
from collections.abc import Iterator
from typing import Any, cast

from pipeline.analysis.library_versions import package_version
from pipeline.analysis.load import Study
from pipeline.analysis.words import short_list, shortened
from pipeline.study.records import Environment

_PACKAGES = ("verl", "megatron-core", "torch", "transformer-engine", "sglang", "mbridge", "transformers", "ray")


def recorded_environment(study: Study) -> Environment | None:
    """Of the first run that recorded it; pairs whose runs differ in it are not valid."""
    return next((run.environment for run in study.runs if run.environment is not None), None)


def reproduce_command(study: Study) -> str:
    """What makes this study again: the sweep, from the overrides that each run recorded, or the runs' own commands."""
    if commands := dict.fromkeys(run.config.command for run in study.runs if run.config.command):
        return "\n".join(commands)
    values = {"arm": study.arms, "seed": [str(seed) for seed in sorted({run.seed for run in study.runs})]}
    for key, value in (_split(override) for run in study.runs for override in run.overrides):
        if key not in ("arm", "seed") and value not in values.setdefault(key, []):
            values[key].append(value)
    if not {"study_name", "+study"} & set(values):
        values["study_name"] = [study.runs[0].config.study_name]
    arguments = [f"{key}={','.join(found)}" for key, found in values.items()]
    return " ".join(["python -m pipeline.sweep", *(_quoted(shortened(argument)) for argument in arguments)])


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value


def _quoted(argument: str) -> str:
    return argument if re.fullmatch(r"[\w.,:=+/@%-]+", argument) else "'" + argument.replace("'", "'\\''") + "'"


def hardware_in_words(study: Study) -> str:
    environment = recorded_environment(study)
    if environment is None:
        return "Hardware not recorded"
    gpus: list[dict[str, Any]] = environment.hardware.get("gpus") or []
    if gpus:
        size = gpus[0].get("memory_gib")
        return f"{len(gpus)} x {gpus[0].get('name', 'GPU')}" + (f" ({size:.0f} GiB)" if size else "")
    hardware = environment.hardware
    memory = hardware.get("memory_gib")
    told = f"{hardware.get('processor', 'processor not recorded')}, {hardware.get('cores', '?')} cores"
    return f"No GPU: {told}" + (f", {memory:.0f} GiB" if isinstance(memory, int | float) else "")


def environment_in_words(study: Study) -> str:
    environment = recorded_environment(study)
    if environment is None:
        return "Versions and hardware were not recorded (no env.json)."
    versions = [f"{name} {found}" for name in _PACKAGES if (found := package_version(environment, name))]
    commit = str(environment.git.get("commit") or "not recorded")[:12]
    dirty = " with uncommitted changes" if environment.git.get("dirty") else ""
    told = f"Python {environment.python}, {', '.join(versions)}"
    return f"{hardware_in_words(study)}. {told}. Project commit {commit}{dirty}."


def settings_by_arm(study: Study) -> str:
    """verl's settings as the recipe and each arm give them, as overrides of verl's own configuration."""
    first = study.runs[0]
    blocks = [
        ("every arm", [*_flat(first.config.recipe.get("verl")), *_flat(first.config.recipe.get("verl_additions"))])
    ]
    for arm in study.arms:
        own = list(_flat(study.runs_of(arm)[0].config.arm.get("verl")))
        blocks.append((f"{arm}, in addition", own or ["# nothing"]))
    return "\n\n".join(f"{name}:\n\n```\n{chr(10).join(short_list(lines, 150))}\n```" for name, lines in blocks)


def _flat(settings: Any, path: str = "") -> Iterator[str]:
    if isinstance(settings, dict):
        for key, value in cast(dict[str, Any], settings).items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield f"{path}={shortened(_hydra_value(settings))}"


def _hydra_value(value: Any) -> str:
    words: dict[Any, str] = {None: "null", True: "true", False: "false"}
    if isinstance(value, list):
        return f"[{','.join(_hydra_value(item) for item in cast(list[Any], value))}]"
    return words[value] if value is None or isinstance(value, bool) else str(value)
