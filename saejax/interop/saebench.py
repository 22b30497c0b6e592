"""SAEBench: the object that its evaluations take, made of a trained coder. (adamkarvonen/SAEBench 0.6.0: custom_saes/)

SAEBench asks a dictionary for W_enc [D, F], W_dec [F, D] with rows of length 1, b_enc, b_dec, encode, decode, a device,
a dtype, and a cfg that names the language model and the hook point as TransformerLens does. Here

    f = |W_dec| select((x' W_enc + b_enc)),   x_hat = f W_dec / |W_dec| + b_dec

so that reconstructions are the coder's, and which latents fire too: the selection sees the weights as they were
trained, and only what it has selected is scaled. This file is one of the few that import torch, inside its functions.
"""

import dataclasses
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError
from saejax.core.extras import installing
from saejax.interop.assemble import UNCENTRED, coder_kind
from saejax.interop.hooks import layer_of, to_transformer_lens
from saejax.trained import TrainedCoder
from saejax.trained.torch_module import selection

_ARCHITECTURES = {"relu": "standard", "topk": "topk", "jumprelu": "jumprelu", "gated": "gated"}


def refuses(sae: TrainedCoder) -> str:
    """The reason why SAEBench cannot evaluate this coder; empty where it can."""
    topology, sparsity = coder_kind(sae)
    if topology not in ("autoencoder", UNCENTRED):
        return f"it puts what the dictionary writes where it reads, and has nothing for a {topology}"
    if sparsity not in _ARCHITECTURES:
        return f"it counts latents above 0, and those of {sparsity} are negative too"
    if layer_of(sae.hook_point) is None:
        return f"it needs the layer of the hook point, and {sae.hook_point!r} names none"
    if to_transformer_lens(sae.hook_point).endswith("hook_z"):
        return "at hook_z it asks for SAELens's own objects: sae.save(folder, format='saelens') and load that there"
    return ""


def as_module(sae: TrainedCoder, model_name: str = "", dtype: str = "float32", device: str = "cpu") -> Any:
    """A torch.nn.Module that SAEBench's evaluations take: `selected_saes=[("mine", as_module(sae))]`.

    Latents are those of the coder times the lengths of its decoder rows; reconstructions are equal to 1e-5 of the
    largest entry in float32. A latent whose decoder row is zero writes nothing, and never fires here.

    Args:
        model_name: TransformerLens's name of the language model; by default that of the coder's origin.
        dtype: float32, bfloat16 or float16; what SAEBench loads the model in.
        device: of torch, as in cpu or cuda.

    Raises:
        ConfigError: what `refuses` says; no model's name; no such dtype; PyTorch is not installed.
    """
    if why := refuses(sae):
        raise ConfigError(f"This coder cannot be evaluated by SAEBench: {why}.")
    name = model_name or sae.origin.model
    if not name:
        raise ConfigError("The coder does not say its language model: give as_module(sae, model_name='gpt2').")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype is {dtype!r}; it must be float32, bfloat16 or float16.")
    try:
        import torch
    except ImportError:
        raise ConfigError(f"SAEBench runs in PyTorch, which is not installed: {installing('torch')}") from None
    layer = layer_of(sae.hook_point)
    assert layer is not None  # `refuses` looked
    (topology, sparsity), t = coder_kind(sae), sae.coder.topology
    config = _Config(
        name,
        t.d_in,
        t.d_sae,
        layer,
        to_transformer_lens(sae.hook_point),
        architecture=_ARCHITECTURES[sparsity],
        apply_b_dec_to_input=topology == "autoencoder",
        activation_fn_str="topk" if sparsity == "topk" else "relu",
        activation_fn_kwargs={"k": sae.coder.sparsity.kept} if sparsity == "topk" else {},
        training_tokens=sae.origin.tokens,
        dtype=dtype,
        device=device,
    )
    return _module(torch, sae, config).to(dtype=getattr(torch, dtype), device=device)


def _module(torch: Any, sae: TrainedCoder, config: "_Config") -> Any:
    params = {key: np.asarray(value, np.float32) for key, value in sae.params.items()}
    norms_F = np.linalg.norm(params["W_dec"].astype(np.float64), axis=1)
    unit_FD = params["W_dec"] / np.maximum(norms_F, np.finfo(np.float32).tiny)[:, None]
    unit_FD[norms_F == 0, 0] = 1.0  # any direction: such a latent is 0
    topology, sparsity = coder_kind(sae)
    centred, select = topology == "autoencoder", selection(torch, sparsity, sae.coder.sparsity.kept, "trained_")

    class Dictionary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cfg = config
            scaled = {"W_dec": unit_FD, "b_dec": params["b_dec"], "norms": norms_F}
            trained = {f"trained_{key}": value for key, value in params.items() if key not in scaled}
            for key, value in (scaled | trained).items():
                tensor = torch.tensor(np.asarray(value, np.float32))
                self.register_parameter(key, torch.nn.Parameter(tensor, requires_grad=False))

        def encode(self, x: Any) -> Any:
            """[..., D] -> [..., F]"""
            x = x - self.b_dec if centred else x
            return select(self, x @ self.trained_W_enc) * self.norms

        def decode(self, latents: Any) -> Any:
            """[..., F] -> [..., D]"""
            return latents @ self.W_dec + self.b_dec

        def forward(self, x: Any) -> Any:
            return self.decode(self.encode(x))

        # What the latents are computed from, in the scale that they have here.
        W_enc = property(lambda self: self.trained_W_enc * self.norms)
        b_enc = property(lambda self: self.trained_b_enc * self.norms)
        if "b_mag" in params:
            b_mag = property(lambda self: self.trained_b_mag * self.norms)
        if "threshold" in params:
            threshold = property(lambda self: self.trained_threshold * self.norms)
        device = property(lambda self: self.W_dec.device)
        dtype = property(lambda self: self.W_dec.dtype)

        def check_decoder_norms(self) -> bool:
            """True where all rows of W_dec have length 1, within the precision of the dtype."""
            off = (self.W_dec.float().norm(dim=1) - 1).abs().max().item()
            return bool(off < (1e-5 if self.dtype == torch.float32 else 1e-2))

    return Dictionary().eval()


@dataclasses.dataclass
class _Config:
    """The fields of a cfg that SAEBench reads or wants to be there. It adds fields, and takes `asdict`."""

    model_name: str
    d_in: int
    d_sae: int
    hook_layer: int
    hook_name: str
    architecture: str
    apply_b_dec_to_input: bool
    activation_fn_str: str
    activation_fn_kwargs: dict[str, Any]
    training_tokens: int
    dtype: str
    device: str
    context_size: int = 128
    hook_head_index: int | None = None
    finetuning_scaling_factor: bool = False
    prepend_bos: bool = True
    normalize_activations: str = "none"
    model_from_pretrained_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    dataset_path: str = ""
    dataset_trust_remote_code: bool = False
    seqpos_slice: tuple[int | None, ...] = (None,)
    sae_lens_training_version: str | None = None
    neuronpedia_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
