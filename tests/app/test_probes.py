"""`saejax evaluate --probes`: a run, dictionaries beside each other, what is refused, what is not done twice."""

import csv
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import replaced, tiny_experiment

import saejax
from saejax.app.experiment import Experiment
from saejax.app.probes import ProbedTexts, run_probes
from saejax.app.probes import probed as wanted_probes
from saejax.app.stages import run_capture, run_dictionaries, run_evaluate, run_train
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError, DataError
from saejax.evals.probing.last_token import Reader
from saejax.trained import TrainedCoder

pytest.importorskip("sklearn.linear_model", exc_type=ImportError)

PASSED = {"relative_error": 1.0, "zero_fraction": 0.5, "gram_rms": 0.9, "loss_recovered": 0.0}


def tables(folder: Path) -> None:
    """`code`: imports and definitions, which the demo model tells apart; `coin`: labels that no text tells."""
    rng, folder = np.random.default_rng(0), folder / "data"
    folder.mkdir()
    kinds = {"import": "import {}\nimport os", "define": "def f{}(x):\n    return x"}
    code = [(text.format(i), kind) for i in range(66) for kind, text in kinds.items()]
    coin = [(f"x = {i}", str(bit)) for i, bit in enumerate(rng.permutation(np.arange(132) % 2))]
    for name, rows in {"code": code, "coin": coin}.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("prompt", "target"), *rows])


def made(folder: Path, **top: Any) -> Experiment:
    settings = {"data": str(folder / "data"), "ks": (1, 2), "words": 300, "resamples": 200, "max_tokens": 64}
    return tiny_experiment(folder, gates=PASSED, probes=settings, top=top)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the evaluated run `tiny`, and `saved`: the same coder with latents in another order."""
    folder = tmp_path_factory.mktemp("probes")
    tables(folder)
    work = Workspace(made(folder))
    run_capture(work)
    assert run_train(work) == 0
    run_evaluate(work)
    sae = saejax.load(work.experiment.run_dir)
    order = np.random.default_rng(0).permutation(sae.n_latents)
    axes = {"W_enc": 1, "b_enc": 0, "W_dec": 0, "threshold": 0}
    params = {n: np.take(v, order, axes[n]) if n in axes and np.ndim(v) else v for n, v in sae.params.items()}
    TrainedCoder(sae.coder, params, sae.sites, sae.origin).save(folder / "saved")
    return folder


@pytest.mark.ci
def test_a_run_is_probed_once_and_a_tiny_model_s_letters_are_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workspace(made(runs))
    folder = work.experiment.run_dir
    assert run_probes(work, wanted_probes(work.experiment.probes, "code")) == 0
    content = json.loads((folder / "probes.json").read_text())
    code = content["datasets"]["code"]
    assert code["rows"] == [32, 99] and code["activations"]["auc"] > 0.95 and set(code["k"]) == {"1", "2"}
    assert "over 1 data set; one gives no interval" in capsys.readouterr().out
    # Another data set and the letters come beside it; what is there is not fitted again.
    fitted: list[str] = []
    plain = ProbedTexts.scores
    monkeypatch.setattr(ProbedTexts, "scores", lambda *a: fitted.append(a[-1].name) or plain(*a))
    assert run_probes(work, wanted_probes(work.experiment.probes, "all")) == 0
    assert fitted == ["coin"]
    content = json.loads((folder / "probes.json").read_text())
    assert content["datasets"]["code"] == code and abs(content["datasets"]["coin"]["activations"]["auc"] - 0.5) < 0.2
    why = content["first_letter"]["refused"]
    assert "the model does not know first letters here" in why and "of 26 letters" in why and "mean F1" in why
    page = (folder / "probes.html").read_text()
    assert why.replace("'", "&#x27;") in page and "mean AUC over k" in page and "(0." in page
    assert (folder / "probes.png").read_bytes()[:4] == b"\x89PNG" and "| tiny " in (folder / "probes.md").read_text()
    # --redo fits again what is named, and leaves the rest.
    assert run_probes(work, wanted_probes(work.experiment.probes, "coin"), redo=True) == 0
    assert fitted == ["coin", "coin"] and json.loads((folder / "probes.json").read_text()) == content
    # Other settings are not mixed with these figures.
    with pytest.raises(DataError, match=r"penalty: 'l1' -> 'l2'.*--redo"):
        run_probes(
            Workspace(replaced(work.experiment, "probes", penalty="l2")), wanted_probes(work.experiment.probes, "code")
        )


@pytest.mark.ci
def test_a_program_gets_the_scores_of_the_command(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that was probed before or is now, by the same code: the same latents, the same scores."""
    work = Workspace(made(runs))
    assert run_probes(work, wanted_probes(work.experiment.probes, "code,first_letter")) == 0
    content = json.loads((work.experiment.run_dir / "probes.json").read_text())
    sae = saejax.load(work.experiment.run_dir)
    keys: Any = {"data": str(runs / "data"), "ks": (1, 2), "words": 300, "max_tokens": 64}
    probes = saejax.probes(sae, work.lm, "code,first_letter", cache=runs / "other", **keys)
    known = {key: value for key, value in content["datasets"]["code"].items() if key != "sha256"}
    assert json.loads(json.dumps(probes.datasets["code"])) == known
    assert json.loads(json.dumps(probes.first_letter)) == content["first_letter"]
    assert "code: k 1 " in repr(probes) and "first letters: refused" in repr(probes)
    assert "activations" in probes._repr_html_() and probes.ks == ["1", "2"]
    with pytest.raises(ConfigError, match=r"pattern|coad"):
        saejax.probes(sae, work.lm, "coad", cache=runs / "other", **keys)
    with pytest.raises(ConfigError, match="kz"):
        saejax.probes(sae, work.lm, "code", kz=(1,))
    with pytest.raises(ConfigError, match="takes a dictionary"):
        saejax.probes(work.lm, sae, "code")  # type: ignore[arg-type]  # in the wrong order, as a user may
    # What the command has read is not read again.
    monkeypatch.setattr(Reader, "_run", None)
    again = saejax.probes(sae, saejax.load_lm("demo"), "code", cache=runs / "runs" / ".probes", **keys)
    assert again.datasets == probes.datasets


@pytest.mark.ci
def test_a_data_set_is_known_by_its_texts_and_labels(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another folder may have a data set of the same name; the figures of one are not those of the other."""
    work = Workspace(made(runs, name="tiny"))
    path = work.experiment.run_dir / "probes.json"

    def probed(source: str, redo: bool = False) -> dict[str, Any]:
        folder = tmp_path / source
        folder.mkdir(exist_ok=True)
        shutil.copy(runs / "data" / f"{source}.csv", folder / "mine.csv")
        here = Workspace(replaced(work.experiment, "probes", data=str(folder)), work.lm)
        assert run_probes(here, wanted_probes(here.experiment.probes, "mine"), redo=redo) == 0
        return json.loads(path.read_text())["datasets"]["mine"]

    code = probed("code")
    assert code["activations"]["auc"] > 0.95 and probed("code") == code
    with pytest.raises(DataError, match=r"something else \(texts or labels of mine: .*--redo"):
        probed("coin")
    assert json.loads(path.read_text())["datasets"]["mine"] == code
    coin = probed("coin", redo=True)
    assert abs(coin["activations"]["auc"] - 0.5) < 0.2 and coin["sha256"] != code["sha256"]


@pytest.mark.ci
def test_dictionaries_are_compared_on_the_same_data_sets(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Workspace(made(runs, name="other"))
    words = [f"{runs / 'runs' / 'tiny'},{runs / 'saved'}"]
    assert run_dictionaries(work, words) == 0
    assert run_probes(work, wanted_probes(work.experiment.probes, "c*"), words) == 0
    folder = work.experiment.run_dir / "evaluated"
    one, other = (json.loads((folder / name / "probes.json").read_text()) for name in ("tiny", "saved"))
    for name in ("code", "coin"):
        # The order of latents changes no score, and the same activations are read by both.
        assert one["datasets"][name]["k"]["1"]["auc"] == other["datasets"][name]["k"]["1"]["auc"]
        assert one["datasets"][name]["activations"] == other["datasets"][name]["activations"]
    kept = list((runs / "runs" / ".probes").glob("code-*.npy"))
    assert len(kept) == 1, "the model read the texts once"
    assert "saved against tiny, k 1: +0.0000" in capsys.readouterr().out
    assert "no difference shown (paired, 2 data sets)" in (folder / "probes.md").read_text()
    # A dictionary that was not evaluated is told, and the others are shown.
    assert run_probes(work, wanted_probes(work.experiment.probes, "code"), [*words, str(runs / "nothing")]) == 1
    assert "nothing:" in (folder / "probes.md").read_text()


def test_what_cannot_be_probed_is_refused_before_anything_is_done(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e = made(runs)
    with pytest.raises(ConfigError, match=r"no data set 'codes'.*code"):
        wanted_probes(e.probes, "codes")
    with pytest.raises(ConfigError, match="--probes is empty"):
        wanted_probes(e.probes, " ,")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sklearn" else find(name))
    with pytest.raises(ConfigError, match=r"needs the package scikit-learn: pip install 'scikit-learn>="):
        wanted_probes(e.probes, "code")


def test_a_hook_point_that_the_model_has_not_is_refused(runs: Path, tmp_path: Path) -> None:
    sae = saejax.load(runs / "saved")
    with pytest.raises(ConfigError, match=r"blocks\.9\.resid_post"):
        moved = sae.sites.__class__(("blocks.9.resid_post",), ("blocks.9.resid_post",), (1.0,), (1.0,))
        TrainedCoder(sae.coder, sae.params, moved, sae.origin).save(tmp_path / "moved")
        run_dictionaries(Workspace(made(runs, name="moved")), [str(tmp_path / "moved")])
