"""Errors that `pipeline.sweep` tells its user in words, without a traceback."""

import difflib
from collections.abc import Iterable
from typing import Any


class BadInput(Exception):  # noqa: N818 - it is the user's input that is at fault, not the program
    """What the user wrote cannot work (exit status 2). The message says which key and value, why, and what to do."""


class ClusterError(RuntimeError):
    """The Ray cluster did not start (exit status 1); no run was started."""


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A question with the known names nearest to `name`, or all of them when none is near; `prefix` before each."""
    names = sorted(known)
    close = [one for one in names if len(name) > 2 and one.startswith(name)]
    close += [one for one in difflib.get_close_matches(name, names, n=3, cutoff=0.6) if one not in close]
    if close:
        return f"Did you mean {' or '.join(prefix + one for one in close)}?"
    return f"Known are {', '.join(prefix + one for one in names)}."


def shown(value: Any) -> str:
    """A value as the user would write it on the command line."""
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if _is_plain(value) else str(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)
