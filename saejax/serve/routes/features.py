"""Features, texts, notes, provenance and caches: what the API answers about dictionaries."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import anyio.to_thread
from fastapi import APIRouter, Query, Response
from pydantic import Field

from saejax.app.experiment import FOREIGN
from saejax.app.steer_settings import SteerSettings
from saejax.core.errors import ConfigError
from saejax.core.files import finite
from saejax.reports.feature_table import Search
from saejax.serve.caches import Caches
from saejax.serve.features.browser import MOST_ROWS, Browser, Window
from saejax.serve.features.coders import Dictionaries, Place
from saejax.serve.features.models import Models
from saejax.serve.features.notes import read_notes
from saejax.serve.features.provenance import Provenance
from saejax.serve.jobs.requests import LARGEST_INT, Body, Name, of
from saejax.serve.problems import Problem
from saejax.serve.runs import is_shown
from saejax.serve.site import Site
from saejax.serve.worker import Worker

LONGEST_TEXT = 20_000

Id = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Count = Annotated[int, Field(ge=1, le=200)]


class Encode(Body):
    """A text, and how many of the latents that fire on it are wanted."""

    dictionary: Name
    text: str
    count: Count = 20
    feature: Id | None = None


class Steer(Body):
    """A prompt, and what is done to which latents while the model continues it."""

    dictionary: Name
    features: Annotated[list[int | Annotated[str, Field(max_length=40)]], Field(min_length=1, max_length=32)]
    operation: str = of(SteerSettings, "operation")
    scale: float = of(SteerSettings, "scale")
    prompt: str
    tokens: int = of(SteerSettings, "tokens", le=200)
    temperature: float = of(SteerSettings, "temperature")
    top_p: float = of(SteerSettings, "top_p")
    seed: int = of(SteerSettings, "seed", ge=0)


class NoteOf(Body):
    """A label and a note of a feature; both empty take them away."""

    id: Id
    label: str = ""
    note: str = ""


class Services:
    """Everything behind these addresses."""

    def __init__(self, site: Site):
        self.site, self.caches, self.worker = site, Caches(), Worker()
        dictionaries = Dictionaries(self.caches.inference, self.worker)
        self.browser = Browser(self.caches.feature, dictionaries, site.folders.own)
        self.models = Models(self.browser, dictionaries)
        self.provenance = Provenance(self.caches.provenance, self.browser, dictionaries, site.folders.stores)

    def place(self, name: str) -> Place:
        """The place of a dictionary's name.

        Raises:
            Problem: 404: there is none, or the folder is neither a run nor an evaluated dictionary.
        """
        path, foreign = self.site.folders.dictionary(name), name.startswith(FOREIGN)
        if not foreign and not is_shown(path):
            raise Problem(404, f"{name} is no dictionary: neither a run nor one that was evaluated.")
        return Place(name, path, foreign)


def router(site: Site) -> APIRouter:
    """The addresses, in front of services that end with the server."""
    services = Services(site)

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        yield
        await anyio.to_thread.run_sync(services.worker.close)

    routes = APIRouter(lifespan=lifespan)
    _about_features(routes, services)
    _with_models(routes, services)
    _noted(routes, services)

    @routes.get("/api/cache/stats", summary="Hits, misses and bytes of the caches")
    def cache_stats() -> Response:
        return _answer(services.caches.stats())

    return routes


def _about_features(routes: APIRouter, services: Services) -> None:
    @routes.get("/api/features/{dictionary:path}", summary="A window of a dictionary's features")
    def features(
        dictionary: str,
        q: Annotated[str, Query(max_length=500)] = "",
        scope: Literal["any", "explained", "fires", "promotes", "label"] = "any",
        sort: Literal["id", "density", "max", "token"] = "id",
        down: bool = False,
        low: Annotated[float | None, Query(ge=0, le=1)] = None,
        high: Annotated[float | None, Query(ge=0, le=1)] = None,
        live: bool = False,
        offset: Id = 0,
        limit: Annotated[int, Query(ge=0, le=MOST_ROWS)] = 200,
    ) -> Response:
        window = Window(Search(q, scope, low, high, live), sort, down, offset, limit)
        return _answer({"dictionary": dictionary} | services.browser.rows(services.place(dictionary), window))

    @routes.get("/api/feature/{dictionary:path}", summary="All that is known of one feature")
    def feature(dictionary: str, id: Id) -> Response:
        place = services.place(dictionary)
        known = services.browser.feature(place, id) or services.models.bare_feature(place, id)
        return _answer({"dictionary": dictionary, "id": id} | known)

    @routes.get("/api/provenance/{name:path}", summary="Where a run, or a feature's example, comes from")
    def provenance(
        name: str, feature: Id | None = None, example: Annotated[int, Query(ge=0, le=10_000)] = 0
    ) -> Response:
        return _answer(services.provenance.of(services.place(name), feature, example))


def _with_models(routes: APIRouter, services: Services) -> None:
    @routes.get("/api/similar/{dictionary:path}", summary="Features that write alike, by the cosine of decoder rows")
    def similar(dictionary: str, id: Id, other: Name = "", count: Count = 20) -> Response:
        there = services.place(other) if other else None
        return _answer({"rows": services.models.similar(services.place(dictionary), id, there, count)})

    @routes.post("/api/encode", summary="Which features fire on a text, token by token")
    def encode(body: Encode) -> Response:
        place = services.place(body.dictionary)
        _bounded("text", body.text)
        return _answer(services.models.encode(place, body.text, body.count, body.feature))

    @routes.post("/api/steer", summary="What the model writes with some latents changed")
    def steer(body: Steer) -> Response:
        place = services.place(body.dictionary)
        _bounded("prompt", body.prompt)
        change = body.model_dump(exclude={"dictionary", "features"})
        return _answer(services.models.steer(place, latents=body.features, **change))


def _noted(routes: APIRouter, services: Services) -> None:
    @routes.get("/api/notes/{dictionary:path}", summary="Labels and notes of a dictionary's features")
    def notes(dictionary: str) -> Response:
        written = read_notes(services.browser.notes_folder(services.place(dictionary)))
        return _answer({"notes": list(written.values())})

    @routes.put("/api/notes/{dictionary:path}", summary="Save a label and a note; empty both removes them")
    def save(dictionary: str, body: NoteOf) -> Response:
        return _answer(services.browser.note(services.place(dictionary), body.id, body.label, body.note))


def _bounded(name: str, text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise Problem(413, f"The {name} has {len(text):,} characters; it may have {LONGEST_TEXT:,}.")
    if not text:
        raise ConfigError(f"The {name} is empty.")


def _answer(value: Any) -> Response:
    # Token strings may hold half of a surrogate pair, which is no UTF-8: these are escaped.
    raw = json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    return Response(raw, media_type="application/json")
