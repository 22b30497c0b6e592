"""The data sets of the comparison, as arrays that every trainer reads alike.

build/quality/<set>/: A.npy rows to train on, H.npy held-out rows, groups.npy the group of each held-out row,
order-<seed>.npy which rows a training takes and in which order; of the known truth also world.json.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs import truth as truth_config
from saejax.core.rng import stream
from saejax.evals.truth import Planted, Scores, plant, score_samples
from saejax.experiment import experiment
from saejax.store import StoreReader

FAMILIES = ("topk", "batchtopk", "matryoshka", "jumprelu", "gated", "standard")
FOLDER, HERE = Path("build/quality"), Path(__file__).parent
# Documents (of the known truth: samples) are dealt to so many groups, which the bootstrap draws.
GROUPS = 100
_HELDOUT, _PIECE = 16_384, 4_096
# Of the stored held-out rows so many, evenly chosen: more documents for the same work.
_STORED_HELDOUT = 32_768


@dataclasses.dataclass(frozen=True)
class DataSet:
    """Activations and how long is trained on them.

    Attributes:
        title: for the tables.
        tokens, batch: of a training.
        d_in, d_sae: width, latents.
        l0s: the sparsities that are asked for.
        rates: learning rates that are tried.
        seeds: of the start and of the order.
        families: that are compared.
        store, hook_point: where the activations lie, below stores/; of the known truth "".
        experiment: of configs/, whose language model and text say what loss a dictionary costs; "" where that is not
            asked. Then the dictionaries are kept.
        preset: of the known truth, that of configs/truth.py.
    """

    name: str
    title: str
    tokens: int
    batch: int
    d_in: int
    d_sae: int
    l0s: tuple[int, ...] = (12, 24, 48)
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    seeds: tuple[int, ...] = (0, 1, 2)
    families: tuple[str, ...] = FAMILIES
    store: str = ""
    hook_point: str = ""
    experiment: str = ""
    preset: str = "small"

    @property
    def steps(self) -> int:
        return self.tokens // self.batch

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def dictionary(self, key: Sequence[Any]) -> Path | None:
        """The folder of a trained dictionary; None where dictionaries are not kept."""
        return self.folder / "dictionaries" / "-".join(map(str, key[1:])) if self.experiment else None

    def order(self, seed: int) -> Path:
        """The file with the numbers of the rows that a training takes, in order: the same for every trainer."""
        path = self.folder / f"order-{seed}-{self.tokens}.npy"
        if not path.exists():
            n, random = len(np.load(self.folder / "A.npy", mmap_mode="r")), np.random.default_rng(seed)
            epochs = [random.permutation(n) for _ in range(-(-self.tokens // n))]
            np.save(path, np.concatenate(epochs)[: self.tokens])
        return path

    def prepare(self, stores: str = "stores") -> None:
        """Write the arrays, if they are not there."""
        if (self.folder / "groups.npy").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        train, heldout, group = self._stored(stores) if self.store else self._planted()
        for name, array in (("A", train), ("H", heldout), ("groups", group)):
            np.save(self.folder / f"{name}.npy", array)

    def _stored(self, stores: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        train, heldout = (
            StoreReader.open(f"{stores}/{self.store}/{split}", [self.hook_point]) for split in ("train", "heldout")
        )
        rows = heldout.rows(0, heldout.n_tokens, metadata=True)
        rows = {name: values[:: max(1, heldout.n_tokens // _STORED_HELDOUT)] for name, values in rows.items()}
        _, number = np.unique(rows["document"], return_inverse=True)
        dealt = np.random.default_rng(0).permutation(int(number.max()) + 1) % GROUPS
        whole = train.rows(0, train.n_tokens)[self.hook_point]
        return whole.astype(np.float32), rows[self.hook_point].astype(np.float32), dealt[number]

    def _planted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        pieces = [
            np.asarray(world(self.preset).sample(stream(0, "quality.train", i), _PIECE)[0], np.float32)
            for i in range(-(-self.tokens // _PIECE))
        ]
        x, _ = _heldout_truth(self.preset)
        return np.concatenate(pieces), x, np.arange(len(x)) * GROUPS // len(x)

    def scores(self, rows_FD: np.ndarray, latents: np.ndarray, y_hat: np.ndarray) -> Scores:
        """Of the known truth: what latents and reconstructions of the held-out rows are worth."""
        x, a = _heldout_truth(self.preset)
        cuts = [slice(i, i + 256) for i in range(0, len(x), 256)]
        return score_samples(rows_FD, world(self.preset), ((x[c], a[c], latents[c], y_hat[c]) for c in cuts))


@functools.cache
def world(preset: str) -> Planted:
    """The world of `saejax truth --config=truth:<preset>`."""
    return plant(experiment(truth_config.get_config(preset)).truth)


@functools.cache
def _heldout_truth(preset: str) -> tuple[np.ndarray, np.ndarray]:
    drawn = [world(preset).sample(stream(0, "quality.heldout", i), _PIECE) for i in range(_HELDOUT // _PIECE)]
    x, a = (np.concatenate([np.asarray(pair[i], np.float32) for pair in drawn]) for i in range(2))
    return x, a


SETS = {
    one.name: one
    for one in (
        DataSet(
            "demo",
            "the demo model, block 3",
            1_024_000,
            1024,
            128,
            1024,
            store="demo",
            hook_point="blocks.3.resid_post",
        ),
        DataSet(
            "smollm2",
            "SmolLM2-135M-Instruct, block 14",
            307_200,
            1024,
            576,
            2304,
            l0s=(16, 32, 64),
            families=("topk", "batchtopk"),
            store="smollm2",
            hook_point="blocks.14.resid_post",
            experiment="smollm2",
        ),
        DataSet(
            "encoder",
            "all-MiniLM-L6-v2, layer 3",
            204_800,
            256,
            384,
            3072,
            store="encoder",
            hook_point="encoder.layer.3.out",
        ),
        DataSet("truth", "known truth, 1,024 features", 512_000, 512, 256, 512, l0s=(6, 12, 24), seeds=(0, 1, 2, 3, 4)),
        DataSet(
            "truth_large",
            "known truth, 4,096 features",
            512_000,
            512,
            512,
            1024,
            l0s=(8, 16, 32),
            families=("topk", "batchtopk", "matryoshka", "jumprelu"),
            preset="large",
        ),
    )
}


def variance_of(data: DataSet) -> np.ndarray:
    """Sum over each group's held-out rows of ||x - mean x||^2, [G]: kept beside the results."""
    path = HERE / "variance.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if data.name not in known:
        x, groups = (np.load(data.folder / f"{name}.npy") for name in ("H", "groups"))
        squares_N = np.square(x.astype(np.float64) - x.mean(0, dtype=np.float64)).sum(1)
        known[data.name] = [float(f"{v:.9g}") for v in np.bincount(groups, squares_N)]
        path.write_text(json.dumps(known, indent=0) + "\n", encoding="utf-8")
    return np.array(known[data.name])
