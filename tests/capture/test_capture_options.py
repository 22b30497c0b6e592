"""Which tokens a capture stores, of which hook points; that a filter changes nothing but what is left out."""

import dataclasses
import importlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import replaced, tiny_experiment
from tiny.by_hand import BOS, HOOK, ROW, SPECIAL, documents, source, tiny_lm

import saejax
from saejax.app.stages import run_capture as run_stage
from saejax.app.workspace import Workspace
from saejax.capture import CaptureConfig, Sinks, capture, expand_hook_points, store_identity
from saejax.capture.sinks import outliers
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel
from saejax.lm.pair import ModelPair
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import StoreReader
from saejax.text import Packer, TextConfig

OTHER = "blocks.0.mlp_out"
CAPTURE = CaptureConfig((HOOK, OTHER), batch_rows=4, shard_rows=64, chunk_rows=16)
TEXT = TextConfig(context_length=ROW)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_lm()


def run(path: Path, lm: LanguageModel, devices: int = 1, config: CaptureConfig = CAPTURE, n_tokens: int = 9999) -> Any:
    mesh = make_mesh(ParallelConfig((devices, 1)))
    return capture(path, lm, source(documents()), TEXT, config, mesh, split="heldout", n_tokens=n_tokens, seed=0)


def stored(path: Path) -> dict[str, np.ndarray]:
    reader = StoreReader.open(path)
    return reader.rows(0, reader.n_tokens, metadata=True)


Row = tuple[int, int, int, bytes]


def rows_of(path: Path) -> "Counter[Row]":
    """(document, position, token, both activations), each as often as it is stored."""
    rows = stored(path)
    values = [rows[name].view(np.uint16) for name in (HOOK, OTHER)]
    keys = (rows[name].tolist() for name in ("document", "position", "token_id"))
    return Counter((*key, a.tobytes() + b.tobytes()) for *key, a, b in zip(*keys, *values, strict=True))


def counters(path: Path) -> dict[str, int]:
    return StoreReader.open(path).counters


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, lm: LanguageModel) -> Path:
    path = tmp_path_factory.mktemp("all") / "store"
    run(path, lm)
    return path


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5])
def test_the_last_tokens_of_every_document(k: int, everything: Path, tmp_path: Path, lm: LanguageModel) -> None:
    run(tmp_path / "s", lm, config=dataclasses.replace(CAPTURE, last_tokens=k))
    rows = stored(tmp_path / "s")
    by_document: dict[int, list[int]] = {}
    for document, token in zip(rows["document"].tolist(), rows["token_id"].tolist(), strict=True):
        by_document.setdefault(document, []).append(token)
    for index, text in enumerate(documents()):
        ordinary = [i for i in lm.tokenizer.encode(text) if i not in (BOS, SPECIAL)]
        assert Counter(by_document.get(index, [])) == Counter(ordinary[-k:]), index
    # The same activations: only less of them.
    assert not rows_of(tmp_path / "s") - rows_of(everything)
    assert counters(tmp_path / "s")["before_last_tokens"] == len(stored(everything)["document"]) - len(rows["document"])


def test_the_place_from_the_end_goes_on_where_a_document_is_cut(lm: LanguageModel) -> None:
    packer = Packer(source(["w1 " * 70, "w2 <mask> w3"]), lm.tokenizer, ROW)
    found: dict[int, list[int]] = {0: [], 1: []}
    for batch in packer.batches("heldout", 2):
        padding = batch.segments < 0
        assert (batch.to_end[padding] == -1).all() and (batch.to_end[~padding] >= 0).all()
        body = (batch.tokens != BOS) & ~padding
        for document, after in zip(batch.documents[body].tolist(), batch.to_end[body].tolist(), strict=True):
            found[document].append(after)
    assert found[0] == list(range(69, -1, -1))
    assert found[1] == [1, 1, 0], "a special token is not counted"


def test_ids_that_are_never_stored(everything: Path, tmp_path: Path, lm: LanguageModel) -> None:
    run(tmp_path / "s", lm, config=dataclasses.replace(CAPTURE, drop_ids=(0, 7)))
    kept = Counter({row: n for row, n in rows_of(everything).items() if row[2] not in (0, 7)})
    assert rows_of(tmp_path / "s") == kept
    dropped = rows_of(everything).total() - kept.total()
    assert counters(tmp_path / "s")["dropped_ids"] == dropped > 0
    assert 0 in stored(everything)["token_id"], "id 0 is a token like any other"


def test_outliers_by_hand() -> None:
    x = np.array([[3.0, 4.0], [0.0, 4.9], [30.0, 40.0], [5.1, 0.0], [900.0, 0.0]], np.float32)[None]
    candidates = np.array([[True, True, True, True, False]])

    def far(activations: dict[str, np.ndarray], ratio: float, here: np.ndarray = candidates) -> Any:
        result = outliers(activations, here, ratio)
        on_device = {name: jnp.asarray(value) for name, value in activations.items()}
        np.testing.assert_array_equal(outliers(on_device, jnp.asarray(here), ratio), result)
        assert isinstance(result, np.ndarray)
        return result.tolist()

    assert far({"a": x}, 9.7) == [[False, False, True, False, False]]
    assert far({"a": x}, 10.3) == [[False] * 5], "the lower median is 5.0"
    # At any hook point.
    second = np.where(np.arange(5)[:, None] == 1, 99.0, 1.0) * np.ones((1, 5, 2), np.float32)
    assert far({"a": x, "b": second}, 9.0) == [[False, True, True, False, False]]
    assert far({"a": np.zeros((1, 5, 2), np.float32)}, 2.0) == [[False] * 5]
    assert far({"a": x}, 2.0, np.zeros((1, 5), bool)) == [[False] * 5]
    # Each row has a median of its own, and what is no candidate may be anything.
    rows = np.concatenate([x, 100 * x, np.full_like(x, np.nan)])
    expected = [[False, False, True, False, False]] * 2 + [[False] * 5]
    assert far({"a": rows}, 9.0, np.concatenate([candidates, candidates, np.zeros((1, 5), bool)])) == expected


def test_sinks_are_what_stands_first_and_what_is_massive() -> None:
    x = np.array([[90.0], [1.0], [1.2], [50.0], [0.9], [80.0], [1.1]], np.float32)[None]
    positions, candidates = np.array([[0, 1, 2, 3, 4, 0, 1]]), np.array([[False, True, True, True, True, True, True]])
    front, massive = Sinks(1, 20.0).among({"a": x}, candidates, positions)
    assert np.flatnonzero(front).tolist() == [5] and np.flatnonzero(massive).tolist() == [3]
    front, massive = Sinks(2, 0.0).among({"a": x}, candidates, positions)
    assert np.flatnonzero(front).tolist() == [1, 5, 6] and not massive.any()
    keep = Sinks(1, 20.0).without({"a": jnp.asarray(x).at[0, 2].set(jnp.nan)}, jnp.asarray(candidates), positions)
    assert np.flatnonzero(keep).tolist() == [1, 4, 6]


def test_the_first_tokens_of_a_text_are_left_out(everything: Path, tmp_path: Path, lm: LanguageModel) -> None:
    """The bos of this model stands first, so that the default leaves out no more than it."""
    assert stored(everything)["position"].min() == 1 and counters(everything)["dropped_first"] == 0
    run(tmp_path / "s", lm, config=dataclasses.replace(CAPTURE, drop_first=3))
    kept = Counter({row: n for row, n in rows_of(everything).items() if row[1] >= 3})
    assert rows_of(tmp_path / "s") == kept
    assert counters(tmp_path / "s")["dropped_first"] == rows_of(everything).total() - kept.total() > 0
    # Without a bos the first is a token of the text.
    text = dataclasses.replace(TEXT, prepend_bos=False)
    for first in (0, 1):
        config = dataclasses.replace(CAPTURE, drop_first=first)
        mesh = make_mesh(ParallelConfig((1, 1)))
        path = tmp_path / f"bare{first}"
        capture(path, lm, source(documents()), text, config, mesh, split="heldout", n_tokens=9999, seed=0)
        assert stored(path)["position"].min() == first


def test_the_filter_leaves_out_what_is_far_from_its_row(everything: Path, tmp_path: Path, lm: LanguageModel) -> None:
    config = dataclasses.replace(CAPTURE, max_norm_ratio=1.2)
    run(tmp_path / "s", lm, config=config)
    packer, wanted = Packer(source(documents()), lm.tokenizer, ROW), 0
    for batch in packer.batches("heldout", 4):
        _, acts = lm.run(batch.tokens, batch.positions, batch.segments, capture=[HOOK, OTHER])
        norms = [np.linalg.norm(np.asarray(acts[name]), axis=-1) for name in (HOOK, OTHER)]
        for row, keep in enumerate(batch.keep):
            usual = [np.sort(n[row][keep])[(keep.sum() - 1) // 2] if keep.any() else 0 for n in norms]
            near = [n[row][keep] <= 1.2 * median for n, median in zip(norms, usual, strict=True)]
            wanted += int(np.logical_and.reduce(near).sum())
    found = rows_of(tmp_path / "s")
    assert not found - rows_of(everything)
    # bfloat16 may move a token over the bar.
    assert found.total() == pytest.approx(wanted, abs=3) and found.total() < rows_of(everything).total() - 20
    assert counters(tmp_path / "s")["dropped_massive"] == rows_of(everything).total() - found.total()
    # However many rows are in a batch, and on however many devices.
    run(tmp_path / "devices", lm, devices=8, config=dataclasses.replace(config, batch_rows=3))
    assert counters(tmp_path / "devices")["dropped_massive"] == counters(tmp_path / "s")["dropped_massive"]


def test_a_filtered_capture_that_was_stopped_leaves_the_same_store(
    tmp_path: Path, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(CAPTURE, batch_rows=2, max_norm_ratio=1.3, last_tokens=30, drop_ids=(3,))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(whole, lm, config=config)
    module = importlib.import_module("saejax.capture.capture")
    append, calls = module._append, []

    def stop_at_the_sixth(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 6:
            raise KeyboardInterrupt
        append(*arguments)

    monkeypatch.setattr(module, "_append", stop_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, lm, config=config)
    monkeypatch.undo()
    with pytest.raises(
        DataError, match=r"made for something else:(.|\n)*max_norm_ratio: the store has 1.3, this run wants 20"
    ):
        run(stopped, lm, config=dataclasses.replace(config, max_norm_ratio=20.0))
    assert 0 < run(stopped, lm, config=config).tokens < rows_of(whole).total()
    assert counters(stopped) == counters(whole)
    want, got = stored(whole), stored(stopped)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_what_decides_the_rows_decides_the_store(everything: Path, lm: LanguageModel) -> None:
    before = {p: p.read_bytes() for p in everything.rglob("*") if p.is_file()}
    for changes in ({"last_tokens": 3}, {"drop_ids": (5,)}, {"drop_first": 0}, {"max_norm_ratio": 9.0}):
        with pytest.raises(DataError, match=rf"made for something else:(.|\n)*{next(iter(changes))}"):
            run(everything, lm, config=dataclasses.replace(CAPTURE, **changes))
    assert {p: p.read_bytes() for p in everything.rglob("*") if p.is_file()} == before

    def identity(config: CaptureConfig, text: TextConfig = TEXT) -> dict[str, Any]:
        return store_identity(lm, source([]), text, "train", config)

    # Settings that change no row, or are left as they were, keep the stores there are.
    always = {"lm", "text", "split", "heldout_fraction", "context_length", "prepend_bos"}
    assert set(identity(CAPTURE)) == always | {"drop_first", "max_norm_ratio"}
    assert set(identity(dataclasses.replace(CAPTURE, drop_first=0, max_norm_ratio=0.0))) == always
    assert identity(dataclasses.replace(CAPTURE, batch_rows=8, tokens=5)) == identity(CAPTURE)
    assert identity(CAPTURE, dataclasses.replace(TEXT, pack=True)) == identity(CAPTURE)
    assert identity(CAPTURE, dataclasses.replace(TEXT, pack=False)) != identity(CAPTURE)
    ids = (identity(dataclasses.replace(CAPTURE, drop_ids=ids)) for ids in ((4, 2, 4), (2, 4)))
    assert next(ids) == next(ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"last_tokens": -1}, r"capture.last_tokens is -1; it must be 0 or more"),
        ({"drop_ids": (3, -2)}, r"capture.drop_ids holds -2"),
        ({"max_norm_ratio": 1.0}, r"capture.max_norm_ratio is 1.0; it must be 0 .* above 1"),
        ({"max_norm_ratio": float("nan")}, r"capture.max_norm_ratio is nan"),
        ({"max_norm_ratio": float("inf")}, r"capture.max_norm_ratio is inf"),
    ],
)
def test_a_selection_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CaptureConfig(**settings)


def test_an_id_that_the_tokenizer_does_not_have_is_refused(tmp_path: Path, lm: LanguageModel) -> None:
    with pytest.raises(ConfigError, match=r"capture.drop_ids holds 99; the largest id of the tokenizer is 61"):
        run(tmp_path / "s", lm, config=dataclasses.replace(CAPTURE, drop_ids=(99,)))
    assert not (tmp_path / "s").exists()


# --- hook points ----------------------------------------------------------------------------------


class TwelveBlocks:
    """The names alone of a model of twelve blocks."""

    def hook_points(self) -> dict[str, int]:
        return {f"blocks.{i}.{name}": 8 for i in range(12) for name in ("resid_post", "mlp_out")}

    def hook_point(self, name: str) -> str:
        name = name.replace("hook_", "")
        if name not in self.hook_points():
            raise ConfigError(f"no hook point {name!r}")
        return name


def test_ranges_stand_for_many_hook_points_in_order() -> None:
    def expanded(*names: str) -> list[str]:
        return list(expand_hook_points(names, TwelveBlocks()))

    assert expanded("blocks.{2..4}.resid_post") == [f"blocks.{i}.resid_post" for i in (2, 3, 4)]
    assert expanded("blocks.*.mlp_out") == [f"blocks.{i}.mlp_out" for i in range(12)], "by number, not by letter"
    assert expanded("blocks.{9..11}.hook_mlp_out", "blocks.10.mlp_out", "blocks.0.mlp_out") == [
        *(f"blocks.{i}.mlp_out" for i in (9, 10, 11)),
        "blocks.0.mlp_out",
    ], "each once, by its canonical name"
    for names, message in (
        ("blocks.{4..2}.mlp_out", r"run from 4 down to 2"),
        ("blocks.{10..12}.mlp_out", r"no hook point 'blocks.12.mlp_out'"),
        ("blocks.*.nothing", r"no hook point 'blocks.0.nothing'"),
        ("layers.*.mlp_out", r"There are no hook points 'layers.\*.mlp_out': nothing is numbered after 'layers.'"),
    ):
        with pytest.raises(ConfigError, match=message):
            expanded(names)


def test_ranges_of_either_of_two_models() -> None:
    both = ModelPair(tiny_lm(), tiny_lm(seed=1))
    assert expand_hook_points(("second.blocks.*.mlp_in", "blocks.{0..1}.mlp_in"), both) == (
        *(f"second.blocks.{i}.mlp_in" for i in (0, 1)),
        *(f"blocks.{i}.mlp_in" for i in (0, 1)),
    )


def test_a_range_is_captured_whole(tmp_path: Path, lm: LanguageModel) -> None:
    run(tmp_path / "s", lm, config=dataclasses.replace(CAPTURE, hook_points=("blocks.*.mlp_out",)), n_tokens=40)
    assert list(StoreReader.open(tmp_path / "s").hook_points) == ["blocks.0.mlp_out", "blocks.1.mlp_out"]


# --- all of it through an experiment --------------------------------------------------------------


def test_an_experiment_captures_a_mixture_of_conversations_and_prompts(tmp_path: Path) -> None:
    """The model's own chat template writes the text, ranges name the hook points, and the reader finds its store."""
    demo, model = Path(saejax.__file__).parent / "lm" / "demo", tmp_path / "model"
    shutil.copytree(demo, model, ignore=shutil.ignore_patterns("*.md", "figures.json"))
    (model / "chat_template.jinja").write_text("{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}")
    pairs = [{"q": f"what is {i}?", "a": f"it is {i + 1}."} for i in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (tmp_path / "prompts.txt").write_text("".join(f"def f{i}(x):\n" for i in range(60)))
    chat = {"source": "files", "paths": (str(tmp_path / "pairs.jsonl"),), "chat": True, "prompt": "q", "response": "a"}
    prompts = {"source": "prompts", "paths": (str(tmp_path / "prompts.txt"),), "weight": 2.0}
    e = tiny_experiment(
        tmp_path,
        lm={"model": str(model)},
        text={"sources": (chat, prompts), "heldout_fraction": 0.3},
        capture={"hook_points": ("blocks.{0..1}.resid_post",), "tokens": 300, "heldout_tokens": 100, "last_tokens": 4},
        top={"hook_point": "blocks.1.resid_post"},
    )
    work = Workspace(e)
    run_stage(work)
    assert work.sites == (("blocks.1.resid_post",), ("blocks.1.resid_post",))
    reader = work.reader("train")
    rows = reader.rows(0, reader.n_tokens, metadata=True)
    texts = {d.index: d.text for d in work.source.documents("train")}
    counts = Counter(rows["document"].tolist())
    assert set(counts) <= set(texts) and set(counts.values()) == {4}
    assert "# user: what is" in "".join(texts.values()) and "# assistant: it is" in "".join(texts.values())
    # What is stored of a document are the tokens it ends with.
    ends = {index: Counter(work.lm.tokenizer.encode(text)[-4:]) for index, text in texts.items()}
    for index in list(counts)[:20]:
        assert Counter(rows["token_id"][rows["document"] == index].tolist()) == ends[index]
    with pytest.raises(DataError, match="last_tokens"):
        Workspace(replaced(e, "capture", last_tokens=5)).reader("train")
