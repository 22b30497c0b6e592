"""Recipes and configuration: every preset builds, explicit keys win, what does not fit is refused with the remedy.

And the architecture of the product: no code forks on a family's name, and a new sparsity is one small class.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.covering import rest_in

import saejax
from saejax.coders import RECIPES, SPARSITIES, TOPOLOGIES, Coder, CoderConfig, Latents, build
from saejax.coders.initialisation import INITS
from saejax.coders.ramp import Ramp
from saejax.coders.sparsity import abs_topk
from saejax.coders.sparsity.base import Sparsity
from saejax.core.errors import ConfigError
from saejax.core.settings import settings_of

D, F, S = 6, 64, 3
FAMILIES = frozenset(RECIPES) | frozenset(SPARSITIES) | frozenset(TOPOLOGIES)

Tree = dict[str, Any]


def _build(d_in: Any = None, d_out: Any = None, steps: int = 100, **changes: Any) -> Coder:
    config = CoderConfig(**({"d_sae": F, "k": 8} | changes))
    stacked = TOPOLOGIES[config.resolved().topology].stacked
    return build(config, d_in or ((D,) * S if stacked else D), steps, d_out)


def _names(coder: Coder) -> list[str]:
    return [term.name for term in coder.terms]


# --- presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", RECIPES)
def test_every_preset_resolves_and_builds(preset: str) -> None:
    recipe, resolved = RECIPES[preset], CoderConfig(preset).resolved()
    assert recipe.title and recipe.paper.startswith("https://")
    known = settings_of(CoderConfig)
    left_to_presets = {f.name for f in dataclasses.fields(CoderConfig) if f.default in (None, "", ())}
    assert (
        recipe.settings.keys()
        <= left_to_presets
        == {key for key in known if known[key].base is not None} | {"prefixes"}
    )
    for key in left_to_presets:
        assert getattr(resolved, key) == recipe.settings.get(key, known[key].base if key != "prefixes" else ())
    assert None not in dataclasses.astuple(resolved)
    assert resolved.resolved() == resolved  # what a run writes down means the same whatever recipes become
    coder = _build(preset=preset)
    assert isinstance(coder.topology, TOPOLOGIES[resolved.topology])
    assert isinstance(coder.sparsity, SPARSITIES[resolved.sparsity])
    parts = "matryoshka" if resolved.prefixes else "hierarchical" if resolved.hierarchical_every else ""
    assert _names(coder)[0] == (parts or resolved.reconstruction)
    assert hash(coder) == hash(_build(preset=preset))  # a coder may be the key of a cache of programs


# A recipe is its losses: read from the papers, not from the table.
LOSSES = {
    "standard": ["mse", "l1", "lift"],
    "p_anneal": ["mse", "lp"],
    "ghost": ["mse", "l1", "ghost"],
    "decorrelated": ["fvu", "auxk", "lift", "decorrelation"],
    "gated": ["mse", "l1", "gate_reconstruction", "lift"],
    "topk": ["fvu", "auxk", "lift"],
    "hierarchical_topk": ["hierarchical", "auxk", "lift"],
    "multi_topk": ["fvu", "multi_topk", "auxk", "lift"],
    "abs_topk": ["fvu", "auxk"],
    "batchtopk": ["fvu", "auxk", "lift"],
    "lista_batchtopk": ["fvu", "auxk", "lift"],
    "jumprelu": ["fvu", "target_l0", "auxk", "lift"],
    "gemma_scope_2": ["matryoshka", "target_l0", "frequency"],
    "jumprelu_l0": ["fvu", "l0_loss"],
    "jumprelu_tanh": ["mse", "tanh", "pre_activation"],
    "matryoshka": ["matryoshka", "auxk", "lift"],
    "temporal": ["matryoshka", "auxk", "lift", "contrastive"],
    "transcoder": ["fvu", "auxk", "lift"],
    "skip_transcoder": ["fvu", "auxk", "lift"],
    "crosscoder": ["mse", "l1"],
    "crosscoder_batchtopk": ["fvu", "auxk", "lift"],
    "crosscoder_causal": ["fvu", "auxk"],
    "clt": ["fvu", "auxk"],
    "clt_jumprelu": ["mse", "tanh", "pre_activation"],
}


def test_the_losses_of_every_preset() -> None:
    assert {preset: _names(_build(preset=preset)) for preset in RECIPES} == LOSSES


def test_explicit_keys_win_over_the_preset() -> None:
    assert CoderConfig("gated", l1_coefficient=0.25).resolved().l1_coefficient == 0.25
    # Zero is a value, not a silence.
    assert _names(_build(preset="topk", auxk_coefficient=0.0, lift_coefficient=0.0)) == ["fvu"]
    assert _build(preset="topk", unit_decoder_every=0).unit_decoder_every == 0
    assert _build(preset="jumprelu", threshold_init=0.0).sparsity.parameters() == {"threshold": 0.0}
    coder = _build(preset="matryoshka", topology="crosscoder", sparsity="topk", prefixes=(8.0, 1.0))
    assert isinstance(coder.topology, TOPOLOGIES["crosscoder"]) and isinstance(coder.sparsity, SPARSITIES["topk"])
    assert coder.terms[0].prefixes == (8, F)  # type: ignore[attr-defined]
    assert CoderConfig("standard").resolved().normalize == "mean_norm"
    assert CoderConfig("standard", normalize="none").resolved().normalize == "none"


def test_schedules_are_shares_of_the_training() -> None:
    coder = _build(preset="topk", k=4, k_start=20, k_anneal_fraction=0.3, steps=50)
    assert coder.sparsity.k == Ramp(20, 4, 15)  # type: ignore[attr-defined]
    (_, lp) = _build(
        preset="p_anneal", lp_after_fraction=0.25, lp_end=0.5, lp_updates=5, sparsity_warmup_fraction=0.1, steps=40
    ).terms
    assert (lp.p, lp.updates) == (Ramp(1.0, 0.5, 30, 10), 5)  # type: ignore[attr-defined]
    assert lp.coefficient == Ramp(0.0, RECIPES["p_anneal"].settings["lp_coefficient"], 4)
    # A sweep over sparsity weights moves penalties, and neither reconstruction nor the care for dead latents.
    scaled = {t.name for p in RECIPES for t in _build(preset=p).terms if t.is_sparsity_weight()}
    assert scaled == {"l1", "lp", "tanh", "l0_loss", "target_l0", "frequency"}


@pytest.mark.parametrize("init", INITS)
def test_every_init_has_the_rows_it_promises(init: str) -> None:
    coder = _build(preset="topk", init=init, decoder_norm=0.3, encoder_scale=1.0, unit_decoder_every=0)
    p = jax.jit(coder.init)(jax.random.key(0))
    lengths = np.linalg.norm(p["W_dec"], axis=1)
    if init in ("transpose", "kaiming"):
        np.testing.assert_allclose(lengths, 0.3, rtol=1e-5)
    if init == "uniform":
        assert np.abs(p["W_dec"]).max() <= D**-0.5 and np.abs(p["W_enc"]).max() <= F**-0.5 and lengths.min() > 0
    if init == "zero_decoder":
        assert not p["W_dec"].any() and 0 < np.abs(p["W_enc"]).max() <= D**-0.5
    assert np.array_equal(p["W_enc"], p["W_dec"].T) == (init == "transpose")
    halved = _build(preset="topk", init=init, decoder_norm=0.3, encoder_scale=0.5, unit_decoder_every=0)
    np.testing.assert_allclose(jax.jit(halved.init)(jax.random.key(0))["W_enc"], p["W_enc"] / 2, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("preset", "width", "k"),
    [("topk", 48, 6), ("topk", 384, 192), ("batchtopk", 384, 8), ("crosscoder_batchtopk", 384, 24)],
)
def test_the_rule_for_the_scale_is_where_the_first_reconstruction_is_best(preset: str, width: int, k: int) -> None:
    """<x, x_hat> / |x_hat|^2 is 1 where no factor would bring the untrained x_hat closer to x."""
    coder = _build(48, preset=preset, d_sae=width, k=k, encoder_scale=0.0, matmul_dtype="float32")
    x = jax.random.normal(jax.random.key(1), (256, *coder.topology.in_shape))
    x_hat = jax.jit(lambda x: coder.reconstruct(coder.init(jax.random.key(0)), x))(x)
    assert abs(float((x * x_hat).sum() / (x_hat * x_hat).sum()) - 1) < 0.1


def test_where_the_encoder_starts() -> None:
    def scale(preset: str, **changes: Any) -> float:
        return float(vars(_build(preset=preset, **changes).topology)["encoder_scale"])

    # Whole, but for transcoders, whose encoder is random.
    small = {preset for preset in RECIPES if scale(preset) != 1}
    assert small == {"transcoder", "skip_transcoder"} and scale("transcoder") == scale("skip_transcoder") == 0.1
    # A run that was started at a tenth has that in its config.json, and keeps it.
    assert scale("topk", encoder_scale=0.1) == 0.1
    assert 1 > scale("topk", encoder_scale=0.0, k=2) > scale("topk", encoder_scale=0.0, k=8)
    assert scale("topk", encoder_scale=0.0, k=2, k_start=8) == scale("batchtopk", encoder_scale=0.0, k=8)
    for elsewhere in ({"sparsity": "jumprelu"}, {"init": "kaiming"}):
        assert scale("topk", encoder_scale=0.0, **elsewhere) == 1


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # Numbers of latents.
        ({"k": 65}, ["coder.k is 65", "64 latents", "raise d_sae"]),
        ({"preset": "batchtopk", "k": 65}, ["coder.k is 65"]),
        ({"k": 4, "k_start": 65}, ["coder.k_start is 65", "64 latents"]),
        ({"k": 8, "k_start": 4}, ["coder.k_start is 4", "coder.k = 8", "falls"]),
        ({"preset": "standard", "k_start": 40}, ["coder.k_start", "relu", "remove"]),
        ({"auxk_k": 65}, ["coder.auxk_k is 65", "64 latents", "lower"]),
        ({"preset": "multi_topk", "k": 17}, ["coder.multi_topk_factor x k is 68", "64 latents", "raise d_sae"]),
        # Prefixes.
        ({"preset": "matryoshka", "prefixes": (0.5, 0.25, 1.0)}, ["coder.prefixes", "(32, 16, 64)", "rise"]),
        ({"preset": "topk", "prefixes_detached": True}, ["coder.prefixes_detached", "coder.prefixes"]),
        ({"preset": "matryoshka", "prefixes": (16, 16, 64)}, ["coder.prefixes", "rise"]),
        ({"preset": "matryoshka", "prefixes": (0.25, 0.5)}, ["coder.prefixes", "end with 64", "1.0"]),
        ({"preset": "matryoshka", "prefixes": (16, 65)}, ["coder.prefixes", "end with 64"]),
        ({"preset": "matryoshka", "prefixes": (0.001, 1.0)}, ["coder.prefixes", "(0, 64)", "rise"]),
        # A loss and a sparsity.
        ({"l0_coefficient": 1.0}, ["l0_loss", "threshold", "topk has not", "jumprelu", "to 0"]),
        ({"target_l0_coefficient": 1.0}, ["target_l0", "threshold", "jumprelu"]),
        ({"preset": "standard", "pre_activation_coefficient": 1.0}, ["pre_activation", "threshold", "relu has not"]),
        ({"preset": "standard", "gate_coefficient": 1.0}, ["gate_reconstruction", "Use gated"]),
        ({"preset": "standard", "multi_topk_coefficient": 1.0}, ["multi_topk", "topk or abs_topk or batchtopk"]),
        ({"ghost_coefficient": 1.0}, ["ghost", "dense", "topk has not", "relu or gated"]),
        # Sites.
        ({"d_in": (D, D)}, ["autoencoder reads and writes one hook point", "2 and 2", "crosscoder or clt"]),
        ({"preset": "transcoder", "d_in": (D, D)}, ["transcoder reads and writes one", "crosscoder or clt"]),
        ({"preset": "crosscoder", "d_in": (D, D + 1)}, ["crosscoder needs sites of one width", "reads", "(6, 7)"]),
        ({"preset": "clt", "d_in": (D, D), "d_out": (D, 3)}, ["clt needs sites of one width", "writes", "(6, 3)"]),
        ({"preset": "clt", "d_in": (D, D), "d_out": (D,)}, ["clt writes a site for each", "2, 1"]),
        ({"d_out": D + 1}, ["autoencoder writes what it reads", "(6,)", "(7,)"]),
        ({"preset": "transcoder", "init": "transpose", "d_out": D + 1}, ["init=transpose", "kaiming or uniform"]),
        ({"preset": "clt", "init": "transpose"}, ["init=transpose", "same shape"]),
        ({"init": "zero_decoder"}, ["init=zero_decoder", "length 1", "unit_decoder_every=0"]),
        ({"decoder_norm": 0.0, "unit_decoder_every": 0}, ["coder.decoder_norm is 0", "init=zero_decoder"]),
        # Names.
        ({"preset": "batch_topk"}, ["coder.preset", "'batch_topk'", "Did you mean 'batchtopk'"]),
        ({"topology": "transcode"}, ["coder.topology", "Did you mean 'transcoder'"]),
        ({"sparsity": "jump_relu"}, ["coder.sparsity", "Did you mean 'jumprelu'"]),
        ({"init": "transposed"}, ["coder.init", "Did you mean 'transpose'"]),
        ({"reconstruction": "mes"}, ["coder.reconstruction", "Did you mean 'mse'"]),
        ({"b_dec_init": "geometric"}, ["coder.b_dec_init", "Did you mean 'geometric_median'"]),
        ({"sparsity": "zzz"}, ["coder.sparsity", "relu, gated, topk, abs_topk, jumprelu, batchtopk"]),
        # Numbers.
        ({"bandwidth": 0.0}, ["coder.bandwidth is 0", "positive"]),
        # What float32 has no number for, and what is no int32.
        ({"bandwidth": 1e-50}, ["coder.bandwidth is 1e-50", "positive and finite in float32"]),
        ({"l1_coefficient": 1e50}, ["coder.l1_coefficient is 1e+50", "finite, not negative in float32"]),
        ({"threshold_decay": 1 - 1e-9}, ["coder.threshold_decay is 0.999999999", "below 1"]),
        ({"unit_decoder_every": 2**40}, ["coder.unit_decoder_every is 1099511627776", "at most 2147483647"]),
        ({"target_l0": 0.0}, ["coder.target_l0 is 0", "positive"]),
        ({"lp_end": 0.0}, ["coder.lp_end", "above 0"]),
        ({"threshold_decay": 1.0}, ["coder.threshold_decay", "below 1"]),
        ({"k_anneal_fraction": 1.5}, ["coder.k_anneal_fraction", "between 0 and 1"]),
        ({"unit_decoder_every": -1}, ["coder.unit_decoder_every is -1", "0 or more"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(changes: Tree, named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        _build(**changes)
    for words in named:
        assert words in str(error.value)


# --- no forks on a family's name ---------------------------------------------------------------------------


def _forks(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, family) for each comparison with a family's name, by ==, !=, in, not in, or a match statement."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        else:
            continue
        constants = [c for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)]
        found += [(node.lineno, c.value) for c in constants if isinstance(c.value, str) and c.value in FAMILIES]
    return found


@pytest.mark.parametrize(
    "code",
    [
        'if sparsity == "topk": pass',
        'x = 1 if "jumprelu" != name else 2',
        'if c.topology in ("clt", "other"): pass',
        'if preset not in {"gated"}: pass',
        'match name:\n    case "matryoshka": pass',
    ],
)
def test_the_reader_of_forks_finds_them(code: str) -> None:
    assert len(_forks(ast.parse(code))) == 1
    assert not _forks(ast.parse('name = "topk"; x = {"topk": 1}["topk"]; y = name == "fvu"'))


def test_no_code_forks_on_a_familys_name() -> None:
    root = Path(saejax.__file__).parent
    # interop says in other projects' words what a coder is: its tables and rules are about names.
    files = [path for path in root.rglob("*.py") if path.name != "recipes.py" and "interop" not in path.parts]
    assert len(files) > 50
    found = [
        f"{path.relative_to(root)}:{line}: compares with {family!r}"
        for path in files
        for line, family in _forks(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


# --- a new sparsity is one class ---------------------------------------------------------------------------


def test_abs_topk_is_one_small_file() -> None:
    assert len(inspect.getsource(abs_topk).splitlines()) < 30


@dataclasses.dataclass(frozen=True)
class SoftShrink(Sparsity):
    """f = sign(pre) max(|pre| - 0.2, 0): nothing that this repository has."""

    def __call__(self, pre: jax.Array, keep: Any, params: Any, step: Any) -> Latents:
        return Latents(jnp.sign(pre) * jax.nn.relu(jnp.abs(pre) - 0.2), None, pre.shape[-1])

    def penalised(self, pre: jax.Array, latents: Latents, params: Any) -> jax.Array:
        return jnp.abs(latents.dense())


@pytest.mark.parametrize("topology", rest_in("ci", TOPOLOGIES, ("clt",)))
def test_a_new_sparsity_works_in_every_topology(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With penalty, prefixes and AuxK; the loss falls along the gradient."""
    monkeypatch.setitem(SPARSITIES, "soft_shrink", SoftShrink)
    coder = _build(
        preset="standard", topology=topology, sparsity="soft_shrink", l1_coefficient=0.1, auxk_coefficient=0.1,
        prefixes=(0.5, 1.0), d_sae=12, auxk_k=3, init="uniform", matmul_dtype="float32", sparsity_warmup_fraction=0.0,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    p = {name: jnp.asarray(rng.normal(size=s.shape), jnp.float32) for name, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(5, *coder.topology.in_shape)), jnp.float32)
    with jax.disable_jit():
        (before, (metrics, stats)), g = jax.value_and_grad(coder.loss, has_aux=True)(
            p, {"x": x, "y": x}, coder.init_stats(), jnp.int32(0)
        )
        lower = jax.tree.map(lambda v, g: v - 1e-3 * g, p, g)
        after, _ = coder.loss(lower, {"x": x, "y": x}, stats, jnp.int32(0))
        alone, own = coder.inference(p, stats)
        assert alone.reconstruct(own, x).shape == x.shape
    assert set(metrics) >= {"matryoshka", "l1", "auxk"}
    assert float(after) < float(before)
