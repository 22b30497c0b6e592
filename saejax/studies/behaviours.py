"""Behaviours: pairs of prompts that differ in one thing, and the two answers that this thing decides between.

A behaviour is what a model does when it prefers `right` after `clean`, and `wrong` after `corrupt`. Answers are one
token each, and both prompts of a pair have as many tokens, so that a place in one is the same place in the other.
"""

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_bounded
from saejax.text import Tokenizer

_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}"
_LARGEST_PAIRS = 64 << 20
_LONGEST_LINE = 1 << 16  # bytes of a line


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two prompts and two answers."""

    clean: str
    corrupt: str
    right: str
    wrong: str


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """Templates with slots, each as (clean, corrupt, right, wrong); every template is filled with all its slots.

    What differs is never the first token, which interventions leave alone where a model has no bos token.

    Slots that go together stand together: {"one/many": ("key/keys", "car/cars")}.
    """

    about: str
    templates: tuple[tuple[str, str, str, str], ...]
    slots: Mapping[str, tuple[str, ...]]

    def pairs(self) -> Iterator[Pair]:
        """Every filling of every template once, the same words in all four parts, no word in two slots."""
        for template in self.templates:
            used = [name for name in self.slots if any(f"{{{one}}}" in "".join(template) for one in name.split("/"))]
            for chosen in itertools.product(*(self.slots[name] for name in used)):
                names, words = "/".join(used).split("/"), "/".join(chosen).split("/")
                if len(set(words)) == len(words):
                    yield Pair(*(part.format_map(dict(zip(names, words, strict=True))) for part in template))


_NAMES = (
    *("data", "name", "value", "items", "args", "result", "path", "key", "index", "line", "text", "buffer", "node"),
    *("state", "count", "values", "fields", "lines", "keys", "attrs"),
)
_SHORT = ("x", "i", "n", "0", "1", "k", "a", "self", "key", "name")

_CAPITALS = (
    *("France/Paris", "Germany/Berlin", "Italy/Rome", "Spain/Madrid", "Japan/Tokyo", "Russia/Moscow", "China/Beijing"),
    *("England/London", "Greece/Athens", "Egypt/Cairo", "Austria/Vienna", "Ireland/Dublin", "Sweden/Stockholm"),
    *("Norway/Oslo", "Poland/Warsaw", "Portugal/Lisbon", "Turkey/Ankara", "Kenya/Nairobi", "Peru/Lima", "Iran/Tehran"),
    *("Iraq/Baghdad", "Belgium/Brussels", "Denmark/Copenhagen", "Hungary/Budapest", "Canada/Ottawa"),
)
_OPPOSITES = (
    *("hot/cold", "big/small", "up/down", "left/right", "old/new", "good/bad", "black/white", "happy/sad", "fast/slow"),
    *("high/low", "open/closed", "rich/poor", "strong/weak", "light/dark", "wet/dry", "true/false", "long/short"),
    *("hard/soft", "early/late", "full/empty", "day/night", "war/peace", "life/death", "first/last", "win/lose"),
)

# What the demo model and other models of code do, and what models of English do.
BEHAVIOURS: dict[str, Behaviour] = {
    "bracket": Behaviour(
        "closes the bracket that was opened: ] after [, ) after (",
        (
            ("{name}[{short}", "{name}({short}", "]", ")"),
            ("x = {name}[{short}", "x = {name}({short}", "]", ")"),
            ("    return {name}[{short}", "    return {name}({short}", "]", ")"),
        ),
        {"name": _NAMES, "short": _SHORT},
    ),
    "quote": Behaviour(
        "closes a text with the mark that opened it: \" after \", ' after '",
        (
            ('x = "{name}', "x = '{name}", '"', "'"),
            ('print("{name}', "print('{name}", '"', "'"),
            ('    {short} = "{name}', "    {short} = '{name}", '"', "'"),
        ),
        {"name": _NAMES, "short": _SHORT},
    ),
    "argument": Behaviour(
        "returns the argument that a function has",
        (("def f({name}):\n    return", "def f({other}):\n    return", " {name}", " {other}"),),
        {"name": _NAMES, "other": _NAMES},
    ),
    "agreement": Behaviour(
        "a verb agrees with its subject, not with the noun before it",
        (
            ("Today the {one} near the {others}", "Today the {many} near the {others}", " is", " are"),
            ("Today the {one} behind the {others}", "Today the {many} behind the {others}", " is", " are"),
        ),
        {
            "one/many": (
                *("key/keys", "car/cars", "dog/dogs", "book/books", "door/doors", "tree/trees", "boy/boys"),
                *("table/tables", "chair/chairs", "picture/pictures", "bird/birds", "ball/balls"),
            ),
            "others": ("houses", "windows", "walls", "fields", "stairs", "lamps", "stones", "gates", "rocks", "cups"),
        },
    ),
    "capital": Behaviour(
        "names the capital of a country",
        (("The capital of {here} is", "The capital of {there} is", " {one}", " {other}"),),
        {"here/one": _CAPITALS, "there/other": _CAPITALS},
    ),
    "opposite": Behaviour(
        "names the opposite of a word",
        (("The opposite of {this} is", "The opposite of {that} is", " {one}", " {other}"),),
        {"this/one": _OPPOSITES, "that/other": _OPPOSITES},
    ),
    "pronoun": Behaviour(
        "a pronoun fits the person that it stands for",
        (
            ("This morning {woman} was late because", "This morning {man} was late because", " she", " he"),
            ("Last night {woman} went home when", "Last night {man} went home when", " she", " he"),
        ),
        {
            "woman": ("Mary", "Anna", "Alice", "Emma", "Sarah", "Laura", "Jane", "Lisa", "Julia", "Rose"),
            "man": ("John", "Peter", "Paul", "James", "David", "Mark", "Tom", "Robert", "George", "Frank"),
        },
    ),
}


def pair_files(named: Sequence[str]) -> dict[str, str]:
    """{name: file of its pairs, or empty}, of `study.behaviours`.

    Raises:
        ConfigError: none, a name that a file cannot have, or one twice.
    """
    parts = [entry.partition("=")[::2] for entry in named]
    if not parts:
        raise ConfigError("study.behaviours is empty: name one, as in --config.study.behaviours=bracket,quote")
    for name, _ in parts:
        if not re.fullmatch(_NAME, name):
            raise ConfigError(f"study.behaviours names {name!r}; a name is at most 80 of A-Z a-z 0-9 . _ -")
        if [n for n, _ in parts].count(name) > 1:
            raise ConfigError(f"study.behaviours names {name!r} twice; names must differ.")
    return dict(parts)


def drawn(
    behaviour: str, tokenizer: Tokenizer, train: int, test: int, seed: int, path: str = "", longest: int = 0
) -> dict[str, list[Pair]]:
    """{"train": pairs, "test": pairs}, in an order of the seed, none in both; of the file where one is given.

    Pairs that cannot be compared (`unfit`) are left out; `longest` is the tokens that the model reads, 0 for any.
    """
    if path:
        pairs = read_pairs(Path(path))
    elif behaviour in BEHAVIOURS:
        pairs = list(dict.fromkeys(BEHAVIOURS[behaviour].pairs()))
    else:
        known = ", ".join(BEHAVIOURS)
        raise ConfigError(f"No behaviour {behaviour!r}; there are {known}, and files of your own: name=pairs.jsonl.")
    reasons = [unfit(pair, tokenizer, longest) for pair in pairs]
    fit = [pair for pair, reason in zip(pairs, reasons, strict=True) if not reason]
    if len(fit) < train + test:
        first = next(filter(None, reasons), "")
        raise DataError(
            f"{behaviour}: {train} + {test} pairs are wanted, and {len(fit)} of {len(pairs)} different ones"
            f"{f' in {path}' if path else ''} can be compared."
            + (f" The first that cannot: {first}." if first else "")
            + " Lower study.train_pairs and study.test_pairs, or give more pairs."
        )
    random.Random(f"{seed} {behaviour}").shuffle(fit)
    return {"train": fit[:train], "test": fit[train : train + test]}


def unfit(pair: Pair, tokenizer: Tokenizer, longest: int = 0) -> str:
    """The reason why two prompts cannot be compared token by token, or the answers by one logit; else empty.

    Without a bos token the first token of both must be the same: interventions leave the first token alone.
    """
    right, wrong = tokenizer.encode_many([pair.right, pair.wrong])
    clean, corrupt = tokenizer.encode_behind_bos([pair.clean, pair.corrupt])
    for answer, ids in ((pair.right, right), (pair.wrong, wrong)):
        if len(ids) != 1:
            return f"the answer {_cut(answer)} has {len(ids)} tokens, not one"
    if right == wrong:
        return f"both answers are {_cut(pair.right)}"
    if clean == corrupt or not clean:
        return f"both prompts are {_cut(pair.clean)}"
    if len(clean) != len(corrupt):
        return f"{_cut(pair.clean)} has {len(clean)} tokens and {_cut(pair.corrupt)} has {len(corrupt)}"
    n_tokens = len(clean) + len(tokenizer.bos)
    if longest and n_tokens > longest:
        return f"{_cut(pair.clean)} has {n_tokens} tokens, and the model reads {longest}"
    if not tokenizer.bos and clean[0] != corrupt[0]:
        return f"{_cut(pair.clean)} and {_cut(pair.corrupt)} differ in their first token, and there is no bos token"
    return ""


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def read_pairs(path: Path) -> list[Pair]:
    """Pairs of a JSONL file: one {"clean", "corrupt", "right", "wrong"} a line."""
    pairs = []
    for number, raw in enumerate(read_bounded(path, _LARGEST_PAIRS).split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            pairs.append(_read_pair(raw))
        except ValueError as fault:
            what = f"{path}, line {number} {fault}"
            raise DataError(f'{what}; a line is {{"clean", "corrupt", "right", "wrong"}}.') from None
    if not pairs:
        raise DataError(f'{path} holds no pair; write one {{"clean", "corrupt", "right", "wrong"}} a line.')
    return list(dict.fromkeys(pairs))


def _read_pair(raw: bytes) -> Pair:
    """Raises ValueError with what is wrong with the line."""
    if len(raw) > _LONGEST_LINE:
        raise ValueError(f"has {len(raw):,} bytes, and a pair at most {_LONGEST_LINE:,}")
    try:
        value: Any = json.loads(raw.decode())
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    texts = value if isinstance(value, dict) else {}
    parts: dict[str, Any] = {field.name: texts.get(field.name) for field in dataclasses.fields(Pair)}
    for name, part in parts.items():
        if part == "":
            raise ValueError(f"has an empty {name!r}")
        if not isinstance(part, str):
            raise ValueError(f"has no text {name!r}")
        if part.encode(errors="replace").decode() != part:
            raise ValueError(f"has half of a surrogate pair in {name!r}")
    return Pair(**parts)


def as_jsonl(pairs: Sequence[Pair]) -> str:
    """One pair a line."""
    return "".join(json.dumps(dataclasses.asdict(pair), ensure_ascii=False) + "\n" for pair in pairs)
