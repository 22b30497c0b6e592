"""A peer as a contestant of `make bench`: full train steps as its own trainer takes them.

    python benchmarks/peers/step_worker.py     (the protocol is that of benchmarks/bench/protocol.py)

SAELens: SAETrainer.step. dictionary_learning: trainer.update. Clipping, Adam, decoder norms, dead latents and
thresholds are the trainer's. Settings are its defaults, but for the learning rate, which is the same for everybody and
constant, k or the target L0, and matryoshka's prefixes, which are ours. `--check`: are the peers there?
"""

import argparse
import gc
import math
import sys
from typing import Any

import numpy as np
import peer_classes as peers
import torch

from benchmarks.bench.activations import Batches, explained
from benchmarks.bench.protocol import forget_peak, peak_bytes, serve, timed_steps, used

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of matryoshka, as saejax's preset has them.
PREFIXES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
WEAK = 0.01  # as for ours: dead latents read so weakly that no selection takes them
STEPS_PLANNED = 1_000_000  # none of the schedules ends while the benchmark runs


class SAELens:
    version = peers.VERSIONS["sae-lens"]

    def __init__(self, row: dict[str, Any], lr: float):
        k, d_sae = row["k"], row["d_sae"]
        sae_class, config_class, own = {
            "standard": (peers.StandardTrainingSAE, peers.StandardTrainingSAEConfig, {}),
            "topk": (peers.TopKTrainingSAE, peers.TopKTrainingSAEConfig, {"k": k}),
            "batchtopk": (peers.BatchTopKTrainingSAE, peers.BatchTopKTrainingSAEConfig, {"k": k}),
            "matryoshka": (
                peers.MatryoshkaBatchTopKTrainingSAE,
                peers.MatryoshkaBatchTopKTrainingSAEConfig,
                {"k": k, "matryoshka_widths": [round(p * d_sae) for p in PREFIXES]},
            ),
            "jumprelu": (
                peers.JumpReLUTrainingSAE,
                peers.JumpReLUTrainingSAEConfig,
                {"jumprelu_sparsity_loss_mode": "quadratic", "target_l0": float(k)},
            ),
        }[row["preset"]]
        # The activations have the scale that expected_average_only_in would give them.
        self.sae = sae_class(config_class(d_in=row["d_in"], d_sae=d_sae, device=DEVICE, **own))
        self.trainer = peers.SAETrainer(
            cfg=peers.SAETrainerConfig(
                total_training_samples=STEPS_PLANNED * row["batch"],
                train_batch_size_samples=row["batch"],
                lr=lr,
                lr_end=lr,
                lr_warm_up_steps=0,
                lr_decay_steps=0,
                device=DEVICE,
            ),
            sae=self.sae,
            data_provider=iter(()),
        )
        self.dead = torch.arange(d_sae, device=DEVICE) < row["dead"]
        with torch.no_grad():
            self.sae.W_enc[:, self.dead] *= WEAK

    def kill(self) -> None:
        self.trainer.n_forward_passes_since_fired[self.dead] = 1e9

    def step(self, x: torch.Tensor) -> None:
        self.trainer.step(x)
        self.trainer.n_training_steps += 1

    def reconstruct(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents, _ = self.sae.encode_with_hidden_pre(x)
        return self.sae.decode(latents), latents

    def count_dead(self) -> int:
        return int(self.trainer.dead_neurons.sum())

    scale = 1.0


class DictionaryLearning:
    version = peers.VERSIONS["dictionary-learning"]

    def __init__(self, row: dict[str, Any], lr: float):
        own: dict[str, Any]
        self.family, k = row["preset"], row["k"]
        trainer_class, own = {
            "standard": (peers.StandardTrainerAprilUpdate, {}),
            "topk": (peers.TopKTrainer, {"k": k}),
            "batchtopk": (peers.BatchTopKTrainer, {"k": k}),
            "matryoshka": (
                peers.MatryoshkaBatchTopKTrainer,
                {"k": k, "group_fractions": [float(width) for width in np.diff((0.0, *PREFIXES))]},
            ),
            "jumprelu": (peers.JumpReluTrainer, {"target_l0": float(k)}),
        }[self.family]
        common = {"steps": STEPS_PLANNED, "warmup_steps": 0, "decay_start": None, "lr": lr, "seed": 0, "device": DEVICE}
        self.trainer = trainer_class(
            activation_dim=row["d_in"], dict_size=row["d_sae"], layer=0, lm_name="none", **(common | own)
        )
        self.at = 0
        self.scale = 1 / math.sqrt(row["d_in"])  # unit mean squared norm, as its trainSAE feeds it
        self.dead = torch.arange(row["d_sae"], device=DEVICE) < row["dead"]
        with torch.no_grad():
            if hasattr(self.trainer.ae, "encoder"):
                self.trainer.ae.encoder.weight[self.dead] *= WEAK
            else:
                self.trainer.ae.W_enc[:, self.dead] *= WEAK

    def kill(self) -> None:
        self.trainer.num_tokens_since_fired[self.dead] = 10**9

    def step(self, x: torch.Tensor) -> None:
        self.trainer.update(self.at, x)
        self.at += 1

    def reconstruct(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Where training selects, inference has a threshold, which it starts to follow after 1,000 steps.
        selects = self.family in ("topk", "batchtopk", "matryoshka")
        latents = self.trainer.ae.encode(x, **({"use_threshold": False} if selects else {}))
        return self.trainer.ae.decode(latents), latents

    def count_dead(self) -> int:
        return max(0, int(getattr(self.trainer, "dead_features", 0)))


PEERS = {"saelens": SAELens, "dictionary_learning": DictionaryLearning}
_training: dict[str, Any] = {}


def prepare(peer: str, row: dict[str, Any], data: str, lr: float) -> dict[str, Any]:
    end_row()
    torch.manual_seed(0)
    made = PEERS[peer](row, lr)
    _training.update(peer=made, row=row, source=Batches(data, row["batch"]))
    return {"version": made.version, "torch": torch.__version__, "device": DEVICE}


def end_row() -> dict[str, Any]:
    """Gives the row's memory back; the process stays, because importing the peers takes half a minute."""
    _training.clear()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    forget_peak()
    return {}


def run(steps: int) -> dict[str, Any]:
    peer, source, dead = _training["peer"], _training["source"], _training["row"]["dead"]

    def before() -> torch.Tensor:
        if dead:
            peer.kill()
        x = torch.from_numpy(np.ascontiguousarray(source.take()[:, 0]))
        return x if peer.scale == 1 else x * peer.scale

    with used() as use:
        seconds = timed_steps(steps, before, lambda x: peer.step(x.to(DEVICE)), wait, each=DEVICE == "cpu")
    return {"seconds": seconds, **use.to_json(), "peak": peak(), "dead": peer.count_dead() if dead else 0}


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else peak_bytes()


def fve(heldout: str) -> dict[str, Any]:
    peer, row = _training["peer"], _training["row"]

    @torch.no_grad()
    def reconstruct(batch_BSD: np.ndarray) -> tuple[np.ndarray, int]:
        x = torch.from_numpy(np.ascontiguousarray(batch_BSD[:, 0])).to(DEVICE)
        x_hat, latents = peer.reconstruct(x * peer.scale)
        return (x_hat / peer.scale).cpu().numpy(), int((latents != 0).sum())

    return explained(reconstruct, heldout, row["batch"], slice(0, 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 0 if all can be imported")
    if parser.parse_args().check:
        print(DEVICE, peers.VERSIONS)
        sys.exit(0)
    serve({"prepare": prepare, "run": run, "fve": fve, "end_row": end_row})
