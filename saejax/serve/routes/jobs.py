"""Addresses of settings, plans and jobs."""

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, status

from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.jobs.job import ENDED
from saejax.plans.devices import PlanSettings
from saejax.runs import Run, Sweep
from saejax.serve.jobs import form
from saejax.serve.jobs.activations import training
from saejax.serve.jobs.experiments import requested
from saejax.serve.jobs.plans import Plans
from saejax.serve.jobs.queue import Queue, View
from saejax.serve.jobs.requests import JobBody, PlanBody, StopBody, TrainBody
from saejax.serve.problems import Problem
from saejax.serve.site import Site

_CREATED = status.HTTP_201_CREATED
_Offset = Annotated[int, Query(ge=0, le=1 << 62)]


def router(site: Site, queue: Queue, plans: Plans) -> APIRouter:
    """Addresses that start, show and stop jobs."""
    routes = APIRouter(prefix="/api")

    @routes.get("/settings", summary="Experiments, commands, and every setting with its documentation.")
    def settings() -> dict[str, Any]:
        return form.settings(site)

    @routes.get("/experiments", summary="Every setting's value in a run (?run=name).")
    def of_run(run: str) -> dict[str, Any]:
        return form.values(site, run=run)

    @routes.get("/experiments/{label}", summary="Every setting's value in an experiment, with a preset of it.")
    def of_experiment(label: str, preset: str = "", run: str = "") -> dict[str, Any]:
        return form.values(site, run=run) if run else form.values(site, label, preset)

    @routes.post("/plan", summary="Begin to predict memory, disk and time of an experiment.")
    def plan(body: PlanBody) -> dict[str, Any]:
        return plans.ask(requested(site, body), PlanSettings(body.device, body.devices))

    @routes.get("/plan/{name}", summary="The prediction, once it is there.")
    def planned(name: str) -> dict[str, Any]:
        return plans.state(name)

    @routes.post("/jobs", status_code=_CREATED, summary="Start a command; where others run, it waits for them.")
    def start(body: JobBody) -> View:
        if body.command not in site.commands:
            name = body.command[:80]
            raise ConfigError(f"The page starts no command {name!r}.{nearest(name, site.commands)}")
        return queue.add(body.command, requested(site, body))

    @routes.post("/sae/train", status_code=_CREATED, summary="Train on activations: files or a store.")
    def train(body: TrainBody) -> View:
        e, before = training(site, body)
        return queue.add("train", e, before)

    @routes.post("/sae/train-fast", status_code=_CREATED, summary="The same with the values of a fast training.")
    def train_fast(body: TrainBody) -> View:
        e, before = training(site, body, fast=True)
        return queue.add("train", e, before)

    @routes.get("/jobs", summary="The jobs, newest first.")
    def jobs() -> dict[str, Any]:
        return {"jobs": queue.views()}

    @routes.get("/jobs/{name}", summary="One job.")
    def job(name: str) -> View:
        return queue.view(name)

    @routes.post("/jobs/{name}/cancel", summary="Tell a job to save and end, or take it out of the queue.")
    def cancel(name: str) -> View:
        return queue.cancel(name)

    @routes.post("/jobs/{name}/continue", summary="Go on with a job that was stopped or failed.")
    def again(name: str) -> View:
        return queue.again(name)

    @routes.get("/jobs/{name}/logs", summary="The log from a byte on, at most 256 kB of it.")
    def logs(name: str, at: _Offset = 0) -> dict[str, Any]:
        # Before the log: what a job has written by its end is read then.
        ended = queue.view(name).state in ENDED
        text, behind = queue.job(name).log(at)
        return {"text": text, "at": behind, "ended": ended and (not text or behind >= queue.job(name).log_bytes())}

    @routes.post("/stop", summary="Tell whoever trains a run on this machine to save and end.")
    def stop(body: StopBody) -> dict[str, Any]:
        folder: Path = site.folders.run(body.run)
        if not (Run(folder).exists or Sweep(folder).exists):
            raise Problem(404, f"{body.run} is neither a run nor a sweep.")
        return {"run": body.run, "pid": queue.stop_run(body.run, folder)}

    return routes
