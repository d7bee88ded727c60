"""What the user sees while a sweep runs: a live table on a terminal, otherwise one line per event and step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.launch.progress import Progress

ViewState = Literal["waiting", "starting", "running", "succeeded", "kept", "failed", "stopped"]

_COLOURS: dict[ViewState, str] = {
    "waiting": "dim",
    "starting": "yellow",
    "running": "cyan",
    "succeeded": "green",
    "kept": "green",
    "failed": "bold red",
    "stopped": "magenta",
}
_STILL_STARTING_S = 20.0


@dataclass
class RunView:
    """One run as the user sees it."""

    label: str
    """The run id without what all runs of a recipe share: `pao-s1`."""
    progress: Progress
    state: ViewState = "waiting"
    stage: str = ""
    """What a starting run is doing; why a run ended."""
    started_at: float | None = None
    """Monotonic seconds; the first step's end ends the start-up."""
    start_up_s: float | None = None
    took_s: float | None = None

    def enter(self, state: ViewState, stage: str = "") -> None:
        self.state, self.stage = state, stage


def clock(seconds: float) -> str:
    """125 -> "2:05", 3725 -> "1:02:05"."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def number(value: float | None, digits: int = 4) -> str:
    """Significant digits; a dash for what was not measured."""
    return "-" if value is None else f"{value:.{digits}g}"


def sweep_left_s(views: Sequence[RunView]) -> float | None:
    """Seconds until the last run ends, by start-up and step times seen so far; None while none were seen."""
    seen = [view for view in views if view.progress.step_s is not None and view.start_up_s is not None]
    total = 0.0
    for view in views:
        if view.state in ("succeeded", "kept", "failed", "stopped"):
            continue
        left = view.progress.left_s()
        if left is None:
            if not seen or view.progress.steps is None:
                return None
            like = seen[-1]
            assert like.progress.step_s is not None
            assert like.start_up_s is not None
            spent = 0.0 if view.started_at is None else time.monotonic() - view.started_at
            left = max(like.start_up_s - spent, 0.0) + view.progress.steps * like.progress.step_s
        total += left
    return total


class Display(Protocol):
    """Where the sweep tells what happens."""

    def __enter__(self) -> "Display": ...

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None:
        """A remark that concerns the sweep, not one run."""
        ...

    def changed(self, view: RunView) -> None:
        """The run's state or stage changed."""
        ...

    def stepped(self, view: RunView) -> None:
        """The run finished a training step."""
        ...

    def tick(self) -> None:
        """Called about twice a second."""
        ...


class PlainDisplay:
    """One line per event, for logs and pipes."""

    def __init__(self, views: Sequence[RunView], console: Console) -> None:
        self._views = views
        self._console = console
        self._began = time.monotonic()
        self._said_at = self._began

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def say(self, text: str) -> None:
        self._said_at = time.monotonic()
        # Never wrapped or coloured: lines are for grep.
        line = f"[{clock(self._said_at - self._began)}] {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def changed(self, view: RunView) -> None:
        self.say(f"{view.label}: {view.state}" + (f": {view.stage}" if view.stage else ""))

    def stepped(self, view: RunView) -> None:
        self.say(f"{view.label}: {step_line(view, sweep_left_s(self._views))}")

    def tick(self) -> None:
        if time.monotonic() - self._said_at < _STILL_STARTING_S:
            return
        for view in self._views:
            if view.state == "starting" and view.started_at is not None:
                spent = clock(time.monotonic() - view.started_at)
                self.say(f"{view.label}: still starting after {spent}" + (f": {view.stage}" if view.stage else ""))


def step_line(view: RunView, sweep_left: float | None) -> str:
    """A step in one line: "step 3 of 8, 5.21 s per step, 0:26 left (sweep 2:31), reward 0.13, ppo_kl 0.0053, ..."."""
    progress = view.progress
    left = progress.left_s()
    parts = [
        f"step {progress.step}" + (f" of {progress.steps}" if progress.steps else ""),
        f"{number(progress.step_s, 3)} s per step",
    ]
    if left is not None:
        parts.append(f"{clock(left)} left" + (f" (sweep {clock(sweep_left)})" if sweep_left is not None else ""))
    parts += [
        f"reward {number(progress.reward)}",
        f"ppo_kl {number(progress.ppo_kl)}",
        f"clip {number(progress.clip_fraction)}",
    ]
    if progress.peak_gib is not None:
        parts.append(f"peak {progress.peak_gib:.2f} GiB ({progress.memory_source})")
    return ", ".join(parts)


class LiveDisplay:
    """A table of all runs that is drawn anew in place."""

    def __init__(self, views: Sequence[RunView], console: Console, title: str) -> None:
        self._views = views
        self._title = title
        self._began = time.monotonic()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2)

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def changed(self, view: RunView) -> None:
        if view.state == "failed":
            self.say(f"{view.label} failed: {view.stage}")

    def stepped(self, view: RunView) -> None:
        return

    def tick(self) -> None:
        return

    def _render(self) -> RenderableType:
        left = sweep_left_s(self._views)
        foot = f"{clock(time.monotonic() - self._began)} elapsed"
        if left:
            foot += f", about {clock(left)} left"
        foot += "".join(f"; {view.label}: {view.stage}" for view in self._views if view.state == "starting")
        return Group(runs_table(self._views, self._title), Text(foot, style="dim"))


def runs_table(views: Sequence[RunView], title: str) -> Table:
    """The runs with state, progress and latest metrics."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "state", "step", "s/step", "left", "reward", "ppo_kl", "clip", "peak GiB"):
        table.add_column(heading, justify="left" if heading in ("run", "state") else "right", overflow="fold")
    for view in views:
        progress, left = view.progress, view.progress.left_s()
        table.add_row(
            view.label,
            Text(_state_text(view), style=_COLOURS[view.state]),
            f"{progress.step}/{progress.steps or '?'}" if progress.step else "",
            number(progress.step_s, 3) if progress.step else "",
            clock(left) if left is not None and view.state == "running" else "",
            *(number(value) if progress.step else "" for value in (progress.reward, progress.ppo_kl)),
            number(progress.clip_fraction) if progress.step else "",
            "" if progress.peak_gib is None else f"{progress.peak_gib:.2f} {progress.memory_source}",
        )
    return table


def _state_text(view: RunView) -> str:
    if view.state == "starting" and view.started_at is not None:
        return f"starting {clock(time.monotonic() - view.started_at)}"
    if view.state == "kept":
        return "succeeded before, kept"
    if view.took_s is not None:
        return f"{view.state} {clock(view.took_s)}"
    return view.state


def display_for(views: Sequence[RunView], title: str) -> Display:
    """The live table on a terminal, plain lines elsewhere."""
    console = Console()
    return LiveDisplay(views, console, title) if console.is_terminal else PlainDisplay(views, console)
