"""A new sparsity is one file and its line; a new loss term is a class, its settings and its line. All else follows."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from tiny import ROOT

SPARSITY = '''
"""f = sign(pre) max(|pre| - width, 0): nothing that this repository has."""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents
from saejax.coders.ramp import At
from saejax.coders.sparsity.base import Sparsity
from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class ShrinkSettings(Settings, section="coder"):
    shrink_width: float = setting(0.2, "Values up to this are 0.", low=0, below=1)


@dataclasses.dataclass(frozen=True)
class Shrink(Sparsity[ShrinkSettings]):
    width: float = 0.2
    settings: ClassVar[type[Settings]] = ShrinkSettings

    @classmethod
    def build(cls, settings: ShrinkSettings, at: At) -> Self:
        return cls(settings.shrink_width)

    def __call__(self, pre, keep, params, step):
        return Latents(jnp.sign(pre) * jax.nn.relu(jnp.abs(pre) - self.width), None, pre.shape[-1])
'''

TERM = """
from saejax.kernels.batch import per_token


@dataclasses.dataclass(frozen=True)
class HoyerSettings(Settings, section="coder"):
    hoyer_coefficient: float | None = weight("Weight of sum f^power.", sparsity=True)
    hoyer_power: float = setting(2.0, "The power.", above=0, high=4)


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


TERMS: list["""

CHECK = """
import pytest
import saejax
assert saejax.__file__.startswith(HERE), saejax.__file__
from saejax.app.experiment import default_config, experiment, from_json, to_run_json
from saejax.app.reference import reference
from saejax.app.sweep.members import SPARSITY_WEIGHTS, members
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
assert "hoyer_coefficient" in SPARSITY_WEIGHTS
c.sweep.update(sparsity_scales=(1.0, 4.0), points=("a: coder.shrink_width=0.1", "b: coder.shrink_width=0.2"))
found = {m.name: m.experiment.coder for m in members(experiment(c))}
assert {n: (k.shrink_width, k.hoyer_coefficient) for n, k in found.items()} == {
    "a-sparsity1.0": (0.1, 0.5), "a-sparsity4.0": (0.1, 2.0), "b-sparsity1.0": (0.2, 0.5), "b-sparsity4.0": (0.2, 2.0)
}
row = "`coder.shrink_width` | float | `0.2` | below 1, not negative | Values up to this are 0. | yes | yes |"
assert row in reference()
"""


def test_a_new_sparsity_and_a_new_term_have_flags_ranges_sweeps_and_a_page(tmp_path: Path) -> None:
    """In a copy of the package: two lines and what they name, nothing else."""
    shutil.copytree(
        ROOT / "saejax", tmp_path / "saejax", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
    )
    coders = tmp_path / "saejax" / "coders"
    (coders / "sparsity" / "shrink.py").write_text(SPARSITY.lstrip(), encoding="utf-8")
    table, losses, relu = coders / "sparsity" / "__init__.py", coders / "losses.py", "from saejax.coders.sparsity.relu"
    for path, old, new in (
        (table, '    "relu": Relu,\n', '    "relu": Relu,\n    "shrink": Shrink,\n'),
        (table, relu, f"from saejax.coders.sparsity.shrink import Shrink\n{relu}"),
        (losses, "\nTERMS: list[", TERM),
        (losses, "    Decorrelation,\n]", "    Decorrelation,\n    Hoyer,\n]"),
    ):
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, old
        path.unlink()
        path.write_text(text.replace(old, new), encoding="utf-8")
    code = f"HERE = {str(tmp_path)!r}\n" + textwrap.dedent(CHECK)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
