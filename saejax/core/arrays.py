"""Whatever holds numbers, as an array of NumPy or JAX; of PyTorch and JAX nothing is imported for it."""

import sys
from typing import TYPE_CHECKING, Any, Union

import ml_dtypes
import numpy as np

from saejax.core.errors import DataError

if TYPE_CHECKING:
    import jax

Array = Union[np.ndarray, "jax.Array"]

_NO_NUMBERS = {"c": "complex numbers", "O": "objects", "U": "text", "S": "text", "M": "dates", "m": "durations"}


def as_array(value: Any, what: str = "the array") -> Array:
    """`value` itself where it is an array of NumPy or JAX (a traced one too); anything else as NumPy, of its own type.

    A tensor of PyTorch is detached from its graph and comes to the host; bfloat16 stays bfloat16. Memory is shared
    where that is possible, so whoever keeps the array copies it.

    Raises:
        DataError: it has no numbers that could be read: ragged lists, text, sparse tensors, masked arrays.
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise DataError(f"{what}: a masked array; leave out the rows with masked numbers, or fill them.")
    try:
        array = value if isinstance(value, np.ndarray) or _is_a("jax", "Array", value) else _read_array(value)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"{what} cannot be read as an array ({why}). Give it as a NumPy array.") from None
    if array.dtype.kind in _NO_NUMBERS:
        raise DataError(f"{what}: dtype {array.dtype} holds {_NO_NUMBERS[array.dtype.kind]}; give real numbers.")
    return array


def _read_array(value: Any) -> Array:
    import jax

    leaves = jax.tree.leaves(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return jax.numpy.asarray(value)
    if any(_is_a("torch", "Tensor", leaf) for leaf in leaves):
        value = jax.tree.map(lambda leaf: _of_torch(leaf) if _is_a("torch", "Tensor", leaf) else leaf, value)
    return np.asarray(value)


def _is_a(package: str, name: str, value: Any) -> bool:
    """`value` is an instance of the package's class; the package is imported already then."""
    return isinstance(value, getattr(sys.modules.get(package), name, ()))


def _of_torch(tensor: Any) -> np.ndarray:
    tensor, kind = tensor.detach().cpu(), str(tensor.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, kind):
        return np.asarray(tensor.numpy(force=True))
    # NumPy has these types from ml_dtypes, of which PyTorch knows nothing: the bytes go over as such.
    raw = tensor.contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return raw.view(getattr(ml_dtypes, kind)).reshape(tuple(tensor.shape))
