"""Look at activation stores, check them, join them, and make them of activations that others computed.

    python -m launch.store info STORE...              rows, hook points, model, text, statistics, or how far it is
    python -m launch.store verify STORE...            every checksum; exits with 1 and names all that is damaged
    python -m launch.store merge OUT STORE STORE...   several stores of one model into one   [--seed]
    python -m launch.store sample STORE...            random rows with their tokens
                                                      [--rows --seed --hook_point --tokenizer]
    python -m launch.store import OUT FILE... --hook_point=blocks.6.resid_pre
                                                      .npy, .safetensors and .parquet files of [N, d] as a store
                                                      [--d --tensor --non_finite --model --revision
                                                       --shard_rows --chunk_rows --seed]

merge and import continue where they were when they are stopped. Imported files may hold integers token_id, document and
position [N] beside the activations; without them token_id is -1, document the file's number, position its row there.
"""

from absl import flags

from saejax.app import cli

_FLAGS = (
    flags.DEFINE_integer("rows", 5, "sample: rows to show.", lower_bound=1),
    flags.DEFINE_integer("seed", 0, "merge, import: of the permutation within shards; sample: of the choice."),
    flags.DEFINE_string("hook_point", "", "sample: this one alone; import: the name that the activations get."),
    flags.DEFINE_string("tokenizer", "", "sample: folder with tokenizer.json."),
    flags.DEFINE_integer("d", 0, "import: width that the files must have; 0 for any.", lower_bound=0),
    flags.DEFINE_string("tensor", "", "import: tensor or column of each file."),
    flags.DEFINE_string("non_finite", "abort", "import: abort, or drop rows with NaN or infinity."),
    flags.DEFINE_string("model", "", "import: the model they come from, for the record."),
    flags.DEFINE_string("revision", "", "import: its revision."),
    flags.DEFINE_integer("shard_rows", 32768, "import: rows of a shard.", lower_bound=1),
    flags.DEFINE_integer("chunk_rows", 256, "import: rows of a chunk.", lower_bound=1),
)


def main(words: list[str]) -> int:
    from saejax.app.store_tools import run_command

    return run_command(words, {flag.name: flag.value for flag in _FLAGS if flag.present})


if __name__ == "__main__":
    cli.run_words(main)
