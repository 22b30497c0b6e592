"""The planted world that SAELens' `SyntheticModel.save` wrote, as it is: its directions, probabilities and trees.

    synthetic_model_config.json   settings, of which the magnitudes are made at each load
    synthetic_model.safetensors   feature_vectors [N, D], bias [D], firing_probabilities [N], and with correlation
                                  correlation_factor [N, R] and correlation_diag [N]
    hierarchy.json                the trees, where there are some

The names are those of sae_lens 6.54.12.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from saejax.core.archives import check_regular, check_size
from saejax.core.errors import DataError
from saejax.core.files import read_bounded, read_json
from saejax.evals.truth.hierarchy import Generation, Hierarchy

CONFIG, WEIGHTS, TREES = "synthetic_model_config.json", "synthetic_model.safetensors", "hierarchy.json"
# SAELens draws each part from a seed of its own: the model's plus this.
_STD_SEED, _MEAN_SEED = 1, 2
_LEAST_DRAWN = 16
_ROUNDING = 1e-4


def read_world(folder: str | Path) -> tuple[dict[str, Any], str]:
    """({attribute of `Planted`: its value} of the world in a folder, sha256 of the files).

    Raises:
        DataError: a file is missing or damaged, or the world is of a kind that saejax does not sample: trees whose
            features do not follow each other as `generate_hierarchy` numbers them, or magnitudes without a seed.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise DataError(
                f"{folder} has no {name}, so it is no world that SAELens saved. truth.source is the folder that "
                "SyntheticModel.save wrote, or a download of one: hf download decoderesearch/synth-sae-bench-16k-v1 "
                "--local-dir world"
            )
    config, tensors = read_json(folder / CONFIG), _tensors(folder / WEIGHTS)
    if not isinstance(config, dict):
        raise DataError(f"{folder / CONFIG} holds no settings; save the world again.")
    rows_ND = _array(folder, tensors, "feature_vectors", (None, None))
    n, d = rows_ND.shape
    if np.abs(np.linalg.norm(rows_ND, axis=1) - 1).max() > _ROUNDING:
        raise DataError(f"{folder / WEIGHTS}: feature_vectors have rows that are not of length 1.")
    digest = hashlib.sha256()
    for path in (folder / name for name in (CONFIG, WEIGHTS, TREES)):
        digest.update(hashlib.sha256(_whole(path)).digest() if path.is_file() else b"")
    saved = {
        "directions": rows_ND,
        "bias": _array(folder, tensors, "bias", (d,)),
        "probability": _array(folder, tensors, "firing_probabilities", (n,)).astype(np.float64),
        "mean": _magnitudes(folder, config, "mean_firing_magnitudes", n, _MEAN_SEED),
        "std": _magnitudes(folder, config, "std_firing_magnitudes", n, _STD_SEED),
        "hierarchy": _hierarchy(folder / TREES, n),
        "causes": _causes(folder, tensors, n),
    }
    return saved, digest.hexdigest()


def _tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load(_whole(path))
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise DataError(f"{path} is not a readable safetensors file ({error}).") from None


def _whole(path: Path) -> bytes:
    check_regular(path)
    size = path.stat().st_size
    check_size(path, size)
    return read_bounded(path, size)


def _array(folder: Path, tensors: Mapping[str, np.ndarray], name: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """One tensor, finite and of this shape (None: any length), as float32."""
    value, path = tensors.get(name), folder / WEIGHTS
    if value is None:
        raise DataError(f"{path} has no {name}; save the world again.")
    fits = len(value.shape) == len(shape) and all(
        wanted in (None, got) and got for wanted, got in zip(shape, value.shape, strict=True)
    )
    if not fits or value.dtype.kind != "f" or not np.isfinite(value).all():
        raise DataError(f"{path}: {name} {value.dtype} {list(value.shape)} does not fit the others, or is not finite.")
    return value.astype(np.float32)


def _causes(folder: Path, tensors: Mapping[str, np.ndarray], n: int) -> np.ndarray:
    """F [N, R], which with the saved diagonal makes variances of 1."""
    if "correlation_factor" not in tensors:
        return np.zeros((n, 0))
    causes_NR = _array(folder, tensors, "correlation_factor", (n, None)).astype(np.float64)
    own_N = _array(folder, tensors, "correlation_diag", (n,))
    if np.abs(np.square(causes_NR).sum(1) + own_N - 1).max() > _ROUNDING:
        raise DataError(f"{folder / WEIGHTS}: correlation_factor and correlation_diag do not make variances of 1.")
    return causes_NR


def _magnitudes(folder: Path, config: Mapping[str, Any], key: str, n: int, seed_offset: int) -> np.ndarray:
    """One number for each feature, float64 [N], as SAELens makes them from its settings at each load."""
    of: Any = config.get(key)
    if isinstance(of, int | float):
        of = {"generator_name": "constant", "value": of}
    try:
        kind = of["generator_name"]
        if kind == "constant":
            return np.full(n, float(of["value"]))
        if kind == "linear":
            return np.linspace(float(of["start"]), float(of["end"]), n)
        if kind == "exponential":
            return float(of["start"]) * (float(of["end"]) / float(of["start"])) ** np.linspace(0, 1, n)
        if kind != "folded_normal":
            raise DataError(f"{folder / CONFIG}: {key} is of the kind {kind!r}, which saejax does not know.")
        drawn_N = np.abs(float(of["mean"]) + float(of["std"]) * _normals(folder, config.get("seed"), seed_offset, n))
        low, high = of.get("min_value"), of.get("max_value")
        return np.clip(drawn_N, -np.inf if low is None else low, np.inf if high is None else high)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise DataError(f"{folder / CONFIG}: {key} is not readable ({error!r}); save the world again.") from None


def _normals(folder: Path, seed: Any, offset: int, n: int) -> np.ndarray:
    """torch.randn(n) of `torch.Generator().manual_seed(seed + offset)` on a CPU, to float32's rounding.

    Of 16 uniform numbers the first eight and the last eight make eight pairs (Box and Muller); the last 16 numbers are
    drawn anew where n is no multiple of 16.
    """
    if type(seed) is not int or seed < 0:
        raise DataError(
            f"{folder / CONFIG}: seed is {seed!r}, so SAELens draws the magnitudes anew at each load, and there is no "
            "one world. Save one with a seed."
        )
    if n < _LEAST_DRAWN:
        raise DataError(f"{folder}: magnitudes of fewer than {_LEAST_DRAWN} features are drawn in another way.")
    words = np.random.RandomState((seed + offset) % 2**32)

    def uniform(count: int) -> np.ndarray:
        return (words.randint(0, 2**32, count, np.uint32) & 0xFFFFFF).astype(np.float64) / 2**24

    def pairs(u: np.ndarray) -> np.ndarray:
        first, second = u.reshape(-1, 2, _LEAST_DRAWN // 2).swapaxes(0, 1)
        radius, angle = np.sqrt(-2 * np.log1p(-first)), 2 * np.pi * second
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).ravel()

    drawn, whole = uniform(n), n - n % _LEAST_DRAWN
    made = np.concatenate([pairs(drawn[:whole]), np.zeros(n - whole)])
    if whole < n:
        made[-_LEAST_DRAWN:] = pairs(uniform(_LEAST_DRAWN))
    return made


def _hierarchy(path: Path, n: int) -> Hierarchy:
    """The trees, generation by generation; features that are in none come last."""
    if not path.is_file():
        return Hierarchy(0, 2, (), False)
    strange = DataError(
        f"{path}: its trees are not numbered as SAELens' generate_hierarchy numbers them (roots first, then each "
        "generation in order, the same number of children for every parent), so saejax cannot sample them."
    )
    try:
        level: list[dict[str, Any]] = read_json(path)["roots"]
        roots = len(level)
        numbers = [node["feature_index"] for node in level]
        scaled = set[bool]()
        branching = max((len(node["children"]) for node in level), default=2)
        generations: list[Generation] = []
        first, start = 0, roots
        while children := [child for node in level for child in node["children"]]:
            parents = [node for node in level if node["children"]]
            exclusive = np.array([bool(node["mutually_exclusive_children"]) for node in parents])
            counts = [len(node["children"]) for node in level]
            full = len(children) // branching
            if counts[:full] != [branching] * full or any(counts[full + 1 :]):
                raise strange
            scaled |= {bool(node["scale_children_by_parent"]) for node in parents}
            generations.append(Generation(start, start + len(children), first, exclusive))
            numbers += [child["feature_index"] for child in children]
            level, first, start = children, start, start + len(children)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} holds no trees ({error!r}); save the world again.") from None
    if numbers != list(range(len(numbers))) or len(numbers) > n or len(scaled) > 1:
        raise strange
    return Hierarchy(roots, max(branching, 1), tuple(generations), scaled.pop() if scaled else False)
