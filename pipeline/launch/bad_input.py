"""What the user wrote cannot work: one clear message, exit status 2."""

import difflib
from collections.abc import Iterable


class BadInput(Exception):  # noqa: N818 - it is the user's input that is at fault, not the program
    """The message says which key and value, why, and what to do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A question with the known names nearest to `name`, or all of them when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known are {', '.join(names)}"
