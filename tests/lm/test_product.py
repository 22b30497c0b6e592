"""The library that XLA's CPU backend multiplies with: it changes seconds and last bits, nothing else."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.decoders import CONFIG, in_order, random_params, rows_of

from saejax.core.host import instruction_sets
from saejax.lm import checkpoint, product
from saejax.lm.forward import forward_program
from saejax.lm.model import LanguageModel
from saejax.parallel import ParallelConfig, make_mesh

ONE = make_mesh(ParallelConfig((1, 1)))


@pytest.fixture
def on_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_measured_here", lambda: True)


def options(params: Any) -> dict[str, str | bool]:
    return product.options_of_blocks(params, ONE)


def shapes(dtype: str = "float32", mlp: int = 64) -> Any:
    block = {"mlp": {"W_in": jax.ShapeDtypeStruct((32, mlp), dtype)}}
    return {"embed": {"W_E": jax.ShapeDtypeStruct((50_000, 32), dtype)}, "blocks": [block]}


@pytest.mark.usefixtures("on_avx2")
def test_eigen_is_asked_for_where_it_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options(shapes()) and options({"first": shapes(), "second": shapes()})
    assert not options(shapes("bfloat16")) and not options(shapes(mlp=4096))
    assert not options({"first": shapes(), "second": shapes(mlp=4096)})
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT")
    assert not options(shapes())


@pytest.mark.parametrize(
    ("known", "measured"),
    [
        ({"avx2"}, True),
        ({"avx2", "avx512f"}, False),
        ({"avx2", "avx512f", "sse4a"}, True),
        ({"asimd"}, False),
        (set(), False),
    ],
)
def test_other_processors_keep_what_xla_chose(monkeypatch: pytest.MonkeyPatch, known: set[str], measured: bool) -> None:
    monkeypatch.setattr(product, "instruction_sets", lambda: frozenset(known))
    assert product._measured_here.__wrapped__() is measured


def test_this_machine_names_its_instruction_sets() -> None:
    assert all(name == name.strip() and " " not in name for name in instruction_sets())


def test_both_libraries_give_the_same_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    config = checkpoint.architecture(CONFIG, "").read_config(CONFIG)
    lm = LanguageModel(config, jax.tree.map(jnp.asarray, random_params(CONFIG)), cast(Any, None), {})
    arrays = tuple(jnp.asarray(row, jnp.int32) for row in in_order(rows_of([[30, 18]])))
    given, found = {}, {}
    for measured in (True, False):
        monkeypatch.setattr(product, "_measured_here", lambda measured=measured: measured)
        program = forward_program(lm, lm.params, ["blocks.1.resid_post"], arrays[0].shape, ONE)
        given[measured] = "ynn" in program.as_text()
        found[measured] = np.asarray(program(lm.params, *arrays)[0]["blocks.1.resid_post"], np.float32)
    assert not given[True] or not product._has_option()
    # bfloat16 has 8 bits.
    np.testing.assert_allclose(found[True], found[False], rtol=2**-7, atol=1e-5)


def test_an_xla_without_the_option_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "EIGEN", {"xla_cpu_no_such_option": ""})
    assert not product._has_option.__wrapped__()
