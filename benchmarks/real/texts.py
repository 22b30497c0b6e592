"""English documents of the packages' files: {"text", "source"} rows of a .jsonl file."""

import gzip
import html
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

# A dictionary's entries are short: so many in a row are one document.
_ENTRIES = 4
# Characters of a document of a long page: intervals of an evaluation need many documents.
_LENGTH = 1000
_SEED = 0


def write_texts(folders: dict[str, Path], path: Path) -> int:
    """Write the documents of {package: its files}, in an order that mixes them; their number."""
    rows = [{"source": name, "text": text} for name in sorted(folders) for text in _DOCUMENTS[name](folders[name])]
    random.Random(_SEED).shuffle(rows)
    beside = path.with_suffix(".partial")
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    beside.rename(path)
    return len(rows)


def of_html(page: str) -> str:
    """The text of an HTML page's paragraphs, headings and list items, a line each."""
    page = re.sub(r"(?is)<(script|style|head)\b.*?</\1>", "", page)
    page = re.sub(r"\s+", " ", page)  # the source's own lines end in the middle of sentences
    page = re.sub(r"(?i)</?(p|h\d|li|div|br|pre|tr|dt|dd|blockquote)\b[^>]*>", "\n", page)
    lines = (" ".join(line.split()) for line in html.unescape(re.sub(r"<[^>]*>", "", page)).split("\n"))
    return "\n".join(line for line in lines if line)


def _pages(folder: Path, pattern: str) -> Iterator[str]:
    for path in sorted(folder.glob(pattern)):
        text = of_html(path.read_text(encoding="utf-8", errors="replace"))
        for document in _cut(text.split("\n"), _LENGTH):
            if len(document) > _LENGTH // 4:
                yield document


def _cut(lines: list[str], size: int) -> Iterator[str]:
    """Lines in documents of `size` characters or a line more."""
    document: list[str] = []
    for line in lines:
        document.append(line)
        if sum(map(len, document)) > size:
            yield "\n".join(document)
            document = []
    yield "\n".join(document)


def _entries(folder: Path) -> Iterator[str]:
    """Neighbouring entries of the dictionary, without the marks of its sources."""
    with gzip.open(folder / "usr/share/dictd/gcide.dict.dz", "rt", encoding="utf-8", errors="replace") as file:
        entries = re.split(r"\n(?=\S)", re.sub(r"\s*\[(1913 Webster|PJC|WordNet[^\]]*)\]", "", file.read()))
    plain = (" ".join(entry.split()) for entry in entries if len(entry) > 80)
    kept = itertools.islice(plain, 0, None, 8)  # an eighth: otherwise nearly all of the text were this
    while some := list(itertools.islice(kept, _ENTRIES)):
        yield "\n".join(some)


_DOCUMENTS = {
    "anarchism": lambda folder: _pages(folder, "usr/share/doc/anarchism/html/*.html"),
    "debian-handbook": lambda folder: _pages(folder, "usr/share/doc/debian-handbook/html/en-US/*.html"),
    "dict-gcide": _entries,
}
