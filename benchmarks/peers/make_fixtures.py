"""Writes what the peers' own code computes, for tests/coders/test_peers.py to compare saejax with.

    build/peers-venv/bin/python benchmarks/peers/make_fixtures.py [folder]

One .npz for each case, and cases.json with the peer, its version, the classes and every setting. Parameters carry
saejax's names and layouts (W_enc [D, F], b_enc [F], W_dec [F, D], b_dec [D], threshold, r_mag, b_mag). Arrays:

    x [3, B, D]           three batches; those of batches.npz where a case has none of its own
    init/<parameter>      where the peer starts
    dead [F]              latents that had not fired for long when the first batch came
    loss, part/<name>     of the first batch; parts as the peer reports them
    grad/<parameter>      of that loss, before clipping and projection
    after1/, after3/      parameters after one and after three steps of the peer's own trainer
    ema [3]               the inference threshold after each of those steps, where there is one
    idle [3, F]           the peer's count of steps or tokens since each latent fired, after each of them
    eval/latents, eval/y_hat   the trained coder on the last batch, through the peer's inference path

Everything is float32, as the peers compute by default.
"""

import copy
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import peer_classes as peers
import torch

D, F, B, K, LR = 16, 48, 32, 6, 1e-3
GROUPS = (8, 24, 48)
FIXTURES = pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "peers"
# Steps of a trainer for which a latent has not fired, where SAELens counts it as dead.
WINDOW = 1000
# dictionary_learning's weight of AuxK: far above its default of 1 / 32, which the rest of the loss would hide.
AUXK = 8.0

Arrays = dict[str, np.ndarray]
Case = tuple[Arrays, dict[str, Any]]
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


# --- inputs ------------------------------------------------------------------------------------------------


def batches(seed: int = 1, width: int = D) -> np.ndarray:
    """[3, B, width] float32, not centred."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(3, B, width)) + rng.normal(size=width) * 0.5).astype(np.float32)


def weights(n_dead: int = 0, unit: bool = False, d_out: int = D, seed: int = 0) -> tuple[Arrays, np.ndarray]:
    """(parameters, dead): nothing in a special position. `unit`: decoder rows of length 1, as dictionary_learning has.

    Dead latents read weakly, so that they rarely win; the first of them fires all the same, with the first batch.
    """
    rng = np.random.default_rng(seed)
    p = {
        "W_enc": rng.normal(size=(D, F)) * 0.4,
        "b_enc": rng.normal(size=F) * 0.3,
        "W_dec": rng.normal(size=(F, d_out)) * rng.uniform(0.15, 0.4, size=(F, 1)),
        "b_dec": rng.normal(size=d_out) * 0.3,
        "threshold": rng.uniform(0.1, 0.8, size=F),
        "r_mag": rng.normal(size=F) * 0.2,
        "b_mag": rng.normal(size=F) * 0.3,
        "W_skip": rng.normal(size=(D, d_out)) * 0.2,
    }
    which = rng.permutation(F)[:n_dead]
    p["W_enc"][:, which] *= 0.25
    p["b_enc"][which] *= 0.5
    p["b_enc"][which[:1]] = 2.5
    dead = np.zeros(F, bool)
    dead[which] = True
    if unit:
        p["W_dec"] /= np.linalg.norm(p["W_dec"], axis=1, keepdims=True)
    return {name: value.astype(np.float32) for name, value in p.items()}, dead


# --- names of the peers' parameters: (theirs, ours, transposed) ------------------------------------------------

Names = tuple[tuple[str, str, bool], ...]
PLAIN: Names = tuple((n, n, False) for n in ("W_enc", "b_enc", "W_dec", "b_dec"))
THRESHOLD: Names = (*PLAIN, ("threshold", "threshold", False))
GATED: Names = (
    ("W_enc", "W_enc", False),
    ("b_gate", "b_enc", False),
    ("r_mag", "r_mag", False),
    ("b_mag", "b_mag", False),
    ("W_dec", "W_dec", False),
    ("b_dec", "b_dec", False),
)
LINEAR: Names = (
    ("encoder.weight", "W_enc", True),
    ("encoder.bias", "b_enc", False),
    ("decoder.weight", "W_dec", True),
    ("b_dec", "b_dec", False),
)
LINEAR_BIAS: Names = (*LINEAR[:3], ("bias", "b_dec", False))
LINEAR_GATED: Names = (
    ("encoder.weight", "W_enc", True),
    ("gate_bias", "b_enc", False),
    ("r_mag", "r_mag", False),
    ("mag_bias", "b_mag", False),
    ("decoder.weight", "W_dec", True),
    ("decoder_bias", "b_dec", False),
)


def load(module: torch.nn.Module, names: Names, values: Arrays) -> None:
    own = dict(module.named_parameters())
    assert set(own) == {name for name, _, _ in names}, sorted(own)
    for name, ours, transposed in names:
        value = torch.from_numpy(values[ours].T.copy() if transposed else values[ours].copy())
        assert own[name].shape == value.shape, (name, own[name].shape, value.shape)
        own[name].data.copy_(value)


def numbers(module: torch.nn.Module, names: Names, prefix: str, gradient: bool = False) -> Arrays:
    own, found = dict(module.named_parameters()), {}
    for name, ours, transposed in names:
        value = own[name].grad if gradient else own[name].data
        assert value is not None, name
        array = value.detach().numpy()
        found[f"{prefix}/{ours}"] = (array.T if transposed else array).copy()
    return found


def started(names: Names, values: Arrays, dead: np.ndarray) -> Arrays:
    return {"x": batches(), "dead": dead} | {f"init/{ours}": values[ours] for _, ours, _ in names}


# --- SAELens -----------------------------------------------------------------------------------------------


def saelens(sae_class: Any, config: Any, names: Names = PLAIN, n_dead: int = 0, **changed: Any) -> Case:
    """Gradients of `training_forward_pass`, and three steps of `SAETrainer.step`."""
    values, dead = weights(n_dead)
    values |= {name: np.asarray(value, np.float32) for name, value in changed.items()}
    sae = sae_class(config)
    load(sae, names, values)
    settings = {"lr": LR, "adam_beta1": 0.9, "adam_beta2": 0.999, "dead_feature_window": WINDOW}
    trainer = peers.SAETrainer(
        cfg=peers.SAETrainerConfig(total_training_samples=100 * B, train_batch_size_samples=B, lr_end=LR, **settings),
        sae=sae,
        data_provider=iter(()),
    )
    trainer.n_forward_passes_since_fired[torch.from_numpy(dead)] = WINDOW + 1

    found = started(names, values, dead)
    probe = copy.deepcopy(sae)
    out = probe.training_forward_pass(
        peers.TrainStepInput(
            sae_in=torch.from_numpy(found["x"][0]),
            dead_neuron_mask=trainer.dead_neurons,
            coefficients=trainer.get_coefficients(),
            n_training_steps=0,
            is_logging_step=False,
        )
    )
    out.loss.backward()
    found |= {"loss": out.loss.detach().numpy()} | {f"part/{n}": v.detach().numpy() for n, v in out.losses.items()}
    found |= numbers(probe, names, "grad", gradient=True)

    ema, idle = [], []
    for i, x in enumerate(found["x"]):
        trainer.step(torch.from_numpy(x))
        trainer.n_training_steps += 1
        idle.append(trainer.n_forward_passes_since_fired.numpy().copy())
        if hasattr(sae, "topk_threshold"):
            ema.append(float(sae.topk_threshold))
        if i in (0, 2):
            found |= numbers(sae, names, f"after{i + 1}")
    found |= {"idle": np.array(idle)} | ({"ema": np.array(ema)} if ema else {}) | _saelens_inference(sae, found["x"][2])
    return found, {
        "peer": "sae-lens",
        "class": sae_class.__name__,
        "functions": ["training_forward_pass", "SAETrainer.step", "process_state_dict_for_saving_inference"],
        "optimizer": settings | {"clip_grad_norm": 1.0, "eps": 1e-8},
        "settings": {k: v for k, v in dataclasses.asdict(config).items() if k != "metadata"},
    }


def _saelens_inference(sae: Any, x: np.ndarray) -> Arrays:
    """What a saved coder gives when it is loaded again for inference."""
    state = {name: value.clone() for name, value in sae.state_dict().items()}
    sae.process_state_dict_for_saving_inference(state)
    described = sae.cfg.get_inference_sae_cfg_dict()
    loaded = peers.SAE.from_dict(described)
    loaded.process_state_dict_for_loading(state)
    loaded.load_state_dict(state)
    with torch.no_grad():
        latents = loaded.encode(torch.from_numpy(x))
        return {"eval/latents": latents.numpy(), "eval/y_hat": loaded.decode(latents).numpy()}


@case
def saelens_standard() -> Case:
    return saelens(peers.StandardTrainingSAE, peers.StandardTrainingSAEConfig(d_in=D, d_sae=F, l1_coefficient=0.7))


@case
def saelens_standard_uncentred() -> Case:
    config = peers.StandardTrainingSAEConfig(d_in=D, d_sae=F, l1_coefficient=0.7, apply_b_dec_to_input=False)
    return saelens(peers.StandardTrainingSAE, config)


@case
def saelens_gated() -> Case:
    return saelens(peers.GatedTrainingSAE, peers.GatedTrainingSAEConfig(d_in=D, d_sae=F, l1_coefficient=0.7), GATED)


def _saelens_topk(n_dead: int, **settings: Any) -> Case:
    return saelens(peers.TopKTrainingSAE, peers.TopKTrainingSAEConfig(d_in=D, d_sae=F, k=K, **settings), n_dead=n_dead)


@case
def saelens_topk() -> Case:
    return _saelens_topk(0)


@case
def saelens_topk_by_value() -> Case:
    return _saelens_topk(0, rescale_acts_by_decoder_norm=False)


@case
def saelens_topk_few_dead() -> Case:
    return _saelens_topk(5)


@case
def saelens_topk_many_dead() -> Case:
    return _saelens_topk(20)


@case
def saelens_batchtopk() -> Case:
    config = peers.BatchTopKTrainingSAEConfig(d_in=D, d_sae=F, k=K)
    return saelens(peers.BatchTopKTrainingSAE, config, n_dead=5)


def _saelens_matryoshka(**settings: Any) -> Case:
    config = peers.MatryoshkaBatchTopKTrainingSAEConfig(
        d_in=D, d_sae=F, k=K, matryoshka_widths=list(GROUPS), **settings
    )
    return saelens(peers.MatryoshkaBatchTopKTrainingSAE, config, n_dead=20)


@case
def saelens_matryoshka() -> Case:
    return _saelens_matryoshka()


@case
def saelens_matryoshka_auxk_by_level() -> Case:
    return _saelens_matryoshka(use_matryoshka_aux_loss=True)


def _saelens_jumprelu(changed: dict[str, Any] | None = None, **settings: Any) -> Case:
    config = peers.JumpReLUTrainingSAEConfig(d_in=D, d_sae=F, jumprelu_bandwidth=0.5, l0_coefficient=0.3, **settings)
    return saelens(peers.JumpReLUTrainingSAE, config, THRESHOLD, n_dead=5, **(changed or {}))


@case
def saelens_jumprelu_step() -> Case:
    return _saelens_jumprelu()


@case
def saelens_jumprelu_step_through_input() -> Case:
    return _saelens_jumprelu(jumprelu_ste_to_input=True)


@case
def saelens_jumprelu_negative_threshold() -> Case:
    threshold = weights(5)[0]["threshold"]
    threshold[:12] = -0.05
    return _saelens_jumprelu({"threshold": threshold})


@case
def saelens_jumprelu_quadratic() -> Case:
    return _saelens_jumprelu(jumprelu_sparsity_loss_mode="quadratic", target_l0=10.0)


@case
def saelens_jumprelu_tanh() -> Case:
    """Anthropic's setup: tanh, the pre-activation loss (its weight enlarged so that it is seen), gradients to all."""
    return _saelens_jumprelu(
        jumprelu_sparsity_loss_mode="tanh", pre_act_loss_coefficient=0.2, jumprelu_ste_to_input=True
    )


@case
def saelens_jumprelu_tanh_threshold_only() -> Case:
    return _saelens_jumprelu(jumprelu_sparsity_loss_mode="tanh", pre_act_loss_coefficient=0.2)


def _saelens_transcoder(sae_class: Any, config_class: Any, own: tuple[str, ...]) -> Case:
    """SAELens trains no transcoders; it loads and runs them."""
    d_out = 12
    config = config_class(d_in=D, d_sae=F, d_out=d_out, apply_b_dec_to_input=False)
    names: Names = tuple((name, name, name == "W_skip") for name in (*(n for n, _, _ in PLAIN), *own))
    values, _ = weights(d_out=d_out)
    sae = sae_class(config)
    load(sae, names, values)
    x = batches()
    with torch.no_grad():
        y_hat, latents = sae.forward_with_activations(torch.from_numpy(x[2]))
    found = {"x": x, "eval/latents": latents.numpy(), "eval/y_hat": y_hat.numpy()}
    return found | {f"init/{ours}": values[ours] for _, ours, _ in names}, {
        "peer": "sae-lens",
        "class": sae_class.__name__,
        "functions": ["forward_with_activations"],
        "settings": {"d_in": D, "d_sae": F, "d_out": d_out},
    }


@case
def saelens_transcoder() -> Case:
    return _saelens_transcoder(peers.Transcoder, peers.TranscoderConfig, ())


@case
def saelens_skip_transcoder() -> Case:
    return _saelens_transcoder(peers.SkipTranscoder, peers.SkipTranscoderConfig, ("W_skip",))


@case
def saelens_jumprelu_transcoder() -> Case:
    return _saelens_transcoder(peers.JumpReLUTranscoder, peers.JumpReLUTranscoderConfig, ("threshold",))


# --- dictionary_learning -----------------------------------------------------------------------------------


def dictionary_learning(
    trainer_class: Any, names: Names, n_dead: int = 0, unit: bool = True, prepare: Any = None, **settings: Any
) -> Case:
    """Gradients of `trainer.loss`, and three calls of `trainer.update`.

    Steps count from 1: at step 0 the trainers would move b_dec to the batch's median.
    """
    values, dead = weights(n_dead, unit)
    common = {"steps": 100, "activation_dim": D, "dict_size": F, "lr": LR, "warmup_steps": 0, "seed": 0}
    trainer = trainer_class(layer=0, lm_name="none", device="cpu", **common, **settings)
    load(trainer.ae, names, values)
    if n_dead:
        trainer.num_tokens_since_fired[torch.from_numpy(dead)] = trainer.dead_feature_threshold
    if prepare:
        prepare(trainer)

    found = started(names, values, dead)
    x = torch.from_numpy(found["x"])
    probe = copy.deepcopy(trainer)
    loss = probe.loss(x[0], step=1)
    loss.backward()
    found |= {"loss": loss.detach().numpy()} | numbers(probe.ae, names, "grad", gradient=True)
    log = copy.deepcopy(trainer).loss(x[0], step=1, logging=True)
    parts = log.losses if hasattr(log, "losses") else log[3]
    found |= {f"part/{name}": np.array(value, np.float32) for name, value in parts.items() if value is not None}

    ema, idle = [], []
    for i in range(3):
        trainer.update(i + 1, x[i])
        if hasattr(trainer, "num_tokens_since_fired"):
            idle.append(trainer.num_tokens_since_fired.numpy().copy())
        if "threshold" in dict(trainer.ae.named_buffers()):
            ema.append(float(trainer.ae.threshold))
        if i in (0, 2):
            found |= numbers(trainer.ae, names, f"after{i + 1}")
    with torch.no_grad():
        latents = trainer.ae.encode(x[2])
        found |= {"eval/latents": latents.numpy(), "eval/y_hat": trainer.ae.decode(latents).numpy()}
    found |= ({"ema": np.array(ema)} if ema else {}) | ({"idle": np.array(idle)} if idle else {})
    group = trainer.optimizer.param_groups[0]
    return found, {
        "peer": "dictionary-learning",
        "class": trainer_class.__name__,
        "functions": ["loss", "update", "ae.encode", "ae.decode"],
        "optimizer": {"lr": LR, "betas": group["betas"], "eps": group["eps"]},
        "settings": {k: v for k, v in (common | settings).items() if not isinstance(v, type)},
    }


@case
def dl_standard() -> Case:
    """Decoder rows of length 1."""
    return dictionary_learning(peers.StandardTrainer, LINEAR_BIAS, l1_penalty=0.7, sparsity_warmup_steps=0)


@case
def dl_standard_april() -> Case:
    """The penalty weighted by decoder norms."""
    return dictionary_learning(
        peers.StandardTrainerAprilUpdate, LINEAR_BIAS, unit=False, l1_penalty=0.7, sparsity_warmup_steps=0
    )


ANNEAL: dict[str, Any] = {
    "initial_sparsity_penalty": 0.7,
    "sparsity_warmup_steps": 0,
    "anneal_start": 3,
    "anneal_end": 12,
    "n_sparsity_updates": 4,
    "p_end": 0.4,
    "sparsity_queue_length": 1,
}


def _at_p(p: float) -> Callable[[Any], None]:
    def prepare(trainer: Any) -> None:
        trainer.p = p

    return prepare


@case
def dl_p_anneal() -> Case:
    """The power fixed at 0.6, `Lp^p`: what the paper defines."""
    return dictionary_learning(
        peers.PAnnealTrainer, LINEAR_BIAS, prepare=_at_p(0.6), sparsity_function="Lp^p", **ANNEAL
    )


@case
def dl_p_anneal_root() -> Case:
    """The power fixed at 0.6, `Lp`: the trainer's default."""
    return dictionary_learning(peers.PAnnealTrainer, LINEAR_BIAS, prepare=_at_p(0.6), **ANNEAL)


@case
def dl_p_anneal_schedule() -> Case:
    """p and the coefficient after each of 16 losses, the parameters held: batches 0, 1, 2, 0, 1, 2, ..."""
    values, dead = weights(unit=True)
    common = {"steps": 100, "activation_dim": D, "dict_size": F, "warmup_steps": 0, "layer": 0, "lm_name": "none"}
    settings = ANNEAL | {"sparsity_function": "Lp^p"}
    trainer = peers.PAnnealTrainer(device="cpu", **common, **settings)
    load(trainer.ae, LINEAR_BIAS, values)
    found = started(LINEAR_BIAS, values, dead)
    trace = []
    for step in range(16):
        trainer.loss(torch.from_numpy(found["x"][step % 3]), step)
        trace.append((trainer.p, trainer.sparsity_coeff))
    found |= {"p": np.array([p for p, _ in trace]), "coefficient": np.array([c for _, c in trace])}
    return found, {
        "peer": "dictionary-learning",
        "class": "PAnnealTrainer",
        "functions": ["loss"],
        "settings": settings,
        "default_settings_raise": _default_annealing_raises(values, found["x"][0]),
    }


def _default_annealing_raises(values: Arrays, x: np.ndarray) -> str:
    """The exception of the trainer's default sparsity function and last power (`Lp`, 0), if any."""
    common = {"steps": 100, "activation_dim": D, "dict_size": F, "warmup_steps": 0, "layer": 0, "lm_name": "none"}
    trainer = peers.PAnnealTrainer(device="cpu", sparsity_warmup_steps=0, anneal_start=3, **common)
    load(trainer.ae, LINEAR_BIAS, values)
    for step in range(100):
        try:
            trainer.loss(torch.from_numpy(x), step)
        except ZeroDivisionError as error:
            return f"{type(error).__name__}: {error} (step {step} of 100, p {trainer.p:.3f}, next {trainer.next_p})"
    return ""


@case
def dl_gated() -> Case:
    return dictionary_learning(peers.GatedSAETrainer, LINEAR_GATED, l1_penalty=0.7, sparsity_warmup_steps=0)


def _dl_topk(n_dead: int) -> Case:
    return dictionary_learning(peers.TopKTrainer, LINEAR, n_dead=n_dead, k=K, threshold_start_step=0, auxk_alpha=AUXK)


@case
def dl_topk_few_dead() -> Case:
    return _dl_topk(5)


@case
def dl_topk_many_dead() -> Case:
    return _dl_topk(20)


@case
def dl_topk_silent_token() -> Case:
    """One token of the first batch has no positive pre-activation: only the trainer's threshold is of interest."""
    values, dead = weights(unit=True)
    common = {"steps": 100, "activation_dim": D, "dict_size": F, "warmup_steps": 0, "layer": 0, "lm_name": "none"}
    trainer = peers.TopKTrainer(device="cpu", k=K, threshold_start_step=0, lr=LR, **common)
    # W_enc scaled down, so that the bias alone keeps every latent below 0 at the token b_dec.
    values |= {"b_enc": -np.abs(values["b_enc"]) - np.float32(0.05)}
    load(trainer.ae, LINEAR, values)
    found = started(LINEAR, values, dead)
    found["x"][0, 5] = values["b_dec"]
    for i in range(3):
        trainer.loss(torch.from_numpy(found["x"][i]), step=i + 1)
        found[f"ema/{i}"] = np.array(float(trainer.ae.threshold))
    return found, {"peer": "dictionary-learning", "class": "TopKTrainer", "functions": ["loss"], "settings": {"k": K}}


@case
def dl_batchtopk() -> Case:
    return dictionary_learning(peers.BatchTopKTrainer, LINEAR, n_dead=5, k=K, threshold_start_step=0, auxk_alpha=AUXK)


@case
def dl_matryoshka() -> Case:
    fractions = [b / F for b in np.diff((0, *GROUPS))]
    return dictionary_learning(
        peers.MatryoshkaBatchTopKTrainer,
        PLAIN,
        n_dead=20,
        k=K,
        group_fractions=fractions,
        threshold_start_step=0,
        auxk_alpha=AUXK,
    )


@case
def dl_jumprelu() -> Case:
    return dictionary_learning(
        peers.JumpReluTrainer, THRESHOLD, bandwidth=0.5, sparsity_penalty=0.8, target_l0=10.0, sparsity_warmup_steps=0
    )


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURES
    folder.mkdir(parents=True, exist_ok=True)
    described = {}
    np.savez_compressed(folder / "batches.npz", x=batches())
    for name, make in CASES.items():
        arrays, about = make()
        if np.array_equal(arrays["x"], batches()):
            del arrays["x"]
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        version = {"version": peers.VERSIONS[about["peer"]]}
        described[name] = about | version | {"what": (make.__doc__ or "").strip()}
    shared = {"torch": peers.VERSIONS["torch"], "B": B, "D": D, "F": F, "k": K, "groups": GROUPS, "cases": described}
    (folder / "cases.json").write_text(json.dumps(shared, indent=1, default=str) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(described)} cases, {size / 1e3:.0f} kB in {folder}")


if __name__ == "__main__":
    main()
