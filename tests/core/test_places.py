"""A door that is given something else says what that is, and which door takes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.torches import needs_torch, torch

import saejax
from saejax.core.errors import ConfigError, SaejaxError
from saejax.core.places import as_place, what_is
from saejax.lm import load_tokenizer
from saejax.store import StoreReader, describe, import_files, merge, verify
from saejax.store.importing import ImportConfig


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of everything."""
    folder = tmp_path_factory.mktemp("places")
    for name in ("acts.npy", "acts.npz", "acts.PT", "acts.safetensors", "notes.txt"):
        (folder / name).write_bytes(b"x")
    for name in ("empty", "others", "stores/train", "saved", "run/checkpoints/000000003", "lm"):
        (folder / name).mkdir(parents=True)
    (folder / "torn" / "commits").mkdir(parents=True)
    for name in ("others/a", "stores/train/manifest.json", "saved/saejax.json", "run/config.json", "lm/config.json"):
        (folder / name).write_bytes(b'{"runs_dir": "runs"}' if name == "run/config.json" else b"{}")
    return folder


KINDS = {
    "nowhere": "it does not exist",
    "acts.npy": r"an array of NumPy, which saejax.train takes as np.load\(.*acts.npy., mmap_mode=.r.\); `saejax store",
    "acts.npz": r"arrays of NumPy, .* np.load\(.*acts.npz.\)\[.NAME.\]",
    "acts.PT": r"a file of PyTorch; .* torch.load\(.*acts.PT.\)",
    "acts.safetensors": "`saejax store import STORE .*acts.safetensors --hook_point=NAME`",
    "notes.txt": "it is a file$",
    "empty": "an empty folder",
    "others": "a folder of other files",
    "stores/train": "it is a store of activations, which saejax.train reads",
    "stores": "it is a folder, and .*stores/train in it is a store of activations",
    "torn": "it is a store without its manifest.json",
    "saved": "it is a dictionary, which saejax.load",
    "run": "it is a run, whose dictionary saejax.load",
    "run/checkpoints/000000003": r"within the run .*run, whose dictionary is saejax.load\(.*run., step=...\)",
    "lm": "a language model: saejax.load_lm",
    "a" * 300: "it (does not exist|cannot be looked at)",
}


@pytest.mark.parametrize("name", KINDS)
def test_what_lies_at_a_path(name: str, here: Path) -> None:
    import re

    assert re.search(KINDS[name], what_is(here / name)), what_is(here / name)


STORES: dict[str, Callable[[str], Any]] = {
    "train": lambda path: saejax.train(path, "topk", progress=False),
    "heldout": lambda path: saejax.train(np.random.rand(99, 4), heldout=path, k=2, d_sae=8, progress=False, tokens=64),
    "StoreReader.open": StoreReader.open,
    "describe": describe,
    "merge": lambda path: merge("out", [path, path]),
    "verify": lambda path: (_ for _ in ()).throw(SaejaxError(verify(path)[0])),
}
DOORS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    **{name: (door, ("acts.npy", "nowhere", "stores", "run", "empty")) for name, door in STORES.items()},
    "load": (saejax.load, ("acts.npy", "nowhere", "stores", "stores/train", "run/checkpoints", "empty")),
    "load_lm": (saejax.load_lm, ("acts.npy", "stores/train", "empty", "run/checkpoints")),
    "import": (lambda path: import_files("out", [path], ImportConfig("h")), ("nowhere", "stores/train", "empty")),
}


@pytest.mark.parametrize("name", DOORS)
def test_every_door_to_a_path_says_what_is_there(name: str, here: Path) -> None:
    door, places = DOORS[name]
    for place in places:
        with pytest.raises(SaejaxError) as caught:
            door(str(here / place))
        said = str(caught.value)
        assert "\n" not in said and (what_is(here / place) in said or (name, place) == ("load", "nowhere")), said
        assert place != "nowhere" or "does not exist" in said


MODULE: Any = torch.nn.Linear(2, 2) if torch else None
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "load": (saejax.load, "saejax.load takes a run, a folder, a file or hf://owner/name"),
    "load_lm": (saejax.load_lm, "load_lm takes demo, the folder of a model, a GGUF file or a hub id owner/name"),
    "load_tokenizer": (
        load_tokenizer,
        "A language model takes demo, the folder of a model, a GGUF file or a hub id owner/name",
    ),
    "StoreReader.open": (StoreReader.open, "A store takes a folder or a URL"),
    "run": (lambda x: saejax.train(np.random.rand(9, 4), run=x, progress=False), "run takes a folder"),
    "init_from": (
        lambda x: saejax.train(np.random.rand(9, 4), init_from=x, progress=False),
        "init_from takes a TrainedCoder or what saejax.load reads",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_path_is_refused_in_words(name: str) -> None:
    door, takes = WRONG[name]
    module = [] if MODULE is None or door is saejax.load_lm else [(MODULE, "a Linear")]  # that one takes modules
    for value, kind in ((3, "an int"), *module, (b"x", "a bytes"), (np.ones((3, 4)), "an array")):
        with pytest.raises(ConfigError) as caught:
            door(value)
        assert str(caught.value).startswith(f"{takes}; it was given {kind}."), caught.value
    if name != "run":
        with pytest.raises(ConfigError, match="it was given None"):
            door(None)


@needs_torch
def test_a_model_in_memory_is_told_which_door_takes_it_and_how_it_becomes_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"given a Linear\. saejax\.load_lm takes a module .* save_pretrained"):
        load_tokenizer(MODULE)


def test_text_and_paths_are_places() -> None:
    assert as_place("a/b", "x", "y") == as_place(Path("a/b"), "x", "y") == "a/b"
