"""Dictionaries on the Hugging Face hub: what an id names, and its files on this machine.

The hub's server is trusted with the length of one answer. What a repository holds is not: its names are checked, at
most `_MOST_LISTED` files are looked at, and only the files of one dictionary are downloaded.
"""

import dataclasses
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from saejax.core.errors import ConfigError, DataError
from saejax.core.hub import ask, be_patient, unreachable
from saejax.interop import FORMATS
from saejax.trained.files import DESCRIPTION, WEIGHTS

_MOST_LISTED = 20_000
_LISTED_IN_ERROR = 8  # dictionaries in a message
_ID_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_ID = re.compile(rf"(?:hf:/{{1,2}})?({_ID_PART})/({_ID_PART})(?:@(refs/pr/\d+|[^/@\s]+))?((?:/[^/]+)*)/?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE_ENDINGS = (".safetensors", ".npz", ".pt", ".pth")  # a place that ends so is a file


@dataclasses.dataclass(frozen=True)
class HubPlace:
    """hf://owner/name@revision/sub/folder: a place in a model repository.

    Attributes:
        repo: owner/name.
        revision: branch, tag or commit (%2F for a slash in it); empty for the main branch.
        sub: a folder, or the file of one dictionary; empty for the repository itself.
        path: what was asked for, where it could be a path of this machine too.
    """

    repo: str
    revision: str = ""
    sub: str = ""
    path: str = ""

    def __str__(self) -> str:
        plain = self.revision.startswith("refs/pr/")
        at = f"@{self.revision if plain else quote(self.revision, safe='')}" if self.revision else ""
        return f"hf://{self.repo}{at}" + (f"/{self.sub}" if self.sub else "")

    def below(self, sub: str) -> "HubPlace":
        return dataclasses.replace(self, sub=sub)


def hub_place(path: str | os.PathLike[str]) -> HubPlace | None:
    """owner/name[@revision][/sub/folder], with or without hf://, as a place on the hub; None for a local path.

    What is there on this machine is never an id. Without hf:// neither is what begins with / . or ~, nor what begins
    with the name of a folder that is there: runs/typo is a run that is missing.

    Raises:
        ConfigError: hf:// and then no such id.
    """
    text = os.fspath(path)
    has_scheme = text.startswith("hf:/")
    if not has_scheme and (os.path.exists(text) or os.path.exists(text.partition("/")[0] or "/")):
        return None
    match = _ID.fullmatch(text)
    if match and _is_plain(sub := match[4].strip("/")):
        return HubPlace(f"{match[1]}/{match[2]}", unquote(match[3] or ""), sub, "" if has_scheme else text)
    if has_scheme:
        raise ConfigError(f"{text!r} is no id of the hub. The form is hf://owner/name@revision/sub/folder.")
    return None


def fetched(wanted: HubPlace) -> tuple[Path, str]:
    """(the dictionary's place on this machine, hf://owner/name@<commit>/place) of one dictionary on the hub.

    A commit that is in the cache costs no question, unless it has many files, of which some may be missing. Of a branch
    or tag the newest commit is taken; where the hub cannot be asked, the one in the cache, with a warning.

    Raises:
        DataError: no such repository, revision or place; no dictionary there, or several (they are named); files that
            do not fit on this machine; no answer.
    """
    cached, certain = _cached(wanted)
    if cached and certain and _COMMIT.fullmatch(wanted.revision):
        return cached
    try:
        commit = str(
            _ask(wanted, lambda api: api.repo_info(wanted.repo, revision=wanted.revision or None, expand=["sha"])).sha
        )
    except DataError as error:
        if not cached:
            raise
        warnings.warn(f"{error} The copy in the cache is read: {cached[1]}.", stacklevel=4)
        return cached
    place, files = _single(wanted, commit)
    folder = _downloaded(wanted, commit, files)
    return folder / place, str(HubPlace(wanted.repo, commit, place))


def is_file(entry: Any) -> bool:
    """True for an entry of the hub's list that is a file, not a folder."""
    return hasattr(entry, "blob_id")


def _listing(place: HubPlace, commit: str) -> dict[str, int]:
    """{name: bytes} of the files below a folder. Raises DataError: no such folder, too many files, no answer."""

    def question(api: Any) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for entry in api.list_repo_tree(place.repo, place.sub or None, recursive=True, revision=commit):
            if entry.path in entries:
                raise ValueError(f"its list of files names {entry.path!r} twice")
            entries[entry.path] = entry
            if len(entries) > _MOST_LISTED:
                break
        return entries

    entries = _ask(place, question)
    if len(entries) > _MOST_LISTED:
        raise DataError(
            f"{place} lists more than {_MOST_LISTED:,} files and folders. Name the folder: {place}/sub/folder."
        )
    files = {name: entry.size for name, entry in entries.items() if is_file(entry)}
    return {name: size for name, size in files.items() if _is_plain(name) and type(size) is int and size >= 0}


def dictionaries(names: Sequence[str]) -> dict[str, list[str]]:
    """{place: the files it is read from} of the dictionaries among the files of a repository, by their names alone."""
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        folders.setdefault(folder, []).append(file)
        if folder:  # some keep their weights in a folder of their own
            above, _, last = folder.rpartition("/")
            folders.setdefault(above, []).append(f"{last}/{file}")
    places: dict[str, list[str]] = {}
    for folder, files in sorted(folders.items()):
        by_format = [format.among(files) for format in FORMATS.values()]
        if {DESCRIPTION, WEIGHTS} <= set(files):
            by_format.append({"": [DESCRIPTION, WEIGHTS]})
        for format_has in by_format:
            for place, needed in format_has.items():
                # Files of the same names may be of several formats. Their contents decide later.
                needed_files = places.setdefault("/".join(filter(None, (folder, place))), [])
                needed_files += [
                    path for file in needed if (path := "/".join(filter(None, (folder, file)))) not in needed_files
                ]
    return places


def _single(wanted: HubPlace, commit: str) -> tuple[str, dict[str, int]]:
    """(place, {file: bytes}) of the one dictionary that is asked for."""
    where = wanted.below(wanted.sub.rpartition("/")[0]) if wanted.sub.endswith(_FILE_ENDINGS) else wanted
    sizes = _listing(where, commit)
    places = dictionaries(list(sizes))
    if wanted.sub not in places:
        below = f"{wanted.sub}/" if wanted.sub else ""
        places = {place: files for place, files in places.items() if place.startswith(below)}
        if len(places) > 1:
            some = ", ".join(str(wanted.below(place)) for place in list(places)[:_LISTED_IN_ERROR])
            more = ", ..." if len(places) > _LISTED_IN_ERROR else ""
            raise DataError(f"{wanted} holds {len(places)} dictionaries. Give one of them: {some}{more}.")
        if not places:
            known = ", ".join(format.title for format in FORMATS.values() if format.needs)
            raise DataError(
                f"{wanted} holds no files that are named as a dictionary of saejax, {known}. `saejax formats` has the "
                f"names. Other files: hf download {wanted.repo}, and load the folder."
            )
    place = wanted.sub if wanted.sub in places else next(iter(places))
    return place, {name: sizes[name] for name in places[place]}


def _downloaded(place: HubPlace, commit: str, files: Mapping[str, int]) -> Path:
    """The repository's folder in the hub's cache, with these files of this commit in it."""
    from huggingface_hub import constants, hf_hub_download

    size = sum(files.values())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    for what, limit in (("memory", memory), (f"free on the disk of {cache}", free)):
        if size > limit:
            raise DataError(
                f"{place} has {size / 1e9:,.1f} GB in {len(files)} files; this machine has {limit / 1e9:,.1f} GB "
                f"{what}. Nothing was downloaded."
            )
    be_patient()
    folders = set()
    for name in files:
        try:
            # By the revision's own name, so that the cache knows later which commit it was.
            path = hf_hub_download(place.repo, name, revision=place.revision or None)
        except Exception as error:  # every failure means the same to the user, and is told
            raise unreachable("model", place.repo, error, _remedy(place)) from None
        folders.add(Path(path[: -len(name)]))
    (folder,) = folders if len(folders) == 1 else (Path(),)
    if folder.name != commit:
        raise DataError(f"{place} was changed while it was downloaded. Run the same again.")
    return folder


def _cached(place: HubPlace) -> tuple[tuple[Path, str] | None, bool]:
    """(as `fetched` of what the cache has at the very place that is asked for, whether all its files are there)."""
    from huggingface_hub import snapshot_download

    wanted: dict[str, Any] = {"revision": place.revision or None, "local_files_only": True}
    try:  # with no pattern: the folder, whatever part of it is there
        folder = Path(snapshot_download(place.repo, **wanted, allow_patterns=[]))
    except Exception:  # not cached: the library raises one of several kinds
        return None, False
    where = place.sub.rpartition("/")[0] if place.sub.endswith(_FILE_ENDINGS) else place.sub
    here = folder / where
    there = sorted(path for pattern in ("*", "*/*") for path in here.glob(pattern) if path.is_file())
    files = dictionaries([path.relative_to(folder).as_posix() for path in there]).get(place.sub)
    if not files:
        return None, False
    # A description and the weights are found together or not at all; of one file a layer, some may be missing.
    return (folder / place.sub, str(HubPlace(place.repo, folder.name, place.sub))), len(files) <= 2


def _ask(place: HubPlace, question: Any) -> Any:
    from huggingface_hub import HfApi

    return ask("model", place.repo, lambda: question(HfApi()), _remedy(place))


def _remedy(place: HubPlace) -> str:
    only = f" --include '{place.sub}/*'" if place.sub and not place.sub.endswith(_FILE_ENDINGS) else ""
    here = f"On this machine nothing is at {place.path}, and " if place.path else "On this machine "
    return (
        f"{here}{place} is not in the hub's cache. Check the name and the network, and HF_TOKEN where it is private. "
        f"To fill the cache where there is a network: hf download {place.repo}{only}."
    )


def _is_plain(name: Any) -> bool:
    """True for a name that stays within its repository."""
    parts = PurePosixPath(name).parts if isinstance(name, str) and name.isprintable() and "\\" not in name else ("..",)
    return ".." not in parts and "/".join(parts) == name and not name.startswith("/")
