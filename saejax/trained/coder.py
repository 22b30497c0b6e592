"""The trained coder: what training ends with, and what evaluation, report, interventions and exports begin with."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import FrozenConfigDict

from saejax.coders import Coder, Latents, Sites
from saejax.coders.ramp import Ramp
from saejax.coders.sparsity.topk import TopK
from saejax.core.arrays import as_array
from saejax.core.config import typed
from saejax.core.errors import ConfigError, DataError
from saejax.core.metrics import columns
from saejax.core.places import as_place, type_in_words
from saejax.kernels.selection import top_k
from saejax.lm import LMConfig
from saejax.lm.forward import Model
from saejax.lm.model import IN_MEMORY
from saejax.trained.display import curves, html_card
from saejax.trained.files import describe, read_folder, write_folder
from saejax.trained.formats import format_named
from saejax.trained.sites import check_widths, unscaled
from saejax.trained.torch_module import torch_module

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ParamMap = dict[str, Any]

# Names that people bring along from other projects, and what they are here.
_ELSEWHERE = {
    "cfg": "sae.config has the settings, sae.describe() what it is",
    "forward": "call it: sae(x)",
    "encoder": "the matrix is sae.W_enc [d_in, d_sae]",
    "decoder": "the matrix is sae.W_dec [d_sae, d_in]",
    "bias": "sae.b_dec, in the units of the activations",
    "k": "sae.coder.sparsity.kept; another one: sae.with_k(k)",
    "n_features": "sae.d_sae",
    "dict_size": "sae.d_sae",
    "activation_dim": "sae.d_in",
    "hook_name": "sae.hook_point",
    "state_dict": "sae.params",
    "parameters": "sae.params",
    "to": "jax.default_device chooses it, and sae.to_torch(device=...) makes a module of PyTorch",
    "device": "jax.default_device chooses it, and sae.to_torch(device=...) makes a module of PyTorch",
    "eval": "it is always what it is after training; sae.to_torch() makes a module of PyTorch",
    "from_pretrained": "saejax.from_pretrained(release, sae_id) or saejax.load",
    "load_from_disk": "saejax.load(folder)",
    "push_to_hub": 'saejax.push_to_hub(sae, "owner/name")',
    "save_model": "sae.save(folder), or sae.save(folder, format='saelens')",
    "save_inference_model": "sae.save(folder, format='saelens')",
    "save_pretrained": "sae.save(folder)",
    "run_with_cache": "lm.run(tokens, capture=[...]) of saejax.load_lm",
}

# Tokens in one block of `encode` at most; wide coders take fewer, by `Coder.few_tokens`.
_BLOCK_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a coder, as far as it is known.

    Attributes:
        model, revision: the language model, by its name or folder, and its commit.
        tokenizer: sha256 of its tokenizer.
        text: the identity of the text that was read.
        tokens: activations trained on.
        step: training steps taken.
        source: the run, file or repository that it was read from.
        saejax: the version that trained it; empty where another project did.
        notes: what is to be known of files that another project wrote, one sentence each.
        center_writing_weights: the model had `lm.center_writing_weights`; None where nobody says.
    """

    model: str = ""
    revision: str = ""
    tokenizer: str = ""
    text: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    step: int = 0
    source: str = ""
    saejax: str = dataclasses.field(default_factory=lambda: importlib.metadata.version("saejax"))
    notes: tuple[str, ...] = ()
    center_writing_weights: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", tuple(self.notes))  # a list in JSON

    @property
    def lm(self) -> LMConfig:
        """The settings by which the language model is loaded."""
        return LMConfig(self.model, self.revision, center_writing_weights=bool(self.center_writing_weights))

    def check_centring(self, lm: Model) -> None:
        """Raises DataError for a model whose residual stream has a mean where the training's had none, or the reverse;
        a model in memory does not say."""
        here, wanted = bool(lm.identity.get("center_writing_weights")), self.center_writing_weights
        if wanted not in (None, here) and not lm.identity["model"].endswith(IN_MEMORY):
            raise DataError(
                f"{self.source or 'The dictionary'} was trained on a model {'with' if wanted else 'without'} "
                f"center_writing_weights, and {lm.identity['model']} was loaded {'with' if here else 'without'}: its "
                f"latents mean nothing there. Set lm.center_writing_weights={str(wanted).lower()}; in Python "
                f"load_lm(..., center_writing_weights={wanted})."
            )


def folded(coder: Coder, params: ParamMap, stats: Mapping[str, Any], sites: Sites) -> tuple[Coder, dict[str, Any]]:
    """(coder, params) of a training as they are used after it: each token alone, raw activations in and out. Pure.

    Args:
        params, stats: of the training, which multiplies activations (and latents) by the scales of `sites`.
    """
    inference, params = coder.inference(dict(params), dict(stats))
    params = inference.topology.fold(params, sites.read_scales, sites.write_scales)
    return inference, params if sites.latent_scale == 1 else inference.rescaled(params, 1 / sites.latent_scale)


def _parameter(name: str, doc: str) -> property:
    """A parameter as an attribute. Raises AttributeError: the coder has none of this name."""

    def value(self: "TrainedCoder") -> Any:
        if name not in self.params:
            raise AttributeError(name)
        return self.params[name]

    return property(value, doc=doc)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedCoder:
    """A sparse dictionary for raw activations.

    `coder` holds pure functions of (params, x), for programs of your own: `jax.grad(lambda x: sae.coder.encode(
    sae.params, x).dense().sum())`. The methods below take numpy or JAX arrays and give back the same kind; PyTorch's
    tensors, bfloat16 ones too, and lists give numpy. They work block by block, so that a million rows of input take the
    memory of one block and of the result.

    Attributes:
        coder: topology and sparsity, taking every token alone.
        params: {W_enc [D, F], b_enc [F], W_dec [F, D], b_dec [D], ...}, float32; a pytree.
        sites: the hook points that it reads and writes.
        origin: where it comes from.
        figures: {metric: value} of its evaluation on held-out text; of a training without a run folder those of its
            last validation, as "val/fve".
        settings: how it was trained, as JSON; {} where that is not known.
        finished: training had come to its end.
        metrics: gives the rows of its training; they are read when `history` is asked for.
    """

    coder: Coder
    params: ParamMap
    sites: Sites
    origin: Origin = Origin()
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    finished: bool = True
    metrics: Callable[[], Sequence[Mapping[str, Any]]] = tuple

    W_enc = _parameter("W_enc", "[D, F] encoder matrix.")
    W_dec = _parameter("W_dec", "[F, D] decoder matrix.")
    b_enc = _parameter("b_enc", "[F] encoder bias.")
    b_dec = _parameter("b_dec", "[D] decoder bias.")
    threshold = _parameter("threshold", "[F] what a pre-activation must exceed, of a jumprelu coder.")

    def __post_init__(self) -> None:
        if unscaled(self.sites) != self.sites:
            raise DataError("A trained coder takes raw activations: fold the scales of its sites in first (`folded`).")

    def __repr__(self) -> str:
        t, kind = self.coder.topology, type(self.coder.sparsity).__name__
        reads, writes = (", ".join(names) for names in (self.sites.reads, self.sites.writes))
        at = reads if reads == writes else f"{reads} -> {writes}"
        lista = f", lista_steps={self.coder.lista.steps}" if self.coder.lista.steps else ""
        sizes = f"d_in={t.d_in}, d_sae={t.d_sae}{lista}, step={self.step}"
        return f"TrainedCoder({type(t).__name__} x {kind}, {at}, {sizes})"

    def _repr_html_(self) -> str:
        return html_card(repr(self), self.describe())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Parameters by name; of what other projects call differently the error says where it is."""
            if name in self.__dict__.get("params", ()):
                return self.params[name]
            where = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"TrainedCoder has no attribute {name!r}{where}.")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.params})

    def __call__(self, x: Any) -> Any:
        """Activations [..., D] -> their reconstruction, float32, of the shape that `decode` gives."""
        rows, outer = _as_rows(x, self.coder.topology.in_shape, "activations")
        return self._in_blocks(self._reconstruct, [rows]).reshape(*outer, *self.coder.topology.out_shape)

    @property
    def d_in(self) -> int:
        """Width of the activations read."""
        return self.coder.topology.d_in

    @property
    def d_sae(self) -> int:
        """Latents, of each layer."""
        return self.coder.topology.d_sae

    @functools.cached_property
    def history(self) -> dict[str, np.ndarray]:
        """{metric: [rows] float64, "step": int64} of its training: `pandas.DataFrame(sae.history)`. NaN where a row has
        none. Empty for a saved folder and other projects' files."""
        return columns(self.metrics())

    def plot(self) -> "Figure":
        """Loss, FVE, L0 and dead latents by step, as a picture of matplotlib.

        Raises:
            DataError: there is no history.
        """
        return curves(self.history)

    def to_torch(self, device: Any = "cpu", dtype: Any = "float32") -> Any:
        """The same dictionary as a torch.nn.Module with `encode`, `decode`, `forward` and the coder's parameters.

        `device` and `dtype` are torch's own or their names.

        Raises:
            ConfigError: several hook points or layers, no such dtype or device, or PyTorch is not installed.
        """
        return torch_module(self.describe(), self.coder.sparsity.kept, self.params, device, dtype)

    @functools.cached_property
    def config(self) -> FrozenConfigDict:
        """`settings` with dots, as in sae.config.coder.k."""
        return FrozenConfigDict(dict(self.settings))

    @property
    def step(self) -> int:
        """Training steps taken."""
        return self.origin.step

    @property
    def hook_point(self) -> str:
        """The (first) hook point read."""
        return self.sites.reads[0]

    @property
    def n_latents(self) -> int:
        """All latents, of all layers."""
        return math.prod(self.coder.topology.latent_shape)

    def encode(self, x: Any) -> Any:
        """Activations [..., D] -> latents [..., F], dense float32.

        A crosscoder reads [..., S, D]. A cross-layer transcoder reads [..., L, D] and gives [..., L, F].

        Raises:
            DataError: the last axes are not those of the coder's input.
        """
        topology = self.coder.topology
        rows, outer = _as_rows(x, topology.in_shape, "activations")
        return self._in_blocks(self._encode, [rows]).reshape(*outer, *topology.latent_shape)

    def encode_sparse(self, x: Any, k: int = 0) -> tuple[Any, Any]:
        """Activations [..., D] -> (values [..., K], indices [..., K]) of the latents that are not 0, largest first.

        K is `k` if given. Else it is the k of a coder that keeps k latents, or the largest number of latents that fire
        for one of the tokens. Places that are left over have value 0. Latent f of layer g of a cross-layer
        transcoder has index g F + f.

        Raises:
            DataError: as `encode`; or inside jit, where a K that depends on the data must be given as `k`.
        """
        k = typed(int, k, "encode_sparse: k")
        rows, outer = _as_rows(x, self.coder.topology.in_shape, "activations")
        if not k and not self.coder.sparsity.sparse and isinstance(rows, jax.core.Tracer):
            raise DataError("Inside jit the number of latents must be known: give encode_sparse(x, k=...).")

        def sparse(params: ParamMap, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            latents = self._code(params, x)
            all_kept = latents.values.shape[-1] if self.coder.sparsity.sparse else 0
            return _largest_latents(latents, k or all_kept or int(latents.active().sum(-1).max()))

        values, indices = self._in_blocks(sparse, [rows])
        return values.reshape(*outer, values.shape[-1]), indices.reshape(*outer, indices.shape[-1])

    def decode(self, latents: Any, x: Any = None) -> Any:
        """Latents [..., F] -> what is written, [..., D] (or [..., S, D]), float32.

        Args:
            x: the activations that were encoded; a skip connection and layer normalisation need them.

        Raises:
            DataError: the last axes are not those of the coder's latents, or `x` has other axes before them.
        """
        topology = self.coder.topology
        rows, outer = _as_rows(latents, topology.latent_shape, "latents")
        blocks_of = [rows]
        if x is not None:
            x_rows, x_outer = _as_rows(x, topology.in_shape, "activations")
            if x_outer != outer:
                raise DataError(f"decode needs the activations of these latents: those are {outer}, x is {x_outer}.")
            blocks_of.append(x_rows)
        return self._in_blocks(self._decode, blocks_of).reshape(*outer, *topology.out_shape)

    def at(self, lm: Model) -> "TrainedCoder":
        """The same coder with its hook points by the model's own names for them.

        Raises:
            ConfigError: no language model, or one without such a hook point.
            DataError: the model has another width there, or other weights than in training.
        """
        if not hasattr(lm, "hook_point"):
            raise ConfigError(f"at takes a model of saejax.load_lm; it was given {type_in_words(lm)}.")
        self.origin.check_centring(lm)
        topology = self.coder.topology
        reads, writes = (tuple(map(lm.hook_point, names)) for names in (self.sites.reads, self.sites.writes))
        sites = dataclasses.replace(self.sites, reads=reads, writes=writes)
        widths = sites.widths(topology.in_shape[-1], topology.out_shape[-1])
        what = f"The coder of {self.origin.source or self.hook_point}"
        check_widths(what, widths, f"the model {lm.identity['model']}", lm.hook_points())
        return dataclasses.replace(self, sites=sites)

    def with_k(self, k: int) -> "TrainedCoder":
        """The same coder keeping the k largest latents of a token (and layer): a HierarchicalTopK at any k.

        Every coder that keeps k latents can do so; one that was trained at another k alone was not made for it.
        Figures of an evaluation belong to the k they were measured at, so they are left out.

        Raises:
            ConfigError: the coder keeps no number of latents, or has fewer than k.
        """
        k = typed(int, k, "with_k: k")
        sparsity, width = self.coder.sparsity, self.coder.topology.d_sae
        if not isinstance(sparsity, TopK):
            raise ConfigError(f"with_k needs a coder that keeps its k largest latents (topk, abs_topk), not {self}.")
        if not 1 <= k <= width:
            raise ConfigError(f"with_k({k}): k must be between 1 and {width}, the number of latents.")
        other = dataclasses.replace(self.coder, sparsity=dataclasses.replace(sparsity, k=Ramp.constant(k)))
        return dataclasses.replace(self, coder=other, figures={})

    def describe(self) -> dict[str, Any]:
        """Topology, sparsity, sizes, hook points, origin, figures and settings, as JSON."""
        return describe(self.coder, self.sites) | {
            "origin": dataclasses.asdict(self.origin),
            "figures": {name: float(value) for name, value in self.figures.items() if math.isfinite(value)},
            "finished": self.finished,
            "settings": dict(self.settings),
        }

    def fingerprint(self) -> str:
        """sha256 of what it computes and where: coder, hook points, and every parameter as float32."""
        digest = hashlib.sha256(json.dumps(describe(self.coder, self.sites), sort_keys=True).encode())
        for name in sorted(self.params):
            value = np.ascontiguousarray(self.params[name], np.float32)
            digest.update(f"{name}{value.shape}".encode())
            digest.update(value.data)
        return digest.hexdigest()

    def save(self, folder: str | os.PathLike[str], format: str = "saejax") -> list[str]:
        """Write the coder into a folder; `saejax.load(folder)` reads it back.

        Args:
            format: saejax (coder.safetensors, saejax.json and a model card; a coder that was saved there before is
                replaced as a whole), or that of another project: `saejax formats` lists them.

        Returns:
            What the format does not say without changing a number, one sentence each; mostly nothing.

        Raises:
            ConfigError: a format that is not known, or that cannot say this coder; says why.
            DataError: the folder holds something else, or cannot be written.
        """
        folder, format = as_place(folder, "save", "a folder"), typed(str, format, "save: format")
        if format == "saejax":
            write_folder(folder, self.describe(), self.params)
            return []
        to = format_named(format)
        if why := to.refuses(self):
            raise ConfigError(f"This coder cannot be written for {to.title}: {why}. `saejax formats` lists the others.")
        return to.write(self, Path(folder))

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Self:
        """The coder that `save` wrote, bit for bit.

        Raises:
            DataError: no such folder; a file that is missing, damaged, or of a newer version; names it.
        """

        def more(described: Mapping[str, Any]) -> dict[str, Any]:
            FrozenConfigDict(dict(described["settings"]))  # what cannot be read is refused here
            return {
                "origin": Origin(**described["origin"]),
                "figures": {str(name): float(value) for name, value in described["figures"].items()},
                "settings": dict(described["settings"]),
                "finished": described["finished"] is True,
            }

        coder, sites, params, rest = read_folder(folder, more)
        return cls(coder, params, sites, **rest)

    # --- block by block -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _on_device(self) -> dict[str, jax.Array]:
        with jax.ensure_compile_time_eval():  # first used within jit, they are still arrays
            return {name: jnp.asarray(value, jnp.float32) for name, value in self.params.items()}

    @functools.cached_property
    def _encode(self) -> Callable[..., Any]:
        return jax.jit(lambda params, x: self.coder.encode(params, x).dense())

    @functools.cached_property
    def _reconstruct(self) -> Callable[..., Any]:
        return jax.jit(self.coder.reconstruct)

    @functools.cached_property
    def _code(self) -> Callable[..., Latents]:
        return jax.jit(lambda params, x: self.coder.encode(params, x).flat())

    @functools.cached_property
    def _decode(self) -> Callable[..., Any]:
        d_sae = self.coder.topology.d_sae
        return jax.jit(lambda params, f, x=None: self.coder.decode(params, Latents(f, None, d_sae), x))

    def _in_blocks(self, function: Callable[..., Any], arrays: list[Any]) -> Any:
        """function(params, *arrays) over blocks of rows, on the kind of array that was given.

        Results of blocks may differ in their last axis: shorter ones are filled up with zeros.
        """
        n = len(arrays[0])
        if any(isinstance(a, jax.core.Tracer) for a in arrays):
            return function(self._on_device, *(a.astype(jnp.float32) for a in arrays))
        size = min(_BLOCK_TOKENS, self.coder.few_tokens, 1 << max(0, n - 1).bit_length())
        xp = np if isinstance(arrays[0], np.ndarray) else jnp
        blocks = []
        for start in range(0, max(n, 1), size):
            block = function(self._on_device, *(_padded(a[start : start + size], size) for a in arrays))
            count = min(size, n - start)
            # To the host at once: the device holds one block.
            blocks.append(jax.tree.map(lambda result, count=count: xp.asarray(result[:count]), block))
        return jax.tree.map(lambda *parts: _concatenated(xp, parts), *blocks)


def _largest_latents(latents: Latents, k: int) -> tuple[jax.Array, jax.Array]:
    """(values [B, k], indices [B, k]): the k largest latents of each token by |value|, falling."""
    at = top_k(jnp.abs(latents.values), min(max(1, k), latents.values.shape[-1]))[1]
    indices = at if latents.indices is None else jnp.take_along_axis(latents.indices, at, axis=-1)
    return jnp.take_along_axis(latents.values, at, axis=-1), indices


def _concatenated(xp: Any, parts: Sequence[Any]) -> Any:
    """The blocks one after the other."""
    width = max(part.shape[-1] for part in parts)
    if len(parts) == 1:
        return parts[0]
    pad = [(0, 0)] * (parts[0].ndim - 1)
    return xp.concatenate([xp.pad(part, [*pad, (0, width - part.shape[-1])]) for part in parts])


def _as_rows(array: Any, shape: tuple[int, ...], what: str) -> tuple[Any, tuple[int, ...]]:
    """([N, *shape], the axes before them); numpy and JAX arrays stay what they are, all else becomes numpy."""
    array = as_array(array, what)
    if array.shape[-len(shape) :] != shape:
        raise DataError(f"The last axes of {what} must be {shape}; the array is {array.shape}.")
    return array.reshape(-1, *shape), array.shape[: -len(shape)]


def _padded(rows: Any, size: int) -> Any:
    """float32 [size, ...], filled up with rows of zeros."""
    xp = np if isinstance(rows, np.ndarray) else jnp
    rows = rows.astype(np.float32)
    return rows if len(rows) == size else xp.pad(rows, ((0, size - len(rows)), *[(0, 0)] * (rows.ndim - 1)))
