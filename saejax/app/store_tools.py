"""The commands of `saejax store`: look at stores, check them, join them, and make them of others' activations."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.core.progress import Progress
from saejax.store import ImportConfig, StoreReader, describe, import_files, merge, verify
from saejax.store.files import StoreFiles
from saejax.store.reader import any_manifest
from saejax.text import Tokenizer

_CONTEXT = 6


def info(paths: Sequence[str]) -> int:
    """Print what each store is."""
    for path in paths:
        print("\n".join(describe(path)))
    return 0


def verify_all(paths: Sequence[str]) -> int:
    """Check every byte of each store and print every problem; 1 when a store is damaged or unfinished."""
    bad = 0
    for path in paths:
        with Progress(f"verify {path}", _rows(path)) as bar:
            problems = verify(path, bar.advance)
        bad += bool(problems)
        print(f"{path}: {f'{len(problems)} problems' if problems else 'good'}")
        print("".join(f"  {problem}\n" for problem in problems), end="")
    return 1 if bad else 0


def merge_into(paths: Sequence[str], seed: int) -> int:
    """Join the stores after the first path into a new store at the first path."""
    out, *sources = paths
    rows = merge(out, sources, seed=seed, progress=_bar("merge"))
    print(f"{out}: {rows:,} rows of {len(sources)} stores")
    return 0


def import_into(paths: Sequence[str], config: ImportConfig) -> int:
    """Write the activations in the files after the first path into a new store at the first path."""
    out, *files = paths
    rows, dropped = import_files(out, files, config, _bar("import"))
    print(f"{out}: {rows:,} rows of {len(files)} files, {dropped:,} dropped because they were not finite")
    return 0


def sample(paths: Sequence[str], rows: int, seed: int, hook_point: str, tokenizer: str) -> int:
    """Print random rows: ids, norms, and the token in its text where the tokenizer can be found."""
    if seed < 0:
        raise ConfigError(f"--seed={seed}; of sample it must be 0 or more.")
    for path in paths:
        reader = StoreReader.open(path, [hook_point] if hook_point else None)
        known, why = find_tokenizer(reader.identity, tokenizer)
        print(f"{path}: {min(rows, reader.n_tokens)} of {reader.n_tokens:,} rows" + (f"; {why}" if why else ""))
        chosen = np.random.default_rng(seed).choice(reader.n_tokens, min(rows, reader.n_tokens), replace=False)
        for row in map(int, chosen):
            print(f"  {sampled_row(reader, row, known)}")
    return 0


def sampled_row(reader: StoreReader, row: int, tokenizer: Tokenizer | None) -> str:
    """One row as a line: its place, its ids, ||x|| of each hook point, and its text."""
    values = {name: array[0] for name, array in reader.rows(row, row + 1, metadata=True).items()}
    ids = ", ".join(f"{name} {int(values[name])}" for name in ("token_id", "document", "position"))
    norms = [f"{name} {np.linalg.norm(values[name].astype(np.float64)):.4g}" for name in reader.hook_points]
    line = f"row {row}: {ids}, norm {', '.join(norms)}"
    if tokenizer is None:
        return line
    before, own, after = (_decode(tokenizer, ids) for ids in token_context(reader, row, _CONTEXT))
    return f"{line}, text {before} [{own}] {after}"


def token_context(reader: StoreReader, row: int, reach: int) -> tuple[list[int], list[int], list[int]]:
    """Token ids (before, [own], after) of a stored row: up to `reach` on each side that are in the store.

    Neighbours are the rows that came next to it in the capture, of the same document, at positions one lower or higher
    each; the run ends where a token was not stored (bos, special tokens, the border of a piece).
    """
    starts = reader.shard_starts
    shard = _shard_at(starts, row)
    centre = int(starts[shard] + np.flatnonzero(reader.stream_places(shard) == row - starts[shard])[0])
    low, high = max(0, centre - reach), min(reader.n_tokens, centre + reach + 1)
    first_shard, last_shard = _shard_at(starts, low), _shard_at(starts, high - 1)
    places = [starts[s] + reader.stream_places(s) for s in range(first_shard, last_shard + 1)]
    at = np.concatenate(places)[low - starts[first_shard] : high - starts[first_shard]].tolist()
    pieces = [(place, place + 1) for place in at]
    token, document, position = (
        np.concatenate(list(reader.read_pieces(name, pieces))).astype(np.int64)
        for name in ("token_id", "document", "position")
    )
    own = centre - low
    offset = np.arange(low, high) - centre
    fits = (document == document[own]) & (position == position[own] + offset)
    first, last = own, own
    while first > 0 and fits[first - 1]:
        first -= 1
    while last + 1 < len(at) and fits[last + 1]:
        last += 1
    return token[first:own].tolist(), [int(token[own])], token[own + 1 : last + 1].tolist()


def _shard_at(starts: np.ndarray, row: int) -> int:
    return int(np.searchsorted(starts, row, "right")) - 1


def find_tokenizer(identity: Mapping[str, Any], folder: str = "") -> tuple[Tokenizer | None, str]:
    """(the tokenizer of a store's model, "") or (None, why there is none); nothing is downloaded.

    Looked for in `folder`, else in the embedded model or in the local folder that the identity names. One with another
    sha256 than the identity's would show wrong text, and is not used.
    """
    lm = identity.get("lm", {})
    model = lm.get("model", "")
    place = folder or (str(_embedded_folder(model)) if model in _EMBEDDED else model)
    if not place:
        return None, "ids only: the store does not say of which model it is; --tokenizer=FOLDER names a tokenizer"
    try:
        found = Tokenizer.from_folder(Path(place))
    except DataError as error:
        if folder:
            raise
        return None, f"ids only: the tokenizer of {model!r} is not here ({error}); --tokenizer=FOLDER names it"
    if found.sha256 != lm.get("tokenizer_sha256", found.sha256):
        return None, f"ids only: {place} has another tokenizer than the one the store was made with"
    return found, ""


# Named here and not asked of saejax.lm: looking at rows loads no jax.
_EMBEDDED = ("demo", "recall")


def _embedded_folder(model: str) -> Path:
    return Path(__file__).parents[1] / "lm" / model


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text as a Python literal, because it may hold line breaks and control characters; -1 and such are unknown."""
    known = all(0 <= i <= tokenizer.largest_id for i in ids)
    return repr(tokenizer.decode_inside(ids)) if known else f"(unknown ids {ids})"


def _rows(path: str) -> int:
    """Rows for a progress bar; 0 for a store whose manifest cannot be read: `verify` says what is wrong with it."""
    try:
        return any_manifest(StoreFiles(path)).n_tokens
    except DataError:
        return 0


def _bar(stage: str) -> Callable[[int, int], Callable[[int], object]]:
    return lambda total, done: Progress(stage, total, done).advance
