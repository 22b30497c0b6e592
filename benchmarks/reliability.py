"""Faults against a training that checkpoints every few steps: how many were tried, detected, survived.

    python -m benchmarks.reliability [--kills=60 --signals=20 --flips=300 --output=benchmarks/reliability.md]

Every life of a training is the real command, launch.train, in a process of its own that is forked from this one, which
has imported everything and started nothing: a start costs a second instead of ten. A run is survived when what it ends
with is, to the last bit, what the same command gives undisturbed. Exits with 1 if one fault is not.
"""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import platform
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags
from absl import logging as absl_logging

import saejax.app.stages  # noqa: F401 - imported once, for all who are forked
from saejax.app.load import load
from saejax.checkpoints import Checkpoints
from saejax.coders import RECIPES, CoderConfig, Sites, build
from saejax.core.errors import EXIT_PREEMPTED
from saejax.core.metrics import read_metrics
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import Batches, StoreLayout, StoreWriter
from saejax.training import TrainConfig, TrainState
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import abstract_state, init_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step

_KILLS = flags.DEFINE_integer("kills", 60, "kill -9 at random moments.")
_SIGNALS = flags.DEFINE_integer("signals", 20, "SIGTERMs at random moments, and a quarter as many SIGUSR1.")
_FLIPS = flags.DEFINE_integer("flips", 300, "Bits flipped in a checkpoint, one at a time.")
_STEPS = flags.DEFINE_integer("steps", 400, "Steps of the run that is disturbed.")
_ONLY = flags.DEFINE_list("only", [], "Of: repeat rest damage meshes kills signals halves (default: all).")
_FOLDER = flags.DEFINE_string("folder", None, "Where to work (default: /dev/shm, whose fsync costs nothing, or /tmp).")
_OUTPUT = flags.DEFINE_string("output", None, "Also write the tables there.")

D_IN = 16
BATCH = 128
EVERY = 5
SAVES = "saves.log"

# Those for one hook point and single tokens: each is another sparsity, or other losses that remember something.
PRESETS = tuple(
    name
    for name, recipe in RECIPES.items()
    if not (re.search("coder|clt", name) or recipe.settings.get("contrastive_coefficient"))
)

_FORK = multiprocessing.get_context("fork")


@dataclasses.dataclass
class Row:
    """A line of the table."""

    fault: str
    tried: int
    detected: int
    survived: int
    how: str

    def line(self) -> str:
        return f"| {self.fault} | {self.tried:d} | {self.detected:d} | {self.survived:d} | {self.how} |"

    @property
    def good(self) -> bool:
        return self.tried == self.detected == self.survived


def planted(path: Path, rows: int, seed: int) -> None:
    """A store that needs no language model: sparse combinations of 32 directions in hook point `h`."""
    directions = np.random.default_rng(99).normal(size=(32, D_IN))
    rng = np.random.default_rng(seed)
    x = (rng.random((rows, 32)) < 0.1) * rng.exponential(2.0, (rows, 32)) @ directions + 0.5
    tokens = {name: np.arange(rows, dtype=np.int32) for name in ("token_id", "document", "position")}
    with StoreWriter.open(
        path,
        identity={"imported": f"planted {seed}"},
        hook_points={"h": D_IN},
        n_tokens=rows,
        layout=StoreLayout(shard_rows=1024, chunk_rows=64),
        seed=seed,
    ) as writer:
        writer.append({"h": x.astype(np.float32)}, tokens, cursor={})
        writer.finish()


# --- lives -------------------------------------------------------------------------------------------------------


class Life:
    """One process of the command, writing to a log, on a mesh of virtual devices."""

    def __init__(self, folder: Path, *extra: str, mesh: str = "(1,1)", bad: tuple[int, ...] = ()) -> None:
        self.run = folder / "runs" / "it"
        self.log = folder / "log"
        self.before = rows(self.run)
        (folder / SAVES).touch()
        self.process = _FORK.Process(target=_live, args=(folder, self.log, extra, mesh, bad))
        self.process.start()

    def wait(self, seconds: float = 300) -> tuple[int | None, str]:
        self.process.join(seconds)
        return self.process.exitcode, self.log.read_text(errors="replace")

    def until(self, reached: Callable[[], bool]) -> bool:
        """Wait for something; False when the life is over before."""
        while self.process.is_alive():
            if reached():
                return True
            time.sleep(0.002)
        return False

    def stop(self, number: int) -> None:
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, number)


def _live(folder: Path, log: Path, extra: tuple[str, ...], mesh: str, bad: tuple[int, ...]) -> None:
    _be_quiet(log, 1 if mesh == "(1,1)" else 8)
    _note_saves(folder / SAVES)
    if bad:
        _poison(bad)
    sys.argv = [
        "launch/train.py",
        "--config=configs/quickstart.py:tiny",
        *(
            "--config.name=it",
            f"--config.runs_dir={folder / 'runs'}",
            f"--config.stores_dir={folder.parent / 'stores'}",
        ),
        *("--config.lm.model=", "--config.store=planted", "--config.hook_point=h", "--config.coder.k=4"),
        *(f"--config.train.tokens={_STEPS.value * BATCH}", f"--config.train.batch_size={BATCH}"),
        *(f"--config.train.checkpoint_every={EVERY}", "--config.train.log_every=1", "--config.train.validate_every=50"),
        *("--config.train.block_chunks=4", f"--config.parallel.mesh={mesh}", "--config.coder.matmul_dtype=float32"),
        *extra,
    ]
    for name in list(flags.FLAGS):
        if name in ("kills", "signals", "flips", "steps", "only", "folder", "output"):
            delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()
    runpy.run_module("launch.train", run_name="__main__")


def _be_quiet(log: Path | None, devices: int) -> None:
    absl_logging.set_verbosity(absl_logging.ERROR)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    # More threads than cores, so that the virtual devices' collectives cannot wait for each other for ever.
    os.environ["NPROC"] = "16"
    jax.config.update("jax_platforms", "cpu")
    if log:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)


def _note_saves(path: Path) -> None:
    """Each save is noted when it begins, which is not before the one before it is durable."""
    handle, original = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), Checkpoints.save

    def save(self: Checkpoints, step: int, *arguments: Any, **named: Any) -> None:
        self.wait()  # what `save` itself does first
        os.write(handle, f"{step}\n".encode())
        original(self, step, *arguments, **named)

    Checkpoints.save = save  # type: ignore[method-assign]


def _poison(bad: tuple[int, ...]) -> None:
    """Row 7 of the batches with these numbers is no number."""
    original = Batches.iterate

    def iterate(self: Batches, start_step: int = 0) -> Iterator[dict[str, np.ndarray]]:
        for step, batch in enumerate(original(self, start_step), start_step):
            spoiled = {name: values.copy() for name, values in batch.items()}
            for values in spoiled.values():
                values[7] = np.nan
            yield spoiled if step in bad else batch

    Batches.iterate = iterate  # type: ignore[assignment,method-assign]


def asked(function: Callable[..., Any], *arguments: Any, devices: int = 1) -> Any:
    """What a function says in a process of its own, which may use devices."""
    receive, send = _FORK.Pipe(duplex=False)

    def answer() -> None:
        _be_quiet(None, devices)
        send.send(function(*arguments))

    process = _FORK.Process(target=answer)
    process.start()
    send.close()
    try:
        return receive.recv()
    finally:
        process.join()


def rows(run: Path) -> int:
    """Steps that metrics.jsonl knows."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return 0
    return max((row["step"] for row in read_metrics(path) if "train/loss" in row), default=0)


def issued(folder: Path) -> set[int]:
    """Steps of the saves that have begun in any life in a folder."""
    return {int(line) for line in (folder / SAVES).read_text().split()}


def state(run: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint."""
    with Checkpoints(run / "checkpoints") as checkpoints:
        last = checkpoints.latest()
        assert last is not None
        items, _ = checkpoints.restore_numpy(last, names=("params", "averaged", "opt_state", "stats", "step"))
    return {jax.tree_util.keystr(p): np.asarray(v) for p, v in jax.tree_util.tree_leaves_with_path(items)}


def fingerprint(run: Path) -> str:
    """sha256 of the newest checkpoint's arrays and of the losses of all steps."""
    arrays = {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in state(run).items()}
    losses = {r["step"]: r["train/loss"] for r in read_metrics(run / "metrics.jsonl") if "train/loss" in r}
    return hashlib.sha256(json.dumps([arrays, losses], sort_keys=True).encode()).hexdigest()


def newest_good(run: Path) -> tuple[int, bool]:
    """(the newest finished step, whether every finished checkpoint is good)"""
    checkpoints = Checkpoints(run / "checkpoints")
    return checkpoints.latest() or 0, not any(checkpoints.verify(step) for step in checkpoints.steps())


# --- the parts ---------------------------------------------------------------------------------------------------


class Faults:
    """All parts, on one store and one undisturbed run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rng, self.rows = folder, random.Random(5), list[Row]()
        for split, count in (("train", 8192), ("heldout", 1024)):
            asked(planted, folder / "stores" / "planted" / split, count, len(split))
        self.want = self.finished("undisturbed")

    def place(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir()
        return path

    def finished(self, name: str) -> str:
        life = Life(self.place(name))
        code, text = life.wait()
        assert code == 0, text
        return str(asked(fingerprint, life.run))

    def as_undisturbed(self, life: Life) -> bool:
        """Whether a life that nothing stopped ended with the bits of the undisturbed run; its folder is removed."""
        code, text = life.wait()
        assert code == 0, text
        same = bool(asked(fingerprint, life.run) == self.want)
        shutil.rmtree(life.log.parent)
        return same

    def add(self, fault: str, tried: int, detected: int, survived: int, how: str) -> None:
        self.rows.append(Row(fault, tried, detected, survived, how))
        print(self.rows[-1].line(), flush=True)

    def repeat(self) -> None:
        same = self.finished("again") == self.want
        self.add("a second fresh run, same seed", 1, same, same, "parameters, moments, statistics, losses: bitwise")

    def kills(self, count: int) -> None:
        """A kill may cost the one save that was issued last, and never a checkpoint that was there before it."""
        done = valid = kept = redone = ends = same = newest = 0
        where: Path | None = None
        while done < count or where is not None:
            if where is None:
                where, newest = self.place(f"kill-{ends}"), 0
            life = Life(where)
            if done < count and self.kill(life):
                done += 1
                earlier, (newest, good) = newest, newest_good(life.run)
                valid += good and newest >= earlier
                kept += sum(step > newest for step in issued(where)) <= 1
                redone = max(redone, rows(life.run) - newest)
                continue
            ends += 1
            same += self.as_undisturbed(life)
            where = None
        how = f"every finished checkpoint is good, at most the save issued last is lost, at most {redone} steps redone"
        self.add("kill -9", done, valid, kept, how)
        self.add("runs that were killed, at their end", ends, same, same, "bitwise the undisturbed run")

    def kill(self, life: Life) -> bool:
        """Kill a life at a random moment, mostly of its steps; whether it still lived."""
        if self.rng.random() < 0.85:
            life.until(lambda: rows(life.run) > life.before)
            time.sleep(self.rng.uniform(0, 1.0))
        else:  # while it starts, restores, compiles
            time.sleep(self.rng.uniform(0, 2.0))
        life.stop(signal.SIGKILL)
        return life.wait()[0] == -signal.SIGKILL

    def signals(self, count: int, number: signal.Signals) -> None:
        done = coded = kept = ends = same = 0
        seconds: list[float] = []
        where: Path | None = None
        while done < count or where is not None:
            if where is None:
                where = self.place(f"{number.name}-{ends}")
            life = Life(where)
            if done < count and life.until(lambda life=life: rows(life.run) > life.before):  # type: ignore[misc]
                time.sleep(self.rng.uniform(0, 0.6))
                told = time.monotonic()
                life.stop(number)
                code, text = life.wait()
                if code != 0:
                    seconds.append(time.monotonic() - told)
                    done += 1
                    coded += code == EXIT_PREEMPTED
                    stopped = re.search(r"stopped by a signal after step ([\d,]+), saved", text)
                    said = int(stopped[1].replace(",", "")) if stopped else -1
                    kept += (said, True) == newest_good(life.run) and said == rows(life.run)
                    continue
            ends += 1
            same += self.as_undisturbed(life)
            where = None
        took = f"{sorted(seconds)[len(seconds) // 2]:.2f} s at the median, {max(seconds):.2f} s at most"
        self.add(
            number.name, done, coded, kept if max(seconds) < 10 else 0, f"exit 75 with the last step saved; {took}"
        )
        self.add(f"runs stopped by {number.name}, at their end", ends, same, same, "bitwise the undisturbed run")

    def damage(self, flips: int) -> None:
        source = self.folder / "undisturbed" / "runs" / "it" / "checkpoints"
        for name, result in asked(damaged, source, flips).items():
            self.add(name, *result, "found by name; restored the checkpoint before it, with a warning")
        where = self.folder / "fallback"
        shutil.copytree(self.folder / "undisturbed", where)
        victim = max(
            (source / f"{_STEPS.value:09d}" / "params").rglob("*"), key=lambda p: p.stat().st_size * p.is_file()
        )
        victim = where / victim.relative_to(self.folder / "undisturbed")
        raw = bytearray(victim.read_bytes())
        raw[len(raw) // 3] ^= 16
        victim.write_bytes(raw)
        life = Life(where)
        code, text = life.wait()
        said = f"falling back to step {_STEPS.value - EVERY}" in text and victim.name in text
        same = code == 0 and asked(fingerprint, life.run) == self.want
        self.add(
            "a bit of a run's last checkpoint, then the same command",
            1,
            said,
            same,
            "says so, redoes the interval, bitwise",
        )

    def rest(self) -> None:
        where = self.place("busy")
        first = Life(where)
        first.until(lambda: rows(first.run) > 3)
        log, second = first.log, None
        keep = log.rename(log.with_name("log-1"))
        second = Life(where)
        code, text = second.wait()
        refused = code == 1 and "is being written by another process" in text
        first.log = keep
        good = first.wait()[0] == 0 and asked(fingerprint, first.run) == self.want
        self.add("a second writer of the same run", 1, refused, good, "refused with exit 1, the first is not disturbed")

        life = Life(self.place("nan-1"), bad=(33,))
        code, _ = life.wait()
        counted = [row["train/skipped"] for row in read_metrics(life.run / "metrics.jsonl") if "train/skipped" in row]
        self.add("a batch that is not finite", 1, counted[-1] == 1, code == 0, "not taken, counted, the run goes on")
        life = Life(self.place("nan-many"), bad=tuple(range(33, _STEPS.value)))
        code, text = life.wait()
        named = code == 1 and "10 in a row" in text and (life.run / "bad_batch.json").is_file()
        finite = asked(is_finite, life.run) and newest_good(life.run)[1]
        self.add(
            "only such batches", 1, named, finite, "stops after 10, exit 1, bad_batch.json; checkpoints are finite"
        )
        self.full_disk()

    def full_disk(self) -> None:
        where = self.place("full")
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
            print("a full disk: not tried, no right to mount a small one", flush=True)
            return
        try:
            life = Life(where, "--config.train.keep_checkpoints=500")
            life.log = life.run.parent.parent / "log"
            code, text = life.wait()
            clear = code == 1 and ("disk is full" in text or "No space left" in text)
            newest, good = newest_good(life.run)
            subprocess.run(["mount", "-o", "remount,size=200m", str(where)], check=True)
            again = Life(where, "--config.train.keep_checkpoints=500")
            same = again.wait()[0] == 0 and asked(fingerprint, again.run) == self.want
            how = "exit 1, a clear error, the last good one kept; with more space bitwise"
            self.add("the disk fills up", 1, clear, good and newest > 0 and same, how)
        finally:
            subprocess.run(["umount", str(where)], check=True)

    def meshes(self) -> None:
        """150 steps of a TopK coder, moved over meshes by signals.

        Another mesh adds in another order, so last bits differ. Sooner or later one of a ReLU's many pre-activations
        lies on the other side of 0, and the trainings diverge; the k-th largest is rarely that close to the next.
        """
        extra = (f"--config.train.tokens={150 * BATCH}",)
        alone, moved = self.place("alone"), self.place("moved")
        assert Life(alone, *extra).wait()[0] == 0
        for shape, upto in (("(8,1)", 40), ("(2,4)", 90), ("(1,1)", 1000)):
            life = Life(moved, *extra, mesh=shape)
            if life.until(lambda life=life, upto=upto: rows(life.run) >= upto):  # type: ignore[misc]
                life.stop(signal.SIGTERM)
            code, text = life.wait()
            assert code in (0, EXIT_PREEMPTED), text
        sessions = json.loads((life.run / "environment.json").read_text())["sessions"]
        began = ["x".join(map(str, s["mesh"])) + f" from step {s['from_step']}" for s in sessions]
        a, b = asked(state, alone / "runs" / "it"), asked(state, life.run)
        worst = max(float(np.abs(a[n] - b[n]).max() / np.abs(a[n]).max()) for n in a if n.startswith("['params']"))
        losses = [
            np.array([r["train/loss"] for r in read_metrics(w / "runs" / "it" / "metrics.jsonl") if "train/loss" in r])
            for w in (alone, moved)
        ]
        apart = float(np.abs(losses[0] / losses[1] - 1).max())
        how = f"{', '.join(began)}: parameters differ by {worst:.1e}, losses of 150 steps by {apart:.1e}"
        self.add("three meshes in one run", 1, len(began) == 3 and apart < 1e-5, worst < 1e-5, how)
        many = self.place("many")
        code = Life(many, *extra, mesh="(2,4)").wait()[0]
        one, eight = (asked(loaded, many / "runs" / "it", devices=n) for n in (1, 8))
        self.add(
            "saejax.load on one device of a run on eight", 1, code == 0, one == eight, "the same parameters, bitwise"
        )

    def halves(self) -> None:
        found = {preset: asked(halves, self.folder / f"halves-{preset}", preset, 12) for preset in PRESETS}
        tried, same = (sum(result[i] for result in found.values()) for i in (0, 1))
        how = f"continued at every step of 12, saved in the background: {', '.join(found)}"
        self.add("k + k = 2k", tried, same, same, how)


def is_finite(run: Path) -> bool:
    return all(np.isfinite(value).all() for value in state(run).values())


def loaded(run: Path) -> str:
    params = load(run).params
    return hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params))).hexdigest()


def damaged(folder: Path, flips: int) -> dict[str, tuple[int, int, int]]:
    """{damage to the newest checkpoint of a folder: (tried, detected, survived)}; each is mended before the next."""
    rng = random.Random(7)
    checkpoints = Checkpoints(folder)
    newest, before = checkpoints.steps()[-1], checkpoints.steps()[-2]
    files = sorted(p for p in (folder / f"{newest:09d}").rglob("*") if p.is_file())
    saved = {path: path.read_bytes() for path in files}
    items = checkpoints.restore_numpy(newest)[0]
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), items)
    found: dict[str, list[int]] = {}

    def judge(name: str, path: Path, mend: bytes) -> None:
        counts = found.setdefault(name, [0, 0, 0])
        counts[0] += 1
        counts[1] += any(path.name in problem for problem in checkpoints.verify(newest))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            restored = checkpoints.restore_latest(abstract)
        told = any(f"falling back to step {before}" in str(w.message) for w in said)
        # What belongs to no item that is asked for does not matter to who asks: then the newest is as good.
        relevant = (
            path.relative_to(folder / f"{newest:09d}").parts[0] in ("params", "meta")
            or path.parent.name == f"{newest:09d}"
        )
        counts[2] += restored is not None and restored[0] == (before if relevant else newest) and told == relevant
        path.write_bytes(mend)

    for _ in range(flips):
        path = rng.choice([p for p in files if saved[p]])
        raw = bytearray(saved[path])
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        judge("a flipped bit", path, saved[path])
    for path in files:
        path.unlink()
        judge("a deleted file", path, saved[path])
        path.write_bytes(saved[path][: len(saved[path]) // 2])
        if saved[path]:
            judge("a file cut in half", path, saved[path])
    assert not checkpoints.verify(newest)
    return {name: (counts[0], counts[1], counts[2]) for name, counts in found.items()}


def halves(folder: Path, preset: str, steps: int) -> tuple[int, int]:
    """(steps at which a run was cut in two, how often the end was bitwise the same).

    Every step is saved, in the background, while the next ones take the memory of the state that is being saved.
    """
    config = TrainConfig(tokens=steps * 64, batch_size=64, lr=3e-3, ema_decay=0.9, resample_every=4)
    coder = build(CoderConfig(preset=preset, d_sae=32, k=4, dead_after_tokens=200, matmul_dtype="float32"), D_IN, steps)
    mesh, optimizer = make_mesh(ParallelConfig((1, 1))), make_optimizer(config)
    init = make_init(coder, optimizer, config)
    abstract = abstract_state(coder, init, mesh)
    step = make_step(coder, optimizer, make_schedule(config), Sites(("h",), ("h",), (0.7,), (0.7,)), config)
    compiled, hyper = compile_step(step, abstract, mesh), default_hyper(3)
    batches = [{"h": np.random.default_rng(i).normal(size=(64, D_IN)).astype(np.float32)} for i in range(steps)]

    def ends(now: Any, first: int, saves: Checkpoints | None) -> list[bytes]:
        for i in range(first, steps):
            now, _ = compiled(now, batches[i], hyper)
            if saves is not None:
                saves.save(i + 1, now.to_items(), {})
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(now)]

    with Checkpoints(folder, keep_last=steps) as checkpoints:
        whole = ends(init_state(init, 3, abstract), 0, checkpoints)
        checkpoints.wait()
        again = [
            ends(TrainState.from_items(checkpoints.restore(k, abstract.to_items())[0]), k, None) == whole
            for k in range(1, steps)
        ]
    return len(again), sum(again)


def main(_: list[str]) -> None:
    started, folder = time.time(), Path(tempfile.mkdtemp(prefix="saejax-reliability-", dir=_folder()))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        faults = Faults(folder)
        parts: dict[str, Callable[[], None]] = {
            "repeat": faults.repeat,
            "rest": faults.rest,
            "damage": lambda: faults.damage(_FLIPS.value),
            "meshes": faults.meshes,
            "kills": lambda: faults.kills(_KILLS.value),
            "signals": lambda: _signals(faults),
            "halves": faults.halves,
        }
        for name, part in parts.items():
            if not _ONLY.value or name in _ONLY.value:
                try:
                    part()
                except (
                    AssertionError
                ) as error:  # a life that ended otherwise than it should: the others are still tried
                    faults.add(name, 1, 0, 0, f"ended with: {str(error).strip()[-200:]}".replace("\n", " "))
    finally:
        shutil.rmtree(folder)
    text = _table(faults.rows, time.time() - started)
    print(text)
    if _OUTPUT.value:
        Path(_OUTPUT.value).write_text(text)
    sys.exit(0 if all(row.good for row in faults.rows) else 1)


def _folder() -> str | None:
    memory = "/dev/shm"
    return _FOLDER.value or (memory if os.access(memory, os.W_OK) else None)


def _signals(faults: Faults) -> None:
    faults.signals(_SIGNALS.value, signal.SIGTERM)
    if few := _SIGNALS.value // 4:
        faults.signals(few, signal.SIGUSR1)


def _table(rows: list[Row], seconds: float) -> str:
    command = " ".join(["python -m benchmarks.reliability", *(a for a in sys.argv[1:] if not a.startswith("--output"))])
    head = (
        "# Faults tried against training\n\n"
        f"`{command}`: {time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, "
        f"jax {jax.__version__}, {seconds:,.0f} s. A run of {_STEPS.value} steps with a checkpoint every {EVERY}.\n\n"
        "| fault | tried | detected | survived | |\n|---|---:|---:|---:|---|\n"
    )
    return head + "\n".join(row.line() for row in rows) + "\n"


if __name__ == "__main__":
    app.run(main)
