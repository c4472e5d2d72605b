"""A stand-in for the W&B server on the loopback interface, so that tests can upload runs without network or account.

It answers the few requests that `wandb sync` and an online run make (GraphQL, the stream of history rows, file uploads)
and keeps what they carry in memory. Whatever it does not know it refuses with status 400 and notes in `problems`: the
client gives up on that status at once, whereas it repeats a request that fails otherwise for minutes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, TypedDict
from urllib.parse import quote, unquote

ENTITY = "local"
HISTORY = "wandb-history.jsonl"
SUMMARY = "wandb-summary.json"
EVENTS = "wandb-events.jsonl"  # system metrics
CONSOLE = "output.log"


class UploadedRun(TypedDict):
    """One run as a test sees it."""

    project: str
    name: str
    tags: tuple[str, ...]
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    exit_code: int | None
    files: dict[str, bytes]


@dataclass
class _StoredRun:
    """One run as the client sent it."""

    project: str
    name: str
    tags: list[str] = field(default_factory=list)
    config_json: str = "{}"
    streams: dict[str, list[str]] = field(default_factory=dict)  # file name -> lines
    exit_code: int | None = None
    files: dict[str, bytes] = field(default_factory=dict)

    def lines(self, stream: str) -> list[str]:
        return self.streams.setdefault(stream, [])

    def write(self, stream: str, offset: int, content: list[str]) -> None:
        # The client repeats a request that got no answer: its offset keeps the lines from being counted twice.
        self.lines(stream)[offset : offset + len(content)] = content


class WandbServer:
    """Use as a context manager; `runs` stays readable after the server has stopped."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._stored: dict[str, _StoredRun] = {}
        self._lock = threading.Lock()
        self._http = _HttpServer(self)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> WandbServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def environment(self) -> dict[str, str]:
        """The variables that make a W&B process use this server and nothing else."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": "local-" + "0" * 40,
            "WANDB_MODE": "online",
            "WANDB_ERROR_REPORTING": "false",  # else telemetry goes out as well
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    @property
    def runs(self) -> dict[str, UploadedRun]:
        with self._lock:
            return {run_id: _uploaded(run) for run_id, run in self._stored.items()}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Handles one request; gives the status and the JSON object to send back."""
        try:
            with self._lock:
                return 200, self._route(method, path, body)
        except Exception as error:  # the client must get an answer, or it would try again and again
            self.problems.append(f"{method} {path}: {error!r}")
            return 400, {"errors": [{"message": repr(error)}]}

    def _route(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        match method, path.strip("/").split("/"):
            case "POST", ["graphql"]:
                return self._graphql(json.loads(body))
            case "POST", ["files", _, _, run_id, "file_stream"]:
                return self._file_stream(run_id, json.loads(body))
            case "PUT", ["upload", run_id, name]:
                self._stored[run_id].files[unquote(name)] = body
                return {}
            case "POST", ["sdk", "otel", *_]:  # telemetry
                return {}
        raise NotImplementedError("unknown address")

    def _graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "Viewer": self._viewer,
            "ServerFeaturesQuery": lambda _: {"serverInfo": {"features": []}},
            "OrganizationCoreWeaveOrganizationID": lambda _: {"entity": None},
            "RunResumeStatus": self._resume_status,
            "UpsertBucket": self._upsert_run,
            "CreateRunFiles": self._create_files,
            "CreateArtifact": self._create_artifact,
            "UseArtifact": self._use_artifact,
        }
        name = request["operationName"]
        if name not in operations:
            raise NotImplementedError(f"unknown operation: {name or request['query']}")
        return {"data": operations[name](request.get("variables") or {})}

    def _viewer(self, _: dict[str, Any]) -> dict[str, Any]:
        names = dict.fromkeys(("id", "entity", "username"), ENTITY)
        return {"viewer": {**names, "email": "", "flags": "{}", "teams": {"edges": []}}}

    def _resume_status(self, variables: dict[str, Any]) -> dict[str, Any]:
        run_id = variables["name"]
        run = self._stored.get(run_id)
        bucket = None if run is None else _resume_state(run_id, run)
        return {"model": {**_project(variables["project"]), "bucket": bucket}}

    def _upsert_run(self, variables: dict[str, Any]) -> dict[str, Any]:
        run_id = variables["name"] or variables["id"]  # the same: see "id" below
        inserted = run_id not in self._stored
        run = self._stored.setdefault(run_id, _StoredRun(variables["project"], run_id))
        run.name = variables["displayName"] or run.name
        run.config_json = variables["config"] or run.config_json
        run.tags = run.tags if variables["tags"] is None else variables["tags"]
        bucket = {"id": run_id, "name": run_id, "displayName": run.name, "config": run.config_json}
        bucket |= {"project": _project(run.project), "historyLineCount": len(run.lines(HISTORY))}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _create_artifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        """A table travels as an artifact; this server always has it already, so that nothing is uploaded."""
        known = {"id": "artifact", "state": "COMMITTED", "artifactSequence": {"id": "sequence", "latestArtifact": None}}
        return {"createArtifact": {"artifact": known}}

    def _use_artifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"useArtifact": {"artifact": {"id": "artifact", "digest": "", "description": "", "state": "COMMITTED"}}}

    def _create_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        run_id = variables["run"]
        # A name may hold slashes ("media/images/..."): quoted, it stays one part of the address.
        addresses = {name: f"{self.url}/upload/{run_id}/{quote(name, safe='')}" for name in variables["files"]}
        files = [{"name": name, "uploadUrl": address} for name, address in addresses.items()]
        return {"createRunFiles": {"runID": run_id, "uploadHeaders": [], "files": files}}

    def _file_stream(self, run_id: str, request: dict[str, Any]) -> dict[str, Any]:
        run = self._stored[run_id]
        for name, part in request.get("files", {}).items():
            run.write(name, part["offset"], part["content"])
        if request.get("complete"):
            run.exit_code = request["exitcode"]
        return {}


def _uploaded(run: _StoredRun) -> UploadedRun:
    config = {key: entry["value"] for key, entry in json.loads(run.config_json).items() if key != "_wandb"}
    summary = run.lines(SUMMARY)
    return {
        "project": run.project,
        "name": run.name,
        "tags": tuple(run.tags),
        "config": config,
        "history": [json.loads(line) for line in run.lines(HISTORY)],
        "summary": json.loads(summary[-1]) if summary else {},
        "exit_code": run.exit_code,
        "files": dict(run.files),
    }


def _project(name: str) -> dict[str, Any]:
    return {"id": name, "name": name, "entity": {"id": ENTITY, "name": ENTITY}}


def _resume_state(run_id: str, run: _StoredRun) -> dict[str, Any]:
    """What a client needs to know in order to append to a run instead of overwriting it."""
    return {
        "id": run_id,
        "name": run_id,
        "displayName": run.name,
        "tags": run.tags,
        "config": run.config_json,
        "summaryMetrics": (run.lines(SUMMARY) or ["{}"])[-1],
        "historyLineCount": len(run.lines(HISTORY)),
        "eventsLineCount": len(run.lines(EVENTS)),
        "logLineCount": len(run.lines(CONSOLE)),
        "historyTail": json.dumps(run.lines(HISTORY)[-1:]),
        "eventsTail": json.dumps(run.lines(EVENTS)[-1:]),
        "wandbConfig": json.dumps({"t": 1}),  # "t" present: the run has begun, so that it can be resumed
    }


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True  # a client that keeps a connection open must not keep the server from stopping

    def __init__(self, backend: WandbServer) -> None:
        self.backend = backend
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A finishing client drops its connections; that is no fault of the test.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer

    def _reply(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, content = self.server.backend.answer(self.command, self.path, body)
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _reply  # the names that http.server looks up

    def log_message(self, format: str, *args: object) -> None:
        """Requests are no news in a test."""
