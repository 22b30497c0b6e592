"""Trains a peer's own coder on stored activations, and measures it on held-out ones as every other coder is measured.

    python benchmarks/peers/train_peers.py --activations A.npy --heldout H.npy --peer saelens --family topk --k 24 \
        --d-sae 1024 --tokens 4000000 --out peers.jsonl

A.npy and H.npy are float32 [N, d]; batches are rows in the given order, from the start again where tokens exceed N;
with --order the rows whose numbers it holds, in that order. Training is the peer's code: SAELens' SAETrainer.fit;
dictionary_learning's trainer.update with the normalisation and the folding that its trainSAE puts around it. Settings
are the peer's published ones (README.md), but for what the command says; --set changes any other. Each learning rate
is a run and a line of --out:

    peer, version, family, k, lr, settings, l0, fve, dead, seconds, tokens

    l0     mean number of non-zero latents of a held-out token, through the peer's inference path
    fve    1 - sum ||x - x_hat||^2 / sum ||x - mean x||^2 over all held-out tokens, float64
    dead   share of latents that are non-zero for no held-out token

With --groups-of, an int64 [M] file, --sums writes what `measure.Measured` has of each group and the decoder's rows, of
the last rate; with --keep also all latents and reconstructions.

With --save, a folder, the dictionary of the last rate is kept there as its trainer's own project keeps dictionaries.

With --lines alone, each line of standard input is the options of a command; "done", or the error in one line, answers
each. One process then imports the peers once.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import peer_classes as peers
import torch
from measure import measured

FAMILIES = ("topk", "batchtopk", "jumprelu", "matryoshka", "gated", "standard")
Encode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training ends with: the inference path, all settings, the decoder's rows [F, d], and what writes the
    dictionary into a folder."""

    encode: Encode
    settings: dict[str, Any]
    rows: np.ndarray
    save: Callable[[pathlib.Path], Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a run is told; `changed` are further settings of the peer's coder or trainer."""

    activations: np.ndarray
    order: np.ndarray | None
    family: str
    k: int
    l1: float
    d_sae: int
    batch: int
    tokens: int
    dead_after: int
    groups: tuple[float, ...]
    device: str
    seed: int
    changed: dict[str, Any]

    @property
    def steps(self) -> int:
        return self.tokens // self.batch

    def batches(self) -> Iterator[torch.Tensor]:
        """Rows in order, for ever."""
        n = len(self.activations) if self.order is None else len(self.order)
        start = 0
        while True:
            at = np.arange(start, start + self.batch) % n
            rows = np.take(self.activations, at if self.order is None else self.order[at], axis=0)
            yield torch.from_numpy(np.ascontiguousarray(rows, np.float32)).to(self.device)
            start += self.batch


# --- SAELens -----------------------------------------------------------------------------------------------


def saelens(task: Task, lr: float) -> Trained:
    """As its documentation advises: mean norm sqrt(d), constant rate, decaying over the last fifth."""
    d_in = task.activations.shape[1]
    sae_class, config_class, own = {
        "topk": (peers.TopKTrainingSAE, peers.TopKTrainingSAEConfig, {"k": task.k}),
        "batchtopk": (peers.BatchTopKTrainingSAE, peers.BatchTopKTrainingSAEConfig, {"k": task.k}),
        "matryoshka": (
            peers.MatryoshkaBatchTopKTrainingSAE,
            peers.MatryoshkaBatchTopKTrainingSAEConfig,
            {"k": task.k, "matryoshka_widths": [round(g * task.d_sae) for g in task.groups or (1 / 4, 1 / 2, 1)]},
        ),
        # The one mode in which an L0 can be asked for.
        "jumprelu": (
            peers.JumpReLUTrainingSAE,
            peers.JumpReLUTrainingSAEConfig,
            {
                "jumprelu_sparsity_loss_mode": "quadratic",
                "target_l0": float(task.k),
                "l0_warm_up_steps": task.steps // 20,
            },
        ),
        "standard": (peers.StandardTrainingSAE, peers.StandardTrainingSAEConfig, _l1(task)),
        "gated": (peers.GatedTrainingSAE, peers.GatedTrainingSAEConfig, _l1(task)),
    }[task.family]
    common = {"normalize_activations": "expected_average_only_in", "device": task.device}
    config = config_class(d_in=d_in, d_sae=task.d_sae, **(common | own | task.changed))
    window = max(1, task.dead_after // task.batch) if task.dead_after else 1000
    training = {"lr_decay_steps": task.steps // 5, "dead_feature_window": window}
    sae = sae_class(config)
    trainer = peers.SAETrainer(
        cfg=peers.SAETrainerConfig(
            total_training_samples=task.steps * task.batch,
            train_batch_size_samples=task.batch,
            lr=lr,
            lr_end=lr / 10,
            device=task.device,
            **training,
        ),
        sae=sae,
        data_provider=task.batches(),
    )
    # As fit() would, but on batches that training sees again.
    trainer.activation_scaler.estimate_scaling_factor(d_in, task.batches(), min(1000, task.steps))
    scale = trainer.activation_scaler.scaling_factor
    trainer.fit()
    with tempfile.TemporaryDirectory() as folder:
        sae.save_inference_model(folder)
        loaded = peers.SAE.load_from_disk(folder, device=task.device)

    def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = loaded.encode(x)
        return latents, loaded.decode(latents)

    settings = {k: v for k, v in dataclasses.asdict(config).items() if k != "metadata"}
    rows = loaded.W_dec.detach().cpu().numpy()
    return Trained(encode, settings | training | {"scaling_factor": scale}, rows, loaded.save_model)


def _l1(task: Task) -> dict[str, Any]:
    """SAELens' penalty, risen over the first twentieth, as its documentation advises."""
    return {"l1_coefficient": task.l1, "l1_warm_up_steps": task.steps // 20}


# --- dictionary_learning -----------------------------------------------------------------------------------


def dictionary_learning(task: Task, lr: float) -> Trained:
    """As its demonstration does: unit mean squared norm, the rate decaying over the last fifth.

    Its warm-ups of 1,000 and 2,000 steps, and the step 1,000 at which it starts to follow the threshold, are for runs
    of 100,000 steps; in short ones they are at most 5 %, 10 % and half of all steps.
    """
    d_in, steps = task.activations.shape[1], task.steps
    followed = {"k": task.k, "threshold_start_step": min(1000, steps // 2)}
    fractions = [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2 + 1 / 32]
    if task.groups:
        fractions = [float(width) for width in np.diff((0.0, *task.groups))]
    short = min(2000, steps // 10)
    trainer_class, own = {
        "topk": (peers.TopKTrainer, followed),
        "batchtopk": (peers.BatchTopKTrainer, followed),
        "matryoshka": (peers.MatryoshkaBatchTopKTrainer, followed | {"group_fractions": fractions}),
        "jumprelu": (peers.JumpReluTrainer, {"target_l0": float(task.k), "sparsity_warmup_steps": short}),
        "standard": (peers.StandardTrainerAprilUpdate, {"l1_penalty": task.l1, "sparsity_warmup_steps": short}),
        "gated": (peers.GatedSAETrainer, {"l1_penalty": task.l1, "sparsity_warmup_steps": short}),
    }[task.family]
    common = {
        "steps": steps,
        "activation_dim": d_in,
        "dict_size": task.d_sae,
        "lr": lr,
        "warmup_steps": min(1000, steps // 20),
        "decay_start": int(0.8 * steps),
        "seed": task.seed,
        "device": task.device,
    }
    settings = common | own | task.changed
    trainer = trainer_class(layer=0, lm_name="none", **settings)
    if task.dead_after and hasattr(trainer, "dead_feature_threshold"):
        trainer.dead_feature_threshold = task.dead_after
    squares = [float(x.square().sum(1).mean()) for x, _ in zip(task.batches(), range(min(100, steps)), strict=False)]
    norm = math.sqrt(sum(squares) / len(squares))
    for step, x in zip(range(steps), task.batches(), strict=False):
        trainer.update(step, x / norm)
    with torch.no_grad():
        trainer.ae.scale_biases(norm)

    def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = trainer.ae.encode(x)
        return latents, trainer.ae.decode(latents)

    # Those with an L1 have no AuxK, and nothing that counts as dead.
    found = {"norm": norm, "dead_feature_threshold": getattr(trainer, "dead_feature_threshold", None)}
    rows = trainer.ae.W_dec if hasattr(trainer.ae, "W_dec") else trainer.ae.decoder.weight.T

    def save(folder: pathlib.Path) -> None:
        """ae.pt and config.json, as its trainSAE writes them."""
        torch.save({name: value.cpu() for name, value in trainer.ae.state_dict().items()}, folder / "ae.pt")
        (folder / "config.json").write_text(json.dumps({"trainer": trainer.config}, default=str))

    return Trained(encode, settings | found, rows.detach().cpu().numpy(), save)


# --- the command -------------------------------------------------------------------------------------------------


def arrays(encode: Encode, device: str) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The same on NumPy's arrays."""

    def on_arrays(x_BD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            latents, x_hat = encode(torch.from_numpy(x_BD).to(device))
        return latents.cpu().numpy(), x_hat.cpu().numpy()

    return on_arrays


def published_lr(peer: str, family: str, d_sae: int) -> float:
    """SAELens 3e-4; dictionary_learning 7e-5 for jumprelu, else 2e-4 / sqrt(F / 2^14)."""
    if peer == "saelens":
        return 3e-4
    return 7e-5 if family == "jumprelu" else 2e-4 / math.sqrt(d_sae / 2**14)


PEERS = {"saelens": (saelens, "sae-lens"), "dictionary_learning": (dictionary_learning, "dictionary-learning")}


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a peer's coder; see the head of this file.", allow_abbrev=False
    )
    parser.add_argument("--activations", required=True, help=".npy, float32 [N, d], shuffled")
    parser.add_argument("--heldout", required=True, help=".npy, float32 [M, d]")
    parser.add_argument("--peer", required=True, choices=PEERS)
    parser.add_argument("--family", required=True, choices=FAMILIES)
    parser.add_argument("--k", type=int, default=0, help="latents of a token; jumprelu's target L0")
    parser.add_argument("--l1", type=float, default=0.0, help="the penalty of gated and standard, as the peer means it")
    parser.add_argument("--d-sae", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--lr", type=float, nargs="+", help="default: the published one, a third and three times of it")
    parser.add_argument("--dead-after", type=int, default=0, help="tokens; default: the peer's")
    parser.add_argument(
        "--groups", type=float, nargs="+", default=[], help="matryoshka: rising shares of the latents, ending with 1"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=JSON", help="other settings, by the peer's names")
    parser.add_argument("--order", help=".npy, int64: numbers of the rows of --activations, in order")
    parser.add_argument("--groups-of", help=".npy, int64 [M]: the group of each held-out row")
    parser.add_argument("--sums", help=".npz for what --groups-of is for")
    parser.add_argument("--save", type=pathlib.Path, help="a folder for the dictionary")
    parser.add_argument("--keep", action="store_true", help="latents and reconstructions too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, help="a line of JSON is added for each learning rate")
    told = parser.parse_args(words)
    if told.groups and (told.groups[-1] != 1 or sorted(set(told.groups)) != told.groups):
        parser.error(f"--groups {told.groups} must rise and end with 1.")
    return told


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def run(words: list[str]) -> None:
    told = parse(words)
    activations, heldout = (np.load(path, mmap_mode="r") for path in (told.activations, told.heldout))
    groups = np.load(told.groups_of) if told.groups_of else None
    changed = {name: _value(text) for name, text in (pair.split("=", 1) for pair in told.set)}
    task = Task(
        activations=activations,
        order=np.load(told.order) if told.order else None,
        family=told.family,
        k=told.k,
        l1=told.l1,
        d_sae=told.d_sae,
        batch=told.batch_size,
        tokens=told.tokens,
        dead_after=told.dead_after,
        groups=tuple(told.groups),
        device=told.device,
        seed=told.seed,
        changed=changed,
    )
    train, package = PEERS[told.peer]
    default = published_lr(told.peer, told.family, told.d_sae)
    for lr in told.lr or (default / 3, default, default * 3):
        torch.manual_seed(told.seed)
        start = time.perf_counter()
        trained = train(task, lr)
        seconds = time.perf_counter() - start
        found = measured(arrays(trained.encode, told.device), heldout, groups, keep=told.keep)
        if told.sums:
            known = {name: value for name, value in dataclasses.asdict(found).items() if value is not None}
            np.savez(told.sums, **known, decoder=trained.rows)
        if told.save:
            told.save.mkdir(parents=True, exist_ok=True)
            trained.save(told.save)
        line = {"peer": told.peer, "version": peers.VERSIONS[package], "family": told.family, "k": told.k, "lr": lr}
        line |= found.figures() | {"l1": told.l1, "seed": told.seed}
        line |= {"seconds": round(seconds, 2), "tokens": task.steps * task.batch, "settings": trained.settings}
        with pathlib.Path(told.out).open("a") as out:
            out.write(json.dumps(line, default=str) + "\n")
        print({name: value for name, value in line.items() if name != "settings"}, flush=True)


def answer_lines() -> None:
    for line in sys.stdin:
        try:
            run(shlex.split(line))
        except Exception as error:
            print("error", repr(error).replace("\n", " "), flush=True)
        else:
            print("done", flush=True)


if __name__ == "__main__":
    answer_lines() if sys.argv[1:] == ["--lines"] else run(sys.argv[1:])
