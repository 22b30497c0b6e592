"""A pass that goes on from what an earlier one computed: the same numbers, and nothing before it runs."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.attributed import FAMILIES, lm_of, prompt
from tiny.covering import rest_in

from saejax.lm import HOOK_NAMES, LanguageModel
from saejax.lm.points import next_block

EDITED = [
    *((f"blocks.1.{name}",) for name in HOOK_NAMES),
    *itertools.combinations(("blocks.1.resid_post", "blocks.2.resid_pre", "blocks.2.mlp_in"), 2),
    ("blocks.2.resid_post",),
    ("blocks.0.resid_pre",),
]


def rows_of(lm: LanguageModel) -> tuple[Any, ...]:
    tokens = np.stack([prompt(9, seed) for seed in (0, 1)])
    positions = np.tile([0, 1, 2, 3, 4, 0, 1, 2, 3], (2, 1))
    return tuple(jnp.asarray(a, jnp.int32) for a in (tokens, positions, np.cumsum(positions == 0, axis=1)))


# Learned positions, a parallel residual, post norms and windows; the others in .ci/run.
@pytest.mark.parametrize("family", rest_in("ci", FAMILIES, ("gpt2", "gpt_neox", "gemma2")))
def test_edits_have_the_effect_of_a_whole_pass(family: str) -> None:
    """Alone and in pairs at every kind of hook point; the start itself may be edited."""
    lm = lm_of(family)
    rows, last = rows_of(lm), f"blocks.{lm.config.n_layer - 1}.resid_post"
    starts = {names: lm.start_of(names) for names in EDITED}

    @jax.jit
    def passes() -> Any:
        found = {}
        _, seen = lm.apply(lm.params, *rows, tuple(set(starts.values())))
        for names, start in starts.items():
            edits = dict.fromkeys(names, lambda x: 0.5 * x + 0.3)
            whole = lm.apply(lm.params, *rows, (last, *names), edits)
            begin = start, jax.lax.optimization_barrier(seen[start])
            begun = lm.apply(lm.params, *rows, (last, *names), edits, begin)
            found["+".join(names)] = whole, begun
        return found

    for name, (whole, begun) in passes().items():
        for want, got in zip(jax.tree.leaves(whole), jax.tree.leaves(begun), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=name)


def test_it_starts_as_late_as_it_can() -> None:
    """Whatever stands in the residual stream behind the start feels the edits."""
    lm = lm_of("gpt2")
    rows, points = (
        rows_of(lm),
        [f"blocks.{i}.{n}" for i in range(lm.config.n_layer) for n in ("resid_pre", "resid_post")],
    )
    _, clean = lm.apply(lm.params, *rows, points)
    for names in EDITED:
        _, seen = lm.apply(lm.params, *rows, points, dict.fromkeys(names, lambda x: 0.5 * x + 0.3))
        changed = [name for name in points if not np.allclose(seen[name], clean[name])]
        first = points.index(changed[0])
        start = points.index(lm.start_of(names))
        # Of what is edited there and of what a block makes of it.
        assert start in (first, first - 1), names


def test_no_block_before_it_runs() -> None:
    lm = lm_of("gpt2")
    rows = rows_of(lm)

    def products(start: str) -> int:
        x = jnp.zeros((*rows[0].shape, lm.config.d_model))
        edits = {start: jnp.zeros_like}
        text = str(jax.make_jaxpr(lambda x: lm.apply(lm.params, *rows, (), edits, (start, x))[0])(x))
        return text.count("dot_general")

    counts = [products(f"blocks.{i}.resid_pre") for i in range(lm.config.n_layer)]
    each = counts[0] - counts[1]
    assert each > 0 and counts == [counts[0] - i * each for i in range(lm.config.n_layer)]
    after = [products(f"blocks.{i}.resid_post") for i in range(lm.config.n_layer)]
    assert after == [*counts[1:], counts[-1] - each]
    assert [next_block(f"blocks.{i}.{name}") for i in (0, 11) for name in ("resid_pre", "resid_post")] == [0, 1, 11, 12]
