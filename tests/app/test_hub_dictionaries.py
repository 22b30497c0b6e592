"""Dictionaries on the hub: ids, what is downloaded, what a hostile repository can do, push and back.

huggingface_hub's own client runs against tests/tiny/hub.py, a small HTTP server that answers as the hub does for the
few endpoints asked here. Nothing was tried against the hub itself: no LFS, no Xet, no rate limits.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
import yaml
from huggingface_hub import constants
from huggingface_hub.utils import close_session

import saejax
from saejax.app import hub as module
from saejax.app.hub import HubPlace, dictionaries, hub_place
from saejax.app.push import public, run_push
from saejax.core.errors import ConfigError, DataError
from saejax.interop import FORMATS
from saejax.interop.table import examples
from saejax.trained import Origin, TrainedCoder
from tests.tiny.hub import Hub, asked_for_everything, entry

TOKEN = "hf_secret"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in hub with an empty cache on this machine, nobody signed in, and an empty current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with asked_for_everything(monkeypatch, tmp_path / "cache") as server:
        server.tokens[TOKEN] = "ann"
        yield server


def example(topology: str = "autoencoder", sparsity: str = "topk") -> TrainedCoder:
    """A coder of 4 x 6 with a history that names folders of this machine."""
    sae = next(
        sae for sae in examples() if (d := sae.describe())["topology"] == topology and d["sparsity"]["name"] == sparsity
    )
    origin = Origin("gpt2", "abc", "00ff", {"files": "/home/ann/text.txt"}, 1000, 10, "/home/ann/runs/mine", "9.9")
    settings = {"lm": {"model": "/home/ann/model"}, "seed": 3}
    return dataclasses.replace(sae, origin=origin, settings=settings, figures={"fve": 0.5})


def saved(folder: Path, format: str = "saejax") -> dict[str, bytes]:
    example().save(folder, format=format)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def same(a: TrainedCoder, b: TrainedCoder) -> bool:
    return a.params.keys() == b.params.keys() and all(np.array_equal(a.params[n], b.params[n]) for n in a.params)


def downloads(hub: Hub) -> list[str]:
    return [line.rpartition("/")[2] for line in hub.asked if line.startswith("GET") and "/resolve/" in line]


# --- ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("o/n", ("o/n", "", "")),
        ("hf://o/n@v1/a/b/", ("o/n", "v1", "a/b")),
        ("hf:/o/n", ("o/n", "", "")),  # what a Path makes of it
        ("o/n@refs/pr/3/a.npz", ("o/n", "refs/pr/3", "a.npz")),
        ("o/n@a%2Fb", ("o/n", "a/b", "")),
    ],
)
def test_an_id_is_a_repository_a_revision_and_a_folder(text: str, place: tuple[str, ...]) -> None:
    read = hub_place(text)
    assert read is not None and (read.repo, read.revision, read.sub) == place
    assert hub_place(str(read)) == dataclasses.replace(read, path="")


@pytest.mark.parametrize("text", ["o", "/o/n", "./o/n", "~/n", "o/../n", "o/n/../m", "o/n//m", "o/n\n", "o\\n/m", ""])
def test_what_is_no_id_stays_a_path_and_is_refused_with_hf(text: str) -> None:
    assert hub_place(text) is None
    with pytest.raises(ConfigError, match="hf://owner/name@revision/sub/folder"):
        hub_place(f"hf://{text}")


def test_what_is_on_this_machine_is_never_an_id(tmp_path: Path, hub: Hub) -> None:
    hub.put("o/n", saved(tmp_path / "a"))
    example().save("o/n")
    assert hub_place("o/n") is None
    assert saejax.load("o/n").origin.source == "/home/ann/runs/mine"
    with pytest.raises(DataError, match=r"o/m does not exist.*hf://owner/name"):
        saejax.load("o/m")  # o is a folder here
    assert hub.asked == []
    assert saejax.load("hf://o/n").origin.source.startswith("hf://o/n@")


# --- loading -----------------------------------------------------------------------------------------------------


WRITTEN = [name for name, format in FORMATS.items() if any(not format.refuses(sae) for sae in examples())]


@pytest.mark.parametrize("format", ["saejax", *WRITTEN])
def test_a_dictionary_is_loaded_by_id_with_its_commit(format: str, tmp_path: Path, hub: Hub) -> None:
    sae = next(sae for sae in examples() if format == "saejax" or not FORMATS[format].refuses(sae))
    sae.save(tmp_path / "a", format=format)
    files = {p.relative_to(tmp_path / "a").as_posix(): p.read_bytes() for p in written(tmp_path / "a")}
    sha = hub.put("o/n", {f"l1/{name}": content for name, content in files.items()} | {"l1/huge.bin": b"x" * 10_000})
    there = FORMATS[format].place_of(sae, tmp_path / "a") if format != "saejax" else tmp_path / "a"
    sub = ("l1" / there.relative_to(tmp_path / "a")).as_posix()
    loaded = saejax.load(f"o/n/{sub}")
    assert same(loaded, saejax.load(there))
    assert loaded.origin.source == f"hf://o/n@{sha}/{sub}"
    assert "huge.bin" not in downloads(hub)
    assert loaded.origin.source == saejax.load(loaded.origin.source).origin.source  # it can be loaded by


def test_only_the_files_of_the_one_wanted_dictionary_are_downloaded(tmp_path: Path, hub: Hub) -> None:
    files = saved(tmp_path / "a")
    hub.put("o/n", {f"{sub}/{name}": content for sub in ("a", "b/c", "b/d") for name, content in files.items()})
    with pytest.raises(DataError, match=r"hf://o/n holds 3 dictionaries.*: hf://o/n/a, hf://o/n/b/c, hf://o/n/b/d\."):
        saejax.load("o/n")
    with pytest.raises(DataError, match=r"hf://o/n@main/b holds 2 dictionaries.*hf://o/n@main/b/c"):
        saejax.load("o/n@main/b")
    assert downloads(hub) == []
    assert same(saejax.load("o/n/b/d"), example())
    assert sorted(downloads(hub)) == ["coder.safetensors", "saejax.json"]


def test_a_revision_is_what_is_loaded(tmp_path: Path, hub: Hub) -> None:
    first = hub.put("o/n", saved(tmp_path / "a"))
    other = dataclasses.replace(example(), params={n: 2 * v for n, v in example().params.items()})
    other.save(tmp_path / "b")
    second = hub.put("o/n", {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()})
    assert same(saejax.load("o/n"), other)
    old = saejax.load(f"o/n@{first}")
    assert same(old, example()) and old.origin.source == f"hf://o/n@{first}"
    assert saejax.load("o/n@main").origin.source == f"hf://o/n@{second}"
    hub.asked.clear()
    assert same(saejax.load(f"o/n@{first}"), example())
    assert hub.asked == []  # a commit that is here costs no question
    with pytest.raises(DataError, match=r"RevisionNotFound.*hf://o/n@v9 is not in the hub's cache"):
        saejax.load("o/n@v9")
    with pytest.raises(DataError, match="holds one step"):
        saejax.load("o/n", step=3)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("o/n", r"hf://o/n holds no files that are named as a dictionary of saejax, .*SAELens.*saejax formats"),
        ("o/n/none", r"EntryNotFound.*hf://o/n/none is not in"),
        ("o/none", r"RepositoryNotFound.*On this machine nothing is at o/none, and hf://o/none is not in"),
    ],
)
def test_what_is_not_there_is_named(place: str, message: str, hub: Hub) -> None:
    hub.put("o/n", {"config.json": b"{}", "model-1-of-2.safetensors": b"1", "model-2-of-2.safetensors": b"2"})
    with pytest.raises(DataError, match=message):
        saejax.load(place)
    assert downloads(hub) == []


def test_without_a_network_the_cache_is_read_or_the_way_to_fill_it_is_said(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = saved(tmp_path / "a")
    sha = hub.put("o/n", {f"{sub}/{name}": content for sub in ("a", "b") for name, content in files.items()})
    saejax.load("o/n/a")
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()  # the library makes a session that refuses
    with pytest.warns(UserWarning, match=rf"OfflineMode.*The copy in the cache is read: hf://o/n@{sha}/a"):
        assert same(saejax.load("o/n/a"), example())
    for place, how in (
        ("o/n/b", r"hf download o/n --include 'b/\*'"),
        ("o/m", r"hf download o/m\."),
        ("o/n", r"hf download o/n\."),
    ):
        with pytest.raises(DataError, match=rf"OfflineMode.*is not in the hub's cache.*{how}"):
            saejax.load(place)
    assert hub.asked == []


def test_names_tell_where_the_published_collections_have_their_dictionaries() -> None:
    """Names as in the repositories of their authors."""
    names = {
        "layer_20/width_16k/average_l0_71": ["params.npz"],
        "resid_post/layer_3_width_16k_l0_small": ["config.json", "params.safetensors"],
        "clt/width_262k_l0_big": ["config.json", "params_layer_0.safetensors", "params_layer_1.safetensors"],
        "layers.3.mlp": ["cfg.json", "sae.safetensors"],
        "Llama3_1-8B-Base-L0R-8x": ["hyperparams.json", "checkpoints/final.safetensors"],
        "resid_post_layer_8/trainer_0": ["ae.pt", "config.json"],
        "set/layer_1.safetensors": ["../config.yaml", "../layer_1.safetensors"],
        "set/layer_2.safetensors": ["../config.yaml", "../layer_2.safetensors"],
        "cross": ["config.yaml", "W_enc_0.safetensors", "W_dec_0.safetensors"],
        "qwen/layer7.sae.pt": ["../layer7.sae.pt"],
    }
    files = {place: sorted(os.path.normpath(f"{place}/{file}") for file in own) for place, own in names.items()}
    others = ["README.md", "eval/config.json", "model-1-of-2.safetensors", "resid_post_layer_8/trainer_0/eval.pt"]
    found = dictionaries([*others, *(name for own in files.values() for name in own)])
    assert {place: sorted(own) for place, own in found.items()} == files


# --- hostile repositories ----------------------------------------------------------------------------------------


HOSTILE: dict[str, Callable[[Hub], None]] = {
    "names that lead out": lambda hub: hub.lists.update(
        {"o/n": [entry(f"{up}/{name}", 9) for up in ("..", "a/..", "/etc", "\n", "a\\..") for name in PAIR]}
    ),
    "more files than anybody looks at": lambda hub: hub.lists.update(
        {"o/n": [entry(f"{i}/x", 1) for i in range(3_000)]} | {"": []}
    ),
    "a list without end": lambda hub: hub.endless.add("o/n"),
    "files that redirect to themselves": lambda hub: hub.circles.add("o/n"),
    "files larger than this machine": lambda hub: hub.lists.update({"o/n": [entry(name, 10**15) for name in PAIR]}),
    "sizes that are none": lambda hub: hub.lists.update({"o/n": [entry(name, -1) for name in PAIR]}),
    "lists that are none": lambda hub: hub.lists.update({"o/n": [{"type": "file"}]}),
    "files that are not there": lambda hub: hub.lists.update({"o/n": [entry(f"a/{name}", 9) for name in PAIR]}),
}
PAIR = ("saejax.json", "coder.safetensors")
SAYS = {
    "names that lead out": "holds no files that are named",
    "more files than anybody looks at": "more than 2,000 files",
    "a list without end": "twice",
    "files that redirect to themselves": "TooManyRedirects",
    "files larger than this machine": "2,000,000.0 GB in 2 files",
    "sizes that are none": "holds no files that are named",
    "lists that are none": "KeyError",
    "files that are not there": "EntryNotFound",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_repository_is_refused_soon(
    kind: str, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_LISTED", 2_000)
    hub.put("o/n", saved(tmp_path / "a"))
    HOSTILE[kind](hub)
    started = time.monotonic()
    with pytest.raises(DataError, match=SAYS[kind]):
        saejax.load("o/n")
    assert time.monotonic() - started < 5
    marked = tmp_path / "cache" / "models--o--n" / ".no_exist"  # empty files: the hub was asked and has none
    there = [path for path in tmp_path.rglob("*") if path.name in PAIR and marked not in path.parents]
    assert not [path for path in there if path.parent != tmp_path / "a"]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_names_of_what_a_format_writes_are_found_again(name: str, tmp_path: Path) -> None:
    format = FORMATS[name]
    sae = next(sae for sae in examples() if not format.refuses(sae))
    sae.save(tmp_path / "a", format=name)
    files = [path.relative_to(tmp_path / "a").as_posix() for path in written(tmp_path / "a")]
    place = format.place_of(sae, tmp_path / "a").relative_to(tmp_path / "a").as_posix().removeprefix(".")
    assert place in dictionaries([*files, "README.md", "b/c.txt"])


# --- push --------------------------------------------------------------------------------------------------------


def push(source: Path, repo: str = "ann/n", to: str = "saejax", folder: str = "", revision: str = "") -> None:
    run_push([str(source), repo], to, private=False, folder=folder, revision=revision, step=None)


@pytest.fixture
def signed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.mark.parametrize(("to", "inner"), [("saejax", ""), ("saelens", ""), ("sparsify", "/blocks.0.mlp_in")])
def test_what_is_pushed_comes_back_and_tells_no_folder(
    to: str, inner: str, tmp_path: Path, hub: Hub, signed_in: None, capsys: pytest.CaptureFixture[str]
) -> None:
    example().save(tmp_path / "a")
    push(tmp_path / "a", to=to, folder="l1", revision="try/one")
    printed = capsys.readouterr().out
    sha = hub.heads["ann/n"]["try/one"]
    assert f"{hub.url}/ann/n/commit/{sha}" in printed and f'saejax.load("ann/n@{sha}/l1{inner}")' in printed
    back = saejax.load(f"ann/n@{sha}/l1{inner}")
    assert same(back, example())
    assert back.origin.source == f"hf://ann/n@{sha}/l1{inner}"
    whole = b"".join(hub.sent) + b"".join(hub.repos["ann/n"][sha].values()) + printed.encode()
    assert b"/home/ann" not in whole and TOKEN.encode() not in whole
    assert len([line for line in hub.asked if "/commit/" in line and line.startswith("POST")]) == 1

    front, _, text = hub.repos["ann/n"][sha]["l1/README.md"].decode().removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(front)["library_name"] == to
    assert f'saejax.load("ann/n@try%2Fone/l1{inner}")' in text and "FVE" in text
    assert ('SAE.from_pretrained("ann/n", "l1")' in text) == (to == "saelens")


def test_what_a_coder_tells_of_this_machine_is_the_last_part_of_a_path() -> None:
    told = public(example())
    assert told.origin.source == "mine" and told.origin.text == {"files": "text.txt"} and told.origin.model == "gpt2"
    assert told.settings == {"lm": {"model": "model"}, "seed": 3}
    on_hub = dataclasses.replace(example(), origin=Origin(source="hf://o/n@abc"))
    assert public(on_hub).origin.source == "hf://o/n@abc"


def test_a_push_replaces_its_own_files_and_no_others(tmp_path: Path, hub: Hub, signed_in: None) -> None:
    example().save(tmp_path / "a")
    push(tmp_path / "a")
    push(tmp_path / "a")
    hub.put("ann/n", {"other/x.safetensors": b"1"})
    push(tmp_path / "a")  # what lies deeper is not in the way
    before = dict(hub.heads["ann/n"])
    with pytest.raises(DataError, match=r"hf://ann/n holds coder.safetensors, saejax.json, which .* --folder"):
        push(tmp_path / "a", to="saelens")
    with pytest.raises(DataError, match=r"hf://ann/n/other holds x.safetensors"):
        push(tmp_path / "a", folder="other")
    with pytest.raises(ConfigError, match="ann/n is there already and public"):
        run_push([str(tmp_path / "a"), "ann/n"], "saejax", private=True, folder="", revision="", step=None)
    assert hub.heads["ann/n"] == before


def test_a_private_repository_is_made_private(tmp_path: Path, hub: Hub, signed_in: None) -> None:
    example().save(tmp_path / "a")
    run_push([str(tmp_path / "a"), "ann/p"], "saejax", private=True, folder="", revision="", step=None)
    assert hub.private == {"ann/p"}
    run_push([str(tmp_path / "a"), "ann/p"], "saejax", private=True, folder="", revision="", step=None)


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["a"], {}, "Give a source and a repository"),
        (["a", "name"], {}, "'name' is no repository"),
        (["a", "ann/n/l1"], {}, "folder and revision are options"),
        (["a", "ann/n"], {"folder": "../x"}, "no id of the hub"),
        (["a", "ann/n"], {"to": "saelense"}, "no format 'saelense'"),
        (["b", "ann/n"], {"to": "saelens"}, "cannot be written for SAELens: SAELens has no crosscoder"),
        (["none", "ann/n"], {}, "none does not exist"),
        (["a", "bob/n"], {}, r"403.*ann's: may it write there\? Nothing was pushed"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_anything_is_sent(
    words: list[str], options: dict[str, str], message: str, hub: Hub, signed_in: None
) -> None:
    example().save("a")
    example("crosscoder").save("b")
    with pytest.raises((ConfigError, DataError), match=message):
        run_push(words, options.get("to", "saejax"), False, options.get("folder", ""), "", None)
    assert hub.repos == {}


def test_without_a_token_or_a_network_nothing_is_pushed(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    example().save(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"no token for the hub.*HF_TOKEN"):
        push(tmp_path / "a")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "wrong")
    with pytest.raises(DataError, match="Is the token right"):
        push(tmp_path / "a")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        push(tmp_path / "a")
    assert hub.repos == {}


def test_a_model_card_takes_no_line_from_a_models_name(tmp_path: Path) -> None:
    origin = Origin(model="a/b\nlicense: mine")
    dataclasses.replace(example(), origin=origin).save(tmp_path / "a")
    front = (tmp_path / "a" / "README.md").read_text().split("---\n")[1]
    assert set(yaml.safe_load(front)) == {"library_name", "tags"}


def test_the_stand_in_stores_what_is_sent(tmp_path: Path, hub: Hub, signed_in: None) -> None:
    """Its files are those that were written, so that the tests above say something."""
    example().save(tmp_path / "a")
    push(tmp_path / "a")
    files = hub.repos["ann/n"][hub.heads["ann/n"]["main"]]
    assert json.loads(files["saejax.json"])["d_in"] == 4
    assert safetensors.numpy.load(files["coder.safetensors"]).keys() == example().params.keys()
    assert hub_place("hf://ann/n") == HubPlace("ann/n")
