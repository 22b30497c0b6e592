"""Behaviours: pairs of prompts that differ in one thing, and the two answers that this thing decides between.

A behaviour is what a model does when it prefers `right` after `clean`, and `wrong` after `corrupt`. Answers are one
token each, and both prompts of a pair have as many tokens, so that a place in one is the same place in the other.
"""

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_bounded
from saejax.text import Tokenizer

_LARGEST = 64 << 20


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
            ("The {one} near the {others}", "The {many} near the {others}", " is", " are"),
            ("The {one} behind the {others}", "The {many} behind the {others}", " is", " are"),
        ),
        {
            "one/many": (
                *("key/keys", "car/cars", "dog/dogs", "book/books", "door/doors", "tree/trees", "boy/boys"),
                *("table/tables", "chair/chairs", "picture/pictures", "bird/birds", "ball/balls"),
            ),
            "others": ("houses", "windows", "walls", "fields", "stairs", "lamps", "stones", "gates", "rocks", "cups"),
        },
    ),
    "pronoun": Behaviour(
        "a pronoun fits the person that it stands for",
        (
            ("{woman} was late because", "{man} was late because", " she", " he"),
            ("{woman} went home when", "{man} went home when", " she", " he"),
        ),
        {
            "woman": ("Mary", "Anna", "Alice", "Emma", "Sarah", "Laura", "Jane", "Lisa", "Julia", "Rose"),
            "man": ("John", "Peter", "Paul", "James", "David", "Mark", "Tom", "Robert", "George", "Frank"),
        },
    ),
}


def drawn(
    behaviour: str, tokenizer: Tokenizer, train: int, test: int, seed: int, path: str = ""
) -> dict[str, list[Pair]]:
    """{"train": pairs, "test": pairs}, in an order of the seed, none in both; of the file where one is given.

    Pairs whose answers are no single tokens, or whose prompts differ in length, are left out.

    Raises:
        ConfigError: no behaviour of this name.
        DataError: too few pairs are left, or the file is none of pairs.
    """
    if path:
        pairs = read_pairs(Path(path))
    elif behaviour in BEHAVIOURS:
        pairs = list(dict.fromkeys(BEHAVIOURS[behaviour].pairs()))
    else:
        known = ", ".join(BEHAVIOURS)
        raise ConfigError(f"No behaviour {behaviour!r}; there are {known}, and files of your own: name=pairs.jsonl.")
    fit = [pair for pair in pairs if fits(pair, tokenizer)]
    if len(fit) < train + test:
        raise DataError(
            f"{behaviour}: {train} + {test} pairs are wanted; {len(pairs)} there are, and {len(fit)} of them have "
            "answers of one token and prompts of one length under this model's tokenizer. Ask for fewer."
        )
    random.Random(f"{seed} {behaviour}").shuffle(fit)
    return {"train": fit[:train], "test": fit[train : train + test]}


def fits(pair: Pair, tokenizer: Tokenizer) -> bool:
    """Both answers are one token, different ones, and both prompts have as many tokens."""
    right, wrong, clean, corrupt = tokenizer.encode_many([pair.right, pair.wrong, pair.clean, pair.corrupt])
    return len(right) == len(wrong) == 1 and right != wrong and 0 < len(clean) == len(corrupt) and clean != corrupt


def read_pairs(path: Path) -> list[Pair]:
    """Pairs of a JSONL file: one {"clean", "corrupt", "right", "wrong"} a line.

    Raises:
        DataError: it is missing, or a line is no pair; names the line.
    """
    pairs = []
    for number, line in enumerate(read_bounded(path, _LARGEST).decode(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
            pair = Pair(*(value[field.name] for field in dataclasses.fields(Pair)))
        except (ValueError, KeyError, TypeError, RecursionError):
            pair = None
        if pair is None or not all(isinstance(part, str) and part for part in dataclasses.astuple(pair)):
            raise DataError(f'{path}, line {number} is no pair: {{"clean", "corrupt", "right", "wrong"}}, all texts.')
        pairs.append(pair)
    return list(dict.fromkeys(pairs))


def as_jsonl(pairs: Sequence[Pair]) -> str:
    """One pair a line."""
    return "".join(json.dumps(dataclasses.asdict(pair), ensure_ascii=False) + "\n" for pair in pairs)
