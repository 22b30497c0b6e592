"""Look at activation stores, check them, join them, and make them of activations that others computed.

    saejax store info STORE...              rows, hook points, model, text, statistics, or how far it is
    saejax store verify STORE...            every checksum; exits with 1 and names all that is damaged
    saejax store merge OUT STORE STORE...   several stores of one model into one   [--seed]
    saejax store sample STORE...            random rows with their tokens
                                            [--rows --seed --hook_point --tokenizer]
    saejax store import OUT FILE... --hook_point=blocks.6.resid_pre
                                            .npy, .safetensors and .parquet files of [N, d] as a store
                                            [--d --tensor --non_finite --model --revision
                                             --dtype --shard_rows --chunk_rows --seed]

merge and import continue where they were when they are stopped. Imported files may hold integers token_id, document and
position [N] beside the activations; without them token_id is -1, document the file's number, position its row there.
"""

import dataclasses
from collections.abc import Callable, Sequence

from saejax.app.command import Command, Line
from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


@dataclasses.dataclass(frozen=True)
class Store(Command, takes="words", answers=True):
    rows: int = setting(5, "Rows to show.", words=("sample",), low=1)
    seed: int = setting(0, "Of the permutation in shards, or of the choice.", words=("merge", "import", "sample"))
    hook_point: str = setting("", "This one, or the name that the activations get.", words=("sample", "import"))
    tokenizer: str = setting("", "Folder with tokenizer.json.", words=("sample",))
    d: int = setting(0, "Width that the files must have; 0 for any.", words=("import",), low=0)
    tensor: str = setting("", "Tensor or column of each file.", words=("import",))
    non_finite: str = setting("abort", "abort, or drop rows with NaN or infinity.", words=("import",))
    model: str = setting("", "The model they come from, for the record.", words=("import",))
    revision: str = setting("", "Its revision.", words=("import",))
    shard_rows: int = setting(32768, "Rows of a shard.", words=("import",), low=1)
    chunk_rows: int = setting(256, "Rows of a chunk.", words=("import",), low=1)
    dtype: str = setting("bfloat16", "bfloat16, or int8 with one scale a row.", words=("import",))

    def run(self, line: Line) -> int:
        from saejax.app import store_tools

        shown = self.rows, self.seed, self.hook_point, self.tokenizer
        commands: dict[str, tuple[int, Callable[[Sequence[str]], int]]] = {
            "info": (1, store_tools.info),
            "verify": (1, store_tools.verify_all),
            "merge": (3, lambda paths: store_tools.merge_into(paths, self.seed)),
            "sample": (1, lambda paths: store_tools.sample(paths, *shown)),
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

    def _import(self, paths: Sequence[str]) -> int:
        """Write the activations in the files after the first path into a new store at the first path."""
        from saejax.app.store_tools import import_into
        from saejax.store import ImportConfig, StoreLayout

        if not self.hook_point:
            raise ConfigError(
                "import needs --hook_point, as in --hook_point=blocks.6.resid_pre: the name of what it reads."
            )
        layout = StoreLayout(self.shard_rows, self.chunk_rows, self.dtype)
        names = ("hook_point", "d", "tensor", "non_finite", "model", "revision", "seed")
        return import_into(paths, ImportConfig(**{name: getattr(self, name) for name in names}, layout=layout))
