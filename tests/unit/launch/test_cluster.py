"""The cluster that a sweep starts on this machine, as far as that needs no Ray."""

import socket
from typing import Any

import pytest

from pipeline.launch.checks import check_cluster
from pipeline.launch.cluster import ClusterSettings, LocalCluster
from pipeline.launch.errors import BadInput


def test_of_two_sweeps_that_start_at_once_the_second_is_told_what_a_later_one_is(cluster: dict[str, Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster["dashboard_port"] = port
    settings = ClusterSettings.from_config(cluster)
    check_cluster(cluster)
    first = LocalCluster(settings, workers=1)
    try:
        check_cluster(cluster)  # the second sweep's: nobody listens yet
        with pytest.raises(BadInput) as at_once:
            LocalCluster(settings, workers=1)
    finally:
        first.stop()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(BadInput) as later:
        check_cluster(cluster)
    assert str(at_once.value) == str(later.value)
    LocalCluster(settings, workers=1).stop()
