"""`LanguageModel`: a loaded model with its tokenizer and the names of its hook points."""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json
from saejax.core.hub import check_hub, unreachable
from saejax.lm import checkpoint, decoder, families
from saejax.lm.conventions import DecoderConfig
from saejax.lm.forward import Forward, compiled_forward
from saejax.lm.torch_hooks import TorchModel, load_torch
from saejax.text import Tokenizer

HOOK_NAMES = ("resid_pre", "attn_z", "attn_out", "resid_mid", "mlp_in", "mlp_act", "mlp_out", "resid_post")

# TransformerLens names of the same places. (Its ln2.hook_normalized is not here: it is taken before the
# norm's own scale and shift, so it is another tensor than mlp_in.)
_TRANSFORMER_LENS = {
    "hook_resid_pre": "resid_pre",
    "ln1.hook_scale": "ln1_scale",
    "attn.hook_pattern": "attn_pattern",
    "attn.hook_z": "attn_z",  # there [B, S, H, D], here flat
    "ln1_post.hook_scale": "ln1_post_scale",
    "hook_attn_out": "attn_out",
    "hook_resid_mid": "resid_mid",
    "ln2.hook_scale": "ln2_scale",
    "mlp.hook_post": "mlp_act",
    "ln2_post.hook_scale": "ln2_post_scale",
    "hook_mlp_out": "mlp_out",
    "hook_resid_post": "resid_post",
}
BACKENDS = ("auto", "jax", "torch")
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """Which language model.

    Attributes:
        model: `demo` (the embedded model), a Hugging Face model folder, or a hub id `owner/name`.
        revision: commit, tag or branch of a hub id; pin it.
        dtype: float32 or bfloat16, of parameters and activations.
        second, second_revision: another model with the same tokenizer, to compare with (model diffing); its hook points
            are named second.blocks.3.resid_post. Empty: none.
        backend: `jax`, the decoder of saejax; `torch`, any model of transformers, and any module of it as a hook point
            (encoder.layer.2.output.out; an extra: pip install 'saejax[torch]'); or `auto`: jax where its decoder knows
            the architecture.
        device: where torch runs the model, as in cpu, cuda or cuda:1. Empty: the GPU where PyTorch sees one.
    """

    model: str = "demo"
    revision: str = ""
    dtype: str = "float32"
    second: str = ""
    second_revision: str = ""
    backend: str = "auto"
    device: str = ""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"lm.backend is {self.backend!r}; it must be one of {', '.join(BACKENDS)}.")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"lm.dtype is {self.dtype!r}; it must be one of {', '.join(_DTYPES)}.")


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A language model as data: configuration, parameters, tokenizer, and where they came from.

    Attributes:
        identity: JSON naming model, revision and hashes of weights and tokenizer; part of a store's identity.
    """

    config: DecoderConfig
    params: Any
    tokenizer: Tokenizer
    identity: dict[str, Any]

    pure = True

    def run(
        self,
        tokens_BS: Any,
        positions_BS: Any = None,
        segments_BS: Any = None,
        capture: Sequence[str] = (),
        edits: Mapping[str, decoder.Edit] | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """tokens [B, S] -> (logits [B, S, V], {hook point: activation}); see `saejax.lm.decoder.run`.

        Takes the names of `hook_points()` and of `inner_points()`.
        """
        names = [self._point(name) for name in capture]
        named_edits = {self._point(name): edit for name, edit in (edits or {}).items()}
        if len(named_edits) < len(edits or {}):
            raise ConfigError(f"Two edits at one hook point under two names: {', '.join(edits or {})}. Compose them.")
        positions, segments = (None if x is None else jnp.asarray(x) for x in (positions_BS, segments_BS))
        tokens = jnp.asarray(tokens_BS)
        return decoder.run(self.config, self.params, tokens, positions, segments, names, named_edits)

    def activations(self, text: str, hook_point: str) -> np.ndarray:
        """Activations [S, d] float32 of one text at one hook point, the model's bos in front."""
        ids = ([] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]) + self.tokenizer.encode(text)
        if len(ids) > self.config.context_length:
            raise DataError(f"The text has {len(ids)} tokens; the model reads {self.config.context_length}.")
        name = self.hook_point(hook_point)
        return np.asarray(self.run([ids], capture=[name])[1][name][0], np.float32)

    def hook_points(self) -> dict[str, int]:
        """{hook point: width} of the whole model, from its config: the points with one vector for each token."""
        c = self.config
        widths = dict.fromkeys(HOOK_NAMES, c.d_model) | {"mlp_act": c.d_mlp, "attn_z": c.n_head * c.d_head}
        return {f"blocks.{i}.{name}": widths[name] for i in range(c.n_layer) for name in HOOK_NAMES}

    def inner_points(self) -> tuple[str, ...]:
        """The other points that `run` watches and edits: attention patterns [B, H, S, S], norms' scales [B, S, 1]."""
        norms = ["ln1"] + (["ln2"] if self.config.residual != "parallel_one_norm" else [])
        norms += ["ln1_post", "ln2_post"] if self.config.post_norms else []
        names = ("attn_pattern", *(f"{norm}_scale" for norm in norms))
        return (*(f"blocks.{i}.{name}" for i in range(self.config.n_layer) for name in names), "ln_final_scale")

    def apply(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        capture: Sequence[str] = (),
        edits: Mapping[str, decoder.Edit] | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(logits [R, S, V], {hook point: [R, S, d]}) of packed rows, for `params` as in `self.params`. Pure."""
        return decoder.run(self.config, params, tokens, positions, segments, capture, dict(edits or {}))

    def measures_loss(self, names: Sequence[str]) -> bool:
        """True: what is put in at any hook point goes on into the logits of the next token."""
        return True

    def readout(self) -> tuple[jax.Array, jax.Array]:
        """(scale of the final norm [D], W_U [D, V]), float32."""
        W_U_DV = decoder.unembedding(self.params).astype(jnp.float32)
        return self.params["ln_final"]["w"].astype(jnp.float32), W_U_DV

    def rows_that_fit(self, names: Sequence[str], length: int) -> int:
        """Not known of a JAX model.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "capture.batch_rows is 0: rows by memory are found for lm.backend=torch only; give a number, such as 32."
        )

    def make_forward(self, names: Sequence[str], shape: tuple[int, int], mesh: Mesh) -> Forward:
        """packed rows [R, S] -> ({hook point: bfloat16 [R S, d]}, finite bool [R S]), compiled, rows over the mesh."""
        return compiled_forward(self, names, shape, mesh)

    def hook_point(self, name: str) -> str:
        """The canonical name of a hook point; TransformerLens names are accepted.

        Raises:
            ConfigError: it does not exist; the message lists those that do.
        """
        canonical = _canonical(name)
        there = self.hook_points()
        if canonical not in there:
            close = difflib.get_close_matches(canonical, there, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            if canonical in self.inner_points():
                hint = " It can be watched and edited in `run`, but holds no vector for each token."
            raise ConfigError(
                f"The model has no hook point {name!r}.{hint} There are blocks.0 to blocks."
                f"{self.config.n_layer - 1}, each with {', '.join(HOOK_NAMES)}."
            )
        return canonical

    def _point(self, name: str) -> str:
        """The canonical name of an inner point or a hook point."""
        canonical = _canonical(name)
        return canonical if canonical in self.inner_points() else self.hook_point(name)


def _canonical(name: str) -> str:
    if name == "ln_final.hook_scale":
        return "ln_final_scale"
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return f"blocks.{match[1]}.{_TRANSFORMER_LENS.get(match[2], match[2])}" if match else name


def load_lm(
    model: str = "demo", revision: str = "", dtype: str = "float32", backend: str = "auto", device: str = ""
) -> LanguageModel | TorchModel:
    """The language model that `model` names: `demo`, a folder, or a hub id `owner/name`; see `LMConfig`.

    Raises:
        ConfigError: a `dtype` or `backend` that is not offered, or torch where it is not installed.
        DataError: it cannot be found or read; the message says what to do.
    """
    wanted = LMConfig(model, revision, dtype, backend=backend, device=device)
    folder = _resolve(model, revision)
    if _runs_in_torch(folder, backend):
        tokenizer = Tokenizer.from_folder(folder)
        return load_torch(folder, tokenizer, _identity(wanted, folder, tokenizer), dtype, device, _TRANSFORMER_LENS)
    config, params = checkpoint.read_params(folder, _DTYPES[wanted.dtype])
    tokenizer = Tokenizer.from_folder(folder)
    largest = tokenizer.largest_id
    if largest >= config.vocab_size:
        raise DataError(
            f"{folder}: the tokenizer has the id {largest}, the model only {config.vocab_size} tokens (0 to "
            f"{config.vocab_size - 1}); they do not belong together."
        )
    return LanguageModel(config, params, tokenizer, _identity(wanted, folder, tokenizer))


def _runs_in_torch(folder: Path, backend: str) -> bool:
    """By lm.backend; of `auto` whether the JAX decoder lacks the architecture that config.json names."""
    if backend != "auto":
        return backend == "torch"
    try:
        config_json = read_json(folder / "config.json", checkpoint.LARGEST_CONFIG)
    except DataError:  # the reader of checkpoints says what is wrong with it
        return False
    kind = config_json.get("model_type") if isinstance(config_json, dict) else None
    return isinstance(kind, str) and kind not in families.ARCHITECTURES


def _identity(wanted: LMConfig, folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "model": wanted.model if not Path(wanted.model).is_dir() else Path(wanted.model).resolve().name,
        "revision": wanted.revision,
        "dtype": wanted.dtype,
        "weights_sha256": checkpoint.weights_sha256(folder),
        "tokenizer_sha256": tokenizer.sha256,
    }


def _resolve(model: str, revision: str) -> Path:
    if model == "demo":
        return Path(__file__).parent / "demo"
    if Path(model).is_dir():
        return Path(model)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
        return _download(model, revision)
    raise DataError(
        f"No model {model!r}: it is not a folder, not 'demo', and not a hub id of the form owner/name "
        "(GPT-2 is openai-community/gpt2)."
    )


def _download(repo: str, revision: str) -> Path:
    """A local copy of a hub repository; what is cached already is used without asking the network."""
    import huggingface_hub

    wanted: dict[str, Any] = {
        "repo_id": repo,
        "revision": revision or None,
        "allow_patterns": [
            *("config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json"),
            *("tokenizer_config.json", "chat_template.jinja"),
        ],
    }
    try:
        cached = Path(huggingface_hub.snapshot_download(**wanted, local_files_only=True))
        if checkpoint.is_complete(cached):  # another program may have fetched the configuration alone
            return cached
    except Exception:  # not cached: the library raises one of several kinds
        pass
    remedy = "It is not cached. Check the name and the network, or give a local folder in lm.model."
    check_hub("model", repo, revision, remedy)
    try:
        return Path(huggingface_hub.snapshot_download(**wanted))
    except Exception as error:  # every failure means the same to the user, and is told
        raise unreachable("model", repo, error, remedy) from None
