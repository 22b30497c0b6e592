"""Bytes of compiled programs: against the arrays of a training that runs, and against XLA on every mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saejax.app.experiment import Experiment, default_config, experiment
from saejax.capture import ALL_TOKENS
from saejax.coders import CoderConfig, Sites, build
from saejax.core.errors import ConfigError
from saejax.evals.evaluate import clean_run, spliced_run
from saejax.lm import load_lm
from saejax.parallel import DATA, ParallelConfig, batch_sharding, make_mesh, replicated
from saejax.plans import lm_stages
from saejax.plans.collectives import collectives
from saejax.plans.models import shape_of
from saejax.plans.outline import Outline, mesh_of
from saejax.plans.programs import _footprint, bytes_on_one, forward_footprint, step_program
from saejax.training.profile import step_bytes

MESHES = ((1, 1), (4, 1), (2, 2), (1, 4))


def made(**values: Any) -> Experiment:
    config = default_config()
    small = {"coder.d_sae": 256, "coder.k": 8, "train.batch_size": 64, "train.tokens": 6400, "eval.batch_rows": 2}
    config.update_from_flattened_dict(small | {key.replace("__", "."): value for key, value in values.items()})
    return experiment(config)


def on(e: Experiment, mesh: tuple[int, int], fsdp: bool = False) -> tuple[Outline, Any]:
    e = dataclasses.replace(e, parallel=dataclasses.replace(e.parallel, mesh=mesh, fsdp=fsdp))
    outline = Outline.of(e)
    return outline, mesh_of(e, mesh[0] * mesh[1], jax.devices())


@pytest.mark.parametrize(("mesh", "fsdp"), [*((mesh, False) for mesh in MESHES), ((4, 1), True), ((2, 2), True)])
def test_state_and_batch_are_what_a_training_holds_on_its_fullest_device(mesh: tuple[int, int], fsdp: bool) -> None:
    outline, virtual = on(made(coder__preset="standard"), mesh, fsdp)
    program, work = step_program(outline.experiment, outline.coder(), outline.work.sites, virtual)
    state = program.start()
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    assert work.state == max(held.values())
    assert work.batch == 64 // mesh[0] * 128 * 2
    # A compiled step is typed as the function that it is; memory_analysis is jax's.
    assert work.bytes == pytest.approx(step_bytes(program.step.memory_analysis()), rel=1e-6)  # type: ignore[attr-defined]


def test_what_training_refuses_of_a_mesh_a_plan_refuses() -> None:
    outline, virtual = on(made(coder__d_sae=250), (1, 4))
    with pytest.raises(ConfigError, match="250 latents cannot be split over the 4 devices"):
        outline.step(virtual)
    outline, virtual = on(made(train__batch_size=62), (4, 1))
    with pytest.raises(ConfigError, match="62 cannot be split over 4 devices"):
        outline.step(virtual)
    with pytest.raises(ConfigError, match="has 4 devices along latent, which does not divide 6"):
        mesh_of(dataclasses.replace(made(), parallel=dataclasses.replace(made().parallel, mesh=(2, 4))), 6)


def test_a_forward_pass_of_two_blocks_stands_for_all() -> None:
    """The model of six blocks, compiled whole, against the first two with the rest added up."""
    lm, shape, names, rows = load_lm("demo"), shape_of("demo"), ["blocks.5.resid_post"], (8, 64)
    mesh = mesh_of(made(), 1, jax.devices())
    found = forward_footprint(shape, names, rows, "float32", mesh)

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        return lm.apply(params, tokens, tokens * 0, tokens * 0, names)[1][names[0]].astype(jnp.bfloat16)

    tokens = jax.ShapeDtypeStruct(rows, jnp.int32)
    whole = jax.jit(forward).lower(lm.params, tokens).compile()
    assert found.state == sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    between = step_bytes(whole.memory_analysis()) - found.state - 12 * rows[0] * rows[1]
    # XLA may let two blocks' arrays live at the same time, or one's.
    assert 0.6 * between < found.temporaries < 1.6 * between
    assert found.flops == pytest.approx(whole.cost_analysis()["flops"], rel=0.15)


@pytest.mark.parametrize(("preset", "rows"), [("topk", 4), ("standard", 8)])
def test_an_evaluation_takes_what_its_programs_do(preset: str, rows: int) -> None:
    e = made(coder__preset=preset, coder__d_sae=1024)
    lm, shape, coder = load_lm("demo"), shape_of("demo"), Outline.of(e).coder()
    sites = Outline.of(e).work.sites
    found = lm_stages.evaluation(shape, coder, sites, (rows, 128), "float32")
    own = Sites(*sites, (1.0,), (1.0,))
    packed = {name: jax.ShapeDtypeStruct((rows, 128), jnp.int32) for name in ("tokens", "positions", "segments")}
    packed["keep"] = jax.ShapeDtypeStruct((rows, 128), jnp.bool_)
    params = jax.eval_shape(coder.init, jax.random.key(0))
    alone = clean_run(lm, own, ALL_TOKENS)
    _, clean = jax.eval_shape(alone, lm.params, packed)
    second = jax.jit(spliced_run(lm, coder, own)).lower(params, lm.params, clean, packed).compile()
    assert found.bytes == pytest.approx(step_bytes(second.memory_analysis()), rel=0.15)


def test_an_evaluation_s_passes_are_counted_as_it_runs_them() -> None:
    """Five where a kept token stands first in every text: the demo has a bos token, which is never kept."""
    found = {}
    for name, given in {
        "bos": {},
        "no bos": {"text__prepend_bos": False},
        "two": {"capture__drop_first": 2},
        "all kept": {"text__prepend_bos": False, "capture__drop_first": 0},
    }.items():
        found[name], note = lm_stages.first_tokens_are_sinks(Outline.of(made(**given)))
        assert note == ""
    assert found == {"bos": False, "no bos": True, "two": True, "all kept": False}
    shape, coder, sites = shape_of("demo"), Outline.of(made()).coder(), Outline.of(made()).work.sites
    assert sites == (("blocks.3.resid_post",),) * 2 and shape.n_layer == 6
    three, five = (lm_stages.evaluation(shape, coder, sites, (2, 128), "float32", sinks) for sinks in (False, True))
    assert three.bytes == five.bytes
    whole, behind = (2 * (shape.operations(128) - shape.operations(128, blocks)) for blocks in (0, 4))
    coded = 2.0 * 2 * 128 * lm_stages.parameter_bytes(coder) / 4
    assert three.flops == pytest.approx(whole + 2 * behind + coded)
    assert five.flops == pytest.approx(whole + 4 * behind + 2 * coded)
    grouped = build(CoderConfig("clt", d_sae=512, k=8), [128] * 6, 10, [128] * 6)
    reads, writes = (tuple(f"blocks.{i}.{name}" for i in range(6)) for name in ("mlp_in", "mlp_out"))
    of_all = reads, writes
    four, seven = (lm_stages.evaluation(shape, grouped, of_all, (2, 128), "float32", sinks) for sinks in (False, True))
    coded = 2.0 * 2 * 128 * lm_stages.parameter_bytes(grouped) / 4  # at once and in turn
    assert four.flops == pytest.approx(4 * whole + 2 * coded)
    assert seven.flops == pytest.approx(7 * whole + 4 * coded)
    assert all(b > a for a, b in zip(three.amounts, five.amounts, strict=True))


def test_without_a_tokenizer_the_plan_says_what_it_took_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_stages, "has_bos", lambda *_: None)
    sinks, note = lm_stages.first_tokens_are_sinks(Outline.of(made()))
    assert not sinks and "as if the model had a bos token" in note


def test_bytes_on_one_device_are_those_of_its_shards() -> None:
    mesh = mesh_of(made(), 4, jax.devices())
    shapes = [
        jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=batch_sharding(mesh)),
        jax.ShapeDtypeStruct((5,), np.int8, sharding=replicated(mesh)),
    ]
    assert bytes_on_one(shapes) == 2 * 3 * 4 + 5


GROUPS_OF_TWO = "replica_groups=mesh['data'=2,'latent'=2] {'latent'}"


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        (f"  %p = f32[6]{{0}} all-reduce(%x), {GROUPS_OF_TWO}, to_apply=%add", 24.0),
        ("  %s = f32[10]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}", 40 * 3.0),
        ("  %c = f32[10]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", 40.0),
        ("  %all-reduce.1 = f32[10,5]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add", 2 * 200 * 3 / 4),
        ("  ROOT %r = (f32[4]{0}, bf16[2]{0}) all-reduce(%x, %y), replica_groups=[2,2]<=[4], to_apply=%add", 20.0),
        ("  %a = pred[8]{0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}", 4.0),
        ("  %all-reduce.2 = f32[10,5]{1,0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add", 0.0),
        ("  %s = f32[10]{0} all-reduce-start(%x), replica_groups={}, to_apply=%add", 2 * 40 * 3 / 4),
        ("  %add.2 = f32[10,5]{1,0} add(%x, %y)", 0.0),
    ],
)
def test_what_a_collective_sends(line: str, sent: float) -> None:
    text = f"HloModule one, num_partitions=4\n\nENTRY %main (x: f32[10]) -> f32[10] {{\n{line}\n}}\n"
    assert sum(one.sent for one in collectives(text)) == sent


def test_a_loop_sends_as_often_as_it_runs_and_what_a_branch_sends_is_not_the_plan_s() -> None:
    """Seven turns with a sum over four devices, and a branch with another."""
    mesh = make_mesh(ParallelConfig((4, 1)), jax.devices()[:4])

    def local(x: jax.Array) -> jax.Array:
        def turn(i: jax.Array, y: jax.Array) -> jax.Array:
            return jax.lax.psum(y, DATA) / 4

        x = jax.lax.fori_loop(0, 7, turn, x)
        return jax.lax.cond(x.sum() > 0, lambda y: jax.lax.psum(y, DATA), lambda y: y, x)

    whole = jax.sharding.PartitionSpec()
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))
    compiled = run.lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
    found = sorted((one.branch, one.times, one.sent) for one in collectives(compiled.as_text()))
    assert found == [(False, 7, 7 * 2 * 32 * 3 / 4), (True, 1, 2 * 32 * 3 / 4)]
    work = _footprint(compiled, 0.0, 0.0)
    assert (work.sent, work.collectives) == (7 * 2 * 32 * 3 / 4, 7)


def test_a_step_on_one_device_sends_nothing_and_on_several_at_least_its_gradients() -> None:
    e = made(coder__preset="standard")
    alone, several = (Outline.of(e).step(mesh_of(e, n, jax.devices()))[1] for n in (1, 4))
    gradients = 4 * (2 * 128 * 256 + 256 + 128)
    assert alone.sent == alone.collectives == 0
    assert 2 * gradients * 3 / 4 <= several.sent <= 1.2 * 2 * gradients * 3 / 4
