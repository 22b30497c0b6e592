"""Addresses of runs, sweeps and stores."""

import hashlib
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Annotated, Any

import fastapi
from fastapi import APIRouter, Query, Request, Response

from saejax.app.experiment import FOREIGN
from saejax.core.config import differences
from saejax.core.files import finite, read_object
from saejax.runs import Run, Sweep
from saejax.serve.descriptions import Descriptions, pages
from saejax.serve.problems import Problem
from saejax.serve.runs import Runs, is_shown
from saejax.serve.site import Site
from saejax.serve.stores import Stores

_MOST_COMPARED = 12


def router(site: Site, runs: Runs, stores: Stores) -> APIRouter:
    """Runs, sweeps and stores, and their states."""
    routes = APIRouter(prefix="/api")
    descriptions = Descriptions()

    @routes.get("/health", summary="Whether the server answers, and what it shows.")
    def health() -> dict[str, Any]:
        return {
            "ok": True,
            "version": importlib.metadata.version("saejax"),
            "now": time.time(),
            "runs_dir": str(site.folders.runs),
            "stores_dir": str(site.folders.stores),
            "plan": True,
        }

    @routes.get("/overview", summary="All runs, sweeps, stores and dictionaries, a few figures of each.")
    def overview(request: Request) -> Response:
        rows = runs.rows()
        content = {
            "runs": rows,
            "sweeps": runs.sweeps(rows),
            "stores": stores.rows(),
            "dictionaries": [{"name": FOREIGN + label, "label": label} for label in site.folders.dictionaries],
        }
        return _tagged(request, content)

    @routes.get("/compare", summary="Several runs side by side: in what their configurations differ, and their curves.")
    def compare(run: Annotated[list[str], Query(min_length=1, max_length=_MOST_COMPARED)]) -> dict[str, Any]:
        folders = [_shown_run(site, name) for name in run]
        configs = [read_object(Run(folder).config) for folder in folders]
        keys: dict[str, None] = {}
        for other in configs[1:]:
            keys.update(dict.fromkeys(line.partition(": ")[0] for line in differences(configs[0], other)))
        named: dict[str, list[dict[str, Any]]] = {}
        for name, folder in zip(run, folders, strict=True):
            for key, curve in descriptions.curves(folder).items():
                named.setdefault(key, []).append({"name": name, **curve})
        rows = [{"key": key, "values": [_value_at(config, key) for config in configs]} for key in keys]
        return finite({"runs": run, "rows": rows, "curves": named})

    @routes.get("/runs", summary="All runs.")
    def all_runs() -> dict[str, Any]:
        return finite({"runs": runs.rows()})

    @routes.get("/runs/{name:path}", summary="One run: its figures, gates, curves, settings, environment and pages.")
    def one_run(name: str, request: Request) -> Response:
        folder = _shown_run(site, name)
        written = pages(site.folders.runs, folder)
        row = runs.row(name) | {"pages": written}
        return _tagged(request, {"run": row, **descriptions.of(folder), "pages": written})

    @routes.get("/sweeps/{name:path}", summary="One sweep and its members.")
    def one_sweep(name: str) -> dict[str, Any]:
        folder = site.folders.run(name)
        sweep = next((one for one in runs.sweeps(runs.rows()) if one["name"] == name), None)
        if sweep is None:
            raise Problem(404, f"{name} is no sweep.")
        rows = _rows_of_sweep(folder)
        members = [member | rows.get(member["label"], {}) for member in sweep["members"]]
        return finite(sweep | {"members": members, "pages": pages(site.folders.runs, folder)})

    @routes.get("/stores", summary="All stores.")
    def all_stores() -> dict[str, Any]:
        return finite({"stores": stores.rows()})

    @routes.get("/stores/{name:path}", summary="One store: its splits, and what `saejax store info` says.")
    def one_store(name: str) -> dict[str, Any]:
        site.folders.store(name)
        return finite(stores.row(name) | {"lines": stores.lines(name)})

    return routes


def _tagged(request: Request, content: dict[str, Any]) -> Response:
    """The content as JSON with its hash as an ETag; 304 without it where the reader has it already."""
    body = json.dumps(finite(content), ensure_ascii=False, separators=(",", ":")).encode()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=fastapi.status.HTTP_304_NOT_MODIFIED, headers={"etag": tag})
    return Response(body, media_type="application/json", headers={"etag": tag})


def _shown_run(site: Site, name: str) -> Path:
    folder = site.folders.run(name)
    if not is_shown(folder):
        raise Problem(404, f"{name} is no run.")
    return folder


def _rows_of_sweep(folder: Path) -> dict[str, dict[str, Any]]:
    """{member: what sweep.json says of it}; {} before the sweep has ended."""
    if not Sweep(folder).result.is_file():
        return {}
    members = read_object(Sweep(folder).result).get("members")
    rows = [row for row in members if isinstance(row, dict)] if isinstance(members, list) else []
    return {str(row["member"]): row for row in rows if "member" in row}


def _value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
