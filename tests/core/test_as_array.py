"""Whatever holds numbers becomes an array that keeps its type and its values, or is refused in one line."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from saejax.core.arrays import as_array
from saejax.core.errors import DataError

torch: Any = pytest.importorskip("torch")
NUMBERS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
TENSOR = torch.from_numpy(NUMBERS)

TYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "uint8", "bool"),
]


@pytest.mark.parametrize("name", TYPES)
def test_a_tensor_of_torch_keeps_its_type_and_every_value(name: str) -> None:
    tensor = TENSOR.to(getattr(torch, name))
    found = as_array(tensor)
    assert isinstance(found, np.ndarray) and str(found.dtype) == name and found.shape == (5, 3)
    np.testing.assert_array_equal(found.astype(np.float64), tensor.to(torch.float64).numpy())


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "of",
    [
        lambda t: t.clone().requires_grad_(),
        lambda t: t.clone().requires_grad_() * 1,
        torch.nn.Parameter,
        lambda t: t.T.contiguous().T,
        lambda t: t[::2],
        lambda t: t[0, 0],
        lambda t: t[:0],
        lambda t: t.expand(2, 5, 3),
    ],
)
def test_tensors_of_every_make_are_taken(of: Any, name: str) -> None:
    tensor = of(TENSOR.to(getattr(torch, name)))
    found = as_array(tensor)
    assert found.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(found.astype(np.float32), tensor.detach().float().numpy())


def test_what_is_an_array_already_is_not_copied() -> None:
    on_device = jnp.ones(3)
    assert as_array(NUMBERS) is NUMBERS and as_array(on_device) is on_device
    assert np.shares_memory(as_array(TENSOR), NUMBERS)
    bits = TENSOR.bfloat16()
    found = as_array(bits)
    bits[0, 0] = 7
    assert found[0, 0] == 7
    assert jax.jit(lambda x: as_array(x) * 2)(on_device).tolist() == [2, 2, 2]  # a tracer is an array too
    assert as_array([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert as_array([bits[1], bits[2].clone().requires_grad_()]).dtype == ml_dtypes.bfloat16
    assert jax.jit(lambda x: as_array([x, x]) * 2)(1.0).tolist() == [2, 2]
    assert as_array(ml_dtypes.bfloat16(3)).shape == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (TENSOR.to_sparse(), r"acts cannot be read as an array \(.*to_dense"),
        (TENSOR.to("meta"), r"acts cannot be read as an array \(.*meta"),
        ([[1.0, 2.0], [3.0]], r"acts cannot be read as an array \(.*inhomogeneous"),
        (["a", "b"], "acts: dtype <U1 holds text"),
        ([1.0, None], "acts: dtype object holds objects"),
        (np.array([1j]), "acts: dtype complex128 holds complex numbers"),
        (torch.zeros(2, dtype=torch.complex64), "acts: dtype complex64 holds complex numbers"),
        (np.ma.masked_invalid([1.0, np.nan]), "acts: a masked array"),
    ],
)
def test_what_holds_no_numbers_is_refused_in_one_line(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as found:
        as_array(value, "acts")
    assert "\n" not in str(found.value)


def test_torch_is_imported_for_nobody_who_has_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    as_array([1.0]), as_array(NUMBERS)
    assert "torch" not in sys.modules
