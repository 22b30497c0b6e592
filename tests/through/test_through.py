"""The loss through the language model: its value and gradient, its text, its place in a training."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import replaced, tiny_experiment
from tiny.by_hand import (
    BOS,
    HOOK,
    SIDES,
    arrays,
    captured_at,
    coder_of,
    documents,
    in_turn_oracle,
    numpy_coder,
    pack_all,
    random_params,
    sites_of,
    splice_oracle,
    tiny_lm,
)
from tiny.trainings import assert_same, final

import saejax
from saejax.app.experiment import Experiment
from saejax.app.stages import run_capture, run_pipeline, run_train
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.capture import Journal, Sinks
from saejax.coders import Coder, Sites
from saejax.core.errors import ConfigError, DataError
from saejax.evals.in_turn import has_turns
from saejax.fit.resolve import step_program
from saejax.lm import LanguageModel
from saejax.parallel import ParallelConfig, make_mesh, on_mesh
from saejax.plans.outline import Outline
from saejax.text import PackedRows, Packer, Source
from saejax.through import TextBatches, Through
from saejax.through.loss import first_step
from saejax.through.text import _BLOCK, ARRAYS, TEXT
from saejax.training import TrainConfig
from saejax.training.profile import step_bytes

ONE = ParallelConfig((1, 1))
CASES = {**SIDES, "autoencoder": ((HOOK,), (HOOK,))}
QUICK = ("autoencoder", "transcoder", "clt")
SIDE = "per_layer_autoencoder"  # where both are replaced at once, the second hides the first


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_lm()


@pytest.fixture(scope="module")
def packed(lm: LanguageModel) -> PackedRows:
    return pack_all(lm)


def loss_of(lm: Any, coder: Coder, sites: Sites, rows: int, mesh: Any = None, **train: Any) -> Through:
    t = TrainConfig(**{"through": "kl", "through_rows": rows, "tokens": 4096, "batch_size": 64, **train})
    mesh = mesh or make_mesh(ONE)
    return Through.of(t, Sinks(), lm, lm.placed(mesh), lm.config.context_length, coder, sites, mesh)


def prefixed(packed: PackedRows) -> dict[str, jax.Array]:
    return {TEXT + name: value for name, value in arrays(packed).items()}


def made(topology: str, sparsity: str = "relu") -> tuple[Coder, Sites, dict[str, np.ndarray]]:
    coder = coder_of(topology, sparsity, *CASES[topology])
    return coder, sites_of(coder, *CASES[topology]), random_params(coder)


# --- value and gradient ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topology",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in CASES if name != SIDE],
)
def test_value_and_gradient_are_those_by_hand(lm: LanguageModel, packed: PackedRows, topology: str) -> None:
    """Value: float64, three separate runs and a loop over all pairs of tokens. Gradient: differences of the value."""
    coder, sites, params = made(topology)
    x = captured_at(lm, packed, sites.reads)
    _, y_hat = numpy_coder(topology, "relu", params, x)
    shape = (*packed.tokens.shape, -1)
    values = {name: y_hat[:, i].reshape(shape) for i, name in enumerate(sites.writes)}
    want = splice_oracle(lm, packed, values)
    stats = coder.init_stats()
    for kind, metric in (("kl", "kl"), ("ce", "ce_sae")):
        loss = loss_of(lm, coder, sites, len(packed.tokens), through=kind)
        gradient = jax.jit(loss.gradient)
        value, grads = gradient(params, stats, prefixed(packed), lm.params)
        assert float(value) == pytest.approx(want[metric], rel=1e-4)
        size = float(np.sqrt(sum(float((g**2).sum()) for g in grads.values())))
        assert size > 1e-3
        step = 0.01
        sides = [
            gradient({k: params[k] + s * step * grads[k] / size for k in params}, stats, prefixed(packed), lm.params)[0]
            for s in (1, -1)
        ]
        assert float(sides[0] - sides[1]) / (2 * step) == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize(
    "topology",
    [
        "clt",
        SIDE,
        *(pytest.param(n, marks=pytest.mark.soak) for n in ("skip_clt", "causal_crosscoder", "per_layer_transcoder")),
    ],
)
def test_in_turn_its_value_and_gradient_are_those_by_hand(lm: LanguageModel, packed: PackedRows, topology: str) -> None:
    """What the evaluation calls kl_in_turn; also in the training's own scales. Gradient: differences of the value."""
    coder, sites, params = made(topology)
    want = in_turn_oracle(lm, packed, topology, "relu", params)["kl_in_turn"]
    stats = coder.init_stats()
    for scales in ((1.0, 1.0), (0.5, 2.0)):
        tied = sites.reads == sites.writes
        scaled = dataclasses.replace(sites, read_scales=scales, write_scales=scales if tied else scales[::-1])
        # The same dictionary in units of the scaled activations.
        own = coder.topology.fold(
            params, *((tuple(1 / s for s in of)) for of in (scaled.read_scales, scaled.write_scales))
        )
        loss = loss_of(lm, coder, scaled, len(packed.tokens), through_in_turn=True)
        gradient = jax.jit(loss.gradient)
        value, grads = gradient(own, stats, prefixed(packed), lm.params)
        assert float(value) == pytest.approx(want, rel=1e-4)
        size = float(np.sqrt(sum(float((g**2).sum()) for g in grads.values())))
        sides = [
            gradient({k: own[k] + s * 0.01 * grads[k] / size for k in own}, stats, prefixed(packed), lm.params)[0]
            for s in (1, -1)
        ]
        assert float(sides[0] - sides[1]) / 0.02 == pytest.approx(size, rel=0.02)


def test_in_turn_is_refused_where_nothing_comes_in_turn(lm: LanguageModel) -> None:
    """One place alone, or places that the model has not computed when a group is read."""
    for topology in ("transcoder", "crosscoder"):
        coder, sites, _ = made(topology)
        with pytest.raises(ConfigError, match="with groups of latents that read one place each"):
            loss_of(lm, coder, sites, 8, through_in_turn=True)
    coder, sites, _ = made(SIDE)
    with pytest.raises(
        ConfigError, match=r"blocks\.1\.resid_mid hides those before it.*Set train\.through_in_turn=True"
    ):
        loss_of(lm, coder, sites, 8)
    coder, sites, _ = made("clt")
    assert has_turns(coder, sites, lm)
    late = dataclasses.replace(sites, reads=sites.reads[::-1], writes=sites.writes[::-1])
    assert not has_turns(coder, late, lm)
    with pytest.raises(ConfigError, match="Set one of them"):
        TrainConfig(through="ce", through_errors=True, through_in_turn=True)


def test_every_parameter_has_the_gradient_of_the_differences(lm: LanguageModel, packed: PackedRows) -> None:
    """In float64, entry by entry: also of a coder with a centre, in the training's own scale."""
    coder, sites, params = made("autoencoder")
    centred = dataclasses.replace(coder, topology=dataclasses.replace(coder.topology, centred=True))
    sites = dataclasses.replace(sites, read_scales=(0.3,), write_scales=(0.3,))
    params = params | {"centre": np.full(16, 0.1, np.float32)}
    loss = loss_of(lm, centred, sites, len(packed.tokens))
    rng = np.random.default_rng(0)
    _, grads = jax.jit(loss.gradient)(params, coder.init_stats(), prefixed(packed), lm.params)
    value = jax.jit(lambda p, model: loss.gradient(p, coder.init_stats(), prefixed(packed), model)[0])
    assert not np.asarray(grads["centre"]).any()
    for name in ("W_enc", "b_enc", "W_dec", "b_dec"):
        way = rng.normal(size=params[name].shape).astype(np.float32)
        way /= np.linalg.norm(way)
        # Few latents begin or end on so short a way.
        up, down = (float(value(params | {name: params[name] + s * 3e-3 * way}, lm.params)) for s in (1, -1))
        along = float((np.asarray(grads[name]) * way).sum())
        assert (up - down) / 6e-3 == pytest.approx(along, rel=0.1, abs=2e-2 * float(jnp.linalg.norm(grads[name]))), name


def test_parts_and_devices_change_no_number(lm: LanguageModel, packed: PackedRows) -> None:
    coder, sites, params = made("autoencoder", "topk")
    rows, found = 16, []
    assert len(packed.tokens) >= rows
    batch = {name: value[:rows] for name, value in prefixed(packed).items()}
    for shape, parts in (((1, 1), 1), ((1, 1), 4), ((2, 1), 1), ((4, 2), 2), ((2, 4), 1)):
        mesh = make_mesh(ParallelConfig(shape))
        loss = loss_of(lm, coder, sites, rows, mesh, through_parts=parts)
        run = jax.jit(on_mesh(loss.gradient, mesh))
        found.append(jax.device_get(run(params, coder.init_stats(), batch, loss.inputs)))
    for value, grads in found[1:]:
        assert value == pytest.approx(found[0][0], rel=1e-5)
        for name, g in found[0][1].items():
            np.testing.assert_allclose(grads[name], g, atol=1e-5 * np.abs(g).max(), err_msg=name)


def test_with_its_errors_the_model_computes_what_it_does_by_itself(lm: LanguageModel, packed: PackedRows) -> None:
    coder, sites, params = made("autoencoder")
    with_errors = loss_of(lm, coder, sites, len(packed.tokens), through="ce", through_errors=True)
    value, grads = with_errors.gradient(params, coder.init_stats(), prefixed(packed), lm.params)
    want = splice_oracle(lm, packed, {HOOK: captured_at(lm, packed, (HOOK,)).reshape(*packed.tokens.shape, -1)})
    assert float(value) == pytest.approx(want["ce_clean"], rel=1e-5)
    assert all(np.asarray(grads[name]).any() for name in params)


def test_sinks_are_not_replaced(lm: LanguageModel, packed: PackedRows) -> None:
    coder, sites, params = made("autoencoder")
    loss = loss_of(lm, coder, sites, len(packed.tokens))
    at = (prefixed(packed), lm.params)
    whole, _ = loss.gradient(params, coder.init_stats(), *at)
    fewer, _ = dataclasses.replace(loss, sinks=Sinks(first=ROW_END)).gradient(params, coder.init_stats(), *at)
    assert abs(float(fewer)) < 1e-6 < 1e-2 < float(whole)


ROW_END = 1000


# --- its text ----------------------------------------------------------------------------------------------------


def text_of(lm: LanguageModel, path: Path, rows: int = 3, seed: int = 0, count: int = 40) -> TextBatches:
    texts = documents(count)
    source = Source({}, lambda start: ((i, f"d{i}", str(i), t) for i, t in enumerate(texts) if i >= start), 0.0)
    return TextBatches(Packer(source, lm.tokenizer, 24), rows, seed, Journal(path, {"rows": rows, "seed": seed}))


def taken(of: TextBatches, start: int, count: int) -> list[dict[str, np.ndarray]]:
    rows = of.iterate(start)
    found = [next(rows) for _ in range(count)]
    rows.close()
    return found


@settings(deadline=None, max_examples=8)
@given(rows=st.integers(1, 9), starts=st.lists(st.integers(0, 2 * _BLOCK + 20), min_size=1, max_size=3))
def test_rows_are_those_of_an_undisturbed_training_from_any_step(
    tmp_path_factory: Any, rows: int, starts: list[int]
) -> None:
    lm, folder = tiny_lm(), tmp_path_factory.mktemp("text")
    whole = taken(text_of(lm, folder / "whole", rows), 0, 2 * _BLOCK + 25)
    for start in starts:
        for got, want in zip(taken(text_of(lm, folder / "again", rows), start, 5), whole[start:], strict=False):
            assert got.keys() == set(ARRAYS)
            for name in ARRAYS:
                np.testing.assert_array_equal(got[name], want[name])


def test_all_text_comes_and_its_order_follows_the_seed(lm: LanguageModel, tmp_path: Path) -> None:
    one, other = (taken(text_of(lm, tmp_path / str(seed), seed=seed), 0, _BLOCK) for seed in (0, 1))
    there, expected = ({row.tobytes() for batch in of for row in batch["tokens"]} for of in (one, other))
    assert there == expected  # whole epochs, mixed
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(one, other, strict=True))
    assert all(batch["tokens"][0, 0] == BOS for batch in one)


def test_no_text_is_said(lm: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not one activation"):
        taken(text_of(lm, tmp_path / "none", count=0), 0, 1)


# --- in a training -----------------------------------------------------------------------------------------------

SECOND = {"through": "kl", "through_rows": 2, "through_parts": 2, "through_from": 0.25}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("through")
    e = tiny_experiment(folder, coder={"d_sae": 64})
    run_capture(Workspace(e))
    assert run_train(Workspace(e)) == 0
    return folder


def second(folder: Path, name: str = "second", **sections: Any) -> Experiment:
    train = SECOND | sections.pop("train", {})
    top = {"name": name, "store": "tiny"} | sections.pop("top", {})
    return tiny_experiment(folder, top=top, coder={"d_sae": 64} | sections.pop("coder", {}), train=train, **sections)


def rows_of(e: Experiment) -> list[dict[str, Any]]:
    return [json.loads(line) for line in e.run.metrics.read_text().splitlines()]


def test_a_training_goes_on_from_a_dictionary_and_ends_bitwise_the_same_however_often_it_stops(
    captured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = {"init_from": str(captured / "runs" / "tiny"), "lr": 3e-4}
    whole, parts = second(captured, "whole", train=warm), second(captured, "parts", train=warm)
    assert run_train(Workspace(whole)) == 0
    iterate = TextBatches.iterate

    def dying(self: TextBatches, start: int) -> Any:
        for i, batch in enumerate(iterate(self, start)):
            if i == 17:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(TextBatches, "iterate", dying)
    with pytest.raises(KeyboardInterrupt):
        run_train(Workspace(parts))
    monkeypatch.undo()
    assert run_train(Workspace(parts)) == 0
    assert_same(final(whole.run_dir, 40), final(parts.run_dir, 40))
    first = first_step(whole.train)
    assert first == 10
    for row in rows_of(whole):
        if "train/through_kl" in row:
            assert (row["train/through_kl"] is None) == (row["step"] <= first), row["step"]
    assert saejax.load(whole.run_dir).coder.topology.d_sae == 64
    with pytest.raises(DataError, match=r"train\.through"):
        run_train(Workspace(second(captured, "whole", train=warm | {"through": "ce"})))


@pytest.mark.soak
def test_until_it_begins_a_training_is_what_it_is_without(captured: Path) -> None:
    until = {"tokens": 5 * 128, "checkpoint_every": 5, "validate_every": 0}
    ends = [
        second(captured, "none", train=until | dict.fromkeys(("through",), "") | UNSET),
        second(captured, "late", train=until | {"through_from": 0.9}),
    ]
    for e in ends:
        assert run_train(Workspace(e)) == 0
    assert first_step(ends[1].train) == 4
    none, late = ([row for row in rows_of(e) if "train/loss" in row] for e in ends)
    assert [row["train/loss"] for row in none[:-1]] == [row["train/loss"] for row in late[:-1]]
    # Divided by 1 + weight, the sum does not jump: both losses are of one size there.
    assert late[-1]["train/loss"] == pytest.approx(none[-1]["train/loss"], rel=0.05)
    assert late[-1]["train/through_kl"] > 0 and late[-2]["train/through_kl"] is None


UNSET = {key: getattr(TrainConfig(), key) for key in ("through_rows", "through_parts", "through_from")}


def test_the_second_loss_is_as_large_as_the_reconstruction_s(captured: Path) -> None:
    """And the step on several devices is that on one; with activations from the running model as from the store."""
    found = []
    cases: list[dict[str, Any]] = [
        {"parallel": {"mesh": (2, 1)}, "train": {"through_rows": 4, "through_weight": 0.5, "through_from": 0.0}},
        {"parallel": {"mesh": (1, 1)}, "train": {"through_rows": 4, "through_weight": 0.5, "through_from": 0.0}},
        {"capture": {"into": "training", "buffer_rows": 1024}, "train": {"through_from": 0.5}},
    ]
    for i, sections in enumerate(cases):
        train = {"tokens": 4 * 128, "log_every": 1} | sections.get("train", {})
        e = second(captured, f"scaled{i}", **(sections | {"train": train}))
        assert run_train(Workspace(e)) == 0
        found.append([row for row in rows_of(e) if "train/loss" in row])
        for row in found[-1]:
            own = {key: value for key, value in row.items() if key.startswith("train/")}
            if own["train/through_kl"] is None:
                continue
            coder = own["train/fvu"] + own["train/auxk"] / 32 + own["train/lift"] / 1000
            weight = e.train.through_weight
            assert own["train/loss"] * (1 + weight) - coder == pytest.approx(weight * own["train/fvu"], rel=0.01)
    for a, b in zip(*found[:2], strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)
        assert a["train/through_kl"] == pytest.approx(b["train/through_kl"], rel=1e-3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pmap": ({"parallel": {"mode": "pmap"}}, "needs parallel.mode=jit"),
    "rows": ({"parallel": {"mesh": (4, 1)}}, r"through_rows 2 cannot be dealt to 4 devices in 2 parts.*multiple of 8"),
    "no model": ({"lm": {"model": ""}}, "lm.model is empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(captured: Path, case: str) -> None:
    sections, message = REFUSED[case]
    e = second(captured, f"refused-{case.replace(' ', '-')}", **sections)
    with pytest.raises(ConfigError, match=message) as error:
        run_train(Workspace(e))
    assert "\n" not in str(error.value) and not e.run.metrics.exists()


def test_a_pipeline_refuses_it_before_it_captures(tmp_path: Path) -> None:
    points = ("blocks.1.resid_post", "blocks.3.resid_post")
    e = tiny_experiment(
        tmp_path,
        coder={"topology": "per_layer_autoencoder", "d_sae": 64},
        capture={"hook_points": points},
        train={"through": "kl", "through_rows": 2},
    )
    with pytest.raises(ConfigError, match=r"hides those before it.*through_in_turn=True"):
        run_pipeline(Workspace(e))
    assert not Path(e.store_dir("train")).exists()


def test_a_hook_point_after_which_nothing_follows_and_a_sweep_are_refused(captured: Path, lm: LanguageModel) -> None:
    coder, sites, _ = made("autoencoder")
    blind = Blind(lm)
    with pytest.raises(ConfigError, match=r"nothing that this model predicts depends on blocks\.0\.resid_post"):
        loss_of(blind, coder, sites, 2)
    with pytest.raises(ConfigError, match="PyTorch runs this one"):
        loss_of(Blind(lm, pure=False), coder, sites, 2)
    e = second(captured, "swept")
    swept = dataclasses.replace(e, sweep=dataclasses.replace(e.sweep, ks=(4, 8)))
    with pytest.raises(ConfigError, match=r"train\.through=kl is for a training of one coder"):
        run_sweep(Workspace(swept))


@dataclasses.dataclass
class Blind:
    """A model whose loss sees nothing of what is written."""

    lm: LanguageModel
    pure: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lm, name)

    def measures_loss(self, names: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"through_rows": 8}, "through_rows=8 does nothing without train.through"),
        ({"through": "kl", "through_errors": True}, "has no gradient"),
        ({"through": "kl", "through_rows": 6, "through_parts": 4}, "not a multiple of train.through_parts 4"),
        ({"through": "mse"}, "There are: kl, ce"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings_)


def test_a_plan_says_what_it_takes(captured: Path) -> None:
    """Within a quarter of the bytes of the whole compiled step."""
    e = second(captured, "planned", train={"through_rows": 8, "through_parts": 1}, text={"context_length": 128})
    mesh = make_mesh(ONE)
    work = Workspace(e)
    coder = work.build()
    whole: Any = step_program(e, coder, work.sites, mesh, np.dtype(np.float32), work.beside).step
    outline = Outline.of(e)
    second_, alone = outline.through(mesh), outline.step(mesh)[1]
    assert second_ is not None
    predicted = second_.state + alone.state + max(second_.temporaries, alone.temporaries)
    assert predicted == pytest.approx(step_bytes(whole.memory_analysis()), rel=0.25)
    assert Outline.of(replaced(e, "train", through="", **UNSET)).through(mesh) is None
