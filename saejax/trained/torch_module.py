"""A trained coder as a torch.nn.Module with the same numbers. torch is imported inside the functions."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError
from saejax.core.extras import installing

_ONE_SITE = ("autoencoder", "transcoder", "skip_transcoder", "layernorm_autoencoder")
_DTYPES = ("float32", "float64", "bfloat16", "float16")


def torch_module(described: Mapping[str, Any], kept: int, params: Mapping[str, Any], device: Any, dtype: Any) -> Any:
    """The coder as a module: `encode` [..., D] -> [..., F], `decode` [..., F] -> [..., D], `forward` both.

    Its parameters have the coder's names and shapes (W_enc [D, F], W_dec [F, D], ...) and take gradients. `decode`
    takes `x` too, which a skip connection and layer normalisation need.

    Args:
        described: as `TrainedCoder.describe`.
        kept: latents that a coder of the k largest keeps.

    Raises:
        ConfigError: a topology of several hook points or layers, no such dtype or device, or PyTorch is not installed.
    """
    topology, sparsity = described["topology"], described["sparsity"]["name"]
    if topology not in _ONE_SITE:
        raise ConfigError(f"to_torch takes one of {', '.join(_ONE_SITE)}, and this coder is a {topology}.")
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ConfigError(f"to_torch: dtype is {dtype!r}; it must be one of {', '.join(_DTYPES)}.")
    try:
        import torch
    except ImportError:
        raise ConfigError(f"to_torch needs PyTorch, which is not installed: {installing('torch')}") from None
    lista = described.get("lista", {"steps": 0, "rate": 0.0})
    selections = [selection(torch, sparsity, kept, suffix=f"_{t}") for t in range(lista["steps"])]
    select = selection(torch, sparsity, kept)
    normalised, skips, centred = topology.startswith("layernorm"), topology.startswith("skip"), "auto" in topology

    class Dictionary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for key, value in params.items():
                self.register_parameter(key, torch.nn.Parameter(torch.tensor(np.asarray(value, np.float32))))

        def encode(self, x: Any) -> Any:
            """[..., D] -> [..., F]"""
            into = x
            for select_step in selections:
                error = x - self.decode(select_step(self, self._products(into)), x)
                size, nothing = (a.norm(dim=-1, keepdim=True) for a in (error, x - self._at_rest(x)))
                share = (nothing / size.clamp(min=torch.finfo(size.dtype).tiny)).clamp(max=1.0)
                into = into + lista["rate"] * share * error
            return select(self, self._products(into))

        def _products(self, x: Any) -> Any:
            if normalised:
                mean, std = self._moments(x)
                x = (x - mean) / (std + self.ln_eps)
            return (x - self.b_dec if centred else x) @ self.W_enc

        def decode(self, latents: Any, x: Any = None) -> Any:
            """[..., F] -> [..., D]"""
            if x is None and (normalised or skips):
                raise ValueError("This coder decodes with its input: give decode(latents, x).")
            y = latents @ self.W_dec
            if normalised:
                y = self._moments(x)[1] * y
            return y + self._at_rest(x)

        def _at_rest(self, x: Any) -> Any:
            y = self.b_dec
            if normalised:
                mean, std = self._moments(x)
                y = std * y + mean
            return y + x @ self.W_skip if skips else y

        def forward(self, x: Any) -> Any:
            return self.decode(self.encode(x), x)

        def _moments(self, x: Any) -> tuple[Any, Any]:
            return x.mean(-1, keepdim=True), x.std(-1, keepdim=True)

    try:
        return Dictionary().to(device=device, dtype=getattr(torch, dtype))
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(f"to_torch: device {str(device)!r} cannot be used here ({why}).") from None


def selection(torch: Any, sparsity: str, kept: int, prefix: str = "", suffix: str = "") -> Callable[[Any, Any], Any]:
    """(module, x' W_enc [..., F]) -> latents [..., F], by the module's parameters b_enc, threshold, r_mag and b_mag.

    Args:
        sparsity: relu, jumprelu, gated, topk or abs_topk.
        kept: latents that the last two keep of a token.
        prefix: of the parameters' names in the module.
        suffix: of the names of parameters that a step of the encoder has for itself.
    """

    def of(module: Any, name: str) -> Any:
        own = prefix + name + suffix
        return getattr(module, own if hasattr(module, own) else prefix + name)

    def pre(module: Any, raw: Any) -> Any:
        return raw + of(module, "b_enc")

    def relu(module: Any, raw: Any) -> Any:
        return torch.relu(pre(module, raw))

    def gated(module: Any, raw: Any) -> Any:
        magnitude = torch.relu(torch.exp(of(module, "r_mag")) * raw + of(module, "b_mag"))
        return magnitude * (pre(module, raw) > 0)

    def jumprelu(module: Any, raw: Any) -> Any:
        return pre(module, raw) * (pre(module, raw) > torch.relu(of(module, "threshold")))

    def largest(latents: Any, sizes: Any) -> Any:
        # torch.topk takes any of several that are equal, the coder the first.
        least = sizes.topk(kept, dim=-1).values[..., -1:]
        above, equal = sizes > least, sizes == least
        left = kept - above.sum(-1, keepdim=True)
        return latents * (above | (equal & (equal.cumsum(-1) <= left)))

    def topk(module: Any, raw: Any) -> Any:
        return largest(relu(module, raw), relu(module, raw))

    def abs_topk(module: Any, raw: Any) -> Any:
        return largest(pre(module, raw), pre(module, raw).abs())

    selections = {select.__name__: select for select in (relu, gated, jumprelu, topk, abs_topk)}
    if sparsity not in selections:
        raise ConfigError(f"The sparsity {sparsity} has no form in PyTorch.")
    return selections[sparsity]
