"""What is fetched of a model on the hub: the files that are read and no others; and a part of it is never read.

huggingface_hub's own client runs against tests/tiny/hub.py. Who has fetched a part of a repository before (another
program, one file alone) must not decide which token is bos, or whether an added token is one.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.numpy
from huggingface_hub import constants
from tiny.decoders import CONFIG, random_params, write_tokenizer
from tiny.hub import Hub, asked_for_everything

from saejax.core.errors import DataError
from saejax.lm import checkpoint, list_hook_points, load_lm, load_tokenizer

REPO = "ann/tiny"
BOS, NAMED_BOS = 95, 96
NEEDED = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with asked_for_everything(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository whose bos is said in tokenizer_config.json alone: without it, tokenizer.json puts another first."""
    folder = tmp_path_factory.mktemp("model")
    checkpoint.write(
        folder, {key: value for key, value in CONFIG.items() if key != "bos_token_id"}, random_params(CONFIG)
    )
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<mask>"}))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS}))
    (folder / "README.md").write_text("A model.")
    (folder / ".gitattributes").write_text("")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fetched(cache: Path) -> set[str]:
    (snapshot,) = (cache / f"models--{REPO.replace('/', '--')}" / "snapshots").iterdir()
    return {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}


def forget_lists(cache: Path) -> None:
    """As older versions of the library leave the cache: without the repository's list of files."""
    from huggingface_hub import _tree_cache

    shutil.rmtree(cache / f"models--{REPO.replace('/', '--')}" / "trees", ignore_errors=True)
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()


def test_only_what_is_read_is_fetched(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    others = ("consolidated.safetensors", "original/model.safetensors", "model.fp16.safetensors", "x/config.json")
    hub.put(REPO, files | dict.fromkeys(others, b"x"))
    assert load_tokenizer(REPO).bos_id == NAMED_BOS
    small = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert fetched(tmp_path / "cache") == small
    lm = load_lm(REPO)
    assert lm.tokenizer.bos_id == NAMED_BOS
    assert fetched(tmp_path / "cache") == small | {"model.safetensors"}


@pytest.mark.parametrize("single", [False, True])
def test_of_shards_those_of_the_index_are_fetched_unless_there_is_one_file(
    hub: Hub, tmp_path: Path, files: dict[str, bytes], single: bool
) -> None:
    tensors = safetensors.numpy.load(files["model.safetensors"])
    names = sorted(tensors)
    parts = {"part[1]-of-2.safetensors": names[::2], "part[2]-of-2.safetensors": names[1::2]}
    index = {"weight_map": {name: part for part, own in parts.items() for name in own}}
    given = {name: content for name, content in files.items() if single or name != "model.safetensors"}
    given["model.safetensors.index.json"] = json.dumps(index).encode()
    given |= {p: safetensors.numpy.save({name: tensors[name] for name in own}) for p, own in parts.items()}
    hub.put(REPO, given | {"part1-of-2.safetensors": b"x"})
    lm = load_lm(REPO)
    weights = {name for name in fetched(tmp_path / "cache") if name.endswith(".safetensors")}
    assert weights == ({"model.safetensors"} if single else set(parts))
    asked = len(hub.asked)
    assert load_lm(REPO).identity == lm.identity
    assert len(hub.asked) == asked, "the second time nobody is asked"


def by_file(names: tuple[str, ...]) -> None:
    for name in names:
        huggingface_hub.hf_hub_download(REPO, name)


def another_asked_for_all() -> None:
    by_file(NEEDED)
    for name in ("tokenizer_config.json", "generation_config.json"):
        huggingface_hub.hf_hub_download(REPO, name)
    for name in ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
        with pytest.raises(huggingface_hub.errors.EntryNotFoundError):
            huggingface_hub.hf_hub_download(REPO, name)


# {how the cache was filled: (by whom, whether it is known to be whole)}
CACHES: dict[str, tuple[Callable[[], object], bool]] = {
    "the files that must be there": (lambda: by_file(NEEDED), False),
    "one file less": (lambda: by_file(("config.json", "tokenizer.json")), False),
    "its tokenizer too": (lambda: by_file((*NEEDED, "tokenizer_config.json")), False),
    "each file asked for": (another_asked_for_all, True),
    "the whole repository": (lambda: huggingface_hub.snapshot_download(REPO), True),
    "by saejax": (lambda: load_lm(REPO), True),
    "its tokenizer by saejax": (lambda: load_tokenizer(REPO), False),
    "its configuration by saejax": (lambda: list_hook_points(REPO), False),
}


@pytest.mark.parametrize("listed", [True, False], ids=["lists kept", "no lists"])
@pytest.mark.parametrize("how", CACHES)
def test_a_part_of_a_repository_is_made_whole_or_refused(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], how: str, listed: bool
) -> None:
    fill, whole = CACHES[how]
    hub.put(REPO, files)
    fill()
    if not listed:
        forget_lists(tmp_path / "cache")
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        if whole:
            assert load_lm(REPO).tokenizer.bos_id == NAMED_BOS
        else:
            with pytest.raises(DataError, match=r"'ann/tiny' cannot be had .*It is not cached( whole|\.).*lm\.model"):
                load_lm(REPO)
    asked = len(hub.asked)
    assert load_lm(REPO).tokenizer.bos_id == NAMED_BOS
    assert (len(hub.asked) == asked) == whole, "the hub is asked for what is missing, and only then"
    if not whole:
        forget_lists(tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_lm(REPO).tokenizer.bos_id == NAMED_BOS, "from then on it is known which files there are"
