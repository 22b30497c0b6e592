"""The language model as capture, evaluation and analysis see it, and the compilation of a JAX one for capture."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.lm.decoder import Begin, Edit
from saejax.lm.product import options_of_blocks
from saejax.parallel import batch_sharding
from saejax.text import PackedRows, Tokenizer

Forward = Callable[[PackedRows], tuple[dict[str, Any], Any]]
F = TypeVar("F", bound=Callable[..., Any])


class Model(Protocol):
    """A language model with named hook points: `LanguageModel`, `TorchModel` or a `ModelPair` of two.

    Attributes:
        config: has context_length and d_model.
        params: a pytree, the first argument of `apply`; empty for a model that JAX does not hold.
        pure: whether `apply` can be traced by JAX; otherwise it takes and gives arrays, and is called as it is.
        longest_mixed: documents of up to so many tokens share a forward pass; longer ones only with their equals.
    """

    @property
    def config(self) -> Any: ...
    @property
    def params(self) -> Any: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def identity(self) -> dict[str, Any]: ...
    @property
    def pure(self) -> bool: ...
    @property
    def longest_mixed(self) -> int: ...

    def hook_points(self) -> dict[str, int]:
        """{hook point: width}."""
        ...

    def hook_point(self, name: str) -> str:
        """The canonical name, or a ConfigError with the nearest."""
        ...

    def activations(self, text: str, hook_point: str) -> np.ndarray:
        """Activations [S, d] float32 of one text at one hook point, the model's bos in front."""
        ...

    def apply(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        capture: Sequence[str] = (),
        edits: Mapping[str, Edit] | None = None,
        begin: Begin | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(logits [R, S, V], {hook point: [R, S, d]}) of packed rows.

        begin: what a pass without edits had at `start_of` of the edits. This one goes on from there.
        """
        ...

    def start_of(self, names: Sequence[str]) -> str:
        """`ModelShape.start_of` of the model whose logits are looked at."""
        ...

    def measures_loss(self, names: Sequence[str]) -> bool:
        """True where the logits predict the next token and edits at one of the names, if any, reach them."""
        ...

    def into_residual(self, hook_point: str, rows_FD: np.ndarray) -> np.ndarray | None:
        """[F, d_model]: what rows added at a hook point add to the residual stream; None if no matrix gives it."""
        ...

    def readout(self) -> tuple[jax.Array, jax.Array] | None:
        """(scale of the final norm [D], W_U [D, V]), float32; None for a model that does not predict the next token."""
        ...

    def placed(self, mesh: Mesh) -> Any:
        """`params` as a program over the mesh wants them."""
        ...

    def rows_that_fit(self, names: Sequence[str], length: int) -> int:
        """Rows of `length` tokens that one forward pass of a capture has memory for."""
        ...

    def make_forward(self, names: Sequence[str], shape: tuple[int, int], mesh: Mesh) -> Forward:
        """packed rows [R, S] -> ({hook point: bfloat16 [R S, d]}, finite bool [R S])."""
        ...


def apart(lm: Model, longest: int) -> dict[str, str]:
    """Part of the identity of what is made of texts of up to `longest` tokens; empty where all may share a pass."""
    if longest <= lm.longest_mixed:
        return {}
    return {"long_documents": f"of more than {lm.longest_mixed} tokens share no forward pass with others"}


def compiled_forward(lm: Model, names: Sequence[str], shape: tuple[int, int], mesh: Mesh) -> Forward:
    """`Model.make_forward` of a pure model: compiled, rows over "data", parameters over "latent"."""
    params = lm.placed(mesh)
    program = forward_program(lm, params, names, shape, mesh)

    def run(packed: PackedRows) -> Any:
        arrays = (packed.tokens, packed.positions, packed.segments)
        return program(params, *(jax.device_put(a, batch_sharding(mesh)) for a in arrays))

    return run


def forward_program(lm: Model, params: Any, names: Sequence[str], shape: tuple[int, int], mesh: Mesh) -> Any:
    """The compiled program of a capture's forward pass; of `params` only the shapes and shardings are looked at.

    XLA drops what no hook point needs: the blocks after the last one, and the unembedding.
    """

    def forward(params: Any, tokens: Any, positions: Any, segments: Any) -> Any:
        _, captured = lm.apply(params, tokens, positions, segments, names)
        flat = {name: captured[name].reshape(-1, captured[name].shape[-1]) for name in names}
        rounded = {name: value.astype(jnp.bfloat16) for name, value in flat.items()}
        # The largest float32 numbers become infinite only then.
        return rounded, jnp.stack([jnp.isfinite(value).all(-1) for value in rounded.values()]).all(0)

    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    lowered = jax.jit(forward).lower(params, rows, rows, rows)
    return lowered.compile(compiler_options=options_of_blocks(params, mesh) or None)


def compiled(lm: Model, function: F, *arguments: Any) -> F:
    """`function`, which calls `lm.apply`, compiled for such arguments; unchanged if the model cannot be traced.

    Unchanged, it gets JAX arrays in place of numpy arrays, as compiled code does.
    """
    if lm.pure:
        return cast(F, jax.jit(function).lower(*arguments).compile())

    def eager(*arguments: Any) -> Any:
        return function(*jax.tree.map(jnp.asarray, arguments))

    return cast(F, eager)
