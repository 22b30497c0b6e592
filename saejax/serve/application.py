"""The server's application: all routers behind one guard, errors as {"error": text}."""

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from saejax.core.errors import SaejaxError
from saejax.serve.jobs.plans import Plans
from saejax.serve.jobs.queue import Queue
from saejax.serve.live import Live
from saejax.serve.problems import status_of
from saejax.serve.routes import features, page
from saejax.serve.routes import jobs as job_routes
from saejax.serve.routes import live as live_routes
from saejax.serve.routes import runs as run_routes
from saejax.serve.runs import Runs
from saejax.serve.site import Site
from saejax.serve.stores import Stores

_ABOUT = """\
Runs, stores, features and jobs of one machine, as JSON. Errors are {"error": "what is wrong, and the remedy"}. A body
needs Content-Type: application/json. Names of runs are their places below the runs folder, with slashes.
"""


def application(site: Site, environment: Mapping[str, str] | None = None) -> FastAPI:
    """The application of a site, without its guard; `environment` is that of the jobs it starts."""
    queue = Queue(site.folders.runs, site.jobs_at_once, environment)
    plans = Plans(site.folders.runs, environment)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with contextlib.closing(plans), plans.queue.turning(), queue.turning():
            yield

    app = FastAPI(
        title="saejax",
        description=_ABOUT,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers=_HANDLERS,
    )
    runs, stores = Runs(site.folders.runs), Stores(site.folders.stores)
    app.include_router(job_routes.router(site, queue, plans))
    app.include_router(live_routes.router(site, Live(runs.state), queue))
    app.include_router(run_routes.router(site, runs, stores))
    app.include_router(features.router(site))
    app.include_router(page.router(site))
    return app


async def _ours(request: Request, error: SaejaxError) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_of(error))


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    faults = "; ".join(f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors()[:5])
    return JSONResponse({"error": faults or "The request cannot be read."}, 400)


async def _of_web(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)


async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    # The traceback is in the server's log; a stranger learns nothing of it.
    return JSONResponse({"error": "The server made a mistake; its log has the traceback."}, 500)


_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    SaejaxError: _ours,
    RequestValidationError: _invalid,
    HTTPException: _of_web,
    Exception: _unforeseen,
}
