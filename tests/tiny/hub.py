"""A stand-in of the Hugging Face hub: the endpoints that huggingface_hub asks when it lists, downloads and commits.

Plain files, inline in the commit (`uploadMode: regular`); no LFS, no Xet, no pull requests. Written from what
huggingface_hub 2.4.0 sends and reads. Its client runs against it unchanged.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from saejax.core import hub as core

Files = dict[str, bytes]


class Hub:
    """Repositories as {name: {branch or commit: files}}, and what was asked.

    Attributes:
        url: the endpoint.
        asked: "METHOD path" of every request, in order.
        tokens: who may write, {token: user}.
        lists: {repo: entries} of lists that are told as they are, instead of the true ones.
        endless: repositories whose list has another page after every page.
        circles: repositories whose files redirect to themselves.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Files]] = {}
        self.heads: dict[str, dict[str, str]] = {}
        self.private: set[str] = set()
        self.asked: list[str] = []
        self.tokens: dict[str, str] = {}
        self.lists: dict[str, list[dict[str, Any]]] = {}
        self.endless: set[str] = set()
        self.circles: set[str] = set()
        self.sent: list[bytes] = []
        self.url = ""

    def put(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files to the branch's; gives its sha."""
        commits, heads = self.repos.setdefault(repo, {}), self.heads.setdefault(repo, {})
        whole = {**commits.get(heads.get(branch, ""), {}), **files}
        sha = hashlib.sha1(repr((repo, branch, len(commits), sorted(whole))).encode()).hexdigest()
        commits[sha], heads[branch] = whole, sha
        return sha

    def commit(self, repo: str, revision: str) -> str:
        return self.heads[repo].get(revision, revision)

    def entries(self, repo: str, revision: str, folder: str, recursive: bool) -> list[dict[str, Any]] | None:
        if repo in self.lists:
            return self.lists[repo]
        files = self.repos[repo][self.commit(repo, revision)]
        prefix = f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for name, content in files.items():
            if name.startswith(prefix):
                inner, slash, _ = name[len(prefix) :].partition("/")
                if slash:
                    found[prefix + inner] = {"type": "directory", "path": prefix + inner, "oid": "0" * 40}
                if recursive or not slash:
                    found[name] = entry(name, len(content))
        return list(found.values()) if found or not folder else None


@contextlib.contextmanager
def asked_for_everything(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """The library of this process asks a stand-in, and keeps what it gets in `cache`; conftest.py holds it offline."""
    close_session()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(core, "DEADLINE_SECONDS", 3.0)
    with stand_in() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield server
    close_session()


def entry(name: str, size: int) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": size, "oid": hashlib.sha1(name.encode()).hexdigest()}


@contextlib.contextmanager
def stand_in() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # as in object_store.py

        def log_message(self, *_: Any) -> None: ...

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def answer(self) -> None:
            asked = urlsplit(self.path)
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.asked.append(f"{self.command} {unquote(asked.path)}")
            if self.body:
                hub.sent.append(self.body)
            # A revision or folder may hold slashes, quoted.
            parts = [unquote(part) for part in asked.path.strip("/").split("/")]
            if parts[0] == "api":
                self.api(parts[1:], parse_qs(asked.query))
            else:
                self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

        def api(self, parts: list[str], query: dict[str, list[str]]) -> None:
            if parts == ["whoami-v2"]:
                user = hub.tokens.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))
                return self.json({"name": user, "type": "user"}) if user else self.fail(401, "")
            if parts == ["validate-yaml"]:
                return self.json({"errors": [], "warnings": []})
            if parts == ["repos", "create"]:
                return self.create()
            repo, action, rest = "/".join(parts[1:3]), parts[3:4], parts[4:]
            if repo not in hub.repos:
                return self.fail(404, "RepoNotFound")
            revision = rest[0] if rest else "main"
            if action == ["branch"]:
                hub.heads[repo].setdefault(revision, hub.heads[repo]["main"])
                return self.json({})
            if action == ["preupload"]:
                modes = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in self.given["files"]
                ]
                return self.json({"files": modes})
            if action == ["commit"]:
                return self.commit(repo, revision)
            if hub.commit(repo, revision) not in hub.repos[repo]:
                return self.fail(404, "RevisionNotFound")
            if action == ["tree"]:
                return self.tree(repo, revision, "/".join(rest[1:]), query)
            self.json({"id": repo, "sha": hub.commit(repo, revision), "private": repo in hub.private})

        @property
        def given(self) -> Any:
            return json.loads(self.body)

        def create(self) -> None:
            repo = f"{self.given['organization']}/{self.given['name']}"
            if self.given["organization"] not in hub.tokens.values():
                return self.fail(403, "")
            hub.put(repo, {".gitattributes": b"*.safetensors filter=lfs"})
            if self.given.get("visibility") == "private":
                hub.private.add(repo)
            self.json({"url": f"{hub.url}/{repo}", "name": repo})

        def commit(self, repo: str, revision: str) -> None:
            lines = [json.loads(line) for line in self.body.splitlines()]
            files = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines[1:]}
            sha = hub.put(repo, files, revision)
            self.json({"commitUrl": f"{hub.url}/{repo}/commit/{sha}", "commitOid": sha, "pullRequestUrl": None})

        def tree(self, repo: str, revision: str, folder: str, query: dict[str, list[str]]) -> None:
            entries = hub.entries(repo, revision, folder, query.get("recursive") == ["true"])
            if entries is None:
                return self.fail(404, "EntryNotFound")
            more = {"Link": f'<{hub.url}{self.path}>; rel="next"'} if repo in hub.endless else {}
            self.json(entries, more)

        def file(self, repo: str, revision: str, name: str) -> None:
            if repo in hub.circles:
                return self.reply(302, b"", {"Location": self.path})
            sha = hub.commit(repo, revision)
            content = hub.repos[repo].get(sha, {}).get(name)
            if content is None:
                return self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            self.reply(200, content, {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

        def json(self, value: Any, more: Mapping[str, str] | None = None) -> None:
            self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(more or {})})

        def fail(self, status: int, code: str) -> None:
            self.reply(status, b"{}", {"X-Error-Code": code} if code else {})

        def reply(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()
