"""Library versions in which the precision-aware optimizer is known to be dead."""

from packaging.version import InvalidVersion, Version

from pipeline.study.records import Environment

# bf16 + PAO + fp32 master dtype built TE's FusedAdam without decoupled gradients and master weights: gradients went
# where FusedAdam does not look. Introduced by Megatron-LM 9d509a03b4, fixed by 972553db35; ranges from every tag.
_DEAD_PAO = (("0.13.0rc0", "0.13.1"), ("0.14.0rc0", "0.14.0rc7"), ("0.15.0rc0", "0.15.0rc2"))
AFFECTED_IN_WORDS = "0.13.0rc0 to 0.13.1, 0.14.0rc0 to rc7, 0.15.0rc0 to rc2"


def has_dead_pao(megatron_core: str) -> bool | None:
    """Whether this release of megatron-core has the bug; None when the text is no version."""
    try:
        version = Version(megatron_core)
    except InvalidVersion:
        return None
    return any(Version(first) <= version <= Version(last) for first, last in _DEAD_PAO)


def package_version(environment: Environment | None, name: str) -> str | None:
    """The version of a package, by either spelling of its name (megatron-core, megatron_core)."""
    if environment is None:
        return None
    wanted = name.replace("_", "-").lower()
    for package, version in environment.packages.items():
        if package.replace("_", "-").lower() == wanted:
            return version
    return None


def megatron_core_in_words(environment: Environment | None) -> str:
    """Whether the recorded release is affected, as part of a sentence."""
    version = package_version(environment, "megatron-core")
    affected = None if version is None else has_dead_pao(version)
    if version is None:
        return f"the version of megatron-core was not recorded (affected: {AFFECTED_IN_WORDS})"
    if affected is None:
        return f"megatron-core {version} cannot be placed among the releases (affected: {AFFECTED_IN_WORDS})"
    known = "IS one of the releases with this bug" if affected else "is not one of the releases with this bug"
    return f"megatron-core {version} {known} ({AFFECTED_IN_WORDS}; fixed by Megatron-LM 972553db35)"
