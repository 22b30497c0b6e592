"""Rows chunk by chunk: which features get one, what is kept of it, and what a stopped graph goes on from."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import ROOT
from tiny.attributed import lm_of, mlp_dictionaries, prompt

from saejax.attribution import AttributionConfig, Graph, attribute, build
from saejax.attribution.influence import influence
from saejax.core.errors import DataError

CONFIG = AttributionConfig(max_features=20, chunk=4, rank_every=2, logits=6)
SAES = mlp_dictionaries("transcoder")


@functools.cache
def undisturbed(**settings: Any) -> Graph:
    return attribute(lm_of("gpt2"), SAES, prompt(), dataclasses.replace(CONFIG, **settings))


def same(a: Graph, b: Graph) -> bool:
    fields = ("tokens", "features", "activations", "logits", "probabilities", "weights")
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in fields)


def stopped(folder: Path, after: int, **given: Any) -> None:
    """A graph that is given up when so many rows are there."""

    def stop(done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attribute(**{"lm": lm_of("gpt2"), "dictionaries": SAES, "tokens": prompt(), "config": CONFIG} | given,
                  folder=folder, progress=stop)  # fmt: skip


def test_a_stopped_graph_goes_on_from_its_rows_and_ends_bitwise_the_same(tmp_path: Path) -> None:
    stopped(tmp_path / "graph", 15)
    there = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "graph").glob("rows_*")}
    assert len(there) == 5  # 6 logits are two chunks
    seen: list[tuple[int, int]] = []
    graph = attribute(
        lm_of("gpt2"), SAES, prompt(), CONFIG, folder=tmp_path / "graph", progress=lambda *at: seen.append(at)
    )
    assert same(graph, undisturbed()) and seen[-1] == (26, 26) and graph.n_features == 20
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "graph").glob("rows_*")}
    assert after.items() > there.items()  # nothing was computed twice


def test_features_of_most_influence_are_chosen() -> None:
    whole, few = undisturbed(max_features=0), undisturbed()
    score = influence(whole)[: whole.n_features]
    place = {tuple(feature): i for i, feature in enumerate(whole.features)}
    chosen = [place[tuple(feature)] for feature in few.features]
    assert score[chosen].sum() > 0.9 * np.sort(score)[-20:].sum() and score[chosen].sum() < 0.99 * score.sum()
    others = np.arange(whole.n_features, whole.n_nodes)
    kept = np.r_[chosen, others]
    np.testing.assert_allclose(few.matrix, whole.matrix[np.ix_(kept, kept)], rtol=0, atol=1e-5)


def test_a_row_keeps_its_largest_effects_and_the_sum_of_all() -> None:
    whole, part = undisturbed(max_features=0), undisturbed(max_features=0, row_features=5)
    n = whole.n_features
    for full, kept in zip(whole.weights[:, :n], part.weights[:, :n], strict=True):
        assert (kept != 0).sum() <= 5
        np.testing.assert_array_equal(kept[kept != 0], full[kept != 0])
        assert np.abs(full[kept == 0]).max(initial=0) <= np.abs(kept[kept != 0]).min(initial=np.inf)
    np.testing.assert_array_equal(whole.weights[:, n:], part.weights[:, n:])
    assert (whole.weights[:, :n] != 0).sum(1).max() > 5
    # What is missing is too little to change which features are chosen.
    np.testing.assert_array_equal(undisturbed(row_features=30).features, undisturbed().features)


def test_a_stopped_graph_of_kept_effects_goes_on_too(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, row_features=7)
    stopped(tmp_path, 10, config=config)
    assert same(attribute(lm_of("gpt2"), SAES, prompt(), config, folder=tmp_path), undisturbed(row_features=7))


def test_a_graph_that_nobody_can_hold_is_refused_before_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saejax.attribution.build.LARGEST", 4 * 26 * 54 - 1)
    told = r"54 nodes, 21 of them errors, .* Shorten the prompt of 7 tokens, or lower attribution\.max_features\."
    with pytest.raises(DataError, match=told):
        attribute(lm_of("gpt2"), SAES, prompt(), CONFIG, progress=lambda *_: pytest.fail("a row was computed"))


def test_a_folder_of_another_graph_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path, 1)
    for differs, given in {
        "prompt": {"tokens": prompt(6)},
        "model": {"lm": dataclasses.replace(lm_of("gpt2", 1), identity=lm_of("gpt2").identity)},
        "dictionaries": {"dictionaries": mlp_dictionaries("transcoder", seed=9)},
        "settings": {"config": dataclasses.replace(CONFIG, chunk=8)},
    }.items():
        with pytest.raises(DataError, match=rf"rows of another graph: {differs} differ\."):
            attribute(**{"lm": lm_of("gpt2"), "dictionaries": SAES, "tokens": prompt(), "config": CONFIG} | given,
                      folder=tmp_path)  # fmt: skip
    (tmp_path / "graph.json").unlink()
    with pytest.raises(DataError, match=r"no graph\.json to say of which"):
        attribute(lm_of("gpt2"), SAES, prompt(), CONFIG, folder=tmp_path)


@pytest.mark.parametrize("damage", ["cut", "other targets", "other shape", "no archive", "a place beyond"])
def test_a_damaged_chunk_is_refused_and_named(tmp_path: Path, damage: str) -> None:
    config = dataclasses.replace(CONFIG, row_features=7)
    stopped(tmp_path, 10, config=config)
    path = tmp_path / "rows_00002.npz"
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "no archive":
        path.write_bytes(b"\x93NUMPY")
    else:
        changed = {
            "other targets": {"targets": arrays["targets"][::-1]},
            "other shape": {"others": arrays["others"][:, :-1]},
            "a place beyond": {"places": arrays["places"] + 10**6},
        }
        np.savez(path, **arrays | changed[damage])
    with pytest.raises(DataError, match=r"rows_00002\.npz is damaged .* Delete it"):
        attribute(lm_of("gpt2"), SAES, prompt(), config, folder=tmp_path)
    path.unlink()
    assert same(attribute(lm_of("gpt2"), SAES, prompt(), config, folder=tmp_path), undisturbed(row_features=7))


def test_a_graph_on_disk_is_the_graph_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new" / "graph.npz"
    undisturbed().save(path)
    found = Graph.load(path)
    assert same(found, undisturbed()) and found.names == undisturbed().names and found.strings == undisturbed().strings
    assert [file.name for file in path.parent.iterdir()] == ["graph.npz"]
    raw = path.read_bytes()
    for broken in (raw[: len(raw) // 2], b"", raw.replace(b"features.npy", b"feature_.npy"), json.dumps({}).encode()):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="no graph of saejax, or it is damaged"):
            Graph.load(path)


@pytest.mark.soak
def test_a_killed_graph_ends_bitwise_the_same(tmp_path: Path) -> None:
    """kill -9 at several moments, of a process that computes slowly; each time it goes on a little."""
    script = textwrap.dedent(
        f"""
        import sys, time
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
        from attribution.test_resume import CONFIG, SAES
        from tiny.attributed import lm_of, prompt
        from saejax.attribution import attribute
        def told(done, total):
            print(done, flush=True)
            time.sleep(0.3)
        attribute(lm_of("gpt2"), SAES, prompt(), CONFIG, folder=sys.argv[1], progress=told).save(sys.argv[1] + "/g.npz")
        """
    )
    for lines in (2, 4, 6, 100):
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ
        ) as process:
            assert process.stdout is not None
            for _, _line in zip(range(lines), process.stdout, strict=False):
                pass
            time.sleep(0.02 * lines)
            if lines < 100:
                process.send_signal(signal.SIGKILL)
    assert process.returncode == 0
    assert same(Graph.load(tmp_path / "g.npz"), undisturbed())


def test_a_model_is_the_same_whatever_the_order_of_its_fields_and_where_it_is_from() -> None:
    note = dataclasses.field(default="", compare=False)
    kinds = (
        dataclasses.make_dataclass("One", [("a", int), ("b", str), ("note", str, note)]),
        dataclasses.make_dataclass("Other", [("b", str), ("a", int)]),
    )
    one, other = kinds[0](a=1, b="x", note="from a folder"), kinds[1](a=1, b="x")
    assert build._digest_of_fields(one) == build._digest_of_fields(other)
    assert build._digest_of_fields(one) != build._digest_of_fields(kinds[1](a=2, b="x"))
