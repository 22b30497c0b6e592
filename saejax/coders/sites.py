"""Sites: which hook points a coder reads and writes, and how their activations become its batch.

    x = s_in * a[reads],   y = s_out * a[writes]

One constant scale a site, so that every site has the same size whatever its layer (normalisation per site). A training
that starts from a trained coder may have its latents in another unit than that coder has.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sites:
    """Hook points in and out.

    Attributes:
        reads, writes: names, in the order of the coder's site axis; for an autoencoder or crosscoder the same.
        read_scales, write_scales: stored activations are multiplied by these, one a site.
        stacked: batches have a site axis, [B, S, D]; else there is one site in and one out, [B, D].
        latent_scale: the training's latents are this many times those of the coder for raw activations.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    read_scales: tuple[float, ...]
    write_scales: tuple[float, ...]
    stacked: bool = False
    latent_scale: float = 1.0

    @property
    def hook_points(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.reads, *self.writes)))

    def widths(self, d_in: int, d_out: int) -> dict[str, int]:
        """{hook point: its width}, for sites of width d_in read and d_out written."""
        return dict.fromkeys(self.writes, d_out) | dict.fromkeys(self.reads, d_in)

    def batch(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """{hook point: [B, D] as stored} -> {x, y}, float32; y is x where a coder writes what it reads."""
        x = self._side(arrays, self.reads, self.read_scales)
        if (self.writes, self.write_scales) == (self.reads, self.read_scales):
            return {"x": x, "y": x}
        return {"x": x, "y": self._side(arrays, self.writes, self.write_scales)}

    def _side(self, arrays: Mapping[str, jax.Array], names: tuple[str, ...], scales: tuple[float, ...]) -> jax.Array:
        scaled = [arrays[name].astype(jnp.float32) * scale for name, scale in zip(names, scales, strict=True)]
        return jnp.stack(scaled, axis=1) if self.stacked else scaled[0]
