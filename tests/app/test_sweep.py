"""Sweeps: the grid and its programs, and that what trains together comes out as if each had trained alone."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from matplotlib import image
from tiny import planted_experiment, replaced, tiny_experiment

import saejax
from saejax.app.experiment import Experiment, from_json
from saejax.app.stages import run_evaluate, run_report, run_train
from saejax.app.sweep import run as sweep_run
from saejax.app.sweep.config import SweepConfig
from saejax.app.sweep.members import Member, groups, members, of_each, sparsity_of, sparsity_weights
from saejax.app.sweep.run import as_begun, decided, run_sweep
from saejax.app.workspace import Workspace
from saejax.checkpoints import Checkpoints
from saejax.coders import RECIPES, CoderConfig, Sites, build
from saejax.coders.parts import TERMS
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json, write_json
from saejax.core.lease import held
from saejax.core.metrics import read_metrics
from saejax.evals import GateConfig
from saejax.fit.stacked import for_all
from saejax.reports.sweep_page import sweep_picture, sweep_table
from saejax.runs import Run
from saejax.store import Batches, StoreReader
from saejax.training import EXIT_PREEMPTED, TrainConfig, TrainState
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import make_init
from saejax.training.step import make_step

STEPS = 30
POINTS = (
    "A: coder.d_sae=48",
    "seeded: coder.d_sae=48,coder_seed=5,train.lr=3e-3",
    "bad: coder.d_sae=48,train.lr=1e30",
    "B: coder.d_sae=64,reads=(blocks.0.mlp_out)",
)
FIRST = ["A-sparsity0.5", "A-sparsity2.0", "seeded-sparsity0.5", "seeded-sparsity2.0"]
BAD = ["bad-sparsity0.5", "bad-sparsity2.0"]
SECOND = ["B-sparsity0.5", "B-sparsity2.0"]


def sweep(folder: Path, **axes: Any) -> Experiment:
    """A tiny sweep below `folder`; relu + L1, whose latents do not flip with the last bit as a TopK's do."""
    e = tiny_experiment(
        folder,
        top={"name": "sweep", "store": "tiny"},
        coder={"preset": "standard", "l1_coefficient": 0.5},
        train={"tokens": STEPS * 128},
    )
    return dataclasses.replace(e, sweep=SweepConfig(**axes))


def plan(**axes: Any) -> tuple[Member, ...]:
    return members(sweep(Path("unused"), **axes))


# --- the grid, without training ------------------------------------------------------------------------------


def test_seeds_rates_and_sparsity_weights_are_one_program() -> None:
    found = plan(seeds=(1, 2), lrs=(1e-3, 2e-3), sparsity_scales=(1.0, 4.0))
    (group,) = groups(found)
    assert group.members == found and len(found) == 8
    assert found[5].name == "lr0.002-sparsity1.0-seed2"
    assert group.hyper() == {"lr": [1.0] * 4 + [2.0] * 4, "sparsity": [1.0, 1.0, 4.0, 4.0] * 2, "seed": [1, 2] * 4}
    own = found[6].experiment
    assert (own.coder_seed, own.train.lr, own.coder.l1_coefficient) == (1, 2e-3, 2.0)
    assert (own.name, own.store, own.sweep) == (found[6].name, "tiny", SweepConfig())
    assert own.run_dir == Path("unused/runs/sweep") / own.name


def test_all_else_is_a_program_of_its_own() -> None:
    found = plan(seeds=(0, 1), expansions=(2, 4), presets=("topk,batchtopk",), reads=("blocks.0.mlp_out",))
    assert [len(group.members) for group in groups(found)] == [2, 2, 2, 2]
    assert [m.experiment.coder.expansion for m in found] == [2, 2, 4, 4] * 2
    # The experiment's own d_sae does not hide the expansion.
    assert all(m.experiment.coder.d_sae == 0 and m.experiment.reads == ("blocks.0.mlp_out",) for m in found)
    # Points may share a program, if they differ in nothing else.
    assert len(groups(plan(points=("A: train.lr=1e-3", "B: train.lr=2e-3", "C: train.b1=0.8")))) == 2


def test_schedule_free_has_a_program_for_each_learning_rate() -> None:
    e = replaced(sweep(Path("unused"), lrs=(1e-3, 2e-3)), "train", optimizer="schedule_free", schedule="constant")
    assert [group.hyper()["lr"] for group in groups(members(e))] == [[1.0], [1.0]]


def test_ks_choose_the_target_where_there_is_no_k() -> None:
    found = plan(presets=("topk", "jumprelu"), ks=(4, 8))
    assert [(m.experiment.coder.k, m.experiment.coder.target_l0, sparsity_of(m.experiment)) for m in found] == [
        *((4, 32.0, 4), (8, 32.0, 8)),
        *((8, 4.0, 4.0), (8, 8.0, 8.0)),
    ]


def test_sparsity_scales_multiply_what_the_losses_say() -> None:
    """The factor in a member's own settings is the one that its program's loss is told."""
    sparse = {kind.name for kind in TERMS.values() if kind.is_sparsity_weight()}
    named = set()
    for preset in RECIPES:
        one, two = (dict(weights) for weights in ({}, {}))
        base = CoderConfig(preset=preset, d_sae=512).resolved()
        scaled = {key: 2 * getattr(base, key) for key in sparsity_weights()}
        for config, weights in ((base, one), (dataclasses.replace(base, **scaled), two)):
            stacked = config.topology in ("crosscoder", "clt")
            for term in build(config, (64, 64) if stacked else 64, 100).terms:
                weights[term.name] = term.coefficient.end
        changed = {name for name in one if two[name] != one[name]}
        assert changed == sparse & one.keys(), preset
        named |= changed
    assert named == sparse


def test_the_order_of_a_begun_sweep_is_the_recorded_one(tmp_path: Path) -> None:
    """Of every axis: members have their places in the state by it, programs their devices and their own rate."""
    axes: dict[str, tuple[Any, ...]] = {
        "points": ("P: coder.bandwidth=0.5", "Q: coder.bandwidth=0.9"),
        "presets": ("jumprelu", "batchtopk"),
        "expansions": (2, 4),
        "d_saes": (64, 96),
        "ks": (4, 6),
        "reads": ("blocks.0.mlp_out", "blocks.1.resid_post"),
        "lrs": (1e-3, 3e-3),
        "sparsity_scales": (0.5, 2.0),
        "seeds": (0, 1),
    }
    assert axes.keys() == {field.name for field in dataclasses.fields(SweepConfig)}
    for name, values in axes.items():
        begun, turned = (
            sweep(tmp_path / name, **{"presets": ("jumprelu",), name: listed}) for listed in (values, values[::-1])
        )
        recorded = members(begun)
        assert as_begun(begun, recorded) == recorded
        assert as_begun(turned, members(turned)) == members(turned) != recorded
        write_json(begun.run_dir / "sweep_config.json", decided(recorded))
        assert as_begun(turned, members(turned)) == recorded


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, r"sweep is empty. Give it .*--config.sweep.seeds=0,1,2"),
        ({"seeds": (0, 0)}, r"Two members .* 'seed0'"),
        ({"seeds": (-1,)}, r"sweep.seeds holds -1"),
        ({"lrs": (1e-3, 0.0)}, r"sweep.lrs holds 0.0; each must be positive"),
        ({"sparsity_scales": (float("nan"),)}, r"sweep.sparsity_scales holds nan"),
        ({"ks": (0,)}, r"sweep.ks holds 0"),
        ({"d_saes": (8,), "expansions": (2,)}, r"both set the width"),
        ({"ks": (4,)}, r"sweep.ks does nothing to standard: .* Vary sweep.sparsity_scales"),
        (
            {"points": ("T: coder.preset=topk,coder.l1_coefficient=0.0",), "sparsity_scales": (0.5,)},
            r"does nothing to 'T-sparsity0.5'.* Vary sweep.ks",
        ),
        ({"presets": ("topkk",)}, r"coder.preset is 'topkk'. Did you mean 'topk'"),
        ({"points": ("A",)}, r"write a point as 'name: key=value"),
        ({"points": ("A: coder.k",)}, r"point 'A' of the sweep holds 'coder.k'; write key=value"),
        ({"points": ("A: coder.expansions=3",)}, r"point 'A' .*config.coder.expansions. Did you mean 'expansion'"),
        ({"points": ("A: train.lr=-1",)}, r"point 'A' of the sweep: train.lr is -1"),
        ({"points": ("A: coder.k.x=3",)}, r"k is not a section"),
        ({"points": ("A: coder.d_sae=8", "A: coder.d_sae=9")}, r"Two members of the sweep are called 'A'"),
        ({"points": ("A: coder.d_sae=8", "B: coder.d_sae=8")}, r"'A' and 'B' of the sweep are the same run"),
        ({"points": ("A: coder.d_sae=8",), "d_saes": (8,)}, r"coder.d_sae is set by the point 'A' and by sweep.d_saes"),
        ({"points": ("groups: coder.d_sae=8",)}, r"'groups', which is a folder of the sweep"),
        ({"points": ("a/b: coder.d_sae=8",)}, r"the name of one folder, without slashes"),
        ({"points": ("A: train.tokens=9999",)}, r"'A' changes train.tokens: 3840 -> 9999.* given the same batches"),
        ({"points": ("A: seed=9",)}, r"'A' changes seed"),
        ({"points": ("A: name=b", "B: coder.k=3")}, r"'A' changes name"),
        ({"points": ("A: sweep.seeds=(1,2)", "B: coder.k=3")}, r"'A' changes sweep.seeds"),
    ],
)
def test_bad_grids_are_refused(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**axes)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("parallel", {"mesh": (2, 1)}, r"parallel.mesh is \(2, 1\), but a sweep puts whole programs on single"),
        ("parallel", {"mode": "pmap"}, r"parallel.mode is 'pmap', but a sweep puts whole programs on single"),
    ],
)
def test_settings_that_a_sweep_cannot_keep_are_refused(
    section: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_sweep(Workspace(replaced(sweep(tmp_path, seeds=(0, 1)), section, **values)))
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_members_in_turn_and_at_once_give_the_same() -> None:
    """What a CPU does and what an accelerator does, of members that differ in all that a program is told."""
    config = TrainConfig(tokens=64 * 100, batch_size=64, lr=1e-2, eps=1e-3, resample_every=3)
    coder = build(CoderConfig(preset="topk", d_sae=32, k=4, matmul_dtype="float32"), 16, 100)
    optimizer = make_optimizer(config)
    step = make_step(coder, optimizer, make_schedule(config), Sites(("h",), ("h",), (1.0,), (1.0,)), config)
    hyper = {"lr": np.float32([1, 0.5]), "sparsity": np.float32([1, 2]), "seed": np.uint32([3, 4])}
    init = jax.jit(jax.vmap(make_init(coder, optimizer, config), out_axes=TrainState(None, 0, 0, 0, 0)))
    x = np.random.default_rng(0).normal(size=(4, 64, 16)).astype(np.float32)
    ends = []
    for platform in ("cpu", "gpu"):
        state, program = init(hyper["seed"]), jax.jit(for_all(step, platform))
        for rows in x:
            state, metrics = program(state, {"h": rows}, hyper)
        assert int(state.step) == 4 and metrics["lr"][0] == 2 * metrics["lr"][1]
        ends.append(jax.device_get((state, metrics)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *ends)
    assert np.abs(ends[0][0].params["W_dec"][0] - ends[0][0].params["W_dec"][1]).max() > 0.1


# --- a sweep, run once ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Done:
    """A finished sweep: two programs, one of them with two members that do not stay finite."""

    folder: Path
    experiment: Experiment
    read: Counter
    printed: str

    @property
    def content(self) -> dict[str, Any]:
        return json.loads((self.experiment.run_dir / "sweep.json").read_text())

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["member"]: row for row in self.content["members"]}

    def member(self, name: str) -> Path:
        return self.experiment.run_dir / name


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("sweep")
    e = sweep(folder, points=POINTS, sparsity_scales=(0.5, 2.0))
    read: Counter = Counter()
    lines: list[str] = []
    original = Batches.batch_at

    def counted(self: Batches, step: int) -> dict[str, np.ndarray]:
        read[step] += 1
        return original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "batch_at", counted)
        for module in ("saejax.app.sweep.run", "saejax.app.training_folders", "saejax.app.console"):
            patch.setattr(f"{module}.say", lambda text="": lines.append(text))
        assert run_sweep(Workspace(e)) == 0
    return Done(folder, e, read, "\n".join(lines))


@pytest.mark.ci
def test_every_batch_is_read_once_for_all_programs(done: Done) -> None:
    assert done.read == Counter(range(STEPS))


def test_programs_are_spread_over_the_devices(done: Done) -> None:
    programs = done.content["programs"]
    assert [p["members"] for p in programs] == [FIRST + BAD, SECOND]
    assert [p["device"] for p in programs] == ["cpu:0", "cpu:1"]
    # Adam keeps two moments of each parameter.
    assert programs[1]["parameter_bytes"] == 2 * 4 * (2 * 128 * 64 + 64 + 2 * 128)
    assert programs[1]["state_bytes"] > 3 * programs[1]["parameter_bytes"]
    assert "sweep: 8 coders in 2 programs on 2 of 8 devices, 30 steps of 128 activations; parameters 0.4 MB" in (
        done.printed
    )


@pytest.mark.ci
def test_programs_that_share_a_device_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("saejax.fit.coders.training_devices", lambda e: jax.devices()[:1])
    e = planted_experiment(tmp_path, "sweep", tokens=2 * 128)
    e = dataclasses.replace(e, sweep=SweepConfig(points=("A: coder.d_sae=4096", "B: coder.d_sae=8192")))
    assert run_sweep(Workspace(e)) == 0
    programs = read_json(e.run_dir / "sweep.json")["programs"]
    assert [program["device"] for program in programs] == ["cpu:0", "cpu:0"]
    together = sum(program["state_bytes"] for program in programs) / 1e6
    assert f"with the optimizer's at most {together:.1f} MB on a device" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["seeded-sparsity2.0", "B-sparsity0.5"])
def test_a_member_is_what_a_single_run_gives(done: Done, name: str, tmp_path: Path) -> None:
    config = from_json(read_json(done.member(name) / "config.json"))
    alone = dataclasses.replace(config, runs_dir=str(tmp_path), name="alone")
    assert run_train(Workspace(alone)) == 0
    (together, meta), (single, wanted) = (
        Checkpoints(folder / "checkpoints").restore_numpy(STEPS, names=("params", "stats", "opt_state"))
        for folder in (done.member(name), alone.run_dir)
    )
    for key, value in single["params"].items():
        assert np.abs(together["params"][key] - value).max() <= 1e-5 * np.abs(value).max(), key
    shapes = [jax.tree.map(np.shape, items) for items in (together, single)]
    assert shapes[0] == shapes[1]
    np.testing.assert_array_equal(together["stats"]["tokens_since_fired"], single["stats"]["tokens_since_fired"])
    assert {key: meta[key] for key in ("reads", "read_scales", "d_writes")} == {
        key: wanted[key] for key in ("reads", "read_scales", "d_writes")
    }
    curves = [read_metrics(folder / "metrics.jsonl") for folder in (done.member(name), alone.run_dir)]
    for key in ("train/loss", "train/lr", "val/fve"):
        here, there = ([row[key] for row in rows if key in row] for rows in curves)
        assert here == pytest.approx(there, rel=1e-3, abs=1e-4) and len(here) > 3, key


def test_a_member_loads_and_is_what_the_table_says(done: Done) -> None:
    name = "B-sparsity2.0"
    sae, row = saejax.load(done.member(name)), done.rows[name]
    assert (sae.step, sae.finished, sae.hook_point) == (STEPS, True, "blocks.0.mlp_out")
    reader = StoreReader.open(done.experiment.store_dir("heldout"))
    x = reader.rows(0, reader.n_tokens)["blocks.0.mlp_out"].astype(np.float32)
    latents = np.asarray(sae.encode(x))
    y = np.asarray(sae.decode(latents))
    assert row["l0"] == pytest.approx((latents > 0).sum(1).mean(), rel=1e-4)
    assert row["dead_fraction"] == pytest.approx((latents == 0).all(0).mean())
    assert row["relative_error"] == pytest.approx(np.square(x - y).sum() / np.square(x).sum(), rel=1e-3)
    assert row["fve"] == pytest.approx(1 - np.square(x - y).sum() / np.square(x - x.mean(0)).sum(), abs=1e-3)
    wanted = {"preset": "standard", "d_sae": 64, "k": None, "lr": 1e-3, "seed": 0, "sparsity_scale": 2.0}
    assert {key: row[key] for key in wanted} == wanted and row["status"] == "ok"


@pytest.mark.ci
def test_each_member_is_evaluated_and_shown(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    """By the same command and configuration as a run; a member that has no end has an error, and the others go on."""

    def page(work: Workspace) -> int:
        if work.experiment.run_dir.name == SECOND[0]:  # one: each costs seconds
            run_report(work)
        return 0

    bars = GateConfig(relative_error=1e9, loss_recovered=0.0, zero_fraction=0.0, gram_rms=9.0, loss_rise=9.0)
    small = dataclasses.replace(done.experiment, gates=bars)
    work = Workspace(small)
    assert of_each(work, run_evaluate) == 1  # the bad ones
    assert {n for n in done.rows if (done.member(n) / Run.evaluation).is_file()} == set(FIRST + SECOND)
    assert capsys.readouterr().out.count("error: ") == len(BAD)
    assert of_each(work, page) == 0 and (done.member(SECOND[0]) / Run.page).is_file()
    assert of_each(work.of(dataclasses.replace(small, sweep=SweepConfig())), lambda one: 3) == 3


def test_members_that_do_not_stay_finite_fail_alone(done: Done) -> None:
    failed = {name: row["status"] for name, row in done.rows.items() if row["status"] != "ok"}
    assert set(failed) == set(BAD)
    for name, status in failed.items():
        step = int(status.removeprefix("not finite at step "))
        # The tenth step in a row that could not be taken, as in a single run.
        assert (
            10 <= step < 15 and f"{name} has failed, the others go on. The loss of step {step} is nan" in done.printed
        )
        assert done.rows[name]["fve"] is None
        assert max(row["step"] for row in read_metrics(done.member(name) / "metrics.jsonl")) == step
        with pytest.raises(DataError, match="it has: none"):
            saejax.load(done.member(name))
    assert all(done.rows[name]["fve"] is not None for name in FIRST + SECOND)


def test_the_table_and_the_picture_show_the_members(done: Done) -> None:
    folder = done.experiment.run_dir
    head, _, *lines = (folder / "sweep.md").read_text().split("\n\n")[2].splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")][:4] == ["member", "preset", "d_sae", "k"]
    for line, row in zip(lines, done.content["members"], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == row["member"] and cells[-1] == row["status"]
        assert cells[8] == ("" if row["fve"] is None else f"{row['fve']:.4f}")
    assert sweep_table(done.content) in (folder / "sweep.md").read_text() and sweep_table(done.content) in done.printed
    shown = image.imread(folder / "sweep.png")
    assert shown.shape == (672, 1080, 4) and len(np.unique(shown.reshape(-1, 4), axis=0)) > 20
    page = (folder / "sweep.html").read_text()
    assert (
        "data:image/png;base64," in page
        and "http" not in page.replace("http-equiv", "")
        and all(name in page for name in BAD)
    )


def test_a_line_joins_one_seed_s_members_in_order_of_l0() -> None:
    def row(preset: str, d_sae: int, seed: int, l0: float | None) -> dict[str, Any]:
        fve = None if l0 is None else l0 / 100
        name = {"member": f"{preset}-{d_sae}-{seed}-{l0}", "preset": preset, "d_sae": d_sae, "seed": seed}
        return name | {"l0": l0, "fve": fve, "reads": ["h"]}

    rows = [row("topk", 64, 0, l0) for l0 in (40, 10, None, 20)]
    rows += [row("topk", 64, 1, 12), row("topk", 128, 0, 11), row("standard", 64, 0, 9)]
    axes = sweep_picture(rows, "title").axes[0]
    drawn = [line for line in axes.get_lines() if len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in drawn] == [[10, 20, 40], [12], [11], [9]]
    assert drawn[0].get_color() == drawn[1].get_color() != drawn[2].get_color() != drawn[3].get_color()
    assert drawn[0].get_marker() == drawn[2].get_marker() != drawn[1].get_marker()
    assert axes.get_xscale() == "log" and "log" in axes.get_xlabel()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["topk, 64 latents", "topk, 128 latents", "standard, 64 latents", "seed 0", "seed 1"]
    few = sweep_picture(rows[:3], "title").axes[0]
    assert not axes.texts and [text.get_text() for text in few.texts] == ["topk-64-0-40", "topk-64-0-10"]
    nobody = sweep_picture([row("topk", 64, 0, None)], "title").axes[0]
    assert [text.get_text() for text in nobody.texts] == ["no member finished"]


def test_each_hook_point_has_a_choice_and_a_paper_its_files(done: Done) -> None:
    folder, (one, other) = done.experiment.run_dir, done.content["choice"]
    assert one.startswith("At blocks.1.resid_post: choose ") and other.startswith("At blocks.0.mlp_out: choose B-spars")
    assert one in done.printed and one in (folder / "sweep.md").read_text()
    assert {path.suffix for path in folder.glob("sweep.*")} >= {".csv", ".tex", ".svg", ".pdf"}
    assert [s["setting"] for s in done.content["settings"]] == list(done.rows)


@pytest.mark.ci
def test_seeds_are_put_together_and_the_choice_is_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand from the members' rows; by another bound, and of a sweep from before choices, without a training."""
    e = planted_experiment(tmp_path, "grid", tokens=20 * 128)
    e = dataclasses.replace(e, sweep=SweepConfig(sparsity_scales=(0.1, 10.0), seeds=(0, 1, 2)))
    assert run_sweep(Workspace(e)) == 0
    path = e.run_dir / "sweep.json"
    content = read_json(path)
    low, high = content["settings"]
    assert [low["setting"], high["setting"]] == ["sparsity0.1", "sparsity10.0"]
    fves = [row["fve"] for row in content["members"] if row["sparsity_scale"] == 0.1]
    assert len(fves) == 3 and low["fve"]["mean"] == pytest.approx(np.mean(fves))
    assert low["fve"]["spread"] == pytest.approx(np.std(fves, ddof=1)) and "Over seeds" in capsys.readouterr().out
    between = (low["l0"]["mean"] + high["l0"]["mean"]) / 2
    assert low["l0"]["mean"] > between and run_sweep(Workspace(e), most_l0=between) == 0
    (line,) = read_json(path)["choice"]
    assert (
        line.startswith("Choose sparsity10.0 (") and "at an L0 of at most" in line and line in capsys.readouterr().out
    )
    write_json(path, {key: value for key, value in content.items() if key not in ("settings", "choice")})
    assert run_sweep(Workspace(e)) == 0 and read_json(path) == content


def test_the_folder_holds_the_experiment_of_the_sweep(done: Done) -> None:
    """Whoever continues the sweep needs nothing but its folder."""
    recorded = from_json(json.loads((done.experiment.run_dir / "sweep_experiment.json").read_text()))
    assert recorded == done.experiment


def test_a_finished_sweep_is_not_done_again(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.folder.rglob("*") if path.is_file()}
    assert run_sweep(Workspace(done.experiment)) == 0
    assert {path: path.stat().st_mtime_ns for path in done.folder.rglob("*") if path.is_file()} == before
    assert "already done" in capsys.readouterr().out


def test_another_sweep_or_run_in_the_folder_is_refused(done: Done, tmp_path: Path) -> None:
    other = replaced(done.experiment, "train", lr=2e-3)
    with pytest.raises(DataError, match=r"another configuration:\n  A-sparsity0.5.train.lr: 0.001 -> 0.002"):
        run_sweep(Workspace(other))
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"holds a single run. Choose another"):
        run_sweep(Workspace(dataclasses.replace(done.experiment, runs_dir=str(tmp_path))))
    with pytest.raises(DataError, match=r"holds a sweep. Choose another folder"):
        run_train(Workspace(done.experiment))


@contextlib.contextmanager
def stopped_in_step(stop: int) -> Iterator[None]:
    """Sweeps are told to stop while they read the batch of step `stop`."""
    original = Batches.iterate

    def stopped(self: Batches, start_step: int = 0) -> Iterator[dict[str, np.ndarray]]:
        for step, batch in enumerate(original(self, start_step), start_step + 1):
            if step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "iterate", stopped)
        yield


@pytest.mark.ci
def test_a_begun_sweep_goes_on_however_its_axes_are_listed(done: Done, tmp_path: Path) -> None:
    """Four members of one program, stopped, and continued with both axes the other way round."""
    axes: dict[str, tuple[Any, ...]] = {"lrs": (1e-3, 3e-3), "seeds": (0, 1)}
    turned = {name: values[::-1] for name, values in axes.items()}
    short = replaced(replaced(done.experiment, "train", tokens=4 * 128, validate_every=0), "coder", d_sae=48)

    def work(folder: str, **given: Any) -> Workspace:
        return Workspace(dataclasses.replace(short, runs_dir=str(tmp_path / folder), sweep=SweepConfig(**given)))

    assert run_sweep(work("whole", **axes)) == 0
    with stopped_in_step(2):
        assert run_sweep(work("turned", **axes)) == EXIT_PREEMPTED
    for seeds, message in (((0,), "lr0.001-seed1: {.*} -> None"), ((2, 1, 0), "lr0.003-seed2: None -> ")):
        with pytest.raises(DataError, match=f"(?s)another configuration:.*{message}"):
            run_sweep(work("turned", **turned | {"seeds": seeds}))
    with stopped_in_step(4):  # the last: what follows the training is left to the next command all the same
        assert run_sweep(work("turned", **turned)) == EXIT_PREEMPTED
    assert not (tmp_path / "turned" / "sweep" / "sweep.json").exists()
    assert run_sweep(work("turned", **turned)) == 0
    whole, other = (json.loads((tmp_path / name / "sweep" / "sweep.json").read_text()) for name in ("whole", "turned"))
    assert [program["members"] for program in other["programs"]] == [[row["member"] for row in whole["members"]]]
    for here, there in zip(whole["members"], other["members"], strict=True):
        assert {**here, "run": "", "tokens_per_second": 0} == {**there, "run": "", "tokens_per_second": 0}
        one, two = saejax.load(here["run"]), saejax.load(there["run"])
        assert (one.config.coder, one.config.coder_seed) == (two.config.coder, two.config.coder_seed)
        jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def test_a_stopped_sweep_continues_bitwise(
    done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in step 13; then a kill that left the newest checkpoint with one program only; then to the end."""
    e = dataclasses.replace(done.experiment, runs_dir=str(tmp_path))
    with stopped_in_step(13):
        assert run_sweep(Workspace(e)) == EXIT_PREEMPTED
    assert "stopped by a signal after step 13, saved; the same command continues" in capsys.readouterr().out
    assert not (e.run_dir / "sweep.json").exists()
    folders = [Checkpoints(e.run_dir / "groups" / str(i) / "checkpoints") for i in range(2)]
    assert [folder.latest() for folder in folders] == [13, 13]
    shutil.rmtree(folders[1].directory / "000000013")
    train, held_by = sweep_run.train, list[str | None]()

    def watched(*of: Any) -> Any:
        outcome = train(*of)
        held_by.append(held(e.run_dir))
        return outcome

    monkeypatch.setattr(sweep_run, "train", watched)
    assert run_sweep(Workspace(e)) == 0
    assert held_by and str(os.getpid()) in str(held_by[0]), "nobody else may come in before the table is there"
    ended = {row["member"]: row for row in json.loads((e.run_dir / "sweep.json").read_text())["members"]}
    for name in FIRST + SECOND:
        here, there = (
            Checkpoints(folder / "checkpoints").restore_numpy(STEPS, names=("params", "stats", "opt_state"))[0]
            for folder in (e.run_dir / name, done.member(name))
        )
        jax.tree.map(np.testing.assert_array_equal, here, there)
        assert {**ended[name], "tokens_per_second": 0, "run": ""} == {
            **done.rows[name],
            "tokens_per_second": 0,
            "run": "",
        }
    # What had failed before the stop is still known to have.
    assert [ended[name]["status"] for name in BAD] == [done.rows[name]["status"] for name in BAD]


@pytest.mark.ci
def test_programs_one_by_one_are_the_sweep(done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each as a job of its own, one of them stopped and continued; then the table, which trains nothing any more."""
    e = dataclasses.replace(done.experiment, runs_dir=str(tmp_path))
    with stopped_in_step(13):
        assert run_sweep(Workspace(e), group=1) == EXIT_PREEMPTED
    assert [run_sweep(Workspace(e), group=i) for i in (1, 0)] == [0, 0]
    assert "bad-sparsity0.5, bad-sparsity2.0 did not stay finite" in capsys.readouterr().out
    assert not (e.run_dir / "sweep.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "batch_at", lambda *_: pytest.fail("a batch was read"))
        assert run_sweep(Workspace(e)) == 0
    ended = {row["member"]: row for row in json.loads((e.run_dir / "sweep.json").read_text())["members"]}
    for name in FIRST + SECOND:
        here, there = (
            Checkpoints(folder / "checkpoints").restore_numpy(STEPS, names=("params", "stats", "opt_state"))[0]
            for folder in (e.run_dir / name, done.member(name))
        )
        jax.tree.map(np.testing.assert_array_equal, here, there)
    same = {"tokens_per_second": 0, "run": ""}
    assert {name: row | same for name, row in ended.items()} == {name: row | same for name, row in done.rows.items()}


@pytest.mark.parametrize(
    ("group", "changed", "message"),
    [
        (2, {}, "--group is 2, and the sweep has the programs 0 to 1"),
        (0, {"early_stop_patience": 2}, "end at different steps"),
    ],
)
def test_programs_that_cannot_train_alone_are_refused(
    done: Done, tmp_path: Path, group: int, changed: dict[str, Any], message: str
) -> None:
    e = replaced(dataclasses.replace(done.experiment, runs_dir=str(tmp_path)), "train", **changed)
    with pytest.raises(ConfigError, match=message):
        run_sweep(Workspace(e), group=group)


@pytest.mark.ci
def test_what_a_single_run_may_a_sweep_may_too(tmp_path: Path) -> None:
    """Early stopping, the best and every n-th checkpoint, TensorBoard, spikes: each member as if it trained alone."""
    settings: dict[str, Any] = {
        "tokens": 24 * 128,
        "validate_every": 3,
        "checkpoint_every": 6,
        "early_stop_patience": 1,
        "early_stop_min_delta": 1e-3,
        "keep_best": "val/fve",
        "keep_every": 6,
        "spike_factor": 50.0,
        "tensorboard": True,
    }

    def experiment(name: str, **own: Any) -> Experiment:
        e = planted_experiment(tmp_path, name, **settings | own)
        return dataclasses.replace(e, coder=dataclasses.replace(e.coder, l1_coefficient=0.5))

    e = dataclasses.replace(experiment("sweep"), sweep=SweepConfig(lrs=(1e-2, 1e-7)))
    assert run_sweep(Workspace(e)) == 0
    rows = {row["member"]: row for row in json.loads((e.run_dir / "sweep.json").read_text())["members"]}
    for name, lr in (("lr0.01", 1e-2), ("lr1e-07", 1e-7)):
        member = e.run_dir / name
        alone = experiment(f"alone-{name}", lr=lr)
        assert run_train(Workspace(alone)) == 0
        sae, single = saejax.load(member), saejax.load(alone.run_dir)
        assert sae.finished and sae.step == single.step == rows[name]["steps"]
        for key, value in single.params.items():
            np.testing.assert_allclose(sae.params[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
        assert saejax.load(member, step="best").step == saejax.load(alone.run_dir, step="best").step
        assert list((member / "tensorboard").iterdir())
        kept = set(Checkpoints(alone.run_dir / "checkpoints").steps())
        assert set(Checkpoints(member / "checkpoints").steps()) <= kept
        values = [
            [row["val/fve"] for row in read_metrics(f / "metrics.jsonl") if "val/fve" in row]
            for f in (member, alone.run_dir)
        ]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    # One stopped at once, for it learns nothing, and took no more steps; the other went on.
    assert rows["lr1e-07"]["steps"] == 6 < rows["lr0.01"]["steps"]


@pytest.mark.ci
def test_a_sweep_that_dies_at_its_last_save_leaves_every_member(tmp_path: Path) -> None:
    """The members' checkpoints come before the program's last one, which says that there is nothing left to do."""
    e = planted_experiment(tmp_path, "sweep", tokens=8 * 128, checkpoint_every=4, validate_every=0)
    e = dataclasses.replace(e, sweep=SweepConfig(seeds=(0, 1)))
    original = Checkpoints.save

    def dying(self: Checkpoints, step: int, *rest: Any, **more: Any) -> None:
        if step == 8 and "groups" in str(self.directory):
            raise KeyboardInterrupt
        original(self, step, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", dying)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(Workspace(e))
    first = [saejax.load(e.run_dir / name).params for name in ("seed0", "seed1")]
    assert run_sweep(Workspace(e)) == 0
    for name, before in zip(("seed0", "seed1"), first, strict=True):
        sae = saejax.load(e.run_dir / name)
        assert sae.finished and sae.step == 8
        jax.tree.map(np.testing.assert_array_equal, dict(sae.params), dict(before))
