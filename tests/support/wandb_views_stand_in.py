"""The stand-in of the W&B server with what dashboards need as well: views (workspaces and reports) and projects."""

import json
from dataclasses import dataclass
from typing import Any

from wandb_stand_in import ENTITY, WandbStandIn


@dataclass
class View:
    """A workspace view (type project-view) or a report (type runs)."""

    id: str
    name: str
    type: str
    display_name: str
    description: str
    project: str
    spec: dict[str, Any]
    saved: int = 1
    """How often."""


class WandbWithViews(WandbStandIn):
    """Saving with an id replaces that view, as W&B does; without one makes a new view."""

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[str, View] = {}

    def views_of(self, view_type: str) -> list[View]:
        return [view for view in self.views.values() if view.type == view_type]

    def _answer_upsert_view(self, variables: dict[str, Any]) -> dict[str, Any]:
        former = self.views.get(variables.get("id") or "")
        view = View(
            former.id if former else f"Vmlldzo{len(self.views)}",
            variables["name"],
            variables["type"],
            variables["displayName"],
            variables["description"],
            variables["projectName"],
            json.loads(variables["spec"]),
            former.saved + 1 if former else 1,
        )
        self.views[view.id] = view
        told = {
            "id": view.id, "name": view.name, "type": view.type, "displayName": view.display_name,
            "description": view.description, "spec": variables["spec"], "updatedAt": "2026-01-01T00:00:00",
            "project": {"id": f"project:{view.project}", "name": view.project, "entityName": ENTITY},
        }  # fmt: skip
        return {"upsertView": {"view": told, "inserted": former is None}}

    _answer_upsert_view2 = _answer_upsert_view

    def _answer_get_projects(self, _: dict[str, Any]) -> dict[str, Any]:
        node = {
            "__typename": "Project", "id": "project", "name": "made-up", "entityName": ENTITY,
            "createdAt": "2026-01-01T00:00:00", "isBenchmark": False, "user": None,
        }  # fmt: skip
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        return {"models": {"pageInfo": page, "edges": [{"node": node}]}}
