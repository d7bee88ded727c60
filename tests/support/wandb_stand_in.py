"""A stand-in of the W&B server on 127.0.0.1, for tests and measurements: what the real `wandb` client needs, no more.

It keeps what it receives in memory (`runs`, `artifacts`), answers wandb.Api, and can be told to misbehave (`disturb`):
errors, 429s, slow answers, connections that die in the middle. Semantics that matter here, as W&B documents them:

* a history line is stored at the offset that the client names: sending the same lines again changes nothing;
* a run that starts anew under an old id, without resuming it, replaces the former data;
* an artifact whose content is there already gets no second version.
"""

import base64
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

API_KEY = "5ecre7" + "0123456789abcdef" * 3
"""Long enough for the client's own check; easy to find in files where it must not be."""
ENTITY = "stand-in"
_RUN_VARIABLES = {
    "display_name": "displayName", "group": "groupName", "job_type": "jobType", "tags": "tags", "notes": "notes",
}  # fmt: skip


@dataclass
class ServerRun:
    """What the server has of one run."""

    project: str
    name: str
    display_name: str = ""
    group: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    state: str = "running"
    resumed: bool = False
    """Whether a client asked for what is there, to go on behind it."""

    @property
    def storage_id(self) -> str:
        return f"id:{self.project}:{self.name}"

    def values(self, key: str) -> Any:
        """A value of the client's configuration."""
        return self.config[key]["value"]

    def as_graphql(self) -> dict[str, Any]:
        last_step = self.history[-1]["_step"] if self.history else -1
        return {
            "id": self.storage_id, "name": self.name, "displayName": self.display_name, "group": self.group,
            "jobType": self.job_type, "tags": self.tags, "state": self.state, "config": json.dumps(self.config),
            "summaryMetrics": json.dumps(self.summary), "systemMetrics": "{}", "historyLineCount": len(self.history),
            "historyKeys": {"lastStep": last_step, "keys": {}}, "sweepName": None, "commit": None, "readOnly": False,
            "createdAt": "2026-01-01T00:00:00", "heartbeatAt": "2026-01-01T00:00:00", "description": None,
            "notes": self.notes, "user": {"name": ENTITY, "username": ENTITY}, "projectId": 1,
            "project": _project(self.project),
        }  # fmt: skip


@dataclass
class ServerArtifact:
    """One version of an artifact."""

    number: int
    project: str
    type: str
    name: str
    digest: str
    run: str
    aliases: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    committed: bool = False

    @property
    def id(self) -> str:
        return f"artifact{self.number}"


@dataclass
class Disturbance:
    """What happens to requests whose path and operation match, instead of or on top of an answer."""

    matches: re.Pattern[str]
    status: int = 200
    """Another status than 200 is sent without doing anything."""
    delay_s: float = 0.0
    cut: bool = False
    """The request is carried out, and the connection dies in the middle of the answer."""
    times: int | None = None
    """How often; None: until `calm`."""


class WandbStandIn:
    """Use it as a context manager; `url` goes into WANDB_BASE_URL."""

    def __init__(self) -> None:
        self.runs: dict[str, ServerRun] = {}
        self.artifacts: list[ServerArtifact] = []
        self.requests: list[str] = []
        """One line per request: method, path, GraphQL operation, and what was answered."""
        self.lock = threading.Lock()
        self._disturbances: list[Disturbance] = []
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "WandbStandIn":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """What sends a client here."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": API_KEY, "WANDB_ENTITY": ENTITY}

    def disturb(self, matches: str, **how: Any) -> None:
        """matches: a regular expression for lines such as "POST /graphql UpsertBucket". how: Disturbance's fields."""
        with self.lock:
            self._disturbances.append(Disturbance(re.compile(matches), **how))

    def calm(self) -> None:
        with self.lock:
            self._disturbances.clear()

    def disturbance_for(self, line: str) -> Disturbance:
        with self.lock:
            for found in self._disturbances:
                if found.matches.search(line) and found.times != 0:
                    found.times = None if found.times is None else found.times - 1
                    return found
        return Disturbance(re.compile(""))

    # -- what clients ask for -----------------------------------------------------------------------------------------

    def graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The `data` of the answer. An operation that is not known here gets nothing (real servers differ as well)."""
        name = re.sub("(?<=[a-z])(?=[A-Z])", "_", operation).lower()
        answer = getattr(self, f"_answer_{name}", None)
        return {} if answer is None else answer(variables)

    def file_stream(self, name: str, body: dict[str, Any]) -> None:
        run = self.runs[name]
        for file, chunk in body.get("files", {}).items():
            lines = [json.loads(line) for line in chunk["content"]] if file.endswith((".jsonl", ".json")) else []
            if file == "wandb-history.jsonl":
                run.history[chunk["offset"] : chunk["offset"] + len(lines)] = lines
            elif file == "wandb-summary.json":
                run.summary = lines[-1]
        if body.get("complete"):
            run.exit_code = body.get("exitcode")
            run.state = {0: "finished", 255: "killed"}.get(body.get("exitcode", 0), "failed")

    def store(self, path: str, content: bytes) -> None:
        kind, owner, name = path.removeprefix("/storage/").split("/", 2)
        if kind == "run":
            self.runs[owner].files[name] = content
        else:
            self.artifacts[int(owner)].files[name] = content

    def _answer_viewer(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "viewer": {
                "id": "viewer", "entity": ENTITY, "username": ENTITY, "name": ENTITY, "email": None, "admin": False,
                "flags": "{}", "teams": {"edges": []}, "apiKeys": {"edges": []}, "deletedAt": None,
            }
        }  # fmt: skip

    _answer_get_default_entity = _answer_viewer

    def _answer_server_features_query(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def _answer_server_info(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None}}

    def _answer_run_resume_status(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(variables["name"])
        if run is None:
            return {"model": {**_project(variables["project"]), "bucket": None}}
        run.resumed = True
        bucket = {
            **run.as_graphql(), "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]",
            "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
            "wandbConfig": json.dumps({"t": 1}),
        }  # fmt: skip
        return {"model": {**_project(run.project), "bucket": bucket}}

    def _answer_upsert_bucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self._by_storage_id(variables.get("id"))
        if run is None:
            name = variables["name"]
            inserted = name not in self.runs
            run = self.runs.setdefault(name, ServerRun(variables["project"], name))
            if variables.get("displayName") is not None:  # a start; later updates of the configuration bring none
                run.history, run.summary, run.files = [], {}, {}
        else:
            inserted = False
        if variables.get("displayName") is not None:
            run.state, run.exit_code = "running", None
        for attribute, variable in _RUN_VARIABLES.items():
            if variables.get(variable) is not None:
                setattr(run, attribute, variables[variable])
        if variables.get("config") is not None:
            run.config = json.loads(variables["config"])
        if variables.get("summaryMetrics") is not None:
            run.summary = json.loads(variables["summaryMetrics"])
        return {"upsertBucket": {"bucket": run.as_graphql(), "inserted": inserted}}

    def _by_storage_id(self, storage_id: str | None) -> ServerRun | None:
        return next((run for run in self.runs.values() if run.storage_id == storage_id), None)

    def _answer_create_run_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["run"]
        files = [{"name": file, "uploadUrl": f"{self.url}/storage/run/{name}/{file}"} for file in variables["files"]]
        return {"createRunFiles": {"runID": self.runs[name].storage_id, "uploadHeaders": [], "files": files}}

    def _answer_run(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(variables["name"])
        found = run is not None and run.project == variables["project"]
        return {"project": {**_project(variables["project"]), "run": run.as_graphql() if run and found else None}}

    _answer_run_history_keys = _answer_run

    def _answer_run_parquet_history(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs[variables["runName"]]
        live = [{"_step": row["_step"]} for row in run.history[:1]]
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": live}}}}

    def _answer_sampled_history_page(self, variables: dict[str, Any]) -> dict[str, Any]:
        spec = json.loads(variables["spec"])
        rows = [
            {key: row[key] for key in spec["keys"]}
            for row in self.runs[variables["run"]].history
            if spec["minStep"] <= row["_step"] <= spec["maxStep"] and all(key in row for key in spec["keys"])
        ]
        return {"project": {"run": {"sampledHistory": [rows[: spec["samples"]]]}}}

    def _answer_history_page(self, variables: dict[str, Any]) -> dict[str, Any]:
        rows = self.runs[variables["run"]].history
        wanted = range(variables["minStep"], variables["maxStep"])
        return {"project": {"run": {"history": [json.dumps(row) for row in rows if row["_step"] in wanted]}}}

    # -- artifacts ----------------------------------------------------------------------------------------------------

    def versions(self, name: str) -> list[ServerArtifact]:
        return [found for found in self.artifacts if found.name == name and found.committed]

    def _answer_create_artifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        asked = variables["input"]
        name = asked["artifactCollectionName"]
        former = [found for found in self.versions(name) if found.digest == asked["digest"]]
        if not former:
            aliases = [alias["alias"] for alias in asked.get("aliases") or []]
            self.artifacts.append(
                ServerArtifact(
                    len(self.artifacts), asked["projectName"], asked["artifactTypeName"], name, asked["digest"],
                    asked["runName"], aliases,
                )
            )  # fmt: skip
        artifact = former[0] if former else self.artifacts[-1]
        latest = {"id": self.versions(name)[-1].id, "versionIndex": 0} if self.versions(name) else None
        return {
            "createArtifact": {
                "artifact": {
                    "id": artifact.id,
                    "state": "COMMITTED" if former else "PENDING",
                    "artifactSequence": {"id": f"sequence:{name}", "latestArtifact": latest},
                }
            }
        }

    def _artifact(self, artifact_id: str) -> ServerArtifact:
        return self.artifacts[int(artifact_id.removeprefix("artifact"))]

    def _answer_artifact_type(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"artifact": None}}

    def _answer_artifact_by_id(self, variables: dict[str, Any]) -> dict[str, Any]:
        artifact = self._artifact(variables["id"])
        number = self.versions(artifact.name).index(artifact)
        sequence = {"__typename": "ArtifactSequence", "name": artifact.name, "project": _project(artifact.project)}
        return {
            "artifact": {
                "__typename": "Artifact", "id": artifact.id, "artifactSequence": sequence, "versionIndex": number,
                "artifactType": {"name": artifact.type}, "description": None, "metadata": "{}",
                "ttlDurationSeconds": -2, "ttlIsInherited": True, "tags": [], "historyStep": None,
                "state": "COMMITTED" if artifact.committed else "PENDING", "size": 1, "digest": artifact.digest,
                "digestAlgorithm": "MANIFEST_MD5", "commitHash": "0", "fileCount": len(artifact.files),
                "createdAt": "2026-01-01T00:00:00", "updatedAt": None, "aliases": [],
            }
        }  # fmt: skip

    def _answer_create_artifact_manifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        number = self._artifact(variables["artifactID"]).number
        file = {
            "id": f"manifest{number}", "name": variables["name"], "displayName": variables["name"],
            "uploadUrl": f"{self.url}/storage/artifact/{number}/{variables['name']}", "uploadHeaders": [],
        }  # fmt: skip
        return {"createArtifactManifest": {"artifactManifest": {"id": f"manifest{number}", "file": file}}}

    def _answer_update_artifact_manifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        number = int(variables["artifactManifestID"].removeprefix("manifest"))
        file = {
            "id": f"manifest{number}", "name": "wandb_manifest.json", "displayName": "wandb_manifest.json",
            "uploadUrl": f"{self.url}/storage/artifact/{number}/wandb_manifest.json", "uploadHeaders": [],
        }  # fmt: skip
        return {"updateArtifactManifest": {"artifactManifest": {"id": f"manifest{number}", "file": file}}}

    def _answer_create_artifact_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        nodes: list[dict[str, Any]] = []
        for spec in variables["input"]["artifactFiles"]:
            number, name = self._artifact(spec["artifactID"]).number, spec["name"]
            nodes.append(
                {
                    "id": f"file:{number}:{name}", "name": name, "displayName": name, "storagePath": name,
                    "uploadUrl": f"{self.url}/storage/artifact/{number}/{name}", "uploadHeaders": [],
                    "uploadMultipartUrls": None, "artifact": {"id": spec["artifactID"]},
                }
            )  # fmt: skip
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _answer_commit_artifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        artifact = self._artifact(variables["artifactID"])
        artifact.committed = True
        return {"commitArtifact": {"artifact": {"id": artifact.id, "digest": artifact.digest}}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, stand_in: WandbStandIn) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stand_in = stand_in

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients leave as they like
            super().handle_error(request, client_address)


def _project(name: str) -> dict[str, Any]:
    return {"id": f"project:{name}", "internalId": "1", "name": name, "entity": {"id": "entity", "name": ENTITY}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def stand_in(self) -> WandbStandIn:
        assert isinstance(self.server, _Server)
        return self.server.stand_in

    def do_POST(self) -> None:
        content = self._content()
        if not self.path.startswith(("/graphql", "/files/")):  # the client's telemetry about itself
            self.send_error(404)
            return
        body = json.loads(content)
        if self.path == "/graphql":
            found = re.search(r"\b(?:query|mutation)\s+(\w+)", body["query"])
            operation = body.get("operationName") or (found[1] if found else "")
            self._answer(operation, lambda: {"data": self.stand_in.graphql(operation, body.get("variables") or {})})
            return
        *_, name, last = self.path.split("/")
        assert last == "file_stream", self.path

        def take() -> dict[str, Any]:
            self.stand_in.file_stream(name, body)
            return {"exitcode": None, "limits": {}}

        self._answer("", take)

    def do_PUT(self) -> None:
        content = self._content()

        def take() -> dict[str, Any]:
            self.stand_in.store(self.path, content)
            return {}

        self._answer("", take)

    def do_GET(self) -> None:
        self._answer("", dict)

    def _content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            return b"".join(self._chunks())
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().strip(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _answer(self, operation: str, act: Callable[[], dict[str, Any]]) -> None:
        line = f"{self.command} {self.path} {operation}".rstrip()
        disturbance = self.stand_in.disturbance_for(line)
        time.sleep(disturbance.delay_s)
        status = disturbance.status
        if status == 200 and "/storage/" not in self.path and not self._has_key():
            status = 401
        with self.stand_in.lock:
            self.stand_in.requests.append(f"{line} {status}{' cut' if disturbance.cut else ''}")
            answer = json.dumps(act() if status == 200 else {"error": "the stand-in was told to say so"}).encode()
        self._send(status, answer, disturbance.cut)

    def _has_key(self) -> bool:
        kind, _, credentials = self.headers.get("Authorization", "").partition(" ")
        return kind == "Basic" and base64.b64decode(credentials).decode() == f"api:{API_KEY}"

    def _send(self, status: int, answer: bytes, cut: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer[: len(answer) // 2] if cut else answer)
        if cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Quiet: `requests` has it."""


@contextmanager
def dead_address() -> Iterator[str]:
    """An address that takes connections and never says a word, as behind a broken network."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
