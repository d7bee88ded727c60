"""The dashboard of a Ray cluster: the HTTP server through which jobs are submitted and the cluster's state is read."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests


def users_token() -> str:
    """The token with which this user reaches Ray clusters, from where Ray itself looks for it; empty without one."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return file.read_text().strip() if file.is_file() else ""


@dataclass(frozen=True)
class RayDashboard:
    """address: http://host:port."""

    address: str
    token: str = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def get(self, path: str, timeout_s: float = 10.0) -> requests.Response:
        """Raises requests.ConnectionError (an OSError) or requests.Timeout where nobody answers."""
        return requests.get(f"{self.address}{path}", headers=self.headers, timeout=timeout_s)

    def answers(self) -> bool:
        """Is the cluster up, with a node to run on? (The dashboard answers before its first node has joined.)"""
        try:
            return self.get("/api/version", timeout_s=2.0).ok and bool(self.alive_nodes())
        except requests.RequestException:
            return False

    def alive_nodes(self) -> list[dict[str, Any]]:
        """The cluster's nodes, each with `resources_total`. Raises requests.RequestException."""
        return self._state("nodes?detail=1&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE")

    def living_actors(self) -> list[dict[str, Any]]:
        """The actors that have not ended, each with `job_id` and `name`. Raises requests.RequestException."""
        return self._state("actors?limit=10000&filter_keys=state&filter_predicates=!%3D&filter_values=DEAD")

    def _state(self, what: str) -> list[dict[str, Any]]:
        response = self.get(f"/api/v0/{what}")
        response.raise_for_status()
        return response.json()["data"]["result"]["result"]

    def in_use(self, resource: str) -> tuple[float, float] | None:
        """How much of a resource is taken and how much there is, as of the last few seconds; None where unknown."""
        response = self.get("/api/cluster_status")
        response.raise_for_status()
        report = (response.json()["data"]["clusterStatus"] or {}).get("loadMetricsReport") or {}
        taken = (report.get("usage") or {}).get(resource)
        return None if taken is None else (float(taken[0]), float(taken[1]))
