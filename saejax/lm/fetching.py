"""A model's files from the hub: those that are read and no others, from the cache where it has all of them."""

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from saejax.core.hub import check_hub, unreachable
from saejax.lm.weight_files import INDEX, SINGLE, has_weights, shard_names

_NOT_CACHED = "It is not cached{missing}. Check the name and the network, or give a local folder in lm.model."
# A file of the second row says something where it is there; that it is not there must be known.
_OF_TOKENIZER = ("config.json", "tokenizer.json")
_MAY_BE_ABSENT = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
)


def fetch_model(repo: str, revision: str) -> Path:
    """A local copy of a hub repository's model and tokenizer.

    The cache is used without asking the network, where it has all of the repository: a bos token or an added token must
    not depend on which files another program has fetched.
    """
    return _fetched(repo, revision, (SINGLE, INDEX), has_weights)


def fetch_tokenizer(repo: str, revision: str) -> Path:
    """As `fetch_model`, of the tokenizer alone."""
    return _fetched(repo, revision, (), lambda folder: True)


def fetch_config(repo: str, revision: str) -> Path:
    """A folder with the repository's config.json, and with whatever else is cached."""
    import huggingface_hub

    wanted: dict[str, Any] = {"repo_id": repo, "filename": "config.json", "revision": revision or None}
    try:
        return Path(huggingface_hub.hf_hub_download(**wanted, local_files_only=True)).parent
    except Exception:  # not cached: the library raises one of several kinds
        pass
    remedy = _NOT_CACHED.format(missing="")
    check_hub("model", repo, revision, remedy)
    try:
        return Path(huggingface_hub.hf_hub_download(**wanted)).parent
    except Exception as error:  # every failure means the same to the user, and is told
        raise unreachable("model", repo, error, remedy) from None


def _fetched(repo: str, revision: str, weights: Sequence[str], complete: Callable[[Path], bool]) -> Path:
    from huggingface_hub import constants

    files = [*_OF_TOKENIZER, *_MAY_BE_ABSENT, *weights]

    def snapshot(**how: Any) -> Path:
        folder = _snapshot(repo, revision, files, **how)
        shards = weights and not (folder / SINGLE).is_file() and (folder / INDEX).is_file()
        if not shards:
            return folder
        names = [re.sub(r"([*?[])", r"[\1]", name) for name in shard_names(folder)]  # patterns that match these alone
        return _snapshot(repo, revision, [*files, *names], **how)

    remedy = _NOT_CACHED.format(missing="")
    try:
        cached = snapshot(local_files_only=True)
    except Exception:  # not cached, or a part: the library raises one of several kinds
        pass
    else:
        unknown = _unknown(repo, cached)
        if complete(cached) and all((cached / name).is_file() for name in _OF_TOKENIZER) and not unknown:
            return cached
        why = f" (nothing says that it has no {unknown[0]}; hf download {repo} fetches all)" if unknown else ""
        remedy = _NOT_CACHED.format(missing=f" whole{why}")
    check_hub("model", repo, revision, remedy)
    try:
        folder = snapshot()
        _mark_absent(repo, folder)
        # The library gives the part that it has where it may not ask, or where the hub falls silent.
        if constants.HF_HUB_OFFLINE or _unknown(repo, folder):
            raise FileNotFoundError("only a part of it is here")
    except Exception as error:
        raise unreachable("model", repo, error, remedy) from None
    return folder


def _snapshot(repo: str, revision: str, files: Sequence[str], **how: Any) -> Path:
    import huggingface_hub

    wanted: dict[str, Any] = {"repo_id": repo, "revision": revision or None, "allow_patterns": list(files)}
    return Path(huggingface_hub.snapshot_download(**wanted, **how))


def _unknown(repo: str, folder: Path) -> list[str]:
    """The files that are not in the cached folder, though nothing says that the repository does not have them.

    Three things say so: the library's list of the repository's files, its mark that it has asked for the file, and a
    .gitattributes in the folder, which every repository has and which comes with a download of everything alone.
    """
    import huggingface_hub

    if (folder / ".gitattributes").is_file():
        return []
    try:
        listed = {file.path for file in huggingface_hub.get_cached_repo_tree(repo, revision=folder.name)}
    except Exception:  # no list, or a version of the library that keeps none
        return _unmarked(repo, folder)
    return [name for name in _MAY_BE_ABSENT if name in listed and not (folder / name).is_file()]


def _unmarked(repo: str, folder: Path) -> list[str]:
    """The absent files that the library has not asked the hub for."""
    import huggingface_hub

    absent = [name for name in _MAY_BE_ABSENT if not (folder / name).is_file()]
    load = huggingface_hub.try_to_load_from_cache
    return [name for name in absent if load(repo, name, revision=folder.name) is None]


def _mark_absent(repo: str, folder: Path) -> None:
    """Ask for files that the repository does not have: the library marks each as absent, for the next time."""
    import huggingface_hub

    for name in _unmarked(repo, folder):
        with contextlib.suppress(Exception):
            huggingface_hub.hf_hub_download(repo, name, revision=folder.name)
