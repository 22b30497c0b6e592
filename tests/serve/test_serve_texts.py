"""Similar features, texts, steering and logits, each against a few lines of numpy or the library's own doors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tiny.by_hand import BOS, MLPS_IN, MLPS_OUT, RESIDUALS, coder_of, random_params, sites_of, tiny_lm
from tiny.covering import rest_in
from tiny.served import RUN, copied

import saejax
from saejax.analysis.features import _into_residual, logits_of, promoted_logits
from saejax.app.steer import Operation, continuations
from saejax.core.errors import ConfigError
from saejax.interventions import Interventions
from saejax.lm import load_lm
from saejax.lm.generation import Sampling
from saejax.serve.application import application
from saejax.serve.caches import Cache
from saejax.serve.features.similar import Rows, nearest_rows
from saejax.serve.features.texts import Encoded, Reader, encoded
from saejax.serve.site import Folders, Site
from saejax.trained import Origin, TrainedCoder

KINDS = {
    "autoencoder": (RESIDUALS[:1], RESIDUALS[:1]),
    "transcoder": (MLPS_IN[:1], MLPS_OUT[:1]),
    "crosscoder": (RESIDUALS, RESIDUALS),
    "clt": (MLPS_IN, MLPS_OUT),
}


def dictionary(kind: str, sparsity: str = "topk", seed: int = 0, **origin: Any) -> TrainedCoder:
    reads, writes = KINDS[kind]
    coder = coder_of(kind, sparsity, reads, writes)
    params = random_params(coder)
    rng = np.random.default_rng(seed)
    params = {name: value + rng.normal(0, 0.1, value.shape).astype(np.float32) for name, value in params.items()}
    return TrainedCoder(coder, params, sites_of(coder, reads, writes), Origin(**origin))


# --- similar --------------------------------------------------------------------------------------------------------


def written_by(sae: TrainedCoder) -> np.ndarray:
    """[G F, all sites D] float64: what each latent writes, zeros where it writes nothing."""
    names = sorted(name for name in sae.params if name.startswith("W_dec"))
    sites = max(sae.params[name].reshape(40, -1).shape[1] for name in names)
    rows = [np.asarray(sae.params[name], np.float64).reshape(40, -1) for name in names]
    return np.concatenate([np.pad(r, ((0, 0), (sites - r.shape[1], 0))) for r in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_rows_are_those_of_the_largest_cosine(kind: str) -> None:
    sae, other = dictionary(kind), dictionary(kind, seed=1)
    sae.params["W_dec_0" if kind == "clt" else "W_dec"][7] = 0
    cache, mine, theirs = Cache(1 << 20), written_by(sae), written_by(other)
    rows, other_rows = Rows.of(sae, cache, (1,)), Rows.of(other, cache, (2,))
    for latent in (0, 3, len(mine) - 1):
        for near, matrix, without in ((rows, mine, latent), (other_rows, theirs, -1)):
            lengths = np.linalg.norm(matrix, axis=1) * np.linalg.norm(mine[latent])
            want = (matrix @ mine[latent]) / np.where(lengths > 0, lengths, np.inf)
            order = [f for f in np.argsort(-want, kind="stable") if f != without]
            found = nearest_rows(rows.row(latent), near, 10, without)
            assert [f for f, _ in found] == order[:10]
            np.testing.assert_allclose([c for _, c in found], want[order[:10]], atol=1e-5)
    everything = nearest_rows(rows.row(0), rows, 1000, 0)
    assert len(everything) == len(mine) - 1 and dict(everything)[7] == 0
    assert nearest_rows(rows.row(0), other_rows, 1, -1)[0][1] <= 1 + 1e-6
    assert cache.stats()["entries"] == 2


def test_dictionaries_of_other_widths_are_not_compared() -> None:
    cache = Cache(1 << 20)
    row = Rows.of(dictionary("crosscoder"), cache, (1,)).row(0)
    with pytest.raises(ConfigError, match="have 32 numbers, those of the other 16"):
        nearest_rows(row, Rows.of(dictionary("autoencoder"), cache, (2,)), 3)


# --- texts ----------------------------------------------------------------------------------------------------------


def by_hand(sae: TrainedCoder, lm: Any, ids: list[int]) -> np.ndarray:
    """[T, G F]: the latents at each token, piece by piece of the context, each run alone behind the bos."""
    parts = []
    for start in range(0, len(ids), lm.config.context_length - 1):
        piece = [BOS, *ids[start : start + lm.config.context_length - 1]]
        seen = lm.run([piece], capture=sae.sites.reads)[1]
        x = np.stack([np.asarray(seen[name])[0] for name in sae.sites.reads], axis=1)[1:]
        f = sae.encode(x if sae.sites.stacked else x[:, 0])
        parts.append(np.asarray(f).reshape(len(piece) - 1, -1))
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("kind", "sparsity"),
    rest_in("ci", itertools.product(KINDS, ("topk", "relu")), [("autoencoder", "topk"), ("clt", "relu")]),
)
def test_a_text_has_the_latents_of_its_activations(kind: str, sparsity: str) -> None:
    lm, rng = tiny_lm(), np.random.default_rng(2)
    sae = dictionary(kind, sparsity)
    reader = Reader(lm, sae)
    for length in (1, 23, 70):
        ids = rng.integers(0, BOS, length).tolist()
        found = encoded(sae, reader, " ".join(f"w{i}" for i in ids))
        f = by_hand(sae, lm, ids)
        dense = np.zeros_like(f)
        dense[found.at, found.latent] = found.value
        np.testing.assert_allclose(dense, f, atol=2e-4)
        assert found.per_token() == (dense != 0).sum(1).tolist() and found.n_latents == f.shape[1]
        assert [t.strip() for t in found.tokens] == [f"w{i}" for i in ids]
        largest = np.abs(dense).max(0)
        top = found.strongest(5)
        assert [one["id"] for one in top] == sorted(np.flatnonzero(largest), key=lambda i: (-largest[i], i))[:5]
        for one in top:
            assert one["max"] == dense[one["at"], one["id"]] and abs(one["max"]) == largest[one["id"]]
            np.testing.assert_array_equal(found.activations(one["id"]), dense[:, one["id"]])


def test_texts_of_several_passes_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, sae = tiny_lm(), dictionary("autoencoder")
    ids = np.random.default_rng(3).integers(0, BOS, 300).tolist()
    text = " ".join(f"w{i}" for i in ids)
    whole = encoded(sae, Reader(lm, sae), text)
    monkeypatch.setattr("saejax.serve.features.texts._MOST", 48)
    parts = encoded(sae, Reader(lm, sae), text)
    assert (parts.at == whole.at).all() and (parts.latent == whole.latent).all() and whole.at.max() == 299
    np.testing.assert_allclose(parts.value, whole.value, atol=1e-5)


@pytest.mark.ci
def test_few_lengths_are_compiled() -> None:
    lm, sae = tiny_lm(), dictionary("autoencoder")
    reader = Reader(lm, sae)
    for length in range(1, 24):
        encoded(sae, reader, " ".join(["w1"] * length))
    assert reader._run._cache_size() <= 2


def test_a_text_on_which_nothing_fires() -> None:
    nothing = np.zeros(0, np.int32)
    found = Encoded(("a", "b"), nothing, nothing, nothing.astype(np.float32), 40)
    assert found.strongest(3) == [] and found.per_token() == [0, 0] and found.activations(3) == [0.0, 0.0]
    sae = dictionary("autoencoder")
    with pytest.raises(ConfigError, match="no tokens"):
        encoded(sae, Reader(tiny_lm(), sae), " ")


# --- over HTTP --------------------------------------------------------------------------------------------------------

_POINT = "blocks.1.resid_post"
_TEXT = "def read(self):\n    return self"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = copied(tmp_path_factory, "texts")
    coder = coder_of("autoencoder", "topk", (_POINT,), (_POINT,), 48, 128)
    sites = sites_of(coder, (_POINT,), (_POINT,))
    for name, origin in (("theirs", Origin(model="demo")), ("nobodys", Origin())):
        TrainedCoder(coder, random_params(coder), sites, origin).save(path / "dictionaries" / name)
    return path


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    given = {name: folder / "dictionaries" / name for name in ("theirs", "nobodys", "gone")}
    site = Site(Folders(folder / "runs", folder / "stores", (), given))
    with TestClient(application(site)) as one:
        yield one


def asked(client: TestClient, path: str, body: Any = None, status: int = 200) -> Any:
    answer = client.get(path) if body is None else client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.ci
@pytest.mark.parametrize("name", [RUN, "@theirs"])
def test_a_text_over_http(name: str, client: TestClient, folder: Path) -> None:
    place = folder / "runs" / RUN if name == RUN else folder / "dictionaries" / "theirs"
    sae, lm = saejax.load(place), load_lm("demo")
    told = asked(client, "/api/encode", {"dictionary": name, "text": _TEXT, "count": 4, "feature": 5})
    f = np.asarray(sae.encode(lm.activations(_TEXT, _POINT)[1:]))
    assert told["tokens"] == lm.tokenizer.token_strings(lm.tokenizer.encode(_TEXT))
    assert told["features_per_token"] == (f != 0).sum(1).tolist()
    want = np.argsort(-np.abs(f).max(0), kind="stable")[:4].tolist()
    assert [one["id"] for one in told["top"]] == want
    assert set(told["activations"]) == {str(i) for i in (*want, 5)}
    for latent, values in told["activations"].items():
        np.testing.assert_allclose(values, f[:, int(latent)], atol=1e-4)
    before = asked(client, "/api/cache/stats")["inference"]
    assert asked(client, "/api/encode", {"dictionary": name, "text": _TEXT, "count": 4, "feature": 5}) == told
    after = asked(client, "/api/cache/stats")["inference"]
    assert after["misses"] == before["misses"] and after["hits"] > before["hits"]


def test_similar_features_over_http(client: TestClient, folder: Path) -> None:
    mine, theirs = (saejax.load(folder / where).params["W_dec"] for where in (f"runs/{RUN}", "dictionaries/theirs"))

    def cosines(row: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        return (matrix @ row) / np.linalg.norm(matrix, axis=1) / np.linalg.norm(row)

    rows = asked(client, f"/api/similar/{RUN}?id=9&count=3")["rows"]
    want = cosines(mine[9], mine)
    want[9] = -2
    assert [row["id"] for row in rows] == np.argsort(-want)[:3].tolist()
    assert {row["dictionary"] for row in rows} == {RUN} and all(row["density"] is not None for row in rows)
    rows = asked(client, f"/api/similar/{RUN}?id=9&count=3&other=@theirs")["rows"]
    assert [row["id"] for row in rows] == np.argsort(-cosines(mine[9], theirs))[:3].tolist()
    assert {row["dictionary"] for row in rows} == {"@theirs"} and {row["token"] for row in rows} == {None}


def test_a_dictionary_without_a_report(client: TestClient, folder: Path) -> None:
    list_ = asked(client, "/api/features/@theirs?offset=46&limit=5")
    assert (list_["total"], list_["all"], list_["has_examples"]) == (48, 48, False)
    assert [row["id"] for row in list_["rows"]] == [46, 47] and list_["rows"][0]["density"] is None
    assert [row["id"] for row in asked(client, "/api/features/@theirs?q=%2312")["rows"]] == [12]
    assert asked(client, "/api/features/@theirs?down=1&limit=1")["rows"][0]["id"] == 47
    told = asked(client, "/api/feature/@theirs?id=3")
    sae, lm = saejax.load(folder / "dictionaries" / "theirs"), load_lm("demo")
    scale, unembed = (np.asarray(part, np.float64) for part in lm.readout())
    logits = (sae.params["W_dec"][3].astype(np.float64) * scale) @ (unembed - unembed.mean(1, keepdims=True))
    best = np.argsort(-logits)[:10]
    assert told["feature"]["top_logits"] == [
        [token, pytest.approx(value, abs=2e-4)]
        for token, value in zip(lm.tokenizer.token_strings(best.tolist()), logits[best], strict=True)
    ]
    assert [v for _, v in told["feature"]["bottom_logits"]] == pytest.approx(np.sort(logits)[:10].tolist(), abs=2e-4)
    assert (told["feature"]["examples"], told["hook_point"], told["model"]) == ([], _POINT, "demo")
    note = client.put("/api/notes/@theirs", json={"id": 3, "label": "bracket", "note": ""})
    assert note.status_code == 200 and (folder / "runs" / ".serve" / "notes" / "@theirs" / "notes.jsonl").is_file()
    assert [row["id"] for row in asked(client, "/api/features/@theirs?q=brack")["rows"]] == [3]
    asked(client, "/api/feature/@theirs?id=48", status=404)


def test_without_a_model_features_and_similar_ones_still_work(client: TestClient) -> None:
    told = asked(client, "/api/feature/@nobodys?id=3")
    assert (told["feature"]["top_logits"], told["model"], told["hook_point"]) == ([], "", _POINT)
    assert len(asked(client, "/api/similar/@nobodys?id=3&count=5")["rows"]) == 5
    for path, body in (
        ("/api/encode", {"dictionary": "@nobodys", "text": "x"}),
        ("/api/steer", {"dictionary": "@nobodys", "features": [1], "prompt": "x"}),
    ):
        assert "does not say which language model" in asked(client, path, body, 400)["error"]
    assert "gone" in asked(client, "/api/features/@gone", status=422)["error"]


@pytest.mark.ci
def test_steering_over_http(client: TestClient, folder: Path) -> None:
    sae, lm = saejax.load(folder / "runs" / RUN), load_lm("demo")
    body = {
        "dictionary": RUN,
        "features": [9, "11"],
        "operation": "set",
        "scale": 30.0,
        "prompt": "def read(",
        "tokens": 5,
    }
    told = asked(client, "/api/steer", body)
    sampling = Sampling(5, stop=tuple(lm.tokenizer.special_ids))
    (want,) = continuations(
        Interventions(lm, {"x": sae}), "x", Operation("set", [9, 11], 30.0), ["def read("], sampling
    )
    assert told["with"] == lm.tokenizer.decode_inside(want.changed) != told["without"]
    assert told["tokens_without"] == lm.tokenizer.token_strings(want.without)
    assert (told["operation"], told["about"], told["prompt"]) == ("f = 30", want.about, "def read(")


def test_another_checkpoint_is_another_dictionary(client: TestClient, folder: Path) -> None:
    before = asked(client, f"/api/similar/{RUN}?id=1&count=1")
    path = folder / "runs" / RUN / "eval.json"
    path.write_text(json.dumps(json.loads(path.read_text())) + "\n")
    misses = asked(client, "/api/cache/stats")["inference"]["misses"]
    assert asked(client, f"/api/similar/{RUN}?id=1&count=1") == before
    assert asked(client, "/api/cache/stats")["inference"]["misses"] > misses


def test_logits_of_one_latent_are_those_of_all() -> None:
    lm = tiny_lm()
    sae = dictionary("clt").at(lm)
    added = _into_residual(sae, lm)
    assert added is not None
    top, bottom = promoted_logits(lm, added, 4)
    for latent in (0, 39, 41, 79):
        own_top, own_bottom = logits_of(sae, lm, latent, 4)
        for own, (ids, values) in ((own_top, top[latent]), (own_bottom, bottom[latent])):
            assert [token for token, _ in own] == lm.tokenizer.token_strings(list(ids))
            assert [value for _, value in own] == pytest.approx(values, rel=1e-3)
