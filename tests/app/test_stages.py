"""The stages in one process: what they leave, and what they say to bad input. Nothing is ever lost or overwritten."""

import contextlib
import dataclasses
import errno
import functools
import html
import importlib
import io
import json
import os
import re
import shutil
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tiny import D_IN, planted_experiment, planted_store, replaced, tiny_experiment
from tiny.commands import run_command
from tiny.feature_tables import with_feature
from tiny.served import finished_run
from tiny.signalled import late

import saejax
from saejax.app.experiment import Experiment
from saejax.app.stages import run_capture, run_evaluate, run_pipeline, run_report, run_train
from saejax.app.workspace import Workspace
from saejax.capture import capture
from saejax.core.errors import EXIT_PREEMPTED, BusyError, ConfigError, DataError
from saejax.core.lease import lease
from saejax.core.progress import Progress
from saejax.core.stopping import Stopped, Stopping
from saejax.lm import LanguageModel, checkpoint, load_lm
from saejax.parallel import ParallelConfig, make_mesh
from saejax.reports.feature_table import read_features
from saejax.runs import Run
from saejax.store import StoreLayout, StoreReader, StoreWriter, verify
from saejax.store.norms import norms
from saejax.text import Packer

HOOK = "blocks.1.resid_post"


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything has been run once; nobody writes into it."""
    return finished_run(tmp_path_factory)


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    shutil.copytree(done, tmp_path / "copy")
    return tmp_path / "copy"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_stored_activations_are_the_model_s_own(done: Path) -> None:
    """Every stored row, found again by its document, position and token, equals a forward pass over the packed text."""
    e = tiny_experiment(done)
    work = Workspace(e)
    reader = StoreReader.open(e.store_dir("train"))
    assert reader.n_tokens == 3000 and not verify(e.store_dir("train"))
    rows = reader.rows(0, reader.n_tokens, metadata=True)
    wanted: dict[tuple[int, int, int], Any] = {}
    seen = 0
    for packed in Packer(work.source, work.lm.tokenizer, 64).batches("train", 8):
        _, acts = work.lm.run(packed.tokens, packed.positions, packed.segments, capture=e.capture.hook_points)
        for r, s in zip(*np.nonzero(packed.keep), strict=True):
            key = (int(packed.documents[r, s]), int(packed.tokens[r, s]), int(packed.positions[r, s]))
            wanted.setdefault(key, []).append({name: np.asarray(value[r, s]) for name, value in acts.items()})
            seen += 1
        if seen >= 3000:
            break
    for i in range(0, 3000, 37):
        key = tuple(int(rows[name][i]) for name in ("document", "token_id", "position"))
        assert any(
            all(np.allclose(rows[name][i].astype(np.float32), c[name], rtol=8e-3, atol=1e-3) for name in c)
            for c in wanted[key]
        ), key
    # No bos, and not in the order of the text.
    assert not np.isin(rows["token_id"], list(work.lm.tokenizer.special_ids)).any()
    assert (np.diff(rows["position"][:1024]) == 1).mean() < 0.2


def test_held_out_text_was_never_captured_for_training(done: Path) -> None:
    e = tiny_experiment(done)
    train, heldout = (
        set(StoreReader.open(e.store_dir(split)).rows(0, 500, metadata=True)["document"].tolist())
        for split in ("train", "heldout")
    )
    assert train and heldout and not train & heldout


def test_loading_gives_the_coder_for_raw_activations(done: Path) -> None:
    e = tiny_experiment(done)
    sae = saejax.load(e.run_dir)
    x = StoreReader.open(e.store_dir("heldout"), [HOOK]).rows(0, 300)[HOOK].astype(np.float32)
    latents = sae.encode(x)
    assert latents.shape == (300, 256) and int((latents != 0).sum(-1).max()) <= 8
    assert sae.decode(latents).shape == x.shape
    # The same as the last validation of the training, which worked on scaled activations.
    error = float(np.square(x - np.asarray(sae.decode(latents))).sum() / np.square(x).sum())
    rows = [json.loads(line) for line in (e.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert error == pytest.approx([row["val/relative_error"] for row in rows if "val/r2" in row][-1], rel=0.2)
    one = sae.encode(x[0])
    assert one.shape == (256,) and np.allclose(one, latents[0], atol=1e-4)
    assert saejax.load(e.run_dir, step=20).step == 20
    with pytest.raises(DataError, match=r"no checkpoint of step 21; it has: .*20"):
        saejax.load(e.run_dir, step=21)
    with pytest.raises(DataError, match=r"last axes of activations must be \(128,\)"):
        sae.encode(np.zeros((3, 64)))
    with pytest.raises(DataError, match="does not exist"):
        saejax.load(done / "nowhere")


def refuse(e: Experiment, stage: Callable[[Workspace], Any], kind: type[Exception], message: str) -> None:
    """The stage refuses with this message, and changes no file."""
    folder = Path(e.runs_dir).parent
    before = snapshot(folder)
    with pytest.raises(kind, match=message):
        stage(Workspace(e))
    assert snapshot(folder) == before


def test_a_run_folder_with_another_configuration_is_refused(copy: Path) -> None:
    e = replaced(tiny_experiment(copy), "train", lr=5e-4)
    refuse(e, run_train, DataError, r"another configuration:\n  train.lr: 0.001 -> 0.0005\nChoose another")
    # What does not change a number may change.
    assert run_train(Workspace(replaced(tiny_experiment(copy), "train", log_every=5))) == 0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "name",
            "x" * 300,
            r"^name has 300 bytes \('xxxxxxxxxxxxxxxxxxxx'\.\.\.\); the name of a folder has at most 255",
        ),
        ("store", "é" * 128, r"^store has 256 bytes"),
        ("name", "a\nb", r"^name is 'a\\nb'; a folder's name must have no line breaks"),
        ("store", "a\0b", r"^store is 'a\\x00b'; a folder's name must have no line breaks"),
        ("name", "a\udcff", r"^name is 'a\\udcff'; a folder's name"),
        ("stores_dir", "", r"^stores_dir is empty; name a folder \('\.' is the current one\)"),
    ],
)
def test_a_name_that_no_folder_can_have_is_refused(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Experiment(**{key: value})
    Experiment(name="x" * 255, store="日本 a")


@pytest.mark.ci
def test_what_nobody_asked_for_may_be_left_unmeasured_and_what_was_asked_for_may_not(copy: Path) -> None:
    lenient = {"relative_error": 1e9, "loss_recovered": 0.0, "zero_fraction": 0.0, "gram_rms": 9.0, "loss_rise": 9.0}
    e = replaced(tiny_experiment(copy), "gates", **lenient)
    assert run_evaluate(Workspace(e), redo=True) == 0, "40 steps: R2 after 1,000 was not measured"
    assert run_evaluate(Workspace(replaced(e, "gates", r2=0.1)), redo=True) == 1
    assert run_evaluate(Workspace(replaced(e, "gates", r2=0.1, r2_step=40)), redo=True) == 0


@pytest.mark.parametrize("stage", [run_evaluate, run_report])
def test_a_run_is_not_evaluated_as_if_it_were_another(copy: Path, stage: Any, other_model: Path) -> None:
    refuse(replaced(tiny_experiment(copy), "lm", model=str(other_model)), stage, DataError, r"lm.model: 'demo' -> ")


def test_numbers_that_a_run_found_for_itself_are_no_other_settings(copy: Path) -> None:
    """From Python, where no command looks them up: an open rate is 0 in the experiment and a number in the record."""
    e = replaced(tiny_experiment(copy), "train", lr=0.0, batch_size=0)
    run_evaluate(Workspace(e))
    run_evaluate(Workspace(e), redo=True)
    run_report(Workspace(e))
    refuse(replaced(e, "train", lr=0.5), run_evaluate, DataError, r"train.lr: 0.001 -> 0.5")


@pytest.mark.ci
def test_figures_and_features_are_of_the_weights_and_not_of_the_step(copy: Path) -> None:
    """Other weights under the run's name, at the same step, with the same settings."""
    e = tiny_experiment(copy)
    run_evaluate(Workspace(e))
    run_report(Workspace(e))
    before = json.loads((e.run_dir / "eval.json").read_text())
    other = dataclasses.replace(e, name="other", store=e.store or e.name, seed=e.seed + 1)
    assert run_train(Workspace(other)) == 0
    shutil.rmtree(e.run_dir / "checkpoints")
    shutil.move(other.run_dir / "checkpoints", e.run_dir / "checkpoints")
    assert "fve" not in saejax.load(e.run_dir).figures
    refuse(e, run_evaluate, DataError, r"something else \(sha256: '[0-9a-f]{64}' -> .*--redo")
    run_evaluate(Workspace(e), redo=True)
    run_report(Workspace(e))
    assert "fve" in saejax.load(e.run_dir).figures
    now = read_features(e.run_dir)
    assert now["sha256"] == saejax.load(e.run_dir).fingerprint() != before["sha256"]


def test_an_evaluation_with_other_settings_is_not_overwritten_silently(copy: Path) -> None:
    e = replaced(tiny_experiment(copy), "eval", tokens=700)
    refuse(e, run_evaluate, DataError, r"eval.tokens: 500 -> 700.*--redo")
    run_evaluate(Workspace(e), redo=True)
    assert json.loads((e.run_dir / "eval.json").read_text())["config"]["eval"]["tokens"] == 700


def test_other_bars_are_judged_by_the_figures_that_are_there(copy: Path) -> None:
    e = tiny_experiment(copy)
    run_evaluate(Workspace(e))
    before = json.loads((e.run_dir / "eval.json").read_text())
    for bar, passed in ((1e-9, False), (9.0, True)):
        run_evaluate(Workspace(replaced(e, "gates", gram_rms=bar)))
        now = json.loads((e.run_dir / "eval.json").read_text())
        (gate,) = [gate for gate in now["gates"] if gate["name"] == "decorrelation"]
        assert (gate["bar"], gate["passed"]) == (bar, passed)
        assert {k: v for k, v in now.items() if k != "gates"} == {k: v for k, v in before.items() if k != "gates"}


def test_a_store_of_another_text_or_context_is_refused(copy: Path) -> None:
    e = replaced(tiny_experiment(copy), "text", context_length=32)
    refuse(e, run_capture, DataError, r"made for something else:(.|\n)*context_length")
    fresh = dataclasses.replace(e, name="other", store="tiny")
    with pytest.raises(DataError, match=r"context_length"):
        run_train(Workspace(fresh))
    rounded = replaced(dataclasses.replace(tiny_experiment(copy), name="other", store="tiny"), "capture", dtype="int8")
    refuse(rounded, run_train, DataError, "holds bfloat16, and capture.dtype asks for int8")


def test_a_store_that_chose_its_tokens_otherwise_is_refused(tmp_path: Path) -> None:
    """What the experiment leaves at its default is in no identity, so nothing of it was compared."""
    e = tiny_experiment(tmp_path, capture={"last_tokens": 1000, "tokens": 200, "heldout_tokens": 200})
    run_capture(Workspace(e))
    plain = replaced(e, "capture", last_tokens=0)
    refuse(plain, run_train, DataError, "was captured with last_tokens, which this experiment leaves at its default")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its weights changed a little."""
    folder = tmp_path_factory.mktemp("other-model")
    demo = load_lm("demo")
    source = Path(saejax.__file__).parent / "lm" / "demo"
    config_json = json.loads((source / "config.json").read_text())
    checkpoint.write(folder, config_json, jax.tree.map(lambda x: x * 1.001, demo.params))
    shutil.copy(source / "tokenizer.json", folder)
    return folder


def test_a_store_of_another_model_is_refused(copy: Path, other_model: Path) -> None:
    e = replaced(tiny_experiment(copy), "lm", model=str(other_model))
    refuse(e, run_capture, DataError, r"weights_sha256")
    with pytest.raises(DataError, match=r"weights_sha256"):
        run_train(Workspace(dataclasses.replace(e, name="other", store="tiny")))


def test_a_store_of_another_tokenizer_is_refused(copy: Path, other_model: Path) -> None:
    path = other_model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(tokenizer))
    e = replaced(tiny_experiment(copy), "lm", model=str(other_model))
    refuse(e, run_capture, DataError, r"tokenizer_sha256")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"hook_points": ("blocks.9.resid_post",)}, ConfigError, r"no hook point 'blocks.9.*blocks.0 to blocks.5"),
        ({"hook_points": ("blocks.1.resid_pots",)}, ConfigError, r"Did you mean 'blocks.1.resid_post'"),
    ],
)
def test_a_hook_point_that_does_not_exist_is_refused(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    e = replaced(tiny_experiment(tmp_path), "capture", **changes)
    refuse(e, run_capture, kind, message)


def test_a_missing_model_or_text_names_what_is_missing(tmp_path: Path) -> None:
    e = tiny_experiment(tmp_path)
    refuse(replaced(e, "lm", model="no/such/folder"), run_capture, DataError, r"No model 'no/such/folder'")
    hub = r"'nobody/nothing' cannot be had from the hub .* It is not cached"
    refuse(replaced(e, "lm", model="nobody/nothing"), run_capture, DataError, hub)
    text = replaced(e, "text", source="files", paths=("absent/*.txt",))
    refuse(text, run_capture, DataError, r"No text file at 'absent/\*.txt'")
    long = replaced(e, "text", context_length=512)
    refuse(long, run_capture, ConfigError, r"context_length is 512, but the model reads at most 256")


def test_the_pipeline_refuses_before_it_captures_what_training_would_refuse(tmp_path: Path) -> None:
    e = tiny_experiment(tmp_path)
    refuse(replaced(e, "coder", k=500), run_pipeline, ConfigError, r"coder.k is 500 but there are only 256 latents")
    refuse(replaced(e, "parallel", mesh=(99, 1)), run_pipeline, ConfigError, r"needs 99 devices; there are 8")
    assert not list(tmp_path.iterdir())


def test_stages_out_of_order_say_which_comes_first(tmp_path: Path) -> None:
    e = tiny_experiment(tmp_path)
    with pytest.raises(DataError, match=r"no store at .*does not exist\. Make one by saejax capture"):
        run_train(Workspace(e))
    with pytest.raises(DataError, match=r"Finish it|Train it first|no checkpoint"):
        run_evaluate(Workspace(e))


def test_a_hook_point_that_was_not_captured_is_refused(copy: Path) -> None:
    e = dataclasses.replace(tiny_experiment(copy), name="other", store="tiny", hook_point="blocks.2.resid_post")
    with pytest.raises(ConfigError, match=r"not in capture.hook_points: blocks.1.resid_post"):
        run_train(Workspace(e))


@pytest.mark.ci
def test_a_second_hook_point_of_the_same_store_trains_too(copy: Path) -> None:
    e = dataclasses.replace(tiny_experiment(copy), name="second", store="tiny", hook_point="blocks.0.hook_mlp_out")
    assert run_train(Workspace(replaced(e, "train", tensorboard=True))) == 0
    assert saejax.load(e.run_dir).hook_point == "blocks.0.mlp_out"
    assert any((e.run_dir / "tensorboard").glob("events.out.tfevents.*"))


def test_a_report_has_the_norms_of_the_store_and_says_where_it_cannot(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    e = tiny_experiment(copy)
    run_report(Workspace(e))
    known, reader = json.loads(e.run.norms.read_text()), StoreReader.open(e.store_dir("train"))
    (name,) = known["hook_points"]
    gamma = {"mean_over_spread": reader.statistics[name].mean_over_spread}
    assert known["hook_points"][name] == dataclasses.asdict(norms(reader, name)) | gamma
    shutil.rmtree(e.store_dir("train"))
    run_report(Workspace(e), redo=True)
    assert "norms of the training's store: those known before stay. There is no store" in capsys.readouterr().out
    assert json.loads(e.run.norms.read_text()) == known and '"norms":{' in e.run.page.read_text()
    e.run.norms.unlink()
    run_report(Workspace(e), redo=True)
    assert "norms of the training's store: left out" in capsys.readouterr().out
    assert '"norms":null' in e.run.page.read_text()


def test_a_program_gets_the_report_of_a_run(copy: Path) -> None:
    e = tiny_experiment(copy)
    page = run_report(Workspace(e)).read_bytes()
    made = saejax.report(e.run_dir)
    assert (made.page, made.page.read_bytes()) == (e.run.page, page)
    assert made.figures == json.loads(e.run.evaluation.read_text())["metrics"] and made.figures["fve"] < 1
    assert html.escape("<title>") in made._repr_html_() and "report.html" in repr(made)
    with pytest.raises(DataError, match="nothing"):
        saejax.report(copy / "nothing")


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_shard_stops_training_and_is_named(copy: Path, damage: str) -> None:
    e = dataclasses.replace(tiny_experiment(copy), name="other", store="tiny")
    victim = next(p for p in (Path(e.store_dir("train")) / "arrays" / HOOK / "c").rglob("*") if p.is_file())
    raw = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    else:
        raw[len(raw) // 3] ^= 1
        victim.write_bytes(raw if damage == "flipped" else raw[: len(raw) // 2])
    with pytest.raises(DataError, match=rf"{HOOK}.*shard"):
        run_train(Workspace(e))


def poisoned(lm: LanguageModel) -> LanguageModel:
    """A model whose activations are NaN wherever token 300 stands."""
    return dataclasses.replace(lm, params=lm.params | {"W_E": lm.params["W_E"].at[300].set(jnp.nan)})


def test_nan_activations_are_refused_or_dropped_and_counted_but_never_stored(tmp_path: Path) -> None:
    e = tiny_experiment(tmp_path, capture={"tokens": 2000})
    work = Workspace(e, loaded={e.lm: poisoned(load_lm("demo"))})
    mesh = make_mesh(ParallelConfig((1, 1)))
    arguments = (work.lm, work.source, e.text)
    how: dict[str, Any] = {"split": "train", "n_tokens": 2000, "seed": 0}
    with pytest.raises(DataError, match=r"NaN or infinity in the activations of \d+ tokens.*capture.non_finite=drop"):
        capture(tmp_path / "abort", *arguments, e.capture, mesh, **how)
    dropping = dataclasses.replace(e.capture, non_finite="drop")
    capture(tmp_path / "drop", *arguments, dropping, mesh, **how)
    reader = StoreReader.open(tmp_path / "drop")
    rows = reader.rows(0, reader.n_tokens, metadata=True)
    assert reader.n_tokens == 2000 and np.isfinite(rows[HOOK].astype(np.float32)).all()
    assert reader.counters["dropped_non_finite"] > 0 and not (rows["token_id"] == 300).any()


def test_a_capture_on_eight_devices_stores_the_same(done: Path, tmp_path: Path) -> None:
    e = tiny_experiment(done)
    work = Workspace(e)
    capture(
        tmp_path / "eight", work.lm, work.source, e.text, e.capture, make_mesh(ParallelConfig()),
        split="train", n_tokens=3000, seed=0,
    )  # fmt: skip
    one, eight = StoreReader.open(e.store_dir("train")), StoreReader.open(tmp_path / "eight")
    a, b = one.rows(0, 3000, metadata=True), eight.rows(0, 3000, metadata=True)
    for name in ("token_id", "document", "position"):
        assert np.array_equal(a[name], b[name])
    # Another split of the rows over devices is another order of float32 sums, then rounded to bf16.
    assert np.allclose(a[HOOK].astype(np.float32), b[HOOK].astype(np.float32), rtol=1e-2, atol=1e-2)


@pytest.mark.ci
@pytest.mark.parametrize("batch_rows", [1, 5, 20])
def test_a_capture_may_be_continued_with_another_batch_size(
    done: Path, tmp_path: Path, batch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row twice, none missing, the same order: the cursor and the rows to skip count in the text, not in batches."""
    e = tiny_experiment(done)
    work, mesh = Workspace(e), make_mesh(ParallelConfig((1, 1)))
    how: dict[str, Any] = {"split": "train", "n_tokens": 3000, "seed": 0}
    # By name: `saejax.capture.capture` as an attribute is the function.
    capture_module = importlib.import_module("saejax.capture.capture")
    append, calls = capture_module._append, []

    def stop_at_the_fourth(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        append(*arguments)

    monkeypatch.setattr(capture_module, "_append", stop_at_the_fourth)
    # 12 rows of about 63 tokens: the first shard of 1,024 ends in the second batch, some 270 tokens into it.
    first = dataclasses.replace(e.capture, batch_rows=12)
    with pytest.raises(KeyboardInterrupt):
        capture(tmp_path / "store", work.lm, work.source, e.text, first, mesh, **how)
    monkeypatch.undo()
    other = dataclasses.replace(e.capture, batch_rows=batch_rows)
    result = capture(tmp_path / "store", work.lm, work.source, e.text, other, mesh, **how)
    assert result.rows == 3000 and 0 < result.tokens < 3000
    a = StoreReader.open(e.store_dir("train")).rows(0, 3000, metadata=True)
    b = StoreReader.open(tmp_path / "store").rows(0, 3000, metadata=True)
    for name in ("token_id", "document", "position"):
        assert np.array_equal(a[name], b[name])
    assert np.allclose(a[HOOK].astype(np.float32), b[HOOK].astype(np.float32), rtol=1e-2, atol=1e-2)


# A signal may come between the opening of a file and its `with`.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stage", [run_capture, run_train, run_evaluate, run_report])
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.ci)])
def test_a_signal_in_a_finalizer_ends_every_stage(
    stage: Callable[[Workspace], Any], number: int, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each begins to count its work, the signal comes where Python drops what its handler raises."""
    done, begin = {}, Progress.__enter__
    run = copy / "runs" / "tiny"
    left = {run_capture: [copy / "stores"], run_train: [run], run_evaluate: [run / "eval.json"], run_report: []}
    for path in left[stage]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def signalled(self: Progress) -> Progress:
        late(number)
        done["came"] = True
        return begin(self)

    monkeypatch.setattr("saejax.core.stopping._LOOK_SECONDS", 0.001)
    monkeypatch.setattr(Progress, "__enter__", signalled)
    with contextlib.suppress(Stopped), Stopping():
        how = {"redo": True} if stage is run_report else {}
        assert stage(Workspace(tiny_experiment(copy)), **how) == EXIT_PREEMPTED, "it went on"
    assert done["came"]


def test_text_that_runs_out_gives_a_smaller_store_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"def f{i}(x):\n    return x + {i}\n" * 3)
    e = replaced(tiny_experiment(tmp_path), "text", source="files", paths=(str(tmp_path / "*.txt"),))
    run_capture(Workspace(e))
    assert "the text ran out before the 3,000 that were asked for" in capsys.readouterr().out
    assert 200 < StoreReader.open(e.store_dir("train")).n_tokens < 4000
    run_capture(Workspace(e))
    assert "already done" in capsys.readouterr().out


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_a_hook_point_where_all_tokens_are_alike_is_refused_before_anything_is_written(
    tmp_path: Path, value: float
) -> None:
    """Its scale would be infinite, or its variance 0; both ended in NaN."""
    e = planted_experiment(tmp_path, "flat")
    rows = 2048
    with StoreWriter.open(
        tmp_path / "stores" / "flat" / "train",
        identity={"imported": "flat"},
        hook_points={"h": D_IN},
        n_tokens=rows,
        layout=StoreLayout(1024, 64),
    ) as writer:
        tokens = {name: np.arange(rows, dtype=np.int32) for name in ("token_id", "document", "position")}
        writer.append({"h": np.full((rows, D_IN), value, np.float32)}, tokens, cursor={})
        writer.finish()
    what = "0" if value == 0 else "the same"
    message = f"activations of h are {what} for all 2,048 tokens.*Choose another hook point"
    refuse(dataclasses.replace(e, store="flat"), run_train, DataError, message)
    assert not (e.run_dir / "config.json").exists()


def _pages(folder: Path, n: int) -> dict[str, Any]:
    """Text of n files of one name, in folders of their own."""
    for i in range(n):
        (folder / f"site{i}").mkdir(parents=True)
        (folder / f"site{i}" / "page.txt").write_text(f"def f{i}(x):\n    return x + {i}\n" * 10)
    return {"source": "files", "paths": (str(folder / "*" / "page.txt"),)}


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        (1e-6, "=1e-06 the heldout split of the text has not one token to store. Raise it, or give"),
        (0.99999, "=0.99999 the train split of the text has not one token to store. Lower it, or give"),
    ],
)
def test_a_split_without_text_is_refused_before_anything_is_captured(
    tmp_path: Path, fraction: float, message: str
) -> None:
    e = tiny_experiment(tmp_path, text=_pages(tmp_path / "text", 3) | {"heldout_fraction": fraction})
    message = re.escape(f"text.heldout_fraction{message}")
    refuse(e, run_capture, DataError, message)
    assert not (tmp_path / "stores").exists()
    streamed = replaced(e, "capture", into="training")
    refuse(streamed, run_capture, DataError, message)


def test_an_empty_split_says_which_store_has_to_be_captured_again(tmp_path: Path) -> None:
    """As an earlier version left it, which captured the training split first."""
    e = tiny_experiment(tmp_path, text=_pages(tmp_path / "text", 3) | {"heldout_fraction": 1e-6})
    work = Workspace(e)
    capture(
        e.store_dir("train"),
        work.lm,
        work.source,
        e.text,
        e.capture,
        make_mesh(e.parallel),
        split="train",
        n_tokens=50,
        seed=0,
    )
    refuse(e, run_capture, DataError, r"Raise it \(the train store then has to be captured again\), or give")


def test_files_of_one_name_are_not_one_group(tmp_path: Path) -> None:
    e = tiny_experiment(tmp_path, text=_pages(tmp_path / "text", 20) | {"heldout_fraction": 0.3})
    run_capture(Workspace(e))
    assert all(StoreReader.open(e.store_dir(split)).n_tokens for split in ("train", "heldout"))


def test_a_second_trainer_of_the_same_run_is_refused(copy: Path) -> None:
    e = replaced(tiny_experiment(copy), "train", keep_checkpoints=5)
    with lease(e.run_dir), pytest.raises(BusyError, match="being written by another process"):
        run_train(Workspace(e))


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(done: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    e = tiny_experiment(done, top={"runs_dir": str(tmp_path / "file"), "name": "x", "store": "tiny"})
    with pytest.raises(DataError, match=r"cannot be (written|used)"):
        run_train(Workspace(e))


def test_what_could_not_be_read_is_not_called_unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails while model or text are read: the message is of these, not of the store or the run."""
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n" * 20)
    text = {"source": "files", "paths": (str(tmp_path / "a.txt"),)}
    e = tiny_experiment(
        tmp_path,
        text=text,
        lm={"model": str(shutil.copytree(Path(saejax.__file__).parent / "lm" / "demo", tmp_path / "lm"))},
    )
    for name in ("a.txt", "config.json", "tokenizer.json"):
        with monkeypatch.context() as patch:
            patch.setattr("io.open", functools.partial(_failing_for, name, io.open))
            patch.setattr("builtins.open", functools.partial(_failing_for, name, open))
            patch.setattr("os.open", functools.partial(_failing_for, name, os.open))
            with pytest.raises(DataError, match=rf"{name} cannot be read: Input/output error") as caught:
                run_capture(Workspace(e))
        assert "written" not in str(caught.value)


def test_a_capture_warns_once_where_transformers_reads_other_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Path | None] = []
    monkeypatch.setattr(
        "saejax.app.stages.capture.disagreement", lambda tokenizer: asked.append(tokenizer.folder) or "'a' is another"
    )
    folder = shutil.copytree(Path(saejax.__file__).parent / "lm" / "demo", tmp_path / "lm")
    e = tiny_experiment(tmp_path, lm={"model": str(folder)})
    run_capture(Workspace(e))
    assert capsys.readouterr().out.count("capture: warning: 'a' is another.") == 1 and asked == [folder]
    run_capture(Workspace(e))
    assert "warning" not in capsys.readouterr().out, "all is captured: there is nothing to warn of"
    run_capture(Workspace(tiny_experiment(tmp_path / "embedded")))
    assert asked == [folder], "the embedded models are saejax's own"


def _failing_for(name: str, there: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    if str(path).endswith(name):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    return there(path, *args, **kwargs)


def test_what_fails_within_a_training_is_not_called_unwritable(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/dev/accelerator")

    monkeypatch.setattr("saejax.fit.train.run_loop", failing)
    e = tiny_experiment(done, top={"name": "failing", "store": "tiny", "runs_dir": str(tmp_path)})
    with pytest.raises(OSError, match="/dev/accelerator"):
        run_train(Workspace(e))


def test_a_full_disk_is_named_and_the_same_command_goes_on(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from saejax.core import metrics

    e = tiny_experiment(done, top={"runs_dir": str(tmp_path), "store": "tiny"})
    rows = []

    def full(value: Any) -> str:
        rows.append(value)
        if len(rows) == 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return json.dumps(value)

    monkeypatch.setattr(metrics, "json", types.SimpleNamespace(dumps=full))
    with pytest.raises(DataError, match=r"No space left to write .*metrics\.jsonl.*run the same command again"):
        run_train(Workspace(e))
    monkeypatch.undo()
    assert run_train(Workspace(e)) == 0
    ours, theirs = saejax.load(e.run_dir).params, saejax.load(tiny_experiment(done).run_dir).params
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


# --- what a run was made from ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stores and with a run that has ten steps still to go."""
    folder = tmp_path_factory.mktemp("begun")
    e = planted_experiment(folder, "run")
    assert run_train(Workspace(e)) == 0
    shutil.rmtree(e.run_dir / "checkpoints" / f"{40:09d}")
    return folder


def continued(begun: Path, folder: Path) -> Experiment:
    """The run with ten steps to go, in a folder of its own."""
    shutil.copytree(begun, folder / "copy")
    return planted_experiment(folder / "copy", "run")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_run_does_not_go_on_with_other_activations(begun: Path, tmp_path: Path, split: str) -> None:
    e = continued(begun, tmp_path)
    stores = Path(e.stores_dir)
    shutil.copytree(stores / "planted", stores / "other")
    shutil.rmtree(stores / "other" / split)
    planted_store(stores / "other" / split, StoreReader.open(e.store_dir(split)).n_tokens, seed=7)
    was, now = (rf".*stores/{name}/{split} \([\d,]+ rows, fingerprint \w{{12}}\)" for name in ("planted", "other"))
    message = rf"made from something else:\n  {split}: {was} -> {now}\nRestore"
    refuse(dataclasses.replace(e, store="other"), run_train, DataError, message)
    assert run_train(Workspace(e)) == 0
    # Nor is a run that is done said to be one on these.
    refuse(dataclasses.replace(e, store="other"), run_train, DataError, message)


def test_a_store_may_move_between_two_sessions_of_a_run(begun: Path, tmp_path: Path) -> None:
    e = continued(begun, tmp_path)
    shutil.move(Path(e.stores_dir) / "planted", tmp_path / "elsewhere" / "renamed")
    moved = dataclasses.replace(e, stores_dir=str(tmp_path / "elsewhere"), store="renamed")
    assert run_train(Workspace(moved)) == 0
    recorded = json.loads((e.run_dir / "provenance.json").read_text())
    assert recorded["train"]["store"] == moved.store_dir("train")
    shutil.rmtree(tmp_path / "elsewhere")
    assert run_train(Workspace(moved)) == 0  # it is complete, and needs its stores no more


def test_a_run_of_an_earlier_version_goes_on_and_says_what_it_takes(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    e = continued(begun, tmp_path)
    before = json.loads((e.run_dir / "provenance.json").read_text())
    (e.run_dir / "provenance.json").unlink()
    assert run_train(Workspace(e)) == 0
    assert f"{e.run_dir} did not record what it was made from" in capsys.readouterr().out
    assert json.loads((e.run_dir / "provenance.json").read_text()) == before | {
        split: before[split] | {"store": e.store_dir(split)} for split in ("train", "heldout")
    }
    planted_store(Path(e.stores_dir) / "other" / "train", seed=7)
    refuse(dataclasses.replace(e, store="other"), run_train, DataError, "made from something else")
    (e.run_dir / "provenance.json").write_text("[]")
    refuse(e, run_train, DataError, r"provenance.json is damaged: it holds a list, .*; restore it or delete it")


@pytest.fixture(scope="module")
def own_text(tmp_path_factory: pytest.TempPathFactory, other_model: Path) -> Path:
    """A folder with a .jsonl, a model, and a run trained on them."""
    folder = tmp_path_factory.mktemp("own-text")
    rows = [{"text": f"def f{i}(x):\n    return x + {i}\n" * 4} for i in range(150)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(other_model, folder / "model")
    work = Workspace(own_experiment(folder))
    run_capture(work)
    assert run_train(work) == 0
    return folder


def own_experiment(folder: Path) -> Experiment:
    return tiny_experiment(
        folder,
        lm={"model": str(folder / "model")},
        text={"source": "files", "paths": (str(folder / "rows.jsonl"),), "heldout_fraction": 0.2},
        capture={"tokens": 1500, "heldout_tokens": 200},
        train={"tokens": 4 * 128, "validate_every": 0},
        eval={"tokens": 100},
        report={"tokens": 100},
    )


@pytest.mark.parametrize("stage", [run_evaluate, run_report])
@pytest.mark.parametrize("changed", ["text", "model"])
@pytest.mark.parametrize("version", ["this", "earlier"])
def test_a_run_is_evaluated_on_its_own_text_and_model(own_text: Path, stage: Any, changed: str, version: str) -> None:
    """A row put in front moves every document on by one: what was trained on would become held-out text."""
    e = own_experiment(own_text)
    path = own_text / ("rows.jsonl" if changed == "text" else "model/model.safetensors")
    before, record = path.read_bytes(), e.run_dir / "provenance.json"
    recorded = record.read_bytes()
    if version == "earlier":
        record.unlink()
    if changed == "text":
        path.write_bytes(b'{"text": "one more row, in front of all the others"}\n' + before)
    else:
        # The last byte of the last tensor.
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        message = r"text.sha256: '\w+' -> '\w+'" if changed == "text" else r"lm.weights_sha256: '\w+' -> '\w+'"
        refuse(e, stage, DataError, rf"made from something else:\n  {message}\nRestore")
    finally:
        path.write_bytes(before)
        record.write_bytes(recorded)


def test_with_its_own_text_and_model_a_run_is_evaluated(own_text: Path) -> None:
    e = own_experiment(own_text)
    recorded = (e.run_dir / "provenance.json").read_bytes()
    run_evaluate(Workspace(e))
    assert json.loads((e.run_dir / "eval.json").read_text())["metrics"]["l0"] > 0
    assert (e.run_dir / "provenance.json").read_bytes() == recorded


# --- to other tools --------------------------------------------------------------------------------------------


def export(capsys: pytest.CaptureFixture[str], *words: Any, **flags: Any) -> str:
    """What `saejax export` says on stdout, with the flags' defaults from its command line."""
    run_command("export", words, **{"creator": "me", "splits": 3} | flags)
    return capsys.readouterr().out


def test_a_run_goes_to_every_tool(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = done / "runs" / "tiny"
    table = read_features(run)
    alive = [f["id"] for f in table["features"] if f["examples"]]
    said = export(capsys, "neuronpedia", run, tmp_path / "np", model="demo-lm", set="mine")
    assert "1-mine" in said and "upload-batch" in said
    paths = sorted((tmp_path / "np/upload/1-mine").iterdir())
    features = [f for path in paths for f in json.loads(path.read_text())["features"]]
    assert [f["index"] for f in features] == alive
    assert (tmp_path / "np/bulk/demo-lm/1-mine/source.jsonl").is_file()

    export(capsys, "delphi", run, tmp_path / "dl")
    cache = tmp_path / "dl/latents" / HOOK
    counts = np.zeros(256, int)
    for path in cache.glob("*.safetensors"):
        arrays = safetensors.numpy.load_file(path)
        latents = arrays["locations"][:, 2].astype(int) + int(path.stem.split("_")[0])
        counts += np.bincount(latents, minlength=256)
    # The same scan as the report's, so the same tokens and the same latents.
    assert (counts / table["n_tokens"]).tolist() == pytest.approx([f["density"] for f in table["features"]], abs=1e-9)
    assert (Path(json.loads((cache / "config.json").read_text())["model_name"]) / "tokenizer.json").is_file()

    assert "256 latents of layers 1" in export(capsys, "circuit-tracer", run, tmp_path / "ct")
    assert "--from-local-sae" in export(capsys, "saedashboard", run, tmp_path / "sd")
    x = np.random.default_rng(0).normal(size=(20, saejax.load(run).coder.topology.d_in)).astype(np.float32)
    np.testing.assert_allclose(saejax.load(tmp_path / "sd").encode(x), saejax.load(run).encode(x), atol=1e-5)


def test_an_export_replaces_an_earlier_one_and_nothing_else(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = copy / "runs" / "tiny", tmp_path / "out"
    for _ in range(2):
        export(capsys, "circuit-tracer", run, out)
    before = snapshot(out)
    with pytest.raises(DataError, match="something other than an export for neuronpedia"):
        export(capsys, "neuronpedia", run, out)
    feature = read_features(run)["features"][0] | {"examples": [{"tokens": [0], "activations": [], "peak": 0}]}
    with_feature(run / Run.features, feature, 0)
    with pytest.raises(DataError, match=r"features.sqlite is damaged: an example of feature 0"):
        export(capsys, "circuit-tracer", run, out)
    (run / Run.features).unlink()
    with pytest.raises(DataError, match=r"no features.sqlite. Make it: saejax report"):
        export(capsys, "circuit-tracer", run, out)
    assert snapshot(out) == before and sorted(path.name for path in tmp_path.iterdir()) == ["copy", "out"]


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        ((), ConfigError, "Say for which tool"),
        (("neuronpedi", "a", "b"), ConfigError, "Did you mean 'neuronpedia'"),
        (("delphi", "a"), ConfigError, "Give a run and a destination"),
        (("delphi", "a", "b", "c"), ConfigError, "Give a run and a destination"),
        (("delphi", "nowhere", "out"), DataError, "nowhere is no run"),
    ],
)
def test_what_export_does_not_take(
    words: tuple[str, ...], error: type[Exception], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=match):
        export(capsys, *words)
