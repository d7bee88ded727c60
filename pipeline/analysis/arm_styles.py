"""How an arm looks, in every picture and dashboard.

Colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart; line styles differ as well.
"""

from collections.abc import Sequence
from typing import Any

from pipeline.analysis.load import BASELINE, BASELINE_REPEAT

ArmStyle = tuple[str, Any]
"""Colour and matplotlib's line style."""

_ARM_STYLE: dict[str, ArmStyle] = {
    BASELINE: ("#000000", "-"),
    BASELINE_REPEAT: ("#999999", ":"),
    "pao": ("#0072B2", "--"),
    "pao_bf16_moments": ("#E69F00", "-."),
    "pao_bf16_all": ("#009E73", (0, (5, 1, 1, 1, 1, 1))),
    "dead_optimizer": ("#D55E00", "--"),
}
_OTHER_STYLES: tuple[ArmStyle, ...] = (("#CC79A7", "--"), ("#56B4E9", "-."), ("#D55E00", ":"), ("#0072B2", "-."))


def arm_style(arms: Sequence[str], arm: str) -> ArmStyle:
    """Colour and line style of an arm; arms that are not ours get the next free one."""
    if arm in _ARM_STYLE:
        return _ARM_STYLE[arm]
    others = [name for name in arms if name not in _ARM_STYLE]
    return _OTHER_STYLES[others.index(arm) % len(_OTHER_STYLES)]
