"""A Hugging Face Hub on 127.0.0.1: a real HTTP server that speaks what huggingface_hub asks for.

    with LoopbackHub() as hub:
        commit = hub.add("org/name", {"config.json": b"{}", "model.safetensors": Path("…")})
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)        and hub.environment for a subprocess
        hub.fault(r"GET /cdn/", cut_after=1000, times=2)       see hub_faults.Fault
        …
        hub.files("org/name")                                  {name: bytes} of a revision
        hub.log.of(r"PUT /lfs/")                               requests, for assertions

Spoken: repository create and info (with `blobs`), revisions, tree (recursive, paged by Link),
paths-info, refs, branches, resolve (GET and HEAD, ranges; large files by a 302 to /cdn/… on
`hub.storage`, another origin, which wants no token and refuses one), validate-yaml, preupload, LFS
batch (basic and multipart), verify, commit (NDJSON, deletions, parentCommit, create_pr; to branches
and pull requests), commits, discussions (pull requests alone), whoami. Xet is not spoken: set
HF_HUB_DISABLE_XET=1, as `hub.environment` does. What the Hub does is told by huggingface_hub's
hf_api.py, lfs.py and _commit_api.py.

Tokens: `hub.token` may write; `hub.read_token` may read private repositories; others get 401.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from loopback_hub.hub_answers import Answer, Refusal
from loopback_hub.hub_faults import Fault, Log
from loopback_hub.hub_requests import answer
from loopback_hub.hub_store import LFS_SUFFIXES, Store

_PIECE = 64 << 10


class LoopbackHub:
    """The server; see the module's text.

    Args:
        part_bytes: LFS objects larger than this are uploaded in parts; None for in one piece.
        page: entries of a tree's page.
    """

    token = "hf_loopbackwritetokenthatmustnotbeshown"
    read_token = "hf_loopbackreadtoken"

    def __init__(
        self, *, part_bytes: int | None = None, page: int = 1000,
        lfs_suffixes: tuple[str, ...] = LFS_SUFFIXES,
    ) -> None:  # fmt: skip
        self.store = Store(lfs_suffixes)
        self.log = Log()
        self.part_bytes, self.page = part_bytes, page
        #: What a new repository is where nothing is asked for, as an organisation may settle it.
        self.private_by_default = False
        self.lock = threading.RLock()
        self._faults: list[Fault] = []
        # storage is another origin: clients follow redirects within a host, and send it no token
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), _Handler) for _ in range(2)]
        for server in self._servers:
            server.daemon_threads = True
            server.hub = self
        self.stopping = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_address[1]}"

    @property
    def storage(self) -> str:
        """Where large files are kept."""
        return f"http://127.0.0.1:{self._servers[1].server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send huggingface_hub here, in a process of its own."""
        return {
            "HF_ENDPOINT": self.endpoint, "HF_TOKEN": self.token, "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }  # fmt: skip

    def __enter__(self) -> LoopbackHub:
        for server in self._servers:
            threading.Thread(
                target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
            ).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, repo: str, files: Mapping[str, bytes | Path], **options: Any) -> str:
        """Put files into a repository (made if absent); returns the commit."""
        with self.lock:
            return self.store.add(repo, files, **options)

    def add_folder(self, repo: str, folder: Path, **options: Any) -> str:
        """Put a whole folder into a repository."""
        paths = [p for p in sorted(folder.rglob("*")) if p.is_file()]
        files = {p.relative_to(folder).as_posix(): p for p in paths}
        return self.add(repo, files, **options)

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """A revision's files."""
        with self.lock:
            found = self.store.repos[repo]
            tree = found.commits[found.resolve(revision)]
            return {name: file.content.read() for name, file in sorted(tree.items())}

    def commits(self, repo: str) -> list[tuple[str, str, str]]:
        """(reference, commit, message) in order."""
        return list(self.store.repos[repo].messages)

    def fault(self, pattern: str, **what: Any) -> Fault:
        """Script a fault; earlier ones win."""
        fault = Fault(pattern, **what)
        with self.lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """No more faults."""
        with self.lock:
            self._faults.clear()

    def fault_of(self, request: str) -> Fault | None:
        with self.lock:
            return next((f for f in self._faults if f.matches(request)), None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        hub: LoopbackHub = self.server.hub
        self.close_connection = False
        line = f"{self.command} {self.path}"
        fault = hub.fault_of(line)
        if fault and fault.delay:
            hub.stopping.wait(fault.delay)
        body = self._body(fault)
        if body is None:
            self._log(0, 0, 0)
            self._cut()
            return
        if fault and fault.status:
            error = {"error": fault.message}
            reply = Answer(fault.status, json.dumps(error).encode(), dict(fault.headers))
        else:
            reply = self._carried_out(body, fault)
        if fault and fault.lose:
            self._log(0, 0, len(body))
            self._cut()
            return
        self._send(reply, fault, len(body))

    def _carried_out(self, body: bytes, fault: Fault | None) -> Answer:
        hub = self.server.hub
        try:
            with hub.lock:
                if fault and fault.before:
                    fault.before()
                reply = answer(hub, self._parsed(body, fault))
                if fault and fault.after:
                    fault.after()
                return reply
        except Refusal as refusal:
            return refusal.answer

    def _parsed(self, body: bytes, fault: Fault | None) -> dict[str, Any]:
        parts = urlsplit(self.path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return {
            "method": self.command,
            "path": unquote(parts.path),
            "raw_path": parts.path,
            "query": {k: v[-1] for k, v in parse_qs(parts.query).items()},
            "token": token or None,
            "range": self.headers.get("Range"),
            "body": body,
            "corrupt": bool(fault and fault.corrupt),
        }

    def _body(self, fault: Fault | None) -> bytes | None:
        """The request's body; None when the connection is to be cut while it comes."""
        limit = fault.cut_after if fault and self.command in ("PUT", "POST") else None
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(pieces)
            return None if limit is not None and len(body) > limit else body
        length = int(self.headers.get("Content-Length") or 0)
        if limit is not None:
            self.rfile.read(min(limit, length))
            return None
        return self.rfile.read(length)

    def _send(self, reply: Answer, fault: Fault | None, received: int) -> None:
        body = reply.body
        if fault and fault.corrupt and self.command == "GET" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        whole = len(body)
        if self.command == "HEAD":
            body = b""
        elif fault and self.command == "GET":
            body = body[: fault.cut_after]
        # before the answer, so that whoever has it finds it in the log
        self._log(reply.status, len(body), received)
        self.send_response(reply.status)
        headers = {"Content-Type": "application/json", "Content-Length": str(whole)}
        for name, value in {**headers, **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for start in range(0, len(body), _PIECE):
                self.wfile.write(body[start : start + _PIECE])
                if fault and fault.pause:
                    self.wfile.flush()
                    self.server.hub.stopping.wait(fault.pause)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        if self.command != "HEAD" and len(body) < whole:
            self._cut()

    def _log(self, status: int, sent: int, received: int) -> None:
        authorized = "Authorization" in self.headers
        self.server.hub.log.add(
            self.command, self.path, status, self.headers.get("Range"), authorized, sent, received
        )

    def _cut(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.close()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""

    def handle(self) -> None:
        """A client that leaves is no failure of the server's."""
        try:
            super().handle()
        except (ConnectionError, ValueError, OSError):
            return

    def finish(self) -> None:
        try:
            super().finish()
        except (ConnectionError, ValueError, OSError):
            return
