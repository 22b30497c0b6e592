"""`saejax.from_pretrained`: a published dictionary by the names that SAELens gives it."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import yaml

from saejax.app.load import load
from saejax.core.config import nearest, typed
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_bounded
from saejax.interop.formats.saelens import centring_said
from saejax.trained import TrainedCoder

_TABLE, _LARGEST_TABLE = "pretrained_saes.yaml", 64 << 20
_BLOCK = re.compile(r"^([^\s#:]+):\s*\n((?:[ \t-].*\n|\s*\n)+)", re.M)
_REMEDY = "or `pip install --no-deps sae-lens`, whose table says where releases are"


def from_pretrained(release: str, sae_id: str = "", *, revision: str = "") -> TrainedCoder:
    """The published dictionary `sae_id` of a release, as `saejax.load` reads it.

    Args:
        release: a repository of the hub, owner/name; or a release of SAELens, as gpt2-small-res-jb, where sae-lens is
            installed: its table is read, and nothing of it is run.
        sae_id: of a repository, the folder in it; of a release, the id that SAELens gives.
        revision: branch, tag or commit of a repository.

    Raises:
        ConfigError: no such release or id; says the nearest.
        DataError: the hub does not answer, or the files are of no format that saejax reads (`saejax formats`).
    """
    release, sae_id = typed(str, release, "from_pretrained: release"), typed(str, sae_id, "from_pretrained: sae_id")
    repo, folder, centring = release, sae_id, None
    if "/" not in release:
        repo, folder, centring = _place(release, sae_id)
    at = f"@{revision.replace('/', '%2F')}" if revision else ""
    sae = load(f"hf://{repo}{at}" + (f"/{folder.strip('/')}" if folder.strip("/") else ""))
    if centring is None:
        return sae
    return dataclasses.replace(sae, origin=dataclasses.replace(sae.origin, center_writing_weights=centring))


def _place(release: str, sae_id: str) -> tuple[str, str, bool | None]:
    """(repository, folder, whether its model had centred weights) of a release and id in SAELens's table."""
    spec = importlib.util.find_spec("sae_lens")
    paths = [Path(folder) / _TABLE for folder in (spec.submodule_search_locations if spec else None) or ()]
    table = next((path for path in paths if path.is_file()), None)
    if table is None:
        raise ConfigError(f"{release!r} is no repository: give owner/name with the folder as sae_id, {_REMEDY}.")
    # A release is a block below a name at the margin; of megabytes of YAML only one block is parsed.
    blocks = dict(_BLOCK.findall(read_bounded(table, _LARGEST_TABLE).decode(errors="replace")))
    if release not in blocks:
        raise ConfigError(f"There is no release {release!r}.{nearest(release, list(blocks))}")
    try:
        known = yaml.safe_load(blocks[release])
        repo, folders = known["repo_id"], {row["id"]: row.get("path", row["id"]) for row in known["saes"]}
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise DataError(f"{table} cannot be read ({type(error).__name__}). Install sae-lens again.") from None
    if sae_id not in folders:
        raise ConfigError(f"The release {release} has no {sae_id!r}.{nearest(sae_id, folders, listed=not sae_id)}")
    overrides = known.get("config_overrides")
    return repo, folders[sae_id], centring_said(overrides if isinstance(overrides, dict) else {})
