"""A tokenizer beside transformers' own reading of the same folder: texts of which the two make other ids.

`Tokenizer` takes `tokenizer.json` at its word. Some of transformers' classes build the tokenizer anew from
tokenizer_config.json and the class's own rules, and then a text can have other ids there than the file gives. Which of
the two the model was trained with, no file says. So the difference is said, before activations are stored.
"""

from pathlib import Path
from typing import Any

from saejax.text.tokenizer import Tokenizer

# Where tokenizers are known to part: spaces at the start and in runs, line ends, letters of several bytes, digits.
_PROBES = (
    "The quick brown fox, 1234567890 times!",
    " a text that begins with a space",
    "  two  spaces\t\ttabs\n\nand lines\r\n",
    "don't we'll I'M (nested [brackets]) <angle> x_y-z",
    "Größe, naïve, 日本語, Привет, 👍🏽",
)
_MOST_TOKENS = 64  # special and added ones, each tried behind and before a word


def disagreement(tokenizer: Tokenizer) -> str:
    """One sentence about the first text of which AutoTokenizer makes other ids; empty where there is none.

    Looks at the folder that the tokenizer was read from, without a network and without running code of the folder.
    Takes some seconds, most of them for importing transformers.
    """
    folder = tokenizer.folder
    if folder is None:
        return ""
    import transformers
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return _first_difference(tokenizer, theirs, folder, transformers.__version__)
    except Exception as error:  # every class of tokenizer has its own ways to fail
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return (
            f"AutoTokenizer of transformers {transformers.__version__} cannot read the tokenizer of {folder} "
            f"({reason[0][:160]}), so nothing compares its ids. saejax reads tokenizer.json"
        )
    finally:
        logging.set_verbosity(level)


def _first_difference(tokenizer: Tokenizer, theirs: Any, folder: Path, version: str) -> str:
    added = tokenizer.backend.get_added_tokens_decoder()
    around = [f"a {added[i].content} b{added[i].content}c" for i in sorted(added)[:_MOST_TOKENS]]
    for text in (*_PROBES, *around):
        ours = tokenizer.backend.encode(text, add_special_tokens=False).ids
        other = list(theirs(text, add_special_tokens=False)["input_ids"])
        if ours != other:
            return (
                f"{text!r} has the ids {_begin(ours)} by the tokenizer.json of {folder}, which saejax follows, and "
                f"{_begin(other)} by AutoTokenizer of transformers {version}, which does not. Save what the model was "
                "trained with by AutoTokenizer.from_pretrained(...).save_pretrained(folder), if it is the latter"
            )
    return ""


def _begin(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:12]))}{', ...' if len(ids) > 12 else ''}]"
