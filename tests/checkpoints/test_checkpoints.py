"""Checkpoints: what is saved comes back, on any devices, and nothing is cast or lost on the way."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from saejax.checkpoints import Checkpoints
from saejax.core.errors import BusyError, ConfigError, DataError
from saejax.core.lease import lease
from saejax.parallel import ParallelConfig, make_mesh

SPECS = {"W_enc": P(None, "latent"), "W_dec": P("latent", None), "b_enc": P("latent"), "b_dec": P()}
SHAPES = {"W_enc": (8, 32), "W_dec": (32, 8), "b_enc": (32,), "b_dec": (8,)}


def mesh_of(shape: tuple[int, int]) -> jax.sharding.Mesh:
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "latent"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def shardings(items: Any, mesh: jax.sharding.Mesh) -> Any:
    """The rule of SPECS for every leaf with such a name (also Adam's moments), else replicated."""

    def rule(path: Any, _: Any) -> NamedSharding:
        return NamedSharding(mesh, SPECS.get(jax.tree_util.keystr(path[-1:], simple=True), P()))

    return jax.tree_util.tree_map_with_path(rule, items)


def training_items(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    params = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, SHAPES.items(), strict=True)}
    adam = optax.adam(1e-3)
    _, opt = adam.update(jax.tree.map(jnp.sin, params), adam.init(params), params)
    stats = {"fired": jnp.arange(32, dtype=jnp.int32), "ema": jnp.full((), 0.1, jnp.bfloat16)}
    items = {"params": params, "opt": opt, "stats": stats, "none": {}}
    return jax.device_put(items, shardings(items, mesh))


def abstract_of(items: Any, mesh: jax.sharding.Mesh) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), items, shardings(items, mesh))


def small(value: float) -> dict[str, Any]:
    return {"params": {"w": jnp.full((4, 3), value), "n": jnp.asarray(int(value))}}


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def sharded_save(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded") / "checkpoints"
    items = training_items(mesh_of((4, 2)))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(7, items, {"config": {"lr": 1e-3}})
    return folder, items


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (1, 2), (1, 1)])
def test_restores_exactly_onto_other_meshes(sharded_save: Any, shape: tuple[int, int]) -> None:
    folder, items = sharded_save
    mesh = mesh_of(shape)
    step, got, meta = Checkpoints(folder).restore_latest(abstract_of(items, mesh)) or pytest.fail("nothing")
    assert step == 7 and meta == {"config": {"lr": 1e-3}}
    assert_same(got, items)
    for leaf, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(shardings(items, mesh)), strict=True):
        assert leaf.sharding == sharding


def test_axes_may_have_had_other_names(sharded_save: Any) -> None:
    """Those of saejax's meshes were called "data" and "latent"."""
    folder, items = sharded_save
    sharding = NamedSharding(make_mesh(ParallelConfig((2, 4))), P())
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), items)
    got = Checkpoints(folder).restore(7, wanted)[0]
    assert_same(got, items)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(got))


def test_restores_a_subset_of_the_items(sharded_save: Any) -> None:
    folder, items = sharded_save
    got, _ = Checkpoints(folder).restore(7, {"stats": items["stats"]})
    assert_same(got, {"stats": items["stats"]})
    with pytest.raises(DataError, match=r"no item 'reader'.*params"):
        Checkpoints(folder).restore(7, {"reader": items["stats"]})


def test_numpy_needs_neither_tree_nor_devices(sharded_save: Any) -> None:
    folder, items = sharded_save
    got, meta = Checkpoints(folder).restore_numpy(7, ("params", "opt", "stats", "none"))
    assert meta == {"config": {"lr": 1e-3}} and got["none"] == {}
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(got))
    assert_same(got["params"], items["params"])
    assert_same(got["opt"]["0"]["mu"], items["opt"][0].mu)
    assert_same(got["stats"], items["stats"])
    assert set(Checkpoints(folder).restore_numpy(7)[0]) == {"params"}


def test_a_leaf_without_sharding_goes_to_the_first_device(sharded_save: Any) -> None:
    folder, items = sharded_save
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), items["params"])
    got, _ = Checkpoints(folder).restore(7, {"params": plain})
    assert_same(got["params"], items["params"])
    assert got["params"]["W_enc"].devices() == {jax.devices()[0]}


def test_plain_orbax_finds_and_reads_the_step(sharded_save: Any) -> None:
    folder, items = sharded_save
    options = ocp.CheckpointManagerOptions(step_format_fixed_length=9, read_only=True)
    with ocp.CheckpointManager(folder, options=options) as manager:
        assert manager.all_steps() == [7]
        args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract_of(items["params"], mesh_of((4, 2)))))
        assert_same(manager.restore(7, args=args)["params"], items["params"])


@pytest.mark.parametrize(
    ("leaf", "asked", "said"),
    [
        ("W_enc", ((8, 32), jnp.bfloat16), "params/W_enc was saved with dtype float32, but dtype bfloat16"),
        ("b_dec", ((9,), jnp.float32), r"params/b_dec was saved with shape \[8\], but shape \[9\]"),
        ("extra", ((1,), jnp.float32), "the checkpoint has no leaf params/extra"),
    ],
)
def test_a_tree_that_differs_is_refused_by_name(sharded_save: Any, leaf: str, asked: Any, said: str) -> None:
    folder, items = sharded_save
    tree = {**items["params"], leaf: jax.ShapeDtypeStruct(*asked)}
    with pytest.raises(DataError, match=said):
        Checkpoints(folder).restore_latest({"params": tree})


def test_a_missing_leaf_is_refused_by_name(sharded_save: Any) -> None:
    folder, items = sharded_save
    tree = {k: v for k, v in items["params"].items() if k != "b_enc"}
    with pytest.raises(DataError, match="the tree asked for has no leaf params/b_enc"):
        Checkpoints(folder).restore(7, {"params": tree})


def test_what_is_saved_is_what_was_there_when_save_returned(tmp_path: Path) -> None:
    """Donation, in-place change of numpy arrays and of the meta dict come too late to be seen."""
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    mesh = mesh_of((4, 2))
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(3):
            tree = {"x": jnp.full((256, 1024), float(step))}
            tree = jax.device_put(tree, NamedSharding(mesh, P(None, "latent")))
            counts, meta = np.full(50_000, step), {"list": [step]}
            checkpoints.save(step, {"tree": tree, "host": {"counts": counts}}, meta)
            jax.block_until_ready(overwrite(tree))
            counts[:] = -1
            meta["list"].append(-1)
            assert tree["x"].is_deleted()
            checkpoints.wait()
            got, meta = checkpoints.restore_numpy(step, ("tree", "host"))
            assert meta == {"list": [step]}
            assert (got["tree"]["x"] == step).all() and (got["host"]["counts"] == step).all()


def test_meta_comes_back_as_json_does(tmp_path: Path) -> None:
    meta = {"text": "ä \u2028 'quoted'", "numbers": [1, -2.5, 1e300, 2**60], "none": None, "deep": {"a": [{}]}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(1), meta)
        assert checkpoints.restore(1, small(1))[1] == meta
        with pytest.raises(DataError, match="meta dict is not JSON"):
            checkpoints.save(2, small(1), {"array": np.ones(2)})


@pytest.mark.parametrize(
    ("items", "error", "said"),
    [
        ({"params": {"lr": 0.1}}, DataError, "leaf 'lr' is of type float"),
        ({"params": jnp.ones(3)}, DataError, "'params' is a bare array"),
        ({"meta": {"a": jnp.ones(3)}}, ConfigError, "item 'meta'"),
        ({"../up": {"a": jnp.ones(3)}}, ConfigError, r"item '\.\./up'"),
    ],
)
def test_items_that_cannot_be_saved(tmp_path: Path, items: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        Checkpoints(tmp_path).save(1, items, {})
    assert Checkpoints(tmp_path).steps() == []


def test_keeps_the_last_n_and_every_mth(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep_last=2, keep_every=4) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, small(step), {})
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6, 7] and checkpoints.latest() == 7
        assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [f"{s:09d}" for s in (4, 6, 7)]


def test_what_was_just_saved_outlives_newer_damage(tmp_path: Path) -> None:
    """Step 9 is damaged, the run goes on from 3: saving 5 must not count 9 as the one to keep."""
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    for step in (3, 9, 5):
        if step == 5:
            (tmp_path / "000000009" / "params" / "_METADATA").unlink()
        with Checkpoints(tmp_path, keep_last=1 if step != 9 else 2) as one:
            one.save(step, small(step), {})
    assert checkpoints.steps() == [5, 9]
    with pytest.warns(UserWarning, match="falling back to step 5"):
        assert (checkpoints.restore_latest(small(0)) or [None])[0] == 5


def test_a_good_step_is_not_saved_again_and_a_damaged_one_is(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {"turn": 1})
    checkpoints.save(1, small(2), {"turn": 2})
    assert checkpoints.restore(1, small(0))[1] == {"turn": 1}
    (tmp_path / "000000001" / "params" / "_METADATA").unlink()
    checkpoints.save(1, small(2), {"turn": 2})
    items, meta = checkpoints.restore(1, small(0))
    assert meta == {"turn": 2} and (items["params"]["w"] == 2).all()


def test_nothing_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.steps() == [] and checkpoints.latest() is None
    assert checkpoints.restore_latest(small(0)) is None
    with pytest.raises(DataError, match="not a complete checkpoint"):
        checkpoints.restore(3, small(0))
    assert not (tmp_path / "none").exists()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with lease(tmp_path), pytest.raises(BusyError):
        checkpoints.save(1, small(1), {})
    checkpoints.save(1, small(1), {})
    checkpoints.close()
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize("kwargs", [{"keep_last": 0}, {"keep_every": 0}])
def test_impossible_policies(tmp_path: Path, kwargs: Any) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(kwargs))} is 0"):
        Checkpoints(tmp_path, **kwargs)


def test_the_manifest_describes_every_file_and_leaf(sharded_save: Any) -> None:
    folder = sharded_save[0] / "000000007"
    body = json.loads((folder / "integrity.json").read_text())["body"]
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    del files["integrity.json"]
    assert {name: entry["size"] for name, entry in body["files"].items()} == files
    assert {"path": "0/mu/W_enc", "dtype": "float32", "shape": [8, 32]} in body["items"]["opt"]
    assert (body["format"], body["step"], body["items"]["none"]) == (1, 7, [])
