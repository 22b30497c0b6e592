"""Compiled memory of the row program, from shapes alone."""

import dataclasses
import functools

import pytest
from tiny.attributed import lm_of

from benchmarks.row_memory import RowMemory, row_memory, transcoder_layers
from saejax.attribution import AttributionConfig
from saejax.parallel import ParallelConfig, make_mesh

LENGTH = 64


@functools.cache
def memory(layers: int = 2, mesh: tuple[int, int] = (1, 1), cross_layer: bool = False, **settings: int) -> RowMemory:
    """Of a decoder as Gemma 2 is one, of width 64, with dictionaries on all MLPs."""
    config = dataclasses.replace(
        lm_of("gemma2").config, n_layer=layers, d_model=64, context_length=LENGTH, windows=(None,) * layers
    )
    given = AttributionConfig(**{"chunk": 8, "block": 256} | settings)
    places = transcoder_layers(config, cross_layer)
    return row_memory(config, places, 512, LENGTH, 32, given, make_mesh(ParallelConfig(mesh)))


def test_arguments_and_rows_are_those_of_the_shapes() -> None:
    found = memory()
    rows = 4 * 8 * (2 * LENGTH * 32 + 2 * LENGTH + LENGTH)
    decoders = 4 * 2 * 512 * 64
    assert rows <= found.rows < 1.05 * rows and decoders < found.arguments < 2 * decoders
    assert found.total == found.arguments + found.rows + found.temporaries
    assert memory(cross_layer=True).arguments - found.arguments == pytest.approx(decoders / 2, rel=0.01)


def test_memory_grows_with_the_chunk_and_hardly_with_the_layers() -> None:
    # 6 layers' cotangents would be three times those of 2. What a layer does add: carries of its loops.
    assert memory(layers=6).temporaries < 1.9 * memory().temporaries
    assert 3 < memory(chunk=32).temporaries / memory().temporaries < 5


def test_devices_divide_it() -> None:
    """Decoder rows by latent, targets along data, rows by both."""
    one, many = memory(), memory(mesh=(2, 2))
    assert many.arguments < 0.65 * one.arguments and many.temporaries < 0.6 * one.temporaries
    assert many.rows == pytest.approx(one.rows / 4, rel=0.05)
