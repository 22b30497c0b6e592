"""The mesh, and shardings by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from saejax.coders import Coder, CoderConfig, build
from saejax.core.errors import ConfigError
from saejax.parallel import (
    DATA,
    LATENT,
    MESH_AXES,
    ParallelConfig,
    Process,
    any_of,
    batch_sharding,
    from_first,
    joined,
    make_mesh,
    own_rows,
    replicated,
    sharding_of,
    tree_shardings,
)

B, D, F = 32, 8, 24


def _coder() -> Coder:
    return build(CoderConfig("topk", d_sae=F, k=3, matmul_dtype="float32"), D, steps=5)


# --- the mesh ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "shape"), [((), (8, 1)), ((4, 2), (4, 2)), ((1, 8), (1, 8)), ((2, 1), (2, 1)), ((1, 1), (1, 1))]
)
def test_make_mesh(asked: tuple[int, ...], shape: tuple[int, int]) -> None:
    mesh = make_mesh(ParallelConfig(asked))
    assert mesh.axis_names == MESH_AXES == (DATA, LATENT)
    assert mesh.devices.shape == shape
    assert len({d.id for d in mesh.devices.flat}) == shape[0] * shape[1]


def test_make_mesh_over_chosen_devices() -> None:
    devices = jax.devices()[4:6]
    assert list(make_mesh(ParallelConfig(), devices).devices.flat) == devices


def test_too_many_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.mesh=4,4 needs 16 devices; there are 8"):
        make_mesh(ParallelConfig((4, 4)))
    with pytest.raises(ConfigError, match=r"parallel\.mesh=2,1 needs 2 devices; there are 1"):
        make_mesh(ParallelConfig((2, 1)), jax.devices()[:1])


@pytest.mark.parametrize("mesh", [(8,), (2, 2, 2), (0, 8), (8, -1)])
def test_a_bad_mesh_is_refused_with_the_remedy(mesh: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.mesh is \(.*two positive numbers, as in 4,2"):
        ParallelConfig(mesh)


def test_with_fsdp_an_array_is_spread_over_data_along_an_axis_that_divides() -> None:
    mesh = make_mesh(ParallelConfig((4, 2)))
    for shape, logical, spec in (
        ((12, 64), ("d_in", "latent"), P(DATA, LATENT)),
        ((64, 3, 12), ("latent", "site", "d_in"), P(LATENT, None, DATA)),
        ((64,), ("latent",), P((LATENT, DATA))),
        ((6, 64), ("d_in", "latent"), P(None, (LATENT, DATA))),
        ((6, 62), ("d_in", "latent"), P(None, LATENT)),
        ((12, 7), ("d_in", "latent"), P(DATA, None)),
        ((5,), ("d_in",), P(None)),
        ((), (), P()),
    ):
        sharding = sharding_of(mesh, shape, logical, fsdp=True)
        assert sharding.spec == spec, shape
        sharding.shard_shape(shape)  # refuses what does not divide


def test_a_process_has_the_rows_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh(ParallelConfig((4, 2)))
    assert own_rows(mesh, 32) == (0, 32)
    with pytest.raises(ConfigError, match=r"batch_size 30 cannot be split over the 4 devices .* train\.batch_size=32"):
        own_rows(mesh, 30)
    assert own_rows(mesh, 24, 3) == (0, 24)
    refused = (
        r"batch_size 30 in 3 parts \(train\.accumulate\) .* 4 devices .* train\.batch_size=36, .*train\.accumulate"
    )
    with pytest.raises(ConfigError, match=refused):
        own_rows(mesh, 30, 3)
    for devices, rows in (({2, 3, 4, 5}, (8, 24)), ({0, 1}, (0, 8)), ({6}, (24, 32))):
        monkeypatch.setattr(
            NamedSharding,
            "addressable_devices_indices_map",
            lambda self, shape, devices=devices: {
                device: index for device, index in self.devices_indices_map(shape).items() if device.id in devices
            },
        )
        assert own_rows(mesh, 32) == rows


def test_processes_that_cannot_meet_are_told_what_to_set() -> None:
    alone = r"^parallel\.processes is '1/2', and .* must meet: set parallel\.coordinator to host:port"
    with pytest.raises(ConfigError, match=alone), joined(ParallelConfig(processes="1/2")):
        pass
    with pytest.raises(ConfigError, match=r"parallel\.coordinator is 'here'; it must be host:port"):
        ParallelConfig(coordinator="here")
    with pytest.raises(ConfigError, match=r"parallel\.heartbeat is 0"):
        ParallelConfig(heartbeat=0)
    with joined(ParallelConfig()) as process:
        assert process == Process(0, 1) and process.first
        assert from_first(process, lambda: 7) == 7 and any_of(process, True) and not any_of(process, False)


# --- shardings ---------------------------------------------------------------------------------------------


def test_tree_shardings_follow_names_into_optimizer_moments() -> None:
    mesh, coder = make_mesh(ParallelConfig((4, 2))), _coder()
    params = coder.init(jax.random.key(0))
    tree = {"params": params, "opt": optax.adam(1e-3).init(params), "stats": coder.init_stats(), "step": jnp.int32(0)}
    shardings = tree_shardings(mesh, tree, coder.logical_axes())
    want = {
        "W_enc": P(None, LATENT),
        "b_enc": P(LATENT),
        "W_dec": P(LATENT, None),
        "b_dec": P(None),
        "centre": P(None),
        "tokens_since_fired": P(LATENT),
    }
    adam = shardings["opt"][0]
    for place in (shardings["params"], adam.mu, adam.nu):
        assert {name: s.spec for name, s in place.items()} == {name: want[name] for name in params}
    assert shardings["stats"]["tokens_since_fired"].spec == want["tokens_since_fired"]
    assert adam.count.spec == shardings["step"].spec == P()
    assert jax.tree.structure(shardings) == jax.tree.structure(tree)

    placed = jax.device_put(tree, shardings)
    shard = {name: v.sharding.shard_shape(v.shape) for name, v in placed["params"].items()}
    assert shard == {"W_enc": (D, F // 2), "b_enc": (F // 2,), "W_dec": (F // 2, D), "b_dec": (D,), "centre": (D,)}


def test_tree_shardings_replicate_what_they_do_not_know() -> None:
    mesh, axes = make_mesh(ParallelConfig((4, 2))), {"W": ("latent", "d_in")}
    tree = {"W": jnp.ones((4, 3)), "other": jnp.ones((4, 3)), "deep": {"W": jnp.ones(4)}, "list": [jnp.ones(4)]}
    shardings = tree_shardings(mesh, tree, axes)
    assert shardings["W"].spec == P(LATENT, None)
    # Of another rank, of no known name, of no name at all.
    assert shardings["deep"]["W"] == shardings["other"] == shardings["list"][0] == replicated(mesh)


def test_batch_sharding_splits_rows_over_data_alone() -> None:
    mesh = make_mesh(ParallelConfig((4, 2)))
    assert batch_sharding(mesh).shard_shape((32, 5)) == (8, 5)
    assert replicated(mesh).shard_shape((32, 5)) == (32, 5)


def test_ties_go_to_the_lower_index_when_latents_are_sharded() -> None:
    mesh, coder = make_mesh(ParallelConfig((1, 8))), _coder()
    params = {name: jnp.zeros(shape) for name, shape in (("W_enc", (D, F)), ("W_dec", (F, D)), ("b_dec", (D,)))}
    params["b_enc"] = jnp.ones(F).at[5].set(0.0)
    placed = jax.device_put(params, tree_shardings(mesh, params, coder.logical_axes()))
    latents = jax.jit(coder.encode)(placed, jnp.zeros((B, D)))
    np.testing.assert_array_equal(np.sort(latents.indices, axis=1), np.tile([0, 1, 2], (B, 1)))
