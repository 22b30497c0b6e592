"""The same training however it is spread: some of the runs of benchmarks/equality.py, whose whole table takes longer.

Trained with SGD: Adam hides a gradient of the wrong scale.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import optax
import pytest
from tiny.covering import rest_in

from benchmarks.equality import ALONE, LAYERS, LIMIT, B, D, F, K, Place, a_coder, difference, program, same_l0, trained
from benchmarks.parallel import least
from saejax.plans.collectives import collectives
from saejax.training.config import TrainConfig
from saejax.training.state import init_state, make_init

# Not every pair: each is a program to compile. Every coder has tokens split, and latents split; every mesh two coders.
PAIRS = (
    ("autoencoder/relu", Place((8, 1))),
    ("autoencoder/gated", Place((2, 4))),
    ("autoencoder/jumprelu", Place((4, 2))),
    ("autoencoder/topk", Place((1, 8))),
    ("autoencoder/topk", Place((8, 1), fsdp=True)),
    ("autoencoder/abs_topk", Place((2, 4))),
    ("autoencoder/batchtopk", Place((4, 2))),
    ("autoencoder/matryoshka", Place((4, 2), fsdp=True)),
    ("autoencoder/jumprelu", Place((8, 1))),
    ("autoencoder/topk", Place((8, 1), mode="pmap")),
    ("autoencoder/batchtopk", Place((8, 1), mode="pmap")),
    ("autoencoder/jumprelu", Place((8, 1), mode="pmap")),
    ("clt/batchtopk", Place((2, 4))),
)


# These have their kept entries by blocks, as in a large training: k of a row, and a list over the batch with groups.
# In the table of benchmarks/equality.py all have.
BY_BLOCKS = ("autoencoder/topk", "clt/batchtopk")

# Only in .ci/run: pmap, which test_pmap.py tries too, what selects as another does, and the clt, which compiles for as
# long as all others together.
LIKE_ANOTHER = ("autoencoder/abs_topk", "autoencoder/matryoshka", "clt/batchtopk")
QUICK = [
    (name, place) for name, place in PAIRS if place.mode == "jit" and place.mesh != (1, 8) and name not in LIKE_ANOTHER
]


@pytest.mark.parametrize(("name", "place"), rest_in("ci", PAIRS, QUICK), ids=str)
def test_twenty_steps_are_those_of_one_device(name: str, place: Place) -> None:
    by_blocks = name in BY_BLOCKS
    got, want = trained(name, place, by_blocks), trained(name, ALONE, by_blocks)
    assert difference(got, want) < LIMIT
    assert same_l0(got, want)
    for one, other in zip(got.rows, want.rows, strict=True):
        assert one == pytest.approx(other, rel=LIMIT, abs=LIMIT)


@pytest.mark.parametrize("name", rest_in("ci", dict(PAIRS), [name for name in dict(PAIRS) if name not in LIKE_ANOTHER]))
def test_the_comparison_has_something_to_compare(name: str) -> None:
    """Latents die and AuxK takes part, the loss falls, every parameter moves; otherwise equality would mean little."""
    run = trained(name, ALONE, name in BY_BLOCKS)
    loss, dead = run.column("loss"), run.column("dead")
    assert loss[-5:].mean() < 0.95 * loss[:5].mean() and dead[0] >= 3
    if "auxk" in run.rows[0]:
        assert dead.max() > 4 * LAYERS and run.column("auxk")[-1] > 0.1
    for array, start in run.start.items():
        if array == "centre":  # a constant
            continue
        assert np.abs(run.end[array] - start).max() > 1e-3, array


def test_a_gradient_of_the_wrong_scale_is_seen() -> None:
    """What the other tests would say if a device's gradients were summed twice."""
    want = trained("autoencoder/topk", ALONE, True)
    end = {name: want.start[name] + 1.001 * (value - want.start[name]) for name, value in want.end.items()}
    assert difference(dataclasses.replace(want, end=end), want) > 10 * LIMIT
    fewer = [row | {"l0": row["l0"] - 1 / B} for row in want.rows]
    assert not same_l0(dataclasses.replace(want, rows=fewer), want)


def test_a_state_is_born_the_same_on_every_mesh() -> None:
    abstract, coder = program("autoencoder/topk", Place((1, 8)), True)[0], a_coder("autoencoder/topk")[0]
    config = TrainConfig(batch_size=B, tokens=B)
    state = init_state(make_init(coder, optax.sgd(1.0), config), 0, abstract)
    for name, start in trained("autoencoder/topk", ALONE, True).start.items():
        if name in state.params:
            np.testing.assert_allclose(state.params[name], start, rtol=1e-6, err_msg=name)


SENDING = tuple((name, place) for name, place in PAIRS if not place.fsdp)


def selecting(name: str, place: Place) -> float:
    """Bytes that choosing and using the kept latents may send beside the least."""
    (n_data, n_latent), groups = place.mesh, LAYERS if name.startswith("clt") else 1
    own_tokens, others = B // n_data, (n_latent - 1) / n_latent
    sent = 0.0
    if name.endswith("/topk") or name.endswith("/abs_topk"):
        # Every device's k candidates of a token, values and indices; then what the chosen are, there and back.
        candidates = 4 * own_tokens * groups * K * n_latent
        chosen = 4 * own_tokens * groups * K
        sent += 2 * others * candidates + 3 * 2 * others * chosen
    if name.endswith("batchtopk") or name.endswith("matryoshka"):
        sent += 2 * 32 * 2 * 8  # two counts in each step of a bisection, of groups and of their members
    if name.endswith("gated"):
        # What the gate alone reconstructs, and three more numbers of each latent.
        sent += 2 * others * 4 * own_tokens * D + 3 * 2 * 4 * F // n_latent
    return sent


@pytest.mark.parametrize(
    ("name", "place"), rest_in("ci", SENDING, [pair for pair in SENDING if pair in QUICK]), ids=str
)
def test_a_step_sends_little_more_than_it_must(name: str, place: Place) -> None:
    """Nothing as large as the pre-activations, no sort but of kept pairs, no rows in a loop; and bytes, of every step.

    Beside the gradients and the reconstruction (`least`) and the selection: how often each latent fired, scalars.
    """
    (n_data, n_latent), groups = place.mesh, LAYERS if name.startswith("clt") else 1
    abstract, step = program(name, place, name in BY_BLOCKS)
    text = step.as_text()
    found = collectives(text)
    assert found and not re.search(r"= \(?f32[^=]* sort\(", text)  # pairs are sorted by their numbers
    for c in found:
        assert c.kind in ("all-reduce", "all-gather"), c
        assert c.kind != "all-gather" or c.size < 4 * B // n_data * groups * F, c
        assert c.times == 1 or c.size <= 24, c  # a loop counts, for three candidates at once: it sends no rows
    sent = sum(c.sent for c in found if not c.branch)
    must = least(abstract, a_coder(name)[0], B, n_data, n_latent)
    fired = 2 * 4 * groups * F // n_latent
    assert must <= sent <= 1.1 * (must + selecting(name, place)) + fired + 256


def test_one_device_sends_nothing() -> None:
    assert collectives(program("autoencoder/topk", ALONE, True)[1].as_text()) == []
