"""The stages of an experiment: each reads what the stage before left on disk, and can be stopped and continued.

capture -> stores/<store>/{train,heldout}
train   -> runs/<name>/{config.json, environment.json, provenance.json, metrics.jsonl, checkpoints}
evaluate-> runs/<name>/eval.json
report  -> runs/<name>/{features.json.gz, report.html}
"""

import contextlib
import dataclasses
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from saejax.analysis import collect_features
from saejax.app.experiment import Experiment, deciding, from_json, to_run_json
from saejax.app.loading import LoadedCoder, load, make_sites, sites_to_meta
from saejax.app.provenance import Provenance, agreed, of_stores, write_down
from saejax.app.workspace import Workspace, check_widths, make_prepare, make_validation
from saejax.capture import Captured, capture
from saejax.checkpoints import Checkpoints
from saejax.coders import SPARSITIES, CoderConfig, Sites
from saejax.core import environment
from saejax.core.config import differences, to_json
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json, write_json, writing
from saejax.core.lease import lease
from saejax.core.metrics import JsonlWriter, TensorBoardWriter, Writer, read_metrics
from saejax.evals import Gate, check_gates, evaluate
from saejax.lm.forward import Model
from saejax.parallel import (
    Process,
    check_divides,
    from_first,
    joined,
    local_mesh,
    make_mesh,
    own_rows,
    refuse_many,
    this_process,
)
from saejax.report import render
from saejax.store import StoreReader
from saejax.store.files import StoreFiles
from saejax.store.manifest import MANIFEST, read_manifest
from saejax.text import SPLITS
from saejax.training import EXIT_PREEMPTED, Setup, train
from saejax.training.blame import make_blame

_DECIDES_EVAL = ("eval", "gates")


def say(text: str = "") -> None:
    print(text, flush=True)


def run_capture(work: Workspace) -> None:
    """Capture the training and the held-out activations; of several processes, this one's share of them."""
    e = work.experiment
    process = this_process(e.parallel)
    mesh = local_mesh(e.parallel, process)
    _refuse_text(work)
    for split, n_tokens in (("train", e.capture.tokens), ("heldout", e.capture.heldout_tokens)):
        path = e.store_dir(split)
        if reason := _not_captured(work, split):
            say(f"capture {split}: {reason}")
            continue
        done = capture(
            path,
            work.lm,
            work.source,
            e.text,
            e.capture,
            mesh,
            split=split,
            n_tokens=n_tokens,
            seed=e.seed,
            process=process,
        )
        if done.already_complete and not done.missing:
            say(f"capture {split}: already complete, {done.rows:,} activations in {path}")
            continue
        if process.rank == 0 and not done.already_complete:
            _record_stage(e, f"capture {split}", done.tokens, done.seconds, **_pace(done))
        if done.missing:
            others = ", ".join(map(str, done.missing))
            say(
                f"capture {split}: this process's parts are done, {done.rows:,} activations in {path}; "
                f"part{'s' * (len(done.missing) > 1)} {others} of {e.capture.parts} still to come"
            )
            continue
        say(f"capture {split}: {done.rows:,} activations in {path}, {done.tokens / done.seconds:,.0f} tokens/s")
        if done.overhead is not None:
            say(
                f"  read {done.read / done.seconds:,.0f} tokens/s, the forward pass alone {done.forward_rate:,.0f}: "
                f"overhead {done.overhead:.1%}"
            )
        if done.rows < n_tokens:
            say(f"  the text ran out before the {n_tokens:,} that were asked for")


def _refuse_text(work: Workspace) -> None:
    """Raise DataError if a split of the text has no token to store: before hours go into the other one."""
    e = work.experiment
    made = {split: read_manifest(StoreFiles(e.store_dir(split))) for split in SPLITS}
    for split, way in (("train", "Lower"), ("heldout", "Raise")):
        there = made[split]
        if not e.lm.model or work.origin(split):
            continue
        work.refuse_other_split(split)
        if (there and there.complete) or any(packed.keep.any() for packed in work.packer.batches(split, 1)):
            continue
        again = [f"the {other} store then has to be captured again" for other in SPLITS if made[other]]
        raise DataError(
            f"At text.heldout_fraction={e.text.heldout_fraction} the {split} split of the text has not one token to "
            f"store. {way} it" + "".join(f" ({note})" for note in again) + ", or give more documents."
        )


def _not_captured(work: Workspace, split: str) -> str:
    """Why there is nothing to capture for a split; empty where there is."""
    e = work.experiment
    if split == "train" and e.capture.into == "training":
        return "the activations go straight into training"
    if origin := work.origin(split):
        made = "imported" if "imported" in origin.identity else "merged"
        return f"{e.store_dir(split)} is {made} and taken as it is"
    if not e.lm.model:
        return "lm.model is empty; there is nothing to capture from"
    return ""


def _pace(done: Captured) -> dict[str, float]:
    """What the last session that was long enough says of its speed, for stages.json."""
    if done.forward_rate is None or done.overhead is None:
        return {}
    return {
        "read_tokens_per_second": done.read / done.seconds,
        "forward_tokens_per_second": done.forward_rate,
        "overhead": done.overhead,
    }


def run_train(work: Workspace) -> int:
    """Train the coder. Returns 0, or EXIT_PREEMPTED when a signal stopped it (all is saved)."""
    e = work.experiment
    with joined(e.parallel) as process, contextlib.ExitStack() as held:
        with writing(e.run_dir):
            e.run_dir.mkdir(parents=True, exist_ok=True)
        # Process 0 holds the run for all of them.
        from_first(process, lambda: bool(held.enter_context(lease(e.run_dir))))
        return _train(work, process)


def _train(work: Workspace, process: Process) -> int:
    e = work.experiment
    tell = say if process.first else _keep_quiet
    _refuse_other_run(e)
    from_first(process, lambda: bool(agreed(e, of_stores(e))))
    folder, last, every = e.run_dir / "checkpoints", e.train.keep_checkpoints, e.train.keep_every or None
    with Checkpoints(folder, keep_last=last, keep_every=every) as checkpoints:
        if from_first(process, lambda: _complete(checkpoints, e.train.steps)):
            tell(f"train: already complete, step {e.train.steps:,} in {e.run_dir}")
            return 0
        coder = work.build()
        mesh = make_mesh(e.parallel)
        check_divides(mesh, coder.topology.d_sae)
        batches, heldout = work.training(mesh, rows=_own_rows(e, mesh)), _heldout(work, tell)
        sites = make_sites(e.coder, coder.topology, *work.sites, batches.statistics)
        # All that could be refused has been: only now the folder becomes this experiment's.
        from_first(process, lambda: _describe_run(work, mesh, checkpoints.latest() or 0))
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(contextlib.closing(w)) for w in _writers(e) if process.first]
            setup = Setup(
                coder=coder,
                mesh=mesh,
                batches=batches.iterate,
                epoch_rows=batches.epoch_rows,
                sites=sites,
                prepare=make_prepare(e.coder, coder, sites, batches),
                seed=e.start_seed,
                validate=make_validation(coder, heldout, sites, mesh, e.train) if heldout else None,
                writers=writers,
                checkpoints=checkpoints,
                meta=sites_to_meta(sites, coder.topology),
                blame=make_blame(e.run_dir, batches, lambda: work.reader("train")) if process.first else None,
                fsdp=e.parallel.fsdp,
                mode=e.parallel.mode,
            )
            groups = f"{len(sites.reads)} x " if len(coder.topology.latent_shape) > 1 else ""
            tell(
                f"train: {e.coder.preset}, {' '.join(sites.reads)} ({coder.topology.d_in}) -> "
                f"{groups}{coder.topology.d_sae:,} latents, {e.train.steps:,} steps"
            )
            outcome = train(e.train, setup)
    if outcome.tokens and process.first:
        _record_stage(e, "train", outcome.tokens, outcome.seconds)
    if not outcome.finished:
        tell(f"train: stopped by a signal after step {outcome.step:,}, saved; the same command continues")
        return EXIT_PREEMPTED
    tell(f"train: {outcome.step:,} steps, {outcome.tokens / max(outcome.seconds, 1e-9):,.0f} tokens/s")
    return 0


def _own_rows(e: Experiment, mesh: Mesh) -> tuple[int, int]:
    return own_rows(mesh, e.train.batch_size, e.train.accumulate)


def _keep_quiet(text: str = "") -> None:
    """`say`, for a process whose words another one says."""


def _complete(checkpoints: Checkpoints, steps: int) -> bool:
    return checkpoints.latest() == steps and not checkpoints.verify(steps)


def _describe_run(work: Workspace, mesh: Mesh, from_step: int) -> int:
    e = work.experiment
    made_from = work.made_from()
    write_json(e.run_dir / "config.json", to_run_json(e))
    shape = list(mesh.devices.shape)
    session = environment.describe(from_step=from_step, seed=e.seed, coder_seed=e.start_seed, mesh=shape)
    environment.append_session(e.run_dir / "environment.json", session)
    # After config.json: what stands here is said of a run that there is.
    write_down(e, made_from, say if from_step else None)
    return 0


def _heldout(work: Workspace, tell: Callable[[str], None]) -> StoreReader | None:
    """The held-out activations; None where the training's were made elsewhere and there are no others.

    Raises:
        ConfigError: there are none, but training is to stop or to keep its best by them.
    """
    e = work.experiment
    path = e.store_dir("heldout")
    if work.origin("train") is None or StoreFiles(path).read(MANIFEST) is not None:
        return work.reader("heldout")
    for key in ("early_stop_patience", "keep_best"):
        if value := getattr(e.train, key):
            raise ConfigError(
                f"train.{key} needs held-out activations, and there is no store at {path}. Make one (python -m "
                f"launch.store import {path} <files>), or leave train.{key}={value} away."
            )
    tell(f"train: there is no store at {path}, so nothing is validated during training")
    return None


def run_evaluate(work: Workspace, redo: bool = False) -> int:
    """Evaluate the last checkpoint on held-out text and check the gates. Returns 0 when all pass, else 1."""
    e = work.experiment
    refuse_many(e.parallel, "launch.evaluate")
    path = e.run_dir / "eval.json"
    sae = _finished_run(work)
    wanted = {"step": sae.step, "config": {key: to_json(getattr(e, key)) for key in _DECIDES_EVAL}}
    if path.is_file() and not redo:
        result = read_json(path)
        if changed := differences({k: result.get(k) for k in wanted}, wanted):
            raise DataError(
                f"{path} was made with other settings ({'; '.join(changed[:5])}). "
                "Pass --redo to evaluate again, or restore the settings."
            )
        say(f"evaluate: already done, {path}")
    else:
        sites, made_from = _sites_of(work.lm, sae), _of_text_and_model(work)
        done = evaluate(sae.coder, sae.params, work.lm, work.packer, sites, e.eval, e.capture.max_norm_ratio)
        gates = check_gates(e.gates, done.metrics, read_metrics(e.run_dir / "metrics.jsonl"))
        result = wanted | {
            "model": work.lm.identity["model"],
            "hook_point": sae.hook_point,
            "reads": list(sae.sites.reads),
            "writes": list(sae.sites.writes),
            "d_in": sae.coder.topology.d_in,
            "d_sae": sae.n_latents,
            "k": _k(e.coder),
            "metrics": done.metrics,
            "gates": [gate.to_json() for gate in gates],
            "density": done.density,
            "non_finite_tokens": done.non_finite,
        }
        write_down(e, made_from, say)
        _record_stage(e, "evaluate", done.tokens, done.seconds)
        write_json(path, result)
        result = read_json(path)
    if bad := result.get("non_finite_tokens"):
        say(
            f"evaluate: {bad:,} tokens are in no metric, because the model's activations or predictions there are NaN "
            "or infinite; lm.dtype=float32 may be enough for it"
        )
    gates = [Gate.from_json(gate) for gate in result["gates"]]
    _print_gates(gates)
    return 0 if all(gate.passed for gate in gates) else 1


def _k(coder: CoderConfig) -> int | None:
    """Latents kept for a token, where the sparsity keeps a number of them."""
    return coder.k if "k" in SPARSITIES[coder.resolved().sparsity].provides else None


def run_report(work: Workspace, redo: bool = False) -> Path:
    """Collect feature examples and write report.html."""
    e = work.experiment
    refuse_many(e.parallel, "launch.report")
    sae = _finished_run(work)
    features, page, record = (e.run_dir / name for name in ("features.json.gz", "report.html", "report.json"))
    old = read_json(record) if record.is_file() and not redo else {}
    wanted = {"step": sae.step, "report": to_json(e.report)}
    if not features.is_file() or old.get("features") != wanted:
        sites, made_from = _sites_of(work.lm, sae), _of_text_and_model(work)
        content, tokens, seconds = collect_features(
            sae.coder, sae.params, work.lm, work.packer, sites, e.report, e.capture.max_norm_ratio
        )
        write_down(e, made_from, say)
        _write_features(features, content)
        _record_stage(e, "features", tokens, seconds)
        old = {}
    shown = _hash_files(e.run_dir / name for name in ("features.json.gz", "metrics.jsonl", "eval.json", "stages.json"))
    if page.is_file() and old.get("shown") == shown:
        say(f"report: already done, {page}")
        return page
    page = render(e.run_dir)
    write_json(record, {"features": wanted, "shown": shown})
    say(f"report: {page}")
    return page


def _write_features(path: Path, content: dict[str, Any]) -> None:
    raw = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        temporary.write_bytes(gzip.compress(raw, 6, mtime=0))
        temporary.replace(path)


def _hash_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
    return digest.hexdigest()


def run_pipeline(work: Workspace) -> int:
    """All stages. Returns the exit code of the first that does not end well; failed gates end it with 1."""
    refuse_many(work.experiment.parallel, "launch.pipeline")
    # What training would refuse is refused before hours of capture.
    _refuse_other_run(work.experiment)
    agreed(work.experiment, of_stores(work.experiment))
    mesh = make_mesh(work.experiment.parallel)
    check_divides(mesh, work.build().topology.d_sae)
    _own_rows(work.experiment, mesh)
    run_capture(work)
    if code := run_train(work):
        return code
    code = run_evaluate(work)
    page = run_report(work)
    print_summary(work, page)
    return code


def print_summary(work: Workspace, page: Path) -> None:
    """The one table at the end of the pipeline."""
    e = work.experiment
    result = read_json(e.run_dir / "eval.json")
    metrics = result["metrics"]
    # A coder that writes in the second of two models alone does not touch the loss of the first.
    recovered = metrics.get("loss_recovered")
    rows = [
        ("L0", f"{metrics['l0']:.1f} of {result['d_sae']:,} latents"),
        ("FVE", f"{metrics['fve']:.4f}"),
        ("loss recovered", "not measured" if recovered is None else f"{recovered:.4f}"),
        ("dead features", f"{metrics['dead_fraction']:.2%}"),
        *((f"{name}", f"{stage['tokens_per_second']:,.0f} tokens/s") for name, stage in _stages(e).items()),
        ("gates passed", f"{sum(g['passed'] for g in result['gates'])} of {len(result['gates'])}"),
        *((f"  {g['name']}", _verdict(Gate.from_json(g))) for g in result["gates"]),
        ("report", str(page)),
    ]
    say()
    for name, value in rows:
        say(f"  {name:<18} {value}")


def _print_gates(gates: list[Gate]) -> None:
    say("gates:")
    for gate in gates:
        say(f"  {_verdict(gate)}  {gate.title}")
        if not gate.passed:
            say(f"        {gate.advice}")


def _verdict(gate: Gate) -> str:
    value = "not measured" if gate.value is None else f"{gate.value:.4g}"
    return f"{'pass' if gate.passed else 'FAIL'}  {value} {gate.comparison} {gate.bar:g}"


def _refuse_other_run(e: Experiment) -> None:
    """Raise if the run's folder holds another experiment's run, or a sweep."""
    if (e.run_dir / "sweep_config.json").is_file():
        raise DataError(f"{e.run_dir} holds a sweep. Choose another --config.name for a single run.")
    path = e.run_dir / "config.json"
    if path.is_file():
        there = to_run_json(from_json(read_json(path)))
        before, now = deciding(there), deciding(to_run_json(e))
        if not before["lm"].get("model"):
            # A model decided nothing yet. Which one it is now, with its weights, is compared by provenance.json.
            before, now = before | {"lm": None}, now | {"lm": None}
        changed = differences(before, now)
        if changed:
            raise DataError(
                f"{e.run_dir} holds a run with another configuration:\n  " + "\n  ".join(changed) + "\n"
                "Choose another --config.name, restore these settings, or delete the folder."
            )


def _finished_run(work: Workspace) -> LoadedCoder:
    e = work.experiment
    if not (e.run_dir / "config.json").is_file():
        raise DataError(f"There is no run in {e.run_dir}. Train it first: python -m launch.train with this --config.")
    _refuse_other_run(e)
    sae = load(e.run_dir)
    if not sae.finished:
        raise DataError(f"{e.run_dir} is at step {sae.step:,} of {e.train.steps:,}. Finish it: python -m launch.train.")
    return sae


def _of_text_and_model(work: Workspace) -> Provenance:
    """What the run was made from, with the text and the model that it is to be looked at with.

    Held-out text is what was not trained on, of the text that was captured and of no other.

    Raises:
        DataError: the run was made from another text or model.
    """
    return agreed(work.experiment, {"lm": work.lm.identity, "text": work.source.identity})


def _sites_of(lm: Model, sae: LoadedCoder) -> Sites:
    """The sites of a coder by the model's own names for them.

    Raises:
        ConfigError: the model has no such hook point.
        DataError: it has another width there.
    """
    topology = sae.coder.topology
    reads, writes = (tuple(map(lm.hook_point, names)) for names in (sae.sites.reads, sae.sites.writes))
    widths = dict.fromkeys(writes, topology.out_shape[-1]) | dict.fromkeys(reads, topology.in_shape[-1])
    check_widths(f"The coder of {sae.config.run_dir}", widths, f"the model {lm.identity['model']}", lm.hook_points())
    return dataclasses.replace(sae.sites, reads=reads, writes=writes)


def _writers(e: Experiment) -> list[Writer]:
    writers: list[Writer] = [JsonlWriter(e.run_dir / "metrics.jsonl")]
    return [*writers, TensorBoardWriter(e.run_dir / "tensorboard")] if e.train.tensorboard else writers


def _record_stage(e: Experiment, stage: str, tokens: int, seconds: float, **last: float) -> None:
    """Add a session's tokens and seconds to a stage's totals in stages.json; `last` replaces what is there."""
    stages = _stages(e)
    before = stages.get(stage, {"tokens": 0, "seconds": 0.0})
    tokens, seconds = before["tokens"] + tokens, before["seconds"] + seconds
    total = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}
    total = before | total | last
    write_json(e.run_dir / "stages.json", stages | {stage: total})


def _stages(e: Experiment) -> dict[str, Any]:
    path = e.run_dir / "stages.json"
    return read_json(path) if path.is_file() else {}
