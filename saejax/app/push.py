"""`saejax push`: a dictionary into a repository of the Hugging Face hub, in one commit, with a model card."""

import dataclasses
import itertools
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.app.convert import compared, refuse
from saejax.app.hub import HubPlace, hub_place, is_file
from saejax.app.load import load
from saejax.core.errors import ConfigError, DataError
from saejax.core.hub import ask, be_patient, unreachable
from saejax.interop import FORMATS
from saejax.trained import TrainedCoder, format_named
from saejax.trained.card import model_card
from saejax.trained.files import CARD

_ABSOLUTE = re.compile(r"(/|~|[A-Za-z]:[\\/]).+")
_NOTHING_PUSHED = "Nothing was pushed."
_MOST_LOOKED_AT = 1_000  # files of the folder that are looked at
_LEFT_ALONE = {".gitattributes", "LICENSE"}


def run_push(words: Sequence[str], to: str, private: bool, folder: str, revision: str, step: int | str | None) -> None:
    """`push_to_hub` of what `saejax.load` reads; prints what it did.

    Raises:
        ConfigError: not a source and an owner/name; as `push_to_hub`.
        DataError: a source that cannot be read; as `push_to_hub`.
    """
    if len(words) != 2:
        raise ConfigError("Give a source and a repository, as in: saejax push runs/quickstart owner/name")
    place = _destination(words[1], folder, revision)
    _push(load(words[0], step), place, to, private, words[0])


def push_to_hub(
    sae: TrainedCoder, repo: str, *, to: str = "saejax", private: bool = False, folder: str = "", revision: str = ""
) -> str:
    """Push a dictionary into a repository of the hub, in one commit with a model card; it is read back first.

    Args:
        repo: owner/name; it is made where it is not there.
        to: the format of the files; `saejax formats` lists them.
        private: the repository is, or becomes, private.
        folder, revision: of the repository; its root and main branch by default.

    Returns:
        What `saejax.load` takes, with the commit.

    Raises:
        ConfigError: no owner/name, a format that cannot say this coder, or no token.
        DataError: a hub that refuses or does not answer; another dictionary in its way.
    """
    return _push(sae, _destination(repo, folder, revision), to, private, "This coder")


def _push(sae: TrainedCoder, place: HubPlace, to: str, private: bool, called: str) -> str:
    """Check all that can be checked, write the files, read them back, push them in one commit, print the address."""
    sae = public(sae)
    if to != "saejax":
        refuse(called, sae, format_named(to))
    api, user = _signed_in(place)
    there = _there(api, place)
    with tempfile.TemporaryDirectory(prefix="saejax-push-") as beside:
        local = Path(beside) / "coder"
        notes = sae.save(local, format=to)
        print(compared(sae, local, to, ()))
        usage = "" if to == "saejax" else FORMATS[to].usage(place.repo, place.sub)
        inner = local if to == "saejax" else FORMATS[to].place_of(sae, local)
        read = place.below("/".join(filter(None, (place.sub, *inner.relative_to(local).parts))))
        where = str(read).removeprefix("hf://")
        (local / CARD).write_text(model_card(sae.describe(), where, to, usage), encoding="utf-8")
        files = {path.relative_to(local).as_posix(): path for path in sorted(local.rglob("*")) if path.is_file()}
        # What we would not replace is another dictionary: two in one folder read as neither.
        if other := sorted(set(there or ()) - files.keys() - _LEFT_ALONE):
            raise DataError(
                f"{place} holds {', '.join(other[:4])}{', ...' if len(other) > 4 else ''}, which this push would not "
                f"replace. Choose another folder with --folder. {_NOTHING_PUSHED}"
            )
        commit = _pushed(api, place, files, private=private, new=there is None, owner=user)
    for note in (*sae.origin.notes, *notes):
        print(f"  {note}")
    print(f"{called} -> {commit.commit_url}")
    pinned = str(dataclasses.replace(read, revision=commit.oid)).removeprefix("hf://")
    print(f'saejax.load("{pinned}") reads it.')
    return pinned


def public(sae: TrainedCoder) -> TrainedCoder:
    """The same coder without the folders of this machine: of an absolute path, the last part stays."""
    origin, source = sae.origin, sae.origin.source
    if not source.startswith("hf://"):
        source = Path(source).name
    told = dataclasses.replace(origin, source=source, model=_told(origin.model), text=_told(dict(origin.text)))
    return dataclasses.replace(sae, origin=told, settings=_told(dict(sae.settings)))


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _told(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_told(item) for item in value]
    if isinstance(value, str) and _ABSOLUTE.fullmatch(value):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value


def _destination(word: str, folder: str, revision: str) -> HubPlace:
    at = f"@{revision.replace('/', '%2F')}" if revision else ""
    sub = f"/{folder.strip('/')}" if folder.strip("/") else ""
    plain = re.fullmatch(r"(?:hf://)?([^/@]+/[^/@]+)", word)
    if not plain:
        raise ConfigError(f"{word!r} is no repository: give owner/name; folder and revision are options of their own.")
    place = hub_place(f"hf://{plain[1]}{at}{sub}")
    assert place is not None  # hf:// is a place or an error
    return place


def _signed_in(place: HubPlace) -> tuple[Any, str]:
    """(the hub's client, who its token belongs to)."""
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set: nothing can be pushed. Unset it.")
    if not get_token():
        raise ConfigError("There is no token for the hub: run `hf auth login`, or set HF_TOKEN to one that may write.")
    api = HfApi()
    name = ask("model", place.repo, api.whoami, f"Is the token right? {_NOTHING_PUSHED}").get("name")
    return api, str(name)


def _there(api: Any, place: HubPlace) -> list[str] | None:
    """The names of the files that are in the folder already; None where there is no such repository."""
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    def question() -> list[str] | None:
        try:
            commit = api.repo_info(place.repo, revision=place.revision or None, expand=["sha"]).sha
        except RevisionNotFoundError:  # a new branch begins as the main one
            commit = api.repo_info(place.repo, expand=["sha"]).sha
        except RepositoryNotFoundError:
            return None
        try:
            entries = api.list_repo_tree(place.repo, place.sub or None, revision=commit)
            return [
                entry.path.rpartition("/")[2] for entry in itertools.islice(entries, _MOST_LOOKED_AT) if is_file(entry)
            ]
        except EntryNotFoundError:
            return []

    return ask("model", place.repo, question, _NOTHING_PUSHED)


def _pushed(api: Any, place: HubPlace, files: Mapping[str, Path], *, private: bool, new: bool, owner: str) -> Any:
    """The hub's answer to the commit."""
    from huggingface_hub import CommitOperationAdd

    be_patient()
    operations = [
        CommitOperationAdd(path_in_repo="/".join(filter(None, (place.sub, name))), path_or_fileobj=path)
        for name, path in files.items()
    ]
    try:
        if new:
            api.create_repo(place.repo, private=private or None, exist_ok=True)
        elif private and api.repo_info(place.repo, expand=["private"]).private is False:
            raise ConfigError(
                f"{place.repo} is there already and public. Make it private first, or leave out --private."
            )
        if place.revision:
            api.create_branch(place.repo, branch=place.revision, exist_ok=True)
        return api.create_commit(
            place.repo, operations, commit_message="A sparse dictionary, by saejax", revision=place.revision or None
        )
    except ConfigError:
        raise
    except Exception as error:  # the library raises many kinds; all mean that it was not pushed
        remedy = f"The token is {owner}'s: may it write there? {_NOTHING_PUSHED}"
        raise unreachable("model", place.repo, error, remedy) from None
