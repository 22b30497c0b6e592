"""sparsify: a folder for each hook point, with cfg.json and sae.safetensors. (EleutherAI/sparsify 1.3.3)

    f = topk(relu(x' encoder.weight^T + encoder.bias)),   y_hat = f W_dec + b_dec (+ x W_skip^T)

x' is x - b_dec in an autoencoder and x in a transcoder. A folder's name is the path of a module in the base model: an
autoencoder reads and writes the module's output, a transcoder reads its input and writes its output. num_latents 0
means d_in * expansion_factor. Transcoders from before February 2025 were trained on x - b_dec; 1.3.3 gives them x, and
so does saejax. `signed`, of 2024, keeps the k largest by absolute value.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from saejax.core.errors import DataError
from saejax.interop.assemble import UNCENTRED, Layout, assemble, check_free, coder_kind, write_files
from saejax.interop.hooks import from_module, norm_notes, to_module
from saejax.interop.tensors import half_precision_notes, read_config, read_safetensors, whole_number
from saejax.lm.points import HOOK_NAMES
from saejax.trained import Format, TrainedCoder, centred, register_format

_CFG, _WEIGHTS = "cfg.json", "sae.safetensors"
_LAYOUT = Layout({"encoder.weight": "W_enc", "encoder.bias": "b_enc"}, transposed=("encoder.weight", "W_skip"))
_TOPOLOGIES = ("autoencoder", UNCENTRED, "transcoder", "skip_transcoder")
_MOST_HOOKS = 4096


@register_format
class Sparsify(Format):
    """One folder a hook point, all of them in the folder of a run."""

    name = "sparsify"
    title = "sparsify"
    files = f"<hook point>/{_CFG}, {_WEIGHTS}"
    needs = ((_CFG, _WEIGHTS),)
    sets = True
    reads = frozenset(
        {(topology, "topk") for topology in ("autoencoder", "transcoder", "skip_transcoder")}
        | {("autoencoder", "abs_topk"), ("transcoder", "abs_topk")}
    )

    def here(self, path: Path) -> list[Path]:
        if _is_one(path):
            return [path]
        try:
            entries = [] if not path.is_dir() else list(itertools.islice(path.iterdir(), _MOST_HOOKS))
        except OSError:
            return []
        return sorted((entry for entry in entries if not entry.is_symlink() and _is_one(entry)), key=_natural)

    def read(self, path: Path, hook_points: Sequence[str] = ()) -> TrainedCoder:
        config = read_config(path / _CFG)
        if (activation := config.get("activation", "topk")) != "topk":
            raise DataError(f"{path / _CFG}: activation is {activation!r}; saejax reads topk of sparsify.")
        d_in, k = (whole_number(config, key, path / _CFG) for key in ("d_in", "k"))
        F = whole_number({"num_latents": 0} | config, "num_latents", path / _CFG, low=0)
        F = F or d_in * whole_number({"expansion_factor": 32} | config, "expansion_factor", path / _CFG)
        arrays = _LAYOUT.read(path / _WEIGHTS, read_safetensors(path / _WEIGHTS))
        if (there := arrays.get("W_enc", np.zeros(0)).shape) != (d_in, F):
            raise DataError(f"{path / _WEIGHTS} has an encoder of {there}; {_CFG} says {(d_in, F)}. One is damaged.")
        if ("W_skip" in arrays) != (config.get("skip_connection") is True):
            raise DataError(f"{path}: {_CFG} and {_WEIGHTS} do not agree about a skip connection (W_skip).")
        transcode = config.get("transcode") is True
        reads, writes = _sites(path, transcode)
        topology = {(True, False): "transcoder", (False, False): "autoencoder"}.get(
            (transcode, "W_skip" in arrays), "skip_transcoder"
        )
        if not transcode and "W_skip" in arrays:
            arrays, writes = centred(arrays, -1), reads
        notes = half_precision_notes(path / _WEIGHTS) + norm_notes(_module_path(path), "")
        sparsity = "abs_topk" if config.get("signed") is True else "topk"
        return assemble(path, topology, sparsity, arrays, hook_points, reads=reads, writes=writes, k=k, notes=notes)

    def refuses(self, sae: TrainedCoder) -> str:
        topology, sparsity = coder_kind(sae)
        if topology not in _TOPOLOGIES or sparsity != "topk":
            return f"sparsify has no {topology} with {sparsity}"
        if sae.coder.topology.in_shape != sae.coder.topology.out_shape:
            return "sparsify's coders are as wide where they write as where they read"
        (reads,), (writes,) = sae.sites.reads, sae.sites.writes
        return "" if _folder(sae) else f"no module of a transformer reads {reads} and writes {writes}"

    def place_of(self, sae: TrainedCoder, folder: Path) -> Path:
        return folder / str(_folder(sae))

    def write(self, sae: TrainedCoder, folder: Path) -> list[str]:
        check_free(folder, bool(self.here(folder)) and not _is_one(folder), "run of sparsify")
        place = self.place_of(sae, folder)
        there = sorted(entry.name for entry in folder.iterdir() if _is_one(entry)) if folder.is_dir() else []
        roots = {name.partition(".")[0]: name for name in (*there, place.name)}
        if {"h", "layers"} <= roots.keys():
            raise DataError(
                f"{folder} would hold {roots['h']} and {roots['layers']}, and no model calls its layers both ways: a "
                "run of sparsify is of one model. Choose another folder."
            )
        arrays = {name: np.asarray(value) for name, value in sae.params.items()}
        same, (topology, _) = sae.sites.reads == sae.sites.writes, coder_kind(sae)
        if same and topology != "autoencoder":
            arrays = centred(arrays, 1)
        d_in, d_sae = sae.coder.topology.d_in, sae.coder.topology.d_sae
        config = {
            "activation": "topk",
            "expansion_factor": max(1, d_sae // d_in),
            "normalize_decoder": False,
            "num_latents": d_sae,
            "k": sae.coder.sparsity.kept,
            "multi_topk": False,
            "skip_connection": "W_skip" in arrays,
            "transcode": not same,
            "d_in": d_in,
        }
        write_files(place, {_WEIGHTS: _LAYOUT.write(arrays), _CFG: config})
        notes = []
        if sae.origin.model:
            notes = [f"The files do not name the language model, {sae.origin.model}."]
            notes += norm_notes(place.name, sae.origin.model)
        if place.name == sae.hook_point:
            notes.append(f"The folder is called {sae.hook_point}, which is no module: give sparsify's own tools one.")
        return notes


def _is_one(path: Path) -> bool:
    return (path / _CFG).is_file() and (path / _WEIGHTS).is_file()


def _natural(path: Path) -> list[tuple[int, str]]:
    """layers.10 comes after layers.9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path.name)]


def _module_path(path: Path) -> str:
    """The folder's name, a module's path. Several seeds lie in seed0, seed1, ... of it."""
    path = path.absolute()
    return path.parent.name if re.fullmatch(r"seed\d+", path.name) else path.name


def _sites(path: Path, transcode: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Hook points by the folder's name; () where it names no layer."""
    name = _module_path(path)
    if re.fullmatch(rf"blocks\.\d+\.({'|'.join(HOOK_NAMES)})", name):
        return (name,), (name,)
    if not re.search(r"(?:^|\.)(?:layers|h|blocks)\.\d+(?:\.|$)|embed", name):
        return (), ()
    return (from_module(name, output=not transcode),), (from_module(name),)


def _folder(sae: TrainedCoder) -> str | None:
    """The module's path; for what no module gives, the hook point's own name."""
    (reads,), (writes,) = sae.sites.reads, sae.sites.writes
    known = to_module(reads, writes, "h" if "gpt2" in sae.origin.model.lower() else "layers")
    return known or (reads if reads == writes and re.fullmatch(r"blocks\.\d+\.\w+", reads) else None)
