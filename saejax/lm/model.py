"""`LanguageModel`: a loaded model with its tokenizer and the names of its hook points."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.core.arrays import as_array
from saejax.core.config import typed
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json
from saejax.core.places import as_place, what_is
from saejax.core.settings import Settings, setting
from saejax.lm import checkpoint, decoder, families
from saejax.lm.adapter import Adapter
from saejax.lm.centring import centre_writes
from saejax.lm.conventions import DecoderConfig, shard_params
from saejax.lm.display import model_html
from saejax.lm.fetching import fetch_config, fetch_model, fetch_tokenizer
from saejax.lm.forward import Forward, compiled_forward
from saejax.lm.gguf import GGUF, as_folder
from saejax.lm.points import ADDED, ADDED_THROUGH, TRANSFORMER_LENS
from saejax.lm.rows import check_length
from saejax.lm.torch_hooks import ModuleTensors, TorchModel, difference, from_module, held_module, load_torch, with_cls
from saejax.lm.torch_hooks.memory import (
    ROUNDING,
    check_place,
    check_tensors,
    config_json_of,
    digest_of,
    rounding_of,
    sampled_results,
    why_not_decoded,
)
from saejax.lm.weight_files import LARGEST_CONFIG, weights_sha256
from saejax.text import IdsAlone, Tokenizer, is_tokenizer, tokenizer_in_memory

# Models that lie beside this file.
EMBEDDED = ("demo", "recall")

# What the name of a model ends with that no file holds.
IN_MEMORY = " in memory"

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class LMConfig(Settings, section="lm"):
    """The language model."""

    model: str = setting(
        "demo",
        "`demo` (the embedded model), `recall` (a second one, for the quickstart of `saejax prefix`), a Hugging Face "
        "model folder, a GGUF file (by the extra gguf), or a hub id `owner/name`.",
        place="hub",
    )
    revision: str = setting("", "Commit, tag or branch of a hub id; pin it.")
    dtype: str = setting(
        "float32",
        "Dtype of parameters and activations. float32 is float32 in every product, also where a device has a faster "
        "one (TF32); bfloat16 is the fast way there.",
        choices=_DTYPES,
    )
    second: str = setting(
        "",
        "Another model with the same tokenizer, to compare with (model diffing); its hook points are named "
        "second.blocks.3.resid_post. Empty: none.",
        place="hub",
    )
    second_revision: str = setting("", "Commit, tag or branch of the second model.")
    backend: str = setting(
        "auto",
        "jax, the decoder of saejax; torch, any model of transformers, and any module of it as a hook point "
        "(encoder.layer.2.output.out; by the extra torch); or auto: jax where its decoder knows the "
        "architecture.",
        choices=("auto", "jax", "torch"),
    )
    device: str = setting(
        "",
        "Where torch runs the model, as in cpu, cuda or cuda:1. Empty: the GPU where PyTorch sees one.",
        decides=False,
    )
    adapter: str = setting(
        "",
        "A folder with a LoRA adapter of PEFT, as `saejax adapt` writes one: the model is loaded with its changes. "
        "Empty: none.",
        place="path",
    )
    center_writing_weights: bool = setting(
        False,
        "The residual stream less its mean over d_model, as TransformerLens's from_pretrained gives it by default. The "
        "logits stay. For dictionaries that were trained so, as SAELens's gpt2-small-res-jb; LayerNorm models in JAX.",
    )


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A language model as data: configuration, parameters, tokenizer, and where they came from.

    Attributes:
        identity: JSON naming model, revision and hashes of weights and tokenizer; part of a store's identity.
        family: `model_type` of config.json; empty where it is not known.
    """

    config: DecoderConfig
    params: Any
    tokenizer: Tokenizer
    identity: dict[str, Any]
    family: str = ""

    pure = True

    def __repr__(self) -> str:
        return self.config.in_one_line(self, self.family, "jax", self.identity.get("dtype", "float32"))

    def _repr_html_(self) -> str:
        return model_html(self)

    @property
    def longest_mixed(self) -> int:
        """Every document: no frequency of the decoder follows a length."""
        return self.config.context_length

    def run(
        self,
        tokens_BS: Any,
        positions_BS: Any = None,
        segments_BS: Any = None,
        capture: Sequence[str] = (),
        edits: Mapping[str, decoder.Edit] | None = None,
        prefix_BPM: Any = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """tokens [B, S] -> (logits [B, S, V], {hook point: activation}); see `saejax.lm.decoder.run`.

        Takes the names of `hook_points()` and of `inner_points()`.
        """
        names = [self.config.any_point(name) for name in typed(tuple[str, ...], capture, "capture")]
        named_edits = {self.config.any_point(name): edit for name, edit in (edits or {}).items()}
        if len(named_edits) < len(edits or {}):
            raise ConfigError(f"Two edits at one hook point under two names: {', '.join(edits or {})}. Compose them.")
        segments = None if segments_BS is None else jnp.asarray(as_array(segments_BS, "segments"))
        positions: Any = None if positions_BS is None else as_array(positions_BS, "positions")
        if positions is not None and self.config.rope is not None:  # learned ones are checked as they are given
            positions = jnp.asarray(positions)
        prefix = None if prefix_BPM is None else jnp.asarray(as_array(prefix_BPM, "prefix"))
        return decoder.run(self.config, self.params, tokens_BS, positions, segments, names, named_edits, prefix)

    def activations(self, text: str, hook_point: str) -> np.ndarray:
        """Activations [S, d] float32 of one text at one hook point, the model's bos in front where it is known."""
        ids = self.tokenizer.bos + self.tokenizer.encode_behind_bos([typed(str, text, "activations: text")])[0]
        check_length("The text has", len(ids), self.config.context_length)
        name = self.hook_point(hook_point)
        return np.asarray(self.run([ids], capture=[name])[1][name][0], np.float32)

    def hook_points(self) -> dict[str, int]:
        """{hook point: width} of the whole model, from its config: the points with one vector for each token."""
        return self.config.hook_points()

    def inner_points(self) -> tuple[str, ...]:
        """The other points that `run` watches and edits: attention patterns [B, H, S, S], norms' scales [B, S, 1]."""
        return self.config.inner_points()

    def apply(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        capture: Sequence[str] = (),
        edits: Mapping[str, decoder.Edit] | None = None,
        begin: decoder.Begin | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(logits [R, S, V], {hook point: [R, S, d]}) of packed rows, for `params` as in `self.params`. Pure."""
        edits = dict(edits or {})
        return decoder.run(self.config, params, tokens, positions, segments, capture, edits, begin=begin)

    def start_of(self, names: Sequence[str]) -> str:
        return self.config.start_of(names)

    def measures_loss(self, names: Sequence[str]) -> bool:
        return True

    def into_residual(self, hook_point: str, rows_FD: np.ndarray) -> np.ndarray | None:
        """[F, d_model]: what rows added at a hook point add to the residual stream; None where no matrix says it.

        attn_z goes through W_O and mlp_act through W_out, unless a norm follows; mlp_in is only read.
        """
        block, _, name = self.hook_point(hook_point).rpartition(".")
        if name in ADDED:
            return rows_FD
        if name not in ADDED_THROUGH or self.config.post_norms:
            return None
        room, matrix = ADDED_THROUGH[name]
        weight = self.params["blocks"][int(block.removeprefix("blocks."))][room][matrix]
        return rows_FD @ np.asarray(jnp.asarray(weight, jnp.float32)).reshape(-1, self.config.d_model)

    def readout(self) -> tuple[jax.Array, jax.Array]:
        W_U_DV = decoder.unembedding(self.params).astype(jnp.float32)
        return self.params["ln_final"]["w"].astype(jnp.float32), W_U_DV

    def placed(self, mesh: Mesh) -> Any:
        """`params` on the mesh: heads, d_mlp and vocabulary over "latent"."""
        return shard_params(self.config, self.params, mesh)

    def rows_that_fit(self, names: Sequence[str], length: int) -> int:
        """Raises ConfigError: not known for a JAX model."""
        raise ConfigError(
            "capture.batch_rows is 0: rows by memory are found for lm.backend=torch only; give a number, such as 32."
        )

    def make_forward(self, names: Sequence[str], shape: tuple[int, int], mesh: Mesh) -> Forward:
        return compiled_forward(self, names, shape, mesh)

    def hook_point(self, name: str) -> str:
        """The canonical name of a hook point; TransformerLens names are accepted.

        Raises:
            ConfigError: it does not exist; the message lists those that do.
        """
        return self.config.hook_point(name)


class _How(TypedDict, total=False):
    revision: str
    dtype: str
    device: str
    mesh: Mesh | None
    context_length: int
    center_writing_weights: bool
    adapter: str | Path


@overload
def load_lm(
    model: Any = "demo", tokenizer: Any = None, *, backend: Literal["jax"], **how: Unpack[_How]
) -> LanguageModel: ...
@overload
def load_lm(
    model: Any = "demo", tokenizer: Any = None, *, backend: Literal["torch"], **how: Unpack[_How]
) -> TorchModel: ...
@overload
def load_lm(
    model: Any = "demo", tokenizer: Any = None, *, backend: str = "auto", **how: Unpack[_How]
) -> LanguageModel | TorchModel: ...
def load_lm(
    model: Any = "demo",
    tokenizer: Any = None,
    *,
    revision: str = "",
    dtype: str = "",
    backend: str = "auto",
    device: str = "",
    mesh: Mesh | None = None,
    context_length: int = 0,
    center_writing_weights: bool = False,
    adapter: str | Path = "",
) -> LanguageModel | TorchModel:
    """The language model that `model` names or is.

    With a mesh, heads, d_mlp and the vocabulary of a JAX model are spread over its axis "latent" while they are read.

    Args:
        model: `demo`, a folder, a GGUF file or a hub id `owner/name` (see `LMConfig`); or a module of PyTorch in
            memory, whose forward takes token ids [B, T] and gives one vector a token. Of a family that the JAX decoder
            knows it is read into the decoder, and its logits are compared; any other runs as it is, watched by hooks.
        tokenizer: of a module: a fast tokenizer of transformers, one of the package tokenizers, or what names a model
            with one. None: the `tokenizer` that the module or its wrapper has; without one it takes ids alone.
        revision, device, backend, center_writing_weights, adapter: as in `LMConfig`.
        dtype: as in `LMConfig`, float32 if empty; PyTorch runs a module in memory in its own, on its own device.
        context_length: tokens that a module reads which has no config that says it.

    Raises:
        ConfigError: arguments that do not go together, a `dtype` or `backend` that is not offered, or torch where it is
            not installed.
        DataError: it cannot be found, read or run; the message says what to do.
    """
    module = held_module(model)
    wanted = LMConfig("" if module is not None else _checked_name(model, "load_lm"), revision, dtype or "float32")
    centre = typed(bool, center_writing_weights, "center_writing_weights")
    changes_at = as_place(adapter, "load_lm: adapter", "the folder of a LoRA adapter")
    how = {"backend": backend, "device": device, "center_writing_weights": centre, "adapter": changes_at}
    wanted = dataclasses.replace(wanted, **how)
    if module is not None:
        return _load_module(model, module, tokenizer, wanted, dtype, mesh, typed(int, context_length, "context_length"))
    if tokenizer is not None or context_length:
        raise ConfigError(
            f"tokenizer and context_length belong to a module in memory, and {wanted.model!r} brings its own. Leave "
            "them out; a version of a hub id is revision=."
        )
    folder = _resolve(wanted.model, revision, fetch_model)
    if runs_in_torch(folder, backend):
        if (folder / GGUF).is_file():
            raise ConfigError(f"lm.backend=torch does not read GGUF ({model}). Set lm.backend=jax.")
        _check_unchanged(wanted)
        read = Tokenizer.from_folder(folder)
        return load_torch(folder, read, _identity(wanted, folder, read), wanted.dtype, device, TRANSFORMER_LENS)
    changes = Adapter.read(wanted.adapter) if wanted.adapter else None
    config, params = checkpoint.read_params(folder, _DTYPES[wanted.dtype], mesh, changes)
    if wanted.center_writing_weights:
        config, params = centre_writes(config, params)
    read, family = Tokenizer.from_folder(folder).for_rows(config.vocab_size), checkpoint.read_config(folder)[0]
    identity = _identity(wanted, folder, read) | ({"adapter_sha256": changes.sha256} if changes else {})
    return LanguageModel(config, params, read, identity, family["model_type"])


def _load_module(
    model: Any, module: Any, tokenizer: Any, wanted: LMConfig, dtype: str, mesh: Mesh | None, context_length: int
) -> LanguageModel | TorchModel:
    """`load_lm` of the module that `model` is or holds."""
    if wanted.revision:
        raise ConfigError("revision names a version of a hub id, and the model is in memory. Leave it out.")
    check_tensors(module)
    config_json, name = config_json_of(module), f"{type(module).__name__}{IN_MEMORY}"
    if tokenizer is None and is_tokenizer(beside := getattr(model, "tokenizer", None)):
        tokenizer = beside
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = load_tokenizer(os.fspath(tokenizer))
    elif tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        tokenizer = tokenizer_in_memory(tokenizer, config_json)
    if wanted.adapter:
        raise ConfigError(
            "adapter changes a model that is read from files, and this one is in memory: merge it by PEFT."
        )
    identity = _named(wanted, name, digest_of(module, config_json), tokenizer.sha256 if tokenizer else "")
    why = why_not_decoded(module, config_json, families.ARCHITECTURES)
    if wanted.backend == "torch" or (wanted.backend == "auto" and why):
        _check_unchanged(wanted)
        identity["dtype"] = check_place(module, dtype, wanted.device)
        if config_json.get("is_encoder_decoder"):
            module = module.get_encoder()
        return with_cls(from_module(module, tokenizer, identity, context_length, TRANSFORMER_LENS))
    if why:
        raise ConfigError(f"The JAX decoder does not read this module: {why}. Or set backend='torch', which runs it.")
    if context_length:
        raise ConfigError(f"context_length is that of the module's own config for {name}. Leave it out.")
    config = checkpoint.config_of(config_json, name)
    read = ModuleTensors(module), config_json, config, name, _DTYPES[wanted.dtype], mesh
    config, params = checkpoint.params_of(*read)
    if wanted.center_writing_weights:
        config, params = centre_writes(config, params)
    tokenizer = tokenizer.for_rows(config.vocab_size) if tokenizer else IdsAlone.of(config.vocab_size)
    lm = LanguageModel(config, params, tokenizer, identity, config_json["model_type"])
    tokens, theirs = sampled_results(module, config.vocab_size, config.context_length)
    ours = np.asarray(lm.run(tokens)[0], np.float32)
    off = difference(ours, theirs) if ours.shape == theirs.shape else np.inf
    if off > (rounding := max(ROUNDING[wanted.dtype], rounding_of(module))):
        raise DataError(
            f"The JAX decoder gives other logits than {name} (by {off:.1g} of their norm; {rounding:.0e} is rounding), "
            "so its forward is another than its class says. Set backend='torch', which runs it as it is."
        )
    return lm


def runs_in_torch(folder: Path, backend: str) -> bool:
    """By lm.backend; for `auto`, whether the JAX decoder lacks the architecture that config.json names."""
    if backend != "auto":
        return backend == "torch"
    try:
        config_json = read_json(folder / "config.json", LARGEST_CONFIG)
    except DataError:  # the reader of checkpoints says what is wrong with it
        return False
    kind = config_json.get("model_type") if isinstance(config_json, dict) else None
    return isinstance(kind, str) and kind not in families.ARCHITECTURES


def _identity(wanted: LMConfig, folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    local = Path(wanted.model).is_dir() or (folder / GGUF).is_file()
    name = Path(wanted.model).resolve().name if local else wanted.model
    return _named(wanted, name, weights_sha256(folder), tokenizer.sha256)


def _named(wanted: LMConfig, name: str, weights: str, tokenizer: str) -> dict[str, Any]:
    identity: dict[str, Any] = {"model": name, "revision": wanted.revision, "dtype": wanted.dtype}
    identity |= {"weights_sha256": weights, "tokenizer_sha256": tokenizer}
    return identity | ({"center_writing_weights": True} if wanted.center_writing_weights else {})


def _check_unchanged(wanted: LMConfig) -> None:
    if wanted.center_writing_weights:
        raise ConfigError("lm.center_writing_weights: PyTorch runs this one with its own weights. Set it to false.")
    if wanted.adapter:
        raise ConfigError("lm.adapter: PyTorch runs this one with its own weights. Merge the adapter by PEFT first.")


def config_folder(model: str, revision: str = "") -> Path:
    """A folder with the model's config.json; for a hub id that is not cached, nothing else is fetched."""
    return _resolve(model, revision, fetch_config)


def load_tokenizer(model: str, revision: str = "") -> Tokenizer:
    """The tokenizer of the model that `model` names, as for `load_lm`; no weights are read, and none are fetched."""
    return Tokenizer.from_folder(_resolve(model, revision, fetch_tokenizer))


def _checked_name(model: Any, door: str) -> str:
    """The text of a model's place or id. Raises ConfigError for anything else, as a model in memory."""
    saved = " saejax.load_lm takes a module of PyTorch; save any other by save_pretrained(FOLDER), and give that."
    remedy = saved if hasattr(model, "forward") else ""
    return as_place(model, door, "demo, the folder of a model, a GGUF file or a hub id owner/name", remedy)


def _resolve(model: str, revision: str, fetch: Callable[[str, str], Path]) -> Path:
    model = _checked_name(model, "A language model")
    if model in EMBEDDED:
        return Path(__file__).parent / model
    if Path(model).is_dir():
        return Path(model)
    if model.lower().endswith(".gguf") and Path(model).is_file():
        return as_folder(Path(model))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
        return fetch(model, revision)
    if model.endswith(IN_MEMORY):
        raise DataError(
            f"{model!r} is in the memory of another program. Save it by save_pretrained(FOLDER), and name that."
        )
    there = f" At this path {what_is(model)}." if Path(model).exists() else ""
    raise DataError(
        f"No model {model!r}: it is not a folder, no .gguf file, not 'demo' or 'recall', and not a hub id of the "
        f"form owner/name (GPT-2 is openai-community/gpt2).{there}"
    )
