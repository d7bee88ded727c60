"""What Hydra says about a mistake, said so that the user can mend it."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from pipeline.launch.hydra_errors import in_words
from pipeline.study.paths import PROJECT

CONF = PROJECT / "conf"


def words_for(override: str, conf: Path = CONF) -> str:
    with initialize_config_dir(str(conf), version_base="1.3"), pytest.raises(HydraException) as raised:
        compose("sweep", overrides=[override])
    return in_words(raised.value, conf)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("arm=baselin", "arm=baselin is unknown. Did you mean baseline or baseline_repeat?"),
        ("recipe=tiny", "recipe=tiny is unknown. Did you mean tiny_cpu?"),
        ("+study=quik", "study=quik is unknown. Did you mean quick?"),
        ("cluster=xyzzy", "cluster=xyzzy is unknown. Known are base, embedded, node_8gpu, one_gpu."),
        ("sed=1", "sed is unknown. Did you mean seed?"),
        ("recipe.lrr=1", "recipe.lrr is unknown. Did you mean recipe.lr?"),
        ("clustr.address=x", "clustr.address is unknown. Did you mean cluster.address or cluster.name or cluster.env?"),
        ("+recipe.lr=2", "+recipe.lr: this setting exists already; leave out the + to change it"),
    ],
)
def test_one_line_with_the_nearest_names(override: str, words: str) -> None:
    assert words_for(override) == words


def test_a_group_without_a_default_choice_takes_a_plus() -> None:
    assert words_for("study=quick").startswith("study is not chosen by default: put a + in front, +study=...")


def test_a_setting_of_verl_that_the_recipe_leaves_out_takes_a_plus() -> None:
    words = words_for("recipe.verl.algorithm.foo=1")
    assert words.startswith("recipe.verl.algorithm.foo is unknown.")
    assert words.endswith("takes a plus: +recipe.verl.algorithm.foo=...")


@pytest.mark.parametrize("override", ["seed=[1", "seed", "recipe.name={a"])
def test_what_cannot_be_read_is_shown_with_the_rule(override: str) -> None:
    words = words_for(override)
    assert override in words
    assert "key=value" in words
    assert len(words.splitlines()) == 1
