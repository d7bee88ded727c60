"""Numbers and lists in plain words, and the one table helper."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, limit: int | None = None) -> str:
    """A Markdown table; numbers should come as text with their unit in the head. "" without rows.

    limit: show so many rows and say how many more there are.
    """
    body = [[_cell(value) for value in row] for row in rows]
    if not body:
        return ""
    left_out = 0 if limit is None else max(len(body) - limit, 0)
    lines = [list(head), ["---"] * len(head), *(body[:limit] if left_out else body)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n({left_out} more in summary.json)" if left_out else text


def _cell(value: object) -> str:
    return "–" if value is None else " ".join(str(value).split()).replace("|", "\\|")


def gib(value: float | None, *, sign: bool = False) -> str:
    """GiB with as many digits as a reader can use: "1.77", "0.00024"."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    text = f"{abs(value):.2f}" if abs(value) >= 0.1 else f"{abs(value):.2g}"
    return f"{'−' if value < 0 else '+' if sign else ''}{text}"


def short_list(items: Sequence[str], limit: int = 8) -> list[str]:
    """The first items, and how many more there are."""
    if len(items) <= limit:
        return list(items)
    return [*items[: limit - 1], f"… and {len(items) - limit + 1} more (all of them in summary.json)"]


def alike(notes: Iterable[tuple[str, str]]) -> list[str]:
    """(run, note) pairs with the runs that share a note put together: "a, b and 3 more: note"."""
    runs: dict[str, list[str]] = {}
    for run, note in notes:
        runs.setdefault(note, []).append(run)
    return [
        f"{', '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''}: {note}"
        for note, names in runs.items()
    ]


def number(value: float | None) -> str | None:
    """Three digits, or nothing."""
    return None if value is None else f"{value:.3g}"


_DEEP_PATH = re.compile(r"(?<![\w.:/])(?:/[\w.+@-]+){3,}")
_SENTENCE_END = re.compile(r"(?<=[\w)\]'\"])\.\s+(?=[A-Z])")
_LONGEST = 400
_LONGEST_BRIEF = 160


def shortened(text: str, longest: int = _LONGEST) -> str:
    """One line of bounded length, absolute paths cut to their last two parts: a report may leave this machine."""
    line = _DEEP_PATH.sub(lambda match: "…/" + "/".join(match[0].split("/")[-2:]), " ".join(text.split()))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def brief(text: str) -> str:
    """The first sentence, for errors where they are told in passing."""
    return shortened(_SENTENCE_END.split(text, maxsplit=1)[0].removesuffix("."), _LONGEST_BRIEF)


def in_setting(arm: str, setting: str) -> str:
    """The arm, and what else was swept."""
    return f"{arm} ({setting})" if setting else arm


def counted(count: int, noun: str) -> str:
    """1 run, 2 runs."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
