"""A new sparsity, loss term or format is one new file, in saejax or anywhere else. All else follows."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny import ROOT, browser
from tiny.served import RUN, copied

SPARSITY = '''
"""f = sign(pre) max(|pre| - width, 0): nothing that this repository has."""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents
from saejax.coders.parts import register_sparsity
from saejax.coders.ramp import At
from saejax.coders.sparsity.base import Sparsity
from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class ShrinkSettings(Settings, section="coder"):
    shrink_width: float = setting(0.2, "Values up to this are 0.", low=0, below=1)


@register_sparsity
@dataclasses.dataclass(frozen=True)
class Shrink(Sparsity[ShrinkSettings]):
    width: float = 0.2
    name: ClassVar[str] = "shrink"
    settings: ClassVar[type[Settings]] = ShrinkSettings

    @classmethod
    def build(cls, settings: ShrinkSettings, at: At) -> Self:
        return cls(settings.shrink_width)

    def __call__(self, pre, keep, params, step):
        return Latents(jnp.sign(pre) * jax.nn.relu(jnp.abs(pre) - self.width), None, pre.shape[-1])
'''

TERM = """
import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.parts import register_term
from saejax.coders.ramp import At, Ramp
from saejax.coders.term import Context, Term, weight
from saejax.core.settings import Settings, setting
from saejax.kernels.batch import per_token


@dataclasses.dataclass(frozen=True)
class HoyerSettings(Settings, section="coder"):
    hoyer_coefficient: float | None = weight("Weight of sum f^power.", sparsity=True)
    hoyer_power: float = setting(2.0, "The power.", above=0, high=4)


@register_term
@dataclasses.dataclass(frozen=True)
class Hoyer(Term[HoyerSettings]):
    power: float = 2.0
    name: ClassVar[str] = "hoyer"
    settings: ClassVar[type[Settings]] = HoyerSettings

    @classmethod
    def build(cls, coefficient: Ramp, settings: HoyerSettings, at: At) -> Self:
        return cls(coefficient, settings.hoyer_power)

    def __call__(self, c: Context) -> jax.Array:
        return per_token(jnp.abs(c.latents.dense()) ** self.power)
"""

FORMAT = """
import numpy as np

from saejax.trained import Format, register_format


@register_format
class Weights(Format):
    name, title, files = "weights", "Weights", "weights.npz"

    def here(self, path):
        return [path] if (path / "weights.npz").is_file() else []

    def refuses(self, sae):
        return ""

    def write(self, sae, folder):
        folder.mkdir()
        np.savez(folder / "weights.npz", **sae.params)
        return ["no hook point"]
"""

# A workload that is no coder: least squares, from a section of the experiment to a command that a run folder is of.
WORKLOAD = {
    "slopes/__init__.py": '''
"""y = x w: what learns, its settings, its data."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class SlopesConfig(Settings, section="slopes"):
    width: int = setting(0, "How many slopes there are; 0: the experiment has none.", low=0)


@dataclasses.dataclass(frozen=True)
class Slopes:
    width: int

    def init(self, key):
        return {"w": jnp.zeros(self.width)}

    def init_stats(self):
        return {}

    def logical_axes(self):
        return {}

    def project_gradients(self, params, grads):
        return grads

    def constrain(self, params, step):
        return params

    def loss(self, params, batch):
        return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"][:, 0]))


@dataclasses.dataclass
class Rows:
    width: int
    size: int
    dtype = np.dtype(np.float32)
    epoch_rows = 1000

    def iterate(self, step):
        while True:
            x = np.random.default_rng(step).normal(size=(self.size, self.width)).astype(np.float32)
            yield {"x": x, "y": x.sum(1, keepdims=True)}
            step += 1

    def places(self, step):
        return {}
''',
    "app/slopes.py": '''
"""`saejax slopes`: least squares in a run folder."""

import dataclasses

import jax
import numpy as np

from saejax.app.console import say
from saejax.app.experiment import Experiment
from saejax.app.training_folders import RunFolder
from saejax.core.errors import EXIT_PREEMPTED
from saejax.fit.devices import training_mesh
from saejax.fit.learner import Ready
from saejax.fit.train import train
from saejax.parallel import joined
from saejax.runs.provenance import verify_provenance
from saejax.slopes import Rows, Slopes
from saejax.training import Setup, put_on
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.program import program_on
from saejax.training.state import make_init
from saejax.training.step import apply_gradients


@dataclasses.dataclass(frozen=True)
class SlopesTraining:
    e: Experiment

    def made_from(self):
        nothing = {"train": {}, "heldout": {}, "lm": {}, "text": {}}
        return verify_provenance(self.e.run, nothing | {"slopes": {"width": self.e.slopes.width}})

    def ready(self, numbers, checkpoints, tell):
        e, learnt = self.e, Slopes(self.e.slopes.width)
        optimizer, schedule, mesh = make_optimizer(e.train), make_schedule(e.train), training_mesh(e)

        def step(state, batch, hyper):
            value, grads = jax.value_and_grad(learnt.loss)(state.params, batch)
            return apply_gradients(learnt, optimizer, schedule, e.train, state, hyper, (grads, {"loss": value}, {}))[:2]

        size = e.train.batch_size
        shapes = {"x": ((size, learnt.width), np.float32), "y": ((size, 1), np.float32)}
        init = make_init(learnt, optimizer, e.train)
        program = program_on(
            mesh, learnt, step, init, lambda dtype: shapes, seed=e.seed, checkpoints=checkpoints[0],
            meta={"kind": "slopes"},
        )
        put = put_on(mesh, size, list(shapes))
        rows, figures = Rows(learnt.width, size), {"loss": ".3f"}
        setup = Setup([program], rows, put, mesh=mesh, unit="rows", figures=figures, tell=tell)
        return Ready(e.train, setup, [f"train: {learnt.width} slopes"])


def run_slopes(e):
    training = SlopesTraining(e)
    with joined(e.parallel) as process:
        outcome = train(training, RunFolder(e, training.made_from), process, say)
    return EXIT_PREEMPTED if outcome is not None and outcome.stopped else 0
''',
    "commands/slopes.py": '''
"""Fit slopes.

    saejax slopes --config=lines.py
"""

from saejax.app.command import Command


class FitSlopes(Command):
    def run(self, line):
        from saejax.app.slopes import run_slopes

        return run_slopes(line.experiment)
''',
}
# The only file that changes.
SECTION = [
    ("from saejax.prefix import PrefixConfig", "from saejax.slopes import SlopesConfig"),
    ("    prefix: PrefixConfig = section(", '    slopes: SlopesConfig = section(SlopesConfig, "Slopes.")'),
]
LINES = """
import saejax


def get_config():
    c = saejax.default_config()
    c.name = "lines"
    c.slopes.width = 3
    c.train.update(batch_size=32, tokens=32 * 60, lr=0.1, schedule="constant", checkpoint_every=20, log_every=20)
    return c
"""

CHECK = """
import numpy as np
import pytest
import saejax
assert saejax.__file__.startswith(HERE), saejax.__file__
before = saejax.default_config()
MINE
from saejax.app.experiment import default_config, experiment, from_json, to_run_json
from saejax.commands._reference import reference
from saejax.app.sweep.members import members, sparsity_weights
from saejax.coders import build
from saejax.core.errors import ConfigError

c = default_config()
c.coder.update(preset="standard", sparsity="shrink", shrink_width=0.3, hoyer_coefficient=0.5, l1_coefficient=0.0)
c.coder.hoyer_power = 3.0
e = experiment(c)
coder = build(e.coder, 8, 100)
assert (coder.sparsity.width, coder.terms[-1].power, coder.terms[-1].coefficient.end) == (0.3, 3.0, 0.5)
assert [term.name for term in coder.terms] == ["mse", "lift", "hoyer"]
assert from_json(to_run_json(e)).coder.shrink_width == 0.3
for key, value, words in (
    ("shrink_width", 1.0, "coder.shrink_width is 1.0; it must be below 1"),
    ("hoyer_power", 0.0, "coder.hoyer_power is 0.0; it must be above 0 and at most 4"),
    ("hoyer_coefficient", -1.0, "coder.hoyer_coefficient is -1.0"),
    ("sparsity", "shrinks", "Did you mean 'shrink'"),
):
    with pytest.raises(ConfigError, match=words):
        from_json(c.to_dict() | {"coder": c.coder.to_dict() | {key: value}})
assert "hoyer_coefficient" in sparsity_weights()
c.sweep.update(sparsity_scales=(1.0, 4.0), points=("a: coder.shrink_width=0.1", "b: coder.shrink_width=0.2"))
found = {m.name: m.experiment.coder for m in members(experiment(c))}
assert {n: (k.shrink_width, k.hoyer_coefficient) for n, k in found.items()} == {
    "a-sparsity1.0": (0.1, 0.5), "a-sparsity4.0": (0.1, 2.0), "b-sparsity1.0": (0.2, 0.5), "b-sparsity4.0": (0.2, 2.0)
}
row = "`coder.shrink_width` | float | `0.2` | below 1, not negative | Values up to this are 0. | yes | yes |"
assert row in reference()

x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
sae = saejax.train(
    x, "standard", sparsity="shrink", shrink_width=0.3, hoyer_coefficient=0.5, d_sae=16, batch_size=64, tokens=512
)
sae.save("saved")
assert np.array_equal(saejax.load("saved").encode(x), sae.encode(x))
assert sae.save("weights", format="weights") == ["no hook point"]
import json, pathlib
pathlib.Path("run.json").write_text(json.dumps(to_run_json(e)))
pathlib.Path("plain.json").write_text(json.dumps(to_run_json(experiment(before))))
"""

MISSING = """
import json, pathlib
import pytest
import saejax
from saejax.app.experiment import from_json
from saejax.core.errors import ConfigError, DataError

from_json(json.loads(pathlib.Path("plain.json").read_text()))
with pytest.raises(ConfigError, match="'shrink' is registered by the module parts_of_mine: import that first"):
    from_json(json.loads(pathlib.Path("run.json").read_text()))
with pytest.raises(DataError, match="'shrink' is registered by the module parts_of_mine: import that first"):
    saejax.load("saved")
import parts_of_mine
assert from_json(json.loads(pathlib.Path("run.json").read_text())).coder.shrink_width == 0.3
assert saejax.load("saved").params["W_enc"].shape == (8, 16)
"""


def _run(code: str, folder: Path, path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"HERE = {str(path)!r}\n" + textwrap.dedent(code)],
        cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join((str(path), str(folder)))},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _package(folder: Path) -> Path:
    """A copy of saejax below `folder`: links, so that a file of it is changed by replacing it."""
    shutil.copytree(
        ROOT / "saejax", folder / "saejax", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def _add(package: Path, files: dict[str, str]) -> None:
    for place, text in files.items():
        assert not (package / "saejax" / place).exists()
        (package / "saejax" / place).parent.mkdir(exist_ok=True)
        (package / "saejax" / place).write_text(text.lstrip(), encoding="utf-8")


def test_one_new_file_each_adds_a_sparsity_a_term_and_a_format(tmp_path: Path) -> None:
    """In a copy of the package, in which no file that is there changes."""
    checkout = _package(tmp_path / "checkout")
    _add(
        checkout,
        {"coders/sparsity/shrink.py": SPARSITY, "coders/terms/hoyer.py": TERM, "interop/formats/weights.py": FORMAT},
    )
    _run(CHECK.replace("MINE", ""), tmp_path, checkout)


@pytest.mark.ci
def test_a_module_of_ones_own_registers_them(tmp_path: Path) -> None:
    """After default_config() was asked for; what is written names the module, and asks for it where it is missing."""
    (tmp_path / "parts_of_mine.py").write_text(SPARSITY + TERM + FORMAT, encoding="utf-8")
    _run(CHECK.replace("MINE", "import parts_of_mine"), tmp_path, ROOT)
    _run(MISSING, tmp_path, ROOT)


@pytest.mark.ci
def test_an_installed_package_names_its_module_as_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "parts_of_mine.py").write_text(SPARSITY + TERM + FORMAT, encoding="utf-8")
    info = tmp_path / "mylab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mylab\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[saejax.parts]\nshrink = parts_of_mine\n", encoding="utf-8")
    _run(CHECK.replace("MINE", ""), tmp_path, ROOT)
    (info / "entry_points.txt").write_text("[saejax.parts]\nshrink = parts_of_nobody\n", encoding="utf-8")
    broken = """
    import pytest
    with pytest.raises(Exception, match="entry point shrink = parts_of_nobody of the group saejax.parts cannot"):
        import saejax.coders
    """
    _run(broken, tmp_path, ROOT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({'"shrink"': '"topk"'}, "the name 'topk' is that of saejax.coders.sparsity.topk.TopK"),
        (
            {"shrink_width": "threshold_decay"},
            "the key coder.threshold_decay is that of saejax.coders.sparsity.batchtopk",
        ),
    ],
)
def test_the_name_or_key_of_another_part_is_refused(change: dict[str, str], words: str, tmp_path: Path) -> None:
    text = SPARSITY
    for old, new in change.items():
        text = text.replace(old, new)
    (tmp_path / "parts_of_mine.py").write_text(text, encoding="utf-8")
    code = f"""
    import pytest
    from saejax.core.errors import ConfigError
    with pytest.raises(ConfigError, match={words!r}):
        import parts_of_mine
    """
    _run(code, tmp_path, ROOT)


@pytest.mark.ci
def test_a_workload_is_a_room_a_command_and_a_section(tmp_path: Path) -> None:
    """It trains in a run folder, goes on where it was stopped, and says when all is done; one file there changes."""
    checkout = _package(tmp_path / "checkout")
    _add(checkout, WORKLOAD)
    experiment = checkout / "saejax" / "app" / "experiment.py"
    text = experiment.read_text(encoding="utf-8")
    for line, new in SECTION:
        assert text.count(line) == 1
        text = text.replace(line, f"{new}\n{line}")
    experiment.unlink()
    experiment.write_text(text, encoding="utf-8")
    (tmp_path / "lines.py").write_text(LINES, encoding="utf-8")

    def slopes(*words: str) -> str:
        command = [sys.executable, "-m", "saejax", "slopes", "--config=lines.py", *words]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "train: 3 slopes" in slopes()
    *_, last = sorted((tmp_path / "runs" / "lines" / "checkpoints").glob("*60"))
    shutil.rmtree(last)
    assert "60 steps" in slopes() and "already done" in slopes()
    code = """
    import numpy as np
    from saejax.checkpoints import Checkpoints
    with Checkpoints("runs/lines/checkpoints") as checkpoints:
        items, meta = checkpoints.restore_numpy(60, names=("params",))
    np.testing.assert_allclose(items["params"]["w"], 1, atol=0.05)
    assert meta["kind"] == "slopes"
    """
    _run(code, tmp_path, checkout)


@pytest.mark.soak
@pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium or google-chrome on the path")
def test_a_section_of_a_report_is_one_new_script(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkout, run = _package(tmp_path / "checkout"), copied(tmp_path_factory) / "runs" / RUN
    script = """
    function helloSection({run}) {
      return section("hello", "Hello", null, el("p", {id: "greeting"}, `Hello, ${run.name}`));
    }

    addSection(50, ["run"], helloSection);
    """
    _add(checkout, {"reports/section_hello.js": textwrap.dedent(script)})
    _run(f"from saejax.reports import render\nrender({str(run)!r})", tmp_path, checkout)
    dom, console = browser.visit((run / "report.html").as_uri())
    assert f'<p id="greeting">Hello, {RUN}</p>' in dom and not console
