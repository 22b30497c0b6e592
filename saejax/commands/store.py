"""Look at activation stores, check them, join them, and make them of activations that others computed.

    saejax store info STORE...              rows, hook points, model, text, statistics, or how far it is
    saejax store verify STORE...            every checksum; exits with 1 and names all that is damaged
    saejax store merge OUT STORE STORE...   several stores of one model into one   [--seed]
    saejax store sample STORE...            random rows with their tokens
                                            [--rows --seed --hook_point --tokenizer]
    saejax store import OUT FILE... --hook_point=blocks.6.resid_pre
                                            .npy, .npz, .safetensors, .pt, .parquet and .arrow files, or folders of
                                            them, as a store   [--tensors in place of --hook_point: NAME=HOOK_POINT,...
                                             --d --non_finite --model --revision
                                             --dtype --shard_rows --chunk_rows --seed]

merge and import continue where they were when they are stopped. Imported tensors are [tokens, d] or
[sequences, positions, d]. Files may hold integers token_id, document and position beside them; without them token_id is
-1, document the number of the sequence or of the file, and position the row there.
"""

import contextlib
from collections.abc import Callable, Sequence

from saejax.app.command import Command, Line
from saejax.core.config import nearest
from saejax.core.errors import ConfigError, DataError
from saejax.core.progress import Progress
from saejax.core.settings import setting


class Store(Command, takes="words", answers=True):
    rows: int = setting(5, "Rows to show.", words=("sample",), low=1)
    seed: int = setting(0, "Of the permutation in shards, or of the choice.", words=("merge", "import", "sample"))
    hook_point: str = setting("", "This one, or the name that the activations get.", words=("sample", "import"))
    tokenizer: str = setting("", "Folder with tokenizer.json.", words=("sample",))
    d: int = setting(0, "Width that the files must have; 0 for any.", words=("import",), low=0)
    tensors: tuple[str, ...] = setting(
        (),
        "Tensors or columns by name: NAME=HOOK_POINT, or NAME where it is the hook point's own; * and ? as in names of "
        "files. The name of an array without one is its file's, below the folder and without the ending.",
        words=("import",),
    )
    non_finite: str = setting("abort", "abort, or drop rows with NaN or infinity.", words=("import",))
    drop_first: int = setting(
        0, "Positions at the front of each text that are left out, as capture.drop_first.", words=("import",), low=0
    )
    model: str = setting("", "The model they come from, for the record.", words=("import",))
    revision: str = setting("", "Its revision.", words=("import",))
    shard_rows: int = setting(32768, "Rows of a shard.", words=("import",), low=1)
    chunk_rows: int = setting(256, "Rows of a chunk.", words=("import",), low=1)
    dtype: str = setting("bfloat16", "bfloat16, or int8 with one scale a row.", words=("import",))

    def run(self, line: Line) -> int:
        commands: dict[str, tuple[int, Callable[[Sequence[str]], int]]] = {
            "info": (1, self._info),
            "verify": (1, self._verify),
            "merge": (3, self._merge),
            "sample": (1, self._sample),
            "import": (2, self._import),
        }
        if not line.words:
            raise ConfigError(f"Name a command: {', '.join(commands)}; --help shows them.")
        word, *paths = line.words
        if word not in commands:
            raise ConfigError(f"There is no command {word!r}.{nearest(word, commands)}")
        least, command = commands[word]
        if len(paths) < least:
            raise ConfigError(f"{word} needs {least} paths or more, got {len(paths)}; --help shows its form.")
        self.refuse_idle(line, word)
        return command(paths)

    def _info(self, paths: Sequence[str]) -> int:
        from saejax.store import describe

        for path in paths:
            print("\n".join(describe(path)))
        return 0

    def _verify(self, paths: Sequence[str]) -> int:
        """Print every problem of each store; 1 when one is damaged or unfinished."""
        from saejax.store import verify
        from saejax.store.files import StoreFiles
        from saejax.store.reader import any_manifest

        damaged = 0
        for path in paths:
            rows = 0
            with contextlib.suppress(DataError):  # `verify` says what is wrong with the manifest
                rows = any_manifest(StoreFiles(path)).n_tokens
            with Progress(f"verify {path}", rows) as bar:
                problems = verify(path, bar.advance)
            damaged += bool(problems)
            print(f"{path}: {f'{len(problems)} problems' if problems else 'good'}")
            print("".join(f"  {problem}\n" for problem in problems), end="")
        return 1 if damaged else 0

    def _merge(self, paths: Sequence[str]) -> int:
        from saejax.store import merge

        out, *sources = paths
        rows = merge(out, sources, seed=self.seed, progress=_bar("merge"))
        print(f"{out}: {rows:,} rows of {len(sources)} stores")
        return 0

    def _sample(self, paths: Sequence[str]) -> int:
        """Print random rows: ids, norms, and the token in its text where the tokenizer can be found."""
        import numpy as np

        from saejax.app.store_rows import find_tokenizer, sampled_row
        from saejax.store import StoreReader

        if self.seed < 0:
            raise ConfigError(f"--seed={self.seed}; of sample it must be 0 or more.")
        for path in paths:
            reader = StoreReader.open(path, [self.hook_point] if self.hook_point else None)
            tokenizer, why = find_tokenizer(reader.identity, self.tokenizer)
            count = min(self.rows, reader.n_tokens)
            print(f"{path}: {count} of {reader.n_tokens:,} rows" + (f"; {why}" if why else ""))
            for row in np.random.default_rng(self.seed).choice(reader.n_tokens, count, replace=False).tolist():
                print(f"  {sampled_row(reader, row, tokenizer)}")
        return 0

    def _import(self, paths: Sequence[str]) -> int:
        from saejax.store import ImportConfig, StoreLayout, StoreReader, import_files
        from saejax.store.norms import few_rows

        layout = StoreLayout(self.shard_rows, self.chunk_rows, self.dtype)
        names = ("hook_point", "d", "tensors", "non_finite", "drop_first", "model", "revision", "seed")
        config = ImportConfig(**{name: getattr(self, name) for name in names}, layout=layout)
        out, *files = paths
        rows, dropped = import_files(out, files, config, _bar("import"))
        reader = StoreReader.open(out)
        count = len(reader.identity["imported"]["files"])
        print(f"{out}: {rows:,} rows of {count} files, {dropped:,} dropped because they were not finite")
        for warning in few_rows(reader, tuple(reader.hook_points)):
            print(f"warning: {warning}")
        return 0


def _bar(stage: str) -> Callable[[int, int], Callable[[int], object]]:
    return lambda total, done: Progress(stage, total, done).advance
