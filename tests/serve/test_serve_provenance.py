"""From a feature's example back to the row of the held-out store that it is, compared with the store itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tiny.served import RUN, copied

from saejax.lm import load_lm
from saejax.reports.feature_table import read_features
from saejax.runs import Run
from saejax.serve.application import application
from saejax.serve.features.provenance import Passage, _that_reads, passages_at
from saejax.serve.site import Folders, Site
from saejax.store import StoreLayout, StoreReader, StoreWriter
from saejax.store.files import StoreFiles
from saejax.store.reader import complete_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory, "provenance")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    site = Site(Folders(folder / "runs", folder / "stores"))
    with TestClient(application(site)) as one:
        yield one


def features_of(run: Path) -> dict[str, Any]:
    return read_features(run)


def asked(client: TestClient, name: str = RUN, status: int = 200, **query: Any) -> Any:
    answer = client.get(f"/api/provenance/{name}", params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


def a_copy(folder: Path, name: str) -> Path:
    path = folder / "runs" / name
    shutil.rmtree(path, ignore_errors=True)
    return Path(shutil.copytree(folder / "runs" / RUN, path))


def test_what_a_run_was_made_by(client: TestClient, folder: Path) -> None:
    told = asked(client)
    run = told["run"]
    files = {
        name: json.loads((folder / "runs" / RUN / f"{name}.json").read_text()) for name in ("config", "provenance")
    }
    assert {name: run[name] for name in files} == files
    assert run["command"] == run["environment"]["command"] and "packages" in run["environment"]
    assert (told["feature"], told["example"], told["why"]) == (None, None, [])


def test_examples_are_rows_of_the_store(client: TestClient, folder: Path) -> None:
    table = features_of(folder / "runs" / RUN)
    store = folder / "stores" / RUN / "heldout"
    reader, tokenizer = StoreReader.open(store), load_lm("demo").tokenizer
    rows = reader.rows(0, reader.n_tokens, metadata=True)
    checked = 0
    for feature in table["features"][::5]:
        for number, example in enumerate(feature["examples"][:2]):
            told = asked(client, feature=feature["id"], example=number)
            where, why = told["example"], told["why"]
            assert (where["document"], where["document_index"]) == (example["document"], example["index"])
            assert where["text"] == "".join(table["vocab"][t] for t in example["tokens"])
            assert (where["model"], where["split"], where["store"]) == ("demo", "heldout", str(store))
            row = where["row"]
            if row is None:
                assert any("not in the held-out store" in one for one in why)
                continue
            assert rows["document"][row] == example["index"] and rows["position"][row] == example["position"]
            # The token itself, and those after it, in the order in which rows came.
            shard = where["shard"]
            stream = reader.shard_starts[shard] + reader.stream_places(shard)
            came = int(np.flatnonzero(stream == row)[0])
            after = example["tokens"][example["peak"] :]
            stored = rows["token_id"][stream[came : came + len(after)]].tolist()
            same_piece = rows["document"][stream[came : came + len(after)]] == example["index"]
            assert all(
                text == table["vocab"][token]
                for text, token, own in zip(tokenizer.token_strings(stored), after, same_piece, strict=False)
                if own
            )
            commit = json.loads((store / "commits" / f"{shard:06d}.json").read_text())
            assert where["shard_sha256"] == commit["sha256"][where["array"]]
            assert where["array"] == "blocks.1.resid_post"
            assert not any("pieces" in one for one in why)
            checked += 1
    assert checked > 30
    stats = client.get("/api/cache/stats").json()["provenance"]
    asked(client, feature=next(f["id"] for f in table["features"] if f["examples"]))
    assert client.get("/api/cache/stats").json()["provenance"]["hits"] >= stats["hits"] + 2


def changed_config(run: Path, change: Any) -> None:
    path = run / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_what_is_not_known_is_said(client: TestClient, folder: Path) -> None:
    live = next(f for f in features_of(folder / "runs" / RUN)["features"] if f["examples"])["id"]

    def why(name: str, change: Any) -> str:
        changed_config(a_copy(folder, name), change)
        told = asked(client, name, feature=live)
        assert told["example"]["row"] is None and told["example"]["document_index"] is not None
        return " ".join(told["why"])

    def streamed(config: dict[str, Any]) -> None:
        config["store"] = "none"
        config["capture"]["into"] = "training"

    assert "capture.into=training" in why("streamed", streamed)
    gone = why("gone", lambda c: c.update(store="gone"))
    assert "There is no held-out store" in gone and "capture.into" not in gone and "no revision" in gone
    shutil.copytree(folder / "stores" / RUN, folder / "stores" / "other")
    assert "another store by now" in why("other", lambda c: [c.update(store="other"), another(folder)])
    broken = folder / "stores" / "broken" / "heldout"
    shutil.copytree(folder / "stores" / RUN / "heldout", broken)
    (broken / "manifest.json").write_text("{}")
    assert "cannot be read" in why("broken", lambda c: c.update(store="broken"))
    (folder / "stores" / "linked").symlink_to(folder)
    changed_config(a_copy(folder, "outside"), lambda c: c.update(store="linked"))
    assert "outside" in asked(client, "outside", 404, feature=live)["error"]


def another(folder: Path) -> None:
    """The provenance of the run `other` names another store."""
    path = folder / "runs" / "other" / "provenance.json"
    content = json.loads(path.read_text())
    content["heldout"]["fingerprint"] = "0" * 64
    path.write_text(json.dumps(content))


def test_dead_features_and_numbers_that_are_not_there(client: TestClient, folder: Path) -> None:
    table = features_of(folder / "runs" / RUN)
    dead = next(f["id"] for f in table["features"] if not f["examples"])
    told = asked(client, feature=dead)
    assert told["example"] is None and "never fired" in told["why"][0] and told["feature"]["density"] == 0
    live = next(f for f in table["features"] if f["examples"])
    asked(client, status=404, feature=live["id"], example=len(live["examples"]))
    asked(client, status=404, feature=100_000)
    (a_copy(folder, "unreported") / Run.features).unlink()
    assert "no report" in asked(client, "unreported", feature=1)["why"][0]


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Seven documents in pieces of at most 9 tokens, in shards of 16 rows; and their columns as they came."""
    rng = np.random.default_rng(0)
    document, position = [], []
    for index in range(7):
        for _ in range(rng.integers(1, 5)):
            length = int(rng.integers(2, 10))
            document += [index] * length
            position += range(1, length + 1)
    columns = {
        "document": np.asarray(document, np.int32),
        "position": np.asarray(position, np.int32),
        "token_id": rng.integers(0, 50, len(document)).astype(np.int32),
    }
    path = tmp_path_factory.mktemp("shards") / "store"
    how = {"identity": {"text": "made up"}, "hook_points": {"h": 2}, "layout": StoreLayout(16, 4), "seed": 3}
    with StoreWriter.open(path, n_tokens=len(document), **how) as writer:
        writer.append({"h": np.ones((len(document), 2), np.float32)}, columns, cursor={"batch": 0})
        writer.finish()
    return path, columns


def test_all_pieces_with_a_position_are_found(store: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, columns = store
    manifest, reader = complete_manifest(StoreFiles(path)), StoreReader.open(path)
    total = 0
    for document in range(8):
        for position in range(11):
            found = passages_at(path, manifest, document, position)
            want = np.flatnonzero((columns["document"] == document) & (columns["position"] == position))
            assert [one.tokens[0] for one in found] == columns["token_id"][want].tolist()
            for one, came in zip(found, want.tolist(), strict=True):
                assert one.shard == came // 16
                assert reader.array_rows("token_id", one.row, one.row + 1)[0] == columns["token_id"][came]
                for offset, token in one.tokens.items():
                    assert columns["token_id"][came + offset] == token
                    assert columns["document"][came + offset] == document
                    assert columns["position"][came + offset] == position + offset
            total += len(found)
    assert total == len(columns["document"])


def test_pieces_that_read_alike_are_said(folder: Path) -> None:
    tokenizer = load_lm("demo").tokenizer
    ids = tokenizer.encode("def read(self): return")
    tokens = tokenizer.token_strings(ids)

    class Demo:
        class lm:
            model, revision = "demo", ""

    right = Passage(0, 1, {i - 2: token for i, token in enumerate(ids)})
    wrong = Passage(0, 0, {0: ids[2], 1: ids[0]})
    assert _that_reads(Demo(), [wrong, right], tokens, 2) == (right, [])
    first, why = _that_reads(Demo(), [wrong, right, right], tokens, 2)
    assert first == right and "3 pieces" in why[0] and "2 read as" in why[0]
    Demo.lm.model = "no/such-model"
    first, why = _that_reads(Demo(), [wrong, right], tokens, 2)
    assert first == wrong and "without the model's tokenizer" in why[0]
