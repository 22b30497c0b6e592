"""The page itself, its scripts, and the pages that runs have written."""

from importlib import resources

from fastapi import APIRouter, Request, Response

from saejax.report.page import section_scripts
from saejax.serve.folders import Folders
from saejax.serve.problems import Problem
from saejax.serve.site import Site

_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".png": "image/png"}
_PLACES = ("saejax.serve.page", "saejax.report")
_LARGEST_PAGE = 512 << 20
# A run's page may hold a script of its own, so it gets an origin of its own, from which it reaches nothing here.
_SANDBOX = "sandbox allow-scripts allow-popups; frame-ancestors 'self'"


def router(site: Site) -> APIRouter:
    """index.html at /, what it loads below /static, pages of runs below /files."""
    routes = APIRouter(include_in_schema=False)
    assets = {name: one for place in reversed(_PLACES) for name, one in _assets(place).items()}
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
    def files(name: str, request: Request) -> Response:
        return Response(
            _page(site.folders, name),
            media_type="text/html",
            headers={"content-security-policy": _SANDBOX, "cross-origin-resource-policy": "cross-origin"},
        )

    return routes


def _assets(package: str) -> dict[str, bytes]:
    """{name: bytes} of all that a page may load, read once."""
    entries = resources.files(package).iterdir()
    return {one.name: one.read_bytes() for one in entries if one.name.endswith(tuple(_KINDS))}


def _page(folders: Folders, name: str) -> bytes:
    path = folders.run(name)
    if path.suffix != ".html" or not path.is_file() or path.stat().st_size > _LARGEST_PAGE:
        raise Problem(404, f"{name} is no page of a run.")
    return path.read_bytes()
