"""`saejax preflight`: an experiment tried on a small part of it, in about a minute, where it is to run.

Versions, devices, free space, the language model on one and on ten prompts, the speed of the disk, and up to 1,000
steps of training. Nothing is left behind.
"""

import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from saejax.app import console
from saejax.app.experiment import Experiment
from saejax.app.extras import refuse_missing
from saejax.app.training_folders import open_numbers
from saejax.app.workspace import Workspace
from saejax.capture import expand_hook_points
from saejax.capture.capture import rows_for
from saejax.core import environment
from saejax.core.amounts import size, span
from saejax.core.errors import EXIT_PREEMPTED, SaejaxError
from saejax.core.files import read_json
from saejax.core.host import available_memory, resident_memory
from saejax.fit.devices import lm_mesh, training_mesh
from saejax.fit.resolve import resolve
from saejax.parallel import own_rows, refuse_many
from saejax.plans.outline import captured_widths, missing_bytes
from saejax.plans.stage import StageEstimate
from saejax.plans.train_stages import checkpoint_bytes
from saejax.plans.trial import Interrupted, Trained, disk_speed, existing, sampled, short_training, temporary
from saejax.store.files import StoreFiles
from saejax.store.manifest import read_manifest

_PROMPTS = 10
_VERSIONS = ("saejax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy")
_SMALLER = (
    "Lower capture.batch_rows or text.context_length for the language model, train.batch_size (or raise "
    "train.accumulate) for the training, or spread it over more devices: parallel.mesh, parallel.fsdp."
)


@dataclasses.dataclass(frozen=True)
class Check:
    """A line of the table.

    Attributes:
        passed: None where it was not tried, because something before it failed.
        needed: what it must be, in words.
        planned: what the plan says, in words.
        remedy: what to do, as a sentence, where it failed.
    """

    name: str
    found: str
    passed: bool | None
    needed: str = ""
    planned: str = ""
    remedy: str = ""


def run_preflight(work: Workspace, estimates: Sequence[StageEstimate] | None = None) -> int:
    """Try the experiment and print a table of what passed and what did not, with a remedy for each that failed.

    Args:
        estimates: of the stages "capture" and "train", printed beside what is found.

    Returns:
        0 when all pass, 1 when something fails, EXIT_PREEMPTED when a signal stopped it.
    """
    refuse_many(work.experiment.parallel, "saejax preflight")
    preflight = _Preflight(work, {estimate.stage: estimate for estimate in estimates or ()})
    try:
        preflight.run()
    except Interrupted:
        console.say("preflight: stopped by a signal; nothing is left behind")
        return EXIT_PREEMPTED
    console.say()
    console.say(checks_table(preflight.checks))
    bad = [check.name for check in preflight.checks if check.passed is not True]
    console.say()
    console.say(f"preflight: {', '.join(bad)}: not ready" if bad else "preflight: ready")
    return 1 if bad else 0


@dataclasses.dataclass
class _Preflight:
    """One preflight: the checks so far, and the rates that later ones compare with.

    Attributes:
        plans: {stage: its estimate}.
        lm_rate: tokens a second of the language model.
        read: bytes a second that the disk reads.
    """

    work: Workspace
    plans: dict[str, StageEstimate]
    checks: list[Check] = dataclasses.field(default_factory=list)
    lm_rate: float = 0.0
    read: float = 0.0

    def run(self) -> None:
        e = self.work.experiment
        self.add("versions", lambda: _versions(e))
        # Too few devices, a batch or a width that does not divide: nothing after them can be tried.
        ready = self.add("devices", lambda: _devices(e)) and self.add("settings", self._settings)
        if ready:
            self.add("free space, stores", lambda: _stores_space(self.work, self.plans.get("capture")))
        # Activations that are there already need no language model.
        manifest = read_manifest(StoreFiles(e.store_dir("train"))) if e.capture.into == "store" else None
        captured = manifest is not None and manifest.complete
        if ready and (captured or self._language_model()) and self.add("disk", self._disk):
            with contextlib.ExitStack() as folders:
                self.add("training", lambda: self._training(folders, captured))
        else:
            self.skip("training", "training, speed", "disk, read", "free space, runs")

    def add(self, name: str, look: Callable[[], Check | Iterable[Check]]) -> bool:
        """Add what `look` finds; an error that has a remedy is a check that failed. Whether all passed."""
        console.say(f"preflight: {name} ...")
        try:
            got = look()
            checks = [got] if isinstance(got, Check) else list(got)
        except SaejaxError as error:
            checks = [Check(name, "refused", False, remedy=str(error)[:600])]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            checks = [Check(name, "out of memory", False, remedy=_SMALLER)]
        self.checks += checks
        return all(check.passed for check in checks)

    def skip(self, *names: str) -> None:
        self.checks += [Check(name, "not tried", None) for name in names]

    # --- what is tried -----------------------------------------------------------------------------------------

    def _settings(self) -> Check:
        """Hook points, coder and batch fit each other, the model and the devices."""
        refuse_missing(self.work.experiment, "text", "lm", "train")
        resolved = resolve(self.work, open_numbers(self.work.experiment.run), console.keep_quiet)
        self.work, coder = resolved.materials, resolved.coder
        e = self.work.experiment
        own_rows(resolved.mesh, e.train.batch_size, e.train.accumulate, e.train.neighbours)
        wide = f"{coder.topology.d_in} -> {coder.topology.d_sae:,} latents"
        return Check("settings", f"{e.coder.preset}, {wide}, batch {e.train.batch_size:,}", True)

    def _language_model(self) -> bool:
        plan = self.plans.get("capture")
        names = expand_hook_points(self.work.experiment.capture.hook_points, self.work.lm)
        if not self.add("one prompt, one layer", lambda: _one_prompt(self.work, names[:1], plan)):
            self.skip("ten prompts")
            return False

        def ten() -> Check:
            self.lm_rate, check = _ten_prompts(self.work, names, plan)
            return check

        return self.add("ten prompts", ten)

    def _disk(self) -> Check:
        e, there = self.work.experiment, self.work.names.hook_points()
        widths = captured_widths(self.work) if e.lm.model else {name: there[name] for name in self.work.sites[0]}
        with temporary(e.stores_dir) as folder:
            wrote, self.read = disk_speed(folder, widths, e.capture.layout("heldout"))
        needed = self.lm_rate * 2 * sum(widths.values())
        return Check(
            "disk, write",
            f"{size(wrote)}/s",
            wrote > needed or e.capture.into == "training",
            f"> {size(needed)}/s" if needed and e.capture.into == "store" else "",
            remedy="The capture would wait for the disk: choose a faster one (stores_dir), or capture.dtype=int8.",
        )

    def _training(self, folders: contextlib.ExitStack, captured: bool) -> Iterable[Check]:
        e, work = self.work.experiment, self.work
        if not captured:
            work = sampled(work, folders.enter_context(temporary(e.stores_dir)), self.lm_rate)
        done = short_training(work, folders.enter_context(temporary(e.runs_dir)))
        widths, (reads, writes) = self.work.names.hook_points(), self.work.sites
        each = 2 * sum(widths[name] for name in dict.fromkeys((*reads, *writes)))
        yield _r2(e, done)
        yield _speed(e, done, self.plans.get("train"))
        yield _memory_check(self.plans.get("train"))
        yield _read_speed(self.read, done.rate * each, e)
        yield _runs_space(e, done)


def is_out_of_memory(error: BaseException) -> bool:
    """A device or the host had no memory left: JAX, PyTorch and Python each say it in their own way."""
    text = str(error)
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def checks_table(checks: Sequence[Check]) -> str:
    """The checks as columns that line up; below each that failed, its remedy."""
    verdicts = {True: "pass", False: "FAIL", None: "not tried"}
    lines = [["check", "found", "needed", "plan", "result"]]
    lines += [[check.name, check.found, check.needed, check.planned, verdicts[check.passed]] for check in checks]
    if not any(check.planned for check in checks):
        lines = [[*line[:3], line[4]] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    remedies = ["", "", *("" if check.passed is not False else check.remedy for check in checks)]
    out = []
    for line, remedy in zip(lines, remedies, strict=True):
        out.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        out += [f"      {part}" for part in remedy.splitlines()]
    return "\n".join(out)


# --- one check each --------------------------------------------------------------------------------------------


def _versions(e: Experiment) -> Check:
    """A run that was begun goes on with the versions that it has, or its numbers change."""
    now = environment.session_record()["packages"]
    shown = ", ".join(f"{name} {now[name]}" for name in _VERSIONS[:2])
    path = e.run.environment
    if not path.is_file():
        return Check("versions", shown, True)
    before = read_json(path).get("packages", {})
    other = [f"{name} {before[name]}" for name in _VERSIONS if name in before and before[name] != now[name]]
    remedy = f"{e.run_dir} was begun with {', '.join(other)}: install these, or choose another --config.name."
    return Check("versions", shown, not other, "those of the run" if other else "", remedy=remedy)


def _devices(e: Experiment) -> Check:
    """Raises ConfigError where the mesh that is asked for does not fit the devices that are there."""
    mesh = training_mesh(e)
    if e.capture.mesh:
        lm_mesh(e)
    there, first = jax.devices(), jax.devices()[0]
    kind = "CPU" if first.platform == "cpu" else first.device_kind
    shape = " x ".join(map(str, mesh.devices.shape))
    return Check("devices", f"{len(there)} x {kind}", True, f"mesh {shape}")


def _stores_space(work: Workspace, plan: StageEstimate | None) -> Check:
    """Room for both stores on their disk; URLs have no end that could be asked for."""
    e = work.experiment
    missing = sum(missing_bytes(work).values()) if e.lm.model else 0
    planned = size(plan.disk_bytes) if plan else ""
    if "://" in e.stores_dir:
        return Check("free space, stores", "not asked of a URL", True, size(missing), planned)
    free = shutil.disk_usage(existing(e.stores_dir)).free
    remedy = "Free space, choose another disk (stores_dir), fewer capture.tokens, or capture.dtype=int8 for half of it."
    return Check("free space, stores", size(free), free > 1.01 * missing, size(missing), planned, remedy)


def _one_prompt(work: Workspace, names: Sequence[str], plan: StageEstimate | None) -> Check:
    """Memory of the language model and of one prompt through it."""
    before = resident_memory()
    _, good = _forward(work, names, 1, times=1)
    host, device = resident_memory(), _device_bytes(False)
    there = f"host {size(host)} (+{size(max(0, host - before))})" + (f", device {size(device)}" if device else "")
    planned = f"host {size(plan.host_bytes)}, device {size(plan.device_bytes)}" if plan else ""
    remedy = "The activations are not finite: lm.dtype=float32 may be enough for this model."
    return Check("one prompt, one layer", there, good, "finite", planned, remedy)


def _ten_prompts(work: Workspace, names: Sequence[str], plan: StageEstimate | None) -> tuple[float, Check]:
    """(tokens a second, check) of ten prompts at all hook points, after a first pass that compiles."""
    e = work.experiment
    rate, good = _forward(work, names, _PROMPTS, times=2)
    total = (e.capture.tokens if e.capture.into == "store" else e.train.tokens) + e.capture.heldout_tokens
    pace = f"{rate:,.0f} tokens/s: {span(total / rate)} for {total:,}"
    planned = span(plan.seconds) if plan else ""
    remedy = "Activations are not finite: lm.dtype=float32 may be enough for this model."
    return rate, Check("ten prompts", pace, good, "finite", planned, remedy)


def _forward(work: Workspace, names: Sequence[str], rows: int, times: int) -> tuple[float, bool]:
    """(tokens a second of the last of `times` passes, whether all was finite) of so many prompts of the text."""
    mesh = lm_mesh(work.experiment)
    rows = rows_for(rows, mesh)
    forward = work.lm.make_forward(list(names), (rows, work.experiment.text.context_length), mesh)
    packed = next(iter(work.packer.batches("train", rows)))
    for _ in range(times):
        started = time.perf_counter()
        activations, finite = forward(packed)
        jax.block_until_ready((activations, finite))
        seconds = time.perf_counter() - started
    wanted = np.asarray(packed.keep)
    good = bool(np.asarray(finite).reshape(wanted.shape)[wanted].all())
    return int(wanted.sum()) / seconds, good


def _r2(e: Experiment, done: Trained) -> Check:
    reached = "nothing held out" if done.r2 is None else f"R2 {done.r2:.3f} at step {done.steps:,}"
    remedy = (
        f"After {done.steps:,} of {done.planned:,} steps R2 is not above gates.r2. Raise coder.k or train.lr, or lower "
        "the sparsity weight; a wide coder may need more steps than these."
    )
    good = done.r2 is None or (math.isfinite(done.r2) and done.r2 > e.gates.r2)
    return Check("training", reached, good, f"R2 > {e.gates.r2:g}", remedy=remedy)


def _speed(e: Experiment, done: Trained, plan: StageEstimate | None) -> Check:
    """Time of the whole training at the pace of the trial."""
    whole = span(e.train.tokens / done.rate) if done.rate else "?"
    pace = f"{done.rate:,.0f} tokens/s: {whole} for {e.train.tokens:,}"
    remedy = "Not one step was timed: run it on more steps, or look at what the training says."
    return Check("training, speed", pace, done.rate > 0, "", span(plan.seconds) if plan else "", remedy)


def _memory_check(plan: StageEstimate | None) -> Check:
    """Bytes that the process holds now, with model and training; of a device the most so far."""
    host, left, device = resident_memory(), available_memory(), _device_bytes(True)
    used = f"host {size(host)}" + (f", device at most {size(device)}" if device else "")
    planned = f"host {size(plan.host_bytes)}, device {size(plan.device_bytes)}" if plan else ""
    # Checkpoints hold the state once more while they are written.
    remedy = f"Only {size(left)} are left on the host. {_SMALLER}"
    return Check("memory", used, not left or left > 0.1 * host, f"{size(left)} left" if left else "", planned, remedy)


def _read_speed(read: float, needed: float, e: Experiment) -> Check:
    remedy = "The training would wait for data: put the store on a faster disk (stores_dir), or raise train.batch_size."
    if e.capture.into == "training":
        return Check("disk, read", f"{size(read)}/s", True)
    return Check("disk, read", f"{size(read)}/s", read > needed, f"> {size(needed)}/s", remedy=remedy)


def _runs_space(e: Experiment, done: Trained) -> Check:
    """Room for the checkpoints that stay, one that is being written, and as many as keep_every adds."""
    needed = (1 + e.gates.retries) * (done.state_bytes + checkpoint_bytes(e.train, done.state_bytes))
    free = shutil.disk_usage(existing(e.runs_dir)).free
    remedy = "Free space, choose another disk (runs_dir), or lower train.keep_checkpoints."
    return Check("free space, runs", size(free), free > needed, size(needed), remedy=remedy)


def _device_bytes(most: bool) -> int:
    """In use on the fullest device, or the most so far; 0 where JAX does not say."""
    key = "peak_bytes_in_use" if most else "bytes_in_use"
    return max((stats.get(key, 0) for device in jax.local_devices() if (stats := device.memory_stats())), default=0)
