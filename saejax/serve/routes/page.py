"""The page itself, its scripts, and the pages that runs have written."""

from importlib import resources

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

from saejax.reports.page import section_scripts
from saejax.serve.problems import Problem
from saejax.serve.site import Site

_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".png": "image/png"}
# The page's own files come before those of a report's page.
_PACKAGES = ("saejax.reports", "saejax.serve.page")
# A run's page may hold a script of its own, so it gets an origin of its own, from which it reaches nothing here.
_SANDBOX = "sandbox allow-scripts allow-popups; frame-ancestors 'self'"


def router(site: Site) -> APIRouter:
    """index.html at /, what it loads below /static, pages of runs below /files."""
    routes = APIRouter(include_in_schema=False)
    entries = [entry for package in _PACKAGES for entry in resources.files(package).iterdir()]
    assets = {entry.name: entry.read_bytes() for entry in entries if entry.name.endswith(tuple(_KINDS))}
    scripts = "\n".join(f'<script defer src="/static/{name}"></script>' for name in section_scripts())
    page = assets["index.html"].replace(b"<!-- sections -->", scripts.encode())

    @routes.get("/")
    def index() -> Response:
        return Response(page, media_type="text/html")

    @routes.get("/favicon.ico")
    def icon() -> Response:
        return Response(status_code=204)

    @routes.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in assets:
            raise Problem(404, f"There is no file {name[:80]!r}.")
        return Response(assets[name], media_type=_KINDS[name[name.rindex(".") :]])

    @routes.get("/files/{name:path}")
    def files(name: str) -> Response:
        path = site.folders.run(name)
        if path.suffix != ".html" or not path.is_file():
            raise Problem(404, f"{name} is no page of a run.")
        headers = {"content-security-policy": _SANDBOX, "cross-origin-resource-policy": "cross-origin"}
        return FileResponse(path, media_type="text/html", headers=headers)

    return routes
