"""Hydra's and OmegaConf's errors in one clear message, with the names nearest to what was written."""

import re
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from pipeline.launch.errors import nearest

_NO_SUCH_KEY = re.compile(r"Could not override '(?P<key>[^']+)'")
_ALREADY_THERE = re.compile(r"An item is already at '(?P<key>[^']+)'")


def in_words(error: Exception, conf: Path) -> str:
    """error: raised by Hydra while it composed conf/sweep.yaml, or a BadInput, whose words stay."""
    missing = _caused_by(error, MissingConfigException)
    if isinstance(missing, MissingConfigException) and missing.missing_cfg_file and missing.options:
        return _unknown_choice(missing.missing_cfg_file, list(missing.options))
    unreadable = _caused_by(error, OverrideParseException)
    if isinstance(unreadable, OverrideParseException):
        return (
            f"cannot read {unreadable.override!r} ({unreadable.message.splitlines()[0]}): overrides are key=value, "
            "several values key=a,b; put quotes around a value with spaces, commas or brackets: 'key=\"a,b\"'"
        )
    text = _whole_text(error)
    if found := _NO_SUCH_KEY.search(text):
        return _unknown_key(found["key"], conf)
    if found := _ALREADY_THERE.search(text):
        return f"+{found['key']}: this setting exists already; leave out the + to change it"
    if "does not support sweep type" in text:
        return "ranges of numbers cannot be swept: list the values, key=a,b,c"
    return text


def _caused_by(error: BaseException | None, kind: type[Exception]) -> BaseException | None:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__
    return error


def _whole_text(error: BaseException) -> str:
    """OmegaConf's errors are the causes of empty ones of Hydra's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if error.__cause__ is not None and (not lines or lines[0].startswith("Error merging override")):
        lines.append(_whole_text(error.__cause__))
    return "\n".join(lines) or type(error).__name__


def _unknown_choice(path: str, options: list[str]) -> str:
    group, _, name = path.rpartition("/")
    return f"{group}={name} is unknown. {nearest(name, options)}"


def _unknown_key(key: str, conf: Path) -> str:
    if (conf / key).is_dir():
        choices = sorted(file.stem for file in (conf / key).glob("*.yaml"))
        return f"{key} is not chosen by default: put a + in front, +{key}=... ({', '.join(choices)})"
    known = _known_keys(conf)
    parent, dot, name = key.rpartition(".")
    siblings = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == parent]
    if siblings:
        message = f"{key} is unknown. {nearest(name, siblings, prefix=parent + dot)}"
    else:
        message = f"{key} is unknown. {nearest(key, [one for one in known if '.verl.' not in one])}"
    if key.startswith("recipe.verl"):
        message += f" A setting of verl that the recipe does not set takes a plus: +{key}=..."
    return message


def _known_keys(conf: Path) -> list[str]:
    with initialize_config_dir(str(conf), version_base="1.3"):
        config = compose("sweep")
    return list(_keys(config))


def _keys(config: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key in map(str, config):
        name = f"{prefix}{key}"
        keys.append(name)
        value = None if OmegaConf.is_interpolation(config, key) or OmegaConf.is_missing(config, key) else config[key]
        if isinstance(value, DictConfig):
            keys += _keys(value, f"{name}.")
    return keys
