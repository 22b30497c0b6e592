"""A new sparsity, loss term or format is one new file, in saejax or anywhere else. All else follows."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny import ROOT

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

from saejax.coders.context import Context
from saejax.coders.parts import register_term
from saejax.coders.ramp import At, Ramp
from saejax.coders.term import Term, weight
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


def test_one_new_file_each_adds_a_sparsity_a_term_and_a_format(tmp_path: Path) -> None:
    """In a copy of the package, in which no file that is there changes."""
    checkout = tmp_path / "checkout"
    shutil.copytree(
        ROOT / "saejax", checkout / "saejax", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
    )
    for place, text in (
        ("coders/sparsity/shrink.py", SPARSITY),
        ("coders/terms/hoyer.py", TERM),
        ("interop/formats/weights.py", FORMAT),
    ):
        assert not (checkout / "saejax" / place).exists()
        (checkout / "saejax" / place).write_text(text.lstrip(), encoding="utf-8")
    _run(CHECK.replace("MINE", ""), tmp_path, checkout)


def test_a_module_of_ones_own_registers_them(tmp_path: Path) -> None:
    """After default_config() was asked for; what is written names the module, and asks for it where it is missing."""
    (tmp_path / "parts_of_mine.py").write_text(SPARSITY + TERM + FORMAT, encoding="utf-8")
    _run(CHECK.replace("MINE", "import parts_of_mine"), tmp_path, ROOT)
    _run(MISSING, tmp_path, ROOT)


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
