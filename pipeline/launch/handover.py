"""What the launcher plugin hands to `pipeline.sweep` past Hydra, whose main function returns nothing."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `--help` needs none of it
    from pipeline.launch.kept_runs import StudyFolder
    from pipeline.launch.runner import SweepOutcome


class Handover:
    """study: as soon as it has a folder. outcome: once the sweep has ended (None for --help and --cfg)."""

    study: "StudyFolder | None" = None
    outcome: "SweepOutcome | None" = None


HANDOVER = Handover()
