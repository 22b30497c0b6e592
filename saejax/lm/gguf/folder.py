"""A GGUF file as a Hugging Face folder: configuration and tokenizer written out, the tensors left where they are."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from saejax.core.errors import DataError
from saejax.core.files import rename_first, writing
from saejax.core.places import user_cache
from saejax.lm.gguf.configuration import config_json
from saejax.lm.gguf.header import read_header
from saejax.lm.gguf.tensors import GGUF
from saejax.lm.gguf.tokens import tokenizer_json

# What is written changes with this number.
_VERSION = 1


def as_folder(path: Path) -> Path:
    """The folder of a GGUF file, made once, in the user's cache: config.json, the tokenizer, and a link to the file.

    Raises:
        DataError: it is no GGUF file, of an architecture or a tokenizer that is not read, or the folder cannot be made.
    """
    path = Path(os.path.realpath(path))
    try:
        facts = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    name = hashlib.sha256(f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}\0{_VERSION}".encode()).hexdigest()[:24]
    folder = user_cache() / "gguf" / name
    if folder.is_dir():
        return folder
    header = read_header(path)
    config = config_json(header)
    tokenizer, beside = tokenizer_json(header)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        begun = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
        try:
            (begun / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            (begun / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
            (begun / "tokenizer_config.json").write_text(json.dumps(beside, indent=2) + "\n")
            (begun / GGUF).symlink_to(path)
            rename_first(begun, folder)
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    return folder
