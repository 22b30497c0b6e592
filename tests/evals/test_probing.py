"""Probing: data sets, rows, words and prompts, the 26 regressions, splitting and absorption that were planted."""

import csv
from pathlib import Path

import numpy as np
import pytest
from tiny.by_hand import coder_of

import saejax
from saejax.coders import Sites
from saejax.core.errors import ConfigError, DataError
from saejax.evals.probing.compare import difference, mean_over
from saejax.evals.probing.config import ProbesConfig
from saejax.evals.probing.datasets import chosen, data_folder, files, read
from saejax.evals.probing.first_letter import (
    LETTERS,
    Task,
    Words,
    absorbed,
    divided,
    first_letters,
    prompts,
    refused_coder,
    vocabulary,
)
from saejax.evals.probing.last_token import Reader
from saejax.evals.probing.linear import Recipe, train_probe
from saejax.evals.probing.sparse import folds, ranked, split
from saejax.trained import TrainedCoder


def write(path: Path, rows: list[tuple[str, str]], head: tuple[str, ...] = ("prompt", "target")) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])
    return path


# --- data sets ----------------------------------------------------------------------------------------------------


def test_a_folder_of_tables_is_read_as_it_is(tmp_path: Path) -> None:
    rows = [('one, "two"\nthree', "yes"), ("ünïcode", "no"), ("NaN", "yes")]
    write(tmp_path / "mine.csv", rows)
    (path,) = files(tmp_path).values()
    data = read(path)
    assert data.name == "mine" and data.texts == tuple(text for text, _ in rows)
    assert data.labels.tolist() == [1, 0, 1]


def test_the_list_of_data_sets_says_which_have_two_classes(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "cleaned_data").mkdir()
    for name in ("1_two", "2_more"):
        path = write(tmp_path / "cleaned_data" / f"{name}.csv", [("a", "0"), ("b", "1")])
        path.with_name(f"{name}.csv.zst").write_bytes(zstandard.compress(path.read_bytes()))
        path.unlink()
    kinds = [("cleaned_data/1_two.csv", "Binary Classification"), ("cleaned_data/2_more.csv", "Continuous Data")]
    write(tmp_path / "probing_datasets_MASTER.csv", kinds, ("Dataset save name", "Data type"))
    assert list(files(tmp_path)) == ["1_two"]
    whole = files(tmp_path)["1_two"]
    assert read(whole).texts == ("a", "b")
    whole.write_bytes(b"no zstandard")
    with pytest.raises(DataError, match=r"1_two\.csv\.zst is damaged"):
        read(whole)


@pytest.mark.parametrize(
    ("rows", "head", "match"),
    [
        ([("a", "0"), ("b", "1"), ("c", "2")], ("prompt", "target"), "has 3 classes"),
        ([("a", "0"), ("b", "1")], ("prompt", "label"), "no column 'target'"),
        ([("a", "0"), ("b",)], ("prompt", "target"), "row 2 has 1 fields in place of 2"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path: Path, rows: list, head: tuple[str, ...], match: str) -> None:
    with pytest.raises(DataError, match=match):
        read(write(tmp_path / "mine.csv", rows, head))


def test_names_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["117_us_state_FL", "118_us_state_CA", "95_toxic_is"]
    assert chosen(["95_toxic_is", "*_us_state_*"], names) == ["95_toxic_is", "117_us_state_FL", "118_us_state_CA"]
    with pytest.raises(ConfigError, match=r"no data set '95_toxic_iss'.*95_toxic_is"):
        chosen(["95_toxic_iss"], names)
    with pytest.raises(ConfigError, match="holds no data set"):
        files(tmp_path)
    with pytest.raises(ConfigError, match="which is no folder"):
        data_folder(str(tmp_path / "missing"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps sae-probes"):
        data_folder()


# --- rows, latents, intervals -------------------------------------------------------------------------------------


def test_rows_are_half_of_each_class_and_none_is_in_both() -> None:
    labels = (np.arange(301) + 1) % 2
    rows = split("a", labels, 0)
    assert [len(part) for part in rows] == [201, 99]
    assert not set(rows.train) & set(rows.test) and len(set(rows.train)) == 201
    assert [int(labels[part].sum()) for part in rows] == [101, 50]
    shorter = split("a", labels, 0, n_test=20)
    assert shorter.train.tolist() == rows.train.tolist() and shorter.test.tolist() == rows.test[:20].tolist()
    with pytest.raises(DataError, match="mine has 101 rows, too few"):
        split("mine", labels[:101], 0)
    with pytest.raises(DataError, match="mine has 250 rows of one class and 51 of the other"):
        split("mine", (np.arange(301) > 249).astype(int), 0)


@pytest.mark.parametrize(("n", "count", "held"), [(8, 16, 2), (60, 6, 10), (500, 1, 100), (300, 1, 60)])
def test_folds(n: int, count: int, held: int) -> None:
    pytest.importorskip("sklearn.linear_model", exc_type=ImportError)
    parts = folds(np.arange(n) % 2, 0)
    assert len(parts) == count and {len(part) for _, part in parts} == {held}


def test_latents_are_ranked_by_the_scaled_difference_of_the_classes() -> None:
    rng = np.random.default_rng(0)
    z = np.maximum(rng.normal(size=(2500, 30)), 0) * rng.exponential(1, 30)[None] * (rng.random(30) < 0.9)[None]
    labels = (rng.random(2500) < 0.4).astype(int)
    z[labels == 1, 7] += 1
    scaled = z / (np.abs(z).sum(0) / ((z != 0).sum(0) + 1e-6) + 1e-6)
    expected = np.argsort(-np.abs(scaled[labels == 1].mean(0) - scaled[labels == 0].mean(0)), kind="stable")
    found = ranked(lambda x: x.astype(np.float32), z, labels, 12)
    assert found.tolist() == expected[:12].tolist() and found[0] == 7


def test_intervals_over_data_sets() -> None:
    values = np.random.default_rng(0).normal(0.7, 0.1, 200)
    found = mean_over(values.tolist(), 10_000, 0)
    half = 1.96 * values.std() / np.sqrt(200)
    assert found.mean == pytest.approx(values.mean())
    np.testing.assert_allclose([found.low, found.high], [values.mean() - half, values.mean() + half], atol=0.1 * half)
    assert found == mean_over(values.tolist(), 10_000, 0)
    alone = mean_over([0.5], 10_000, 0)
    assert (alone.mean, alone.low, alone.high, alone.verdict) == (0.5, None, None, "open")


def test_better_is_said_only_where_the_paired_interval_excludes_0() -> None:
    rng = np.random.default_rng(1)
    base = {f"d{i}": float(v) for i, v in enumerate(rng.uniform(0.5, 1, 40))}
    up = {name: value + 0.005 + rng.normal(0, 0.005) for name, value in base.items()} | {"only here": 9.0}
    noise = {name: value + rng.normal(0, 0.05) for name, value in base.items()}
    found = difference(up, base, 2000, 0)
    assert found is not None and found.n == 40 and found.verdict == "better" and 0.003 < found.mean < 0.007
    worse, unknown = difference(base, up, 2000, 0), difference(noise, base, 2000, 0)
    assert worse is not None and worse.verdict == "worse" and unknown is not None and unknown.verdict == "open"
    assert difference({"a": 1.0}, {"b": 1.0}, 2000, 0) is None


# --- words and prompts --------------------------------------------------------------------------------------------


def test_words_and_prompts_of_a_tokenizer() -> None:
    tokenizer = saejax.load_lm().tokenizer
    words = vocabulary(tokenizer)
    strings = tokenizer.token_strings(words.ids.tolist())
    assert all(s.removeprefix(" ").isalpha() and s.isascii() and not s.startswith("  ") for s in strings)
    assert all(s.strip()[0].lower() == LETTERS[c] for s, c in zip(strings, words.letters, strict=True))
    first, second = divided(words, 0, 200)
    assert len(first.ids) == 160 and len(second.ids) == 40 and not set(first.ids) & set(second.ids)
    made = prompts(tokenizer, second, [0], 0, "test")
    assert made == prompts(tokenizer, second, [0], 0, "test") != prompts(tokenizer, second, [0], 0, "other")
    for ids, word in zip(made, second.ids, strict=True):
        *examples, last = tokenizer.decode(ids[1:]).split("\n")[1:]
        text = tokenizer.token_strings([int(word)])[0]
        assert ids[0] == 0 and ids[-1] == word and last == text and len(examples) == 10
        for line in examples:
            shown, letter = line.split(" has the first letter: ")
            assert shown.strip()[0].upper() == letter and shown != text


def test_texts_of_other_lengths_beside_it_change_no_activation(tmp_path: Path) -> None:
    lm = saejax.load_lm(dtype="float32")
    texts = ["def f():", "x", "import os\n" * 12]
    reader = Reader(lm, ("blocks.1.resid_post", "blocks.0.mlp_out"), True, 32, 64, "float32", tmp_path)
    found = reader.of_texts("some", texts)
    cut = [[lm.tokenizer.bos_id, *lm.tokenizer.encode(text)[-31:]] for text in texts]
    for i, ids in ((0, cut[0]), (2, cut[2])):
        captured = lm.run([ids], capture=list(found))[1]
        for hook, rows in found.items():
            np.testing.assert_allclose(rows[i], captured[hook][0, -1], rtol=1e-4, atol=1e-4)
    with pytest.raises(DataError, match="has 33 tokens, and the model is to read at most 32"):
        reader.of_ids("long", [[1] * 33])
    kept = sorted(tmp_path.glob("*.npy"))
    assert len(kept) == 2
    # Read from disk: what lies there is what comes back.
    kept[0].write_bytes(b"no array")
    with pytest.raises(DataError, match="is damaged"):
        reader.of_texts("some", texts)
    kept[0].unlink()
    again = reader.of_texts("some", texts)
    assert all(np.array_equal(again[hook], found[hook]) for hook in found)


# --- first letters ------------------------------------------------------------------------------------------------


def test_26_regressions_are_adam_on_the_balanced_loss() -> None:
    rng = np.random.default_rng(0)
    x, classes = rng.normal(size=(12, 3)).astype(np.float32), np.arange(12) % 4 % 3
    recipe = Recipe(batch=12, l1=0.02, l2=0.1, lr=0.05, last_lr=0.005, epochs=4)
    found = train_probe(x, classes, 4, recipe, 0)  # class 3 has no rows
    target = np.eye(4)[classes]
    weight = np.where(target.sum(0) > 0, (12 - target.sum(0)) / np.maximum(target.sum(0), 1), 1)
    p, m, v = np.zeros((4, 4)), np.zeros((4, 4)), np.zeros((4, 4))  # the last row is the bias
    rows = np.concatenate([x, np.ones((12, 1))], axis=1).astype(np.float64)
    for t in range(4):
        q = 1 / (1 + np.exp(-rows @ p))
        slope = -(weight * target * (1 - q) - (1 - target) * q) / (12 * 4)
        g = rows.T @ slope + 0.02 / 4 * np.sign(p) * np.array([1, 1, 1, 0])[:, None] + 0.1 * p
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        p -= 0.05 * 0.1 ** (t / 4) * (m / (1 - 0.9 ** (t + 1))) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)
    np.testing.assert_allclose(found.weights, p[:3], atol=5e-4)
    # The first gradient of a balanced bias is 0 but for rounding, which Adam makes a step of: the others' is not.
    np.testing.assert_allclose(found.biases[3], p[3, 3], atol=5e-4)


D = 32


def at(reads: str, writes: str) -> Sites:
    return Sites((reads,), (writes,), (1.0,), (1.0,))


def planted() -> tuple[TrainedCoder, Task]:
    """A direction for each letter, and latents on them: c has two that share its words; s's is silent for some words,
    whose own latent carries the direction of s."""
    rng = np.random.default_rng(0)
    letters = np.repeat(np.arange(26), 60)
    x = np.zeros((len(letters), D), np.float32)
    x[np.arange(len(letters)), letters] = 2
    turn = np.tile(np.arange(60), 26)
    c, s = letters == LETTERS.index("c"), letters == LETTERS.index("s")
    x[c, 26] = np.where(turn[c] % 2, 2, -2)
    special = s & np.isin(turn, (0, 20, 44))
    x[special, 27] = 2
    x += rng.normal(size=x.shape).astype(np.float32) * 0.01
    W_dec, b_enc = np.eye(28, D, dtype=np.float32), np.full(28, -1.0, np.float32)
    W_enc = W_dec.T.copy()
    at_c, at_s = LETTERS.index("c"), LETTERS.index("s")
    # Latents 2 and 26 each fire for one half of c's words; 27 for the special words of s, in place of s's latent.
    W_enc[26, at_c], W_enc[at_c, 26], W_enc[26, 26] = -1.0, 1.0, 1.0
    W_dec[26, at_c], W_dec[26, 26] = 1, 0
    W_enc[27, at_s], W_dec[27, at_s] = -2.0, 1.0
    coder = coder_of("autoencoder", "relu", ("h",), ("h",), width=28, d_model=D)
    params = {"W_enc": W_enc, "b_enc": b_enc, "W_dec": W_dec, "b_dec": np.zeros(D, np.float32)}
    sae = TrainedCoder(coder, params, at("h", "h"))
    test = turn >= 40
    parts = [Words(np.flatnonzero(side), letters[side]) for side in (~test, test)]
    probe = train_probe(x[~test], parts[0].letters, 26, Recipe(batch=128, l2=1e-4, epochs=30), 0)
    return sae, Task(*parts, x[~test], x[test], probe, (1.0,) * 26)


def test_planted_splitting_and_absorption_are_found() -> None:
    pytest.importorskip("sklearn.linear_model", exc_type=ImportError)
    sae, task = planted()
    found = first_letters(sae, task, ProbesConfig(most_latents=4, resamples=200))
    letters = found["letters"]
    assert {name for name, one in letters.items() if one["splits"] > 1} == {"c"} and letters["c"]["splits"] == 2
    assert {name for name, one in letters.items() if one["full_absorption"] > 0} == {"s"}
    assert letters["s"]["words"] == 20 and letters["s"]["full_absorption"] == 1 / 20
    assert letters["s"]["absorption_fraction"] == pytest.approx(1 / 20)
    assert found["splits"]["mean"] == pytest.approx(27 / 26) and found["full_absorption"]["n"] == 26


def test_others_carry_at_most_what_the_main_latents_leave() -> None:
    """Words along the probe: act 1, the main latent 0.75 of it; others write 0.5 more than is left, or 0.2, or 0.5."""
    z, W_dec = np.array([[0.75, 0.75], [0.75, 0.2], [0.0, 0.5]]), np.array([[1.0, 0], [1.0, 0]])
    found = absorbed(z, np.array([[1.0, 0]] * 3), W_dec, np.array([2.0, 0]), [0])
    np.testing.assert_allclose(found.fraction, [0.25, 0, 1])


def test_a_model_that_does_not_know_letters_and_coders_without_directions_are_refused() -> None:
    sae, task = planted()
    assert task.refusal(ProbesConfig()) == "" == refused_coder(sae)
    some = Task(task.train, task.test, task.x_train, task.x_test, task.probe, (0.9,) * 12 + (0.2,) * 14)
    assert "0.6 on held-out words for 12 of 26 letters (mean F1 0.52" in some.refusal(ProbesConfig())
    moved = TrainedCoder(sae.coder, sae.params, at("h", "g"))
    assert "does not write the one hook point" in refused_coder(moved)
