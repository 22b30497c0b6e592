"""`saejax prefix`: trained, stopped and continued to the same bits, compared, shown; the models stay as they are."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny.prefixes import random_model_folder, small_prefix, write_squad

import saejax
from saejax.app import experiments
from saejax.app import prefix as app
from saejax.app.command import Line
from saejax.app.experiment import Experiment, experiment
from saejax.app.prefix import load_prefix, run_prefix
from saejax.commands import COMMANDS
from saejax.core.errors import EXIT_PREEMPTED, ConfigError, DataError
from saejax.prefix.samples import SampleBatches


def bits(tree: Any) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        digest.update(str(path).encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, dict[str, str]]:
    """A run, and the bits of its models after it."""
    e, after = small_prefix(tmp_path_factory.mktemp("runs")), {}

    class Watched(app.PrefixTraining):
        def ready(self, *given: Any) -> Any:
            found = super().ready(*given)
            after["before"] = bits({name: lm.params for name, lm in self.models.items()})
            after["job"] = self
            return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "PrefixTraining", Watched)
        assert run_prefix(e) == 0
    after["after"] = bits({name: lm.params for name, lm in after.pop("job").models.items()})
    return e, after


@pytest.mark.ci
def test_it_trains_compares_and_shows(trained: tuple[Experiment, Any], capsys: pytest.CaptureFixture[str]) -> None:
    e = trained[0]
    content = json.loads((e.run_dir / "prefix.json").read_text())
    assert content["step"] == 12 and content["records"] == 20 and list(content["models"]) == ["recall", "demo"]
    for model in content["models"].values():
        assert list(model["ways"]) == ["text", "truncated", "none", "replay", "random", "prefix"]
        low, high = model["ways"]["prefix"]["intervals"]["nll"]
        assert low <= model["ways"]["prefix"]["nll"] <= high
        apart = model["differences"]["truncated"]["nll"]
        assert apart["value"] == pytest.approx(model["ways"]["prefix"]["nll"] - model["ways"]["truncated"]["nll"])
        assert apart["interval"][0] <= apart["value"] <= apart["interval"][1]
    page = (e.run_dir / "report.html").read_text()
    assert "data:image/png;base64" in page and "recall: prefix" in page and "tokens saved" in page
    rows = [json.loads(line) for line in (e.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert any("val/nll_recall" in row for row in rows) and any("train/first_demo" in row for row in rows)
    assert run_prefix(e) == 0
    said = capsys.readouterr().out
    assert (
        "train: already done" in said
        and "evaluate: already done" in said
        and "| recall | prefix" in said
        and "| demo   | prefix" in said
    )
    # Other weights at the same step, whose figures these are not.
    (e.run_dir / "prefix.json").write_text(json.dumps(content | {"sha256": "0" * 64}))
    with pytest.raises(DataError, match=r"prefix\.json was made from something else \(sha256: '000.*--redo"):
        run_prefix(e)
    (e.run_dir / "prefix.json").write_text(json.dumps(content))


@pytest.mark.ci
def test_the_models_are_not_changed_and_not_saved(trained: tuple[Experiment, Any]) -> None:
    e, models = trained
    assert models["before"] == models["after"]
    prefix = load_prefix(e.run_dir)
    fresh = prefix.encoder.init(jax.random.key(0))
    assert jax.tree.map(np.shape, prefix.params) == jax.tree.map(np.shape, fresh), "encoder and adapters, nothing else"
    first = load_prefix(e.run_dir, step=4)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), first.params, prefix.params)
    del moved["W_E"], moved["W_pos"]
    assert all(jax.tree.leaves(moved)), "every part of them is trained"
    state = sum(f.stat().st_size for f in (e.run_dir / "checkpoints").rglob("*") if f.is_file())
    assert state < 3 * 4 * sum(x.size for x in jax.tree.leaves(fresh)) * 4 + 1e6, "no model in the checkpoints"


@pytest.mark.ci
def test_who_loads_it_as_something_else_is_told(trained: tuple[Experiment, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds a prefix"):
        saejax.load(trained[0].run_dir)
    with pytest.raises(DataError, match="no checkpoint of step 5; it has: 4, 8, 12"):
        load_prefix(trained[0].run_dir, step=5)


@pytest.mark.ci
def test_stopped_amid_it_goes_on_to_the_same_bits(
    trained: tuple[Experiment, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e, asked = small_prefix(tmp_path), SampleBatches.whole_batch_at

    def stopping(self: SampleBatches, step: int) -> Any:
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return asked(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(SampleBatches, "whole_batch_at", stopping)
        assert run_prefix(e) == EXIT_PREEMPTED
    assert not (e.run_dir / "prefix.json").exists() and load_prefix(e.run_dir).step < 12
    assert run_prefix(e) == 0
    assert bits(load_prefix(e.run_dir).params) == bits(load_prefix(trained[0].run_dir).params)
    contents = [json.loads((one.run_dir / "prefix.json").read_text()) for one in (e, trained[0])]
    em = [{way: row["nll"] for way, row in one["models"]["recall"]["ways"].items()} for one in contents]
    assert em[0] == em[1]


@pytest.mark.ci
def test_a_run_does_not_go_on_as_another(trained: tuple[Experiment, Any]) -> None:
    e = trained[0]
    other = small_prefix(Path(e.runs_dir), prefix={"latents": 5})
    with pytest.raises(DataError, match=r"prefix.latents: 4 -> 5"):
        run_prefix(other)


@pytest.mark.ci
def test_it_is_evaluated_as_it_is_asked_today(trained: tuple[Experiment, Any], tmp_path: Path) -> None:
    shutil.copytree(trained[0].run_dir, tmp_path / "prefix")
    changed = small_prefix(tmp_path, prefix={"heldout": 12, "answer_tokens": 1})
    with pytest.raises(DataError, match=r"answer_tokens: 6 -> 1.*Pass --redo"):
        run_prefix(changed)
    assert run_prefix(changed, redo=True) == 0
    content = json.loads((tmp_path / "prefix" / "prefix.json").read_text())
    assert content["records"] == 12 and content["answer_tokens"] == 1
    said = {tuple(one["said"]["demo"].values()) for one in content["examples"]}
    assert max(len(text.split()) for texts in said for text in texts) == 1, "one token each"
    assert run_prefix(changed) == 0


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"prefix": {"source": ""}}, "the experiment has no prefix"),
        ({"train": {"lr": 0.0}}, "train.lr is 0"),
        ({"train": {"neighbours": 2}}, "train.neighbours is about coders"),
        ({"train": {"block_chunks": 8}}, "train.block_chunks is about coders"),
        ({"train": {"optimizer": "muon"}}, "matrices of coders"),
        ({"parallel": {"mode": "pmap"}}, "one process over parallel.mesh"),
        ({"lm": {"second": "demo"}}, "leave lm.second empty"),
        ({"parallel": {"mesh": (3, 1)}}, "cannot be split over the 3 devices"),
    ],
)
def test_what_cannot_train_is_refused(sections: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        run_prefix(small_prefix(tmp_path, **sections))
    assert not (tmp_path / "prefix" / "config.json").exists()


@pytest.mark.parametrize("command", ["train", "pipeline", "capture", "sweep", "evaluate", "report", "preflight"])
def test_a_command_for_coders_says_which_one_it_is(command: str) -> None:
    line = Line(experiments.shipped("latentwire_quickstart"))
    with pytest.raises(ConfigError, match=r"trains a prefix and no coder .*: run `saejax prefix`"):
        COMMANDS[command]().run(line)


@pytest.mark.soak
def test_the_reports_recipe_shrunk(tmp_path: Path) -> None:
    """configs/latentwire.py with a random Llama and a random Qwen2 in place of its models, on rows as SQuAD's."""
    c = experiments.shipped("latentwire")
    c.runs_dir, c.parallel.mesh = str(tmp_path / "runs"), (2, 2)
    c.lm.model = str(random_model_folder(tmp_path / "llama"))
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "head_dim": 16}
    c.prefix.second = str(random_model_folder(tmp_path / "qwen", 1, **qwen))
    c.text.source, c.text.paths, c.text.dataset = "files", (str(write_squad(tmp_path / "rows.jsonl", 120)),), ""
    c.prefix.update(samples=40, heldout=12, d_encoder=16, d_latent=16, distill=0.1, answer_tokens=4, timed=1)
    c.train.update(tokens=4 * 6, checkpoint_every=3, validate_every=3)
    assert run_prefix(experiment(c)) == 0
    content = json.loads((tmp_path / "runs" / "latentwire" / "prefix.json").read_text())
    assert list(content["models"]) == ["llama", "qwen"] and content["step"] == 6
    assert load_prefix(tmp_path / "runs" / "latentwire").encoder.config.latents == 32
    made_from = json.loads((tmp_path / "runs" / "latentwire" / "provenance.json").read_text())
    assert made_from["second"]["model"] == "qwen" and made_from["train"]["rows"] == 40


@pytest.mark.soak
def test_killed_at_random_it_ends_with_the_same_bits(trained: tuple[Experiment, Any], tmp_path: Path) -> None:
    """kill -9 in a loop of real processes; the end is that of a run that nobody killed."""
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\nfrom tiny.prefixes import small_prefix\nfrom saejax.app.prefix import run_prefix\n"
        f"import time\nfrom saejax.prefix.samples import SampleBatches as B\nasked = B.whole_batch_at\n"
        "B.whole_batch_at = lambda self, step: (time.sleep(0.6), asked(self, step))[1]\n"
        f"run_prefix(small_prefix(Path({str(tmp_path)!r})))\n"
    )
    draw, kills = random.Random(0), 0
    while True:
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # The first ends before all steps can be done; later ones are given longer, however slow the machine is.
        deadline = time.monotonic() + draw.uniform(3, 6 + 2 * kills)
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if child.poll() is not None:
            break
        child.kill()
        child.wait()
        kills += 1
        assert kills < 40
    assert child.returncode == 0 and kills
    assert bits(load_prefix(tmp_path / "prefix").params) == bits(load_prefix(trained[0].run_dir).params)
