"""The model, the text, the stores and the coder of an experiment, which its stages share."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from saejax.app.experiment import Experiment
from saejax.app.load import load
from saejax.capture import Journal, Named, SelectingPacker, expand_hook_points, store_identity, stream_activations
from saejax.coders import TOPOLOGIES, Coder, Sites
from saejax.core.config import nearest
from saejax.core.errors import ConfigError, DataError
from saejax.fit.devices import lm_mesh
from saejax.fit.learner import Data, Sides, Tell
from saejax.fit.trainable import coder_of, refuse_unused
from saejax.lm.forward import Model
from saejax.lm.pair import load_models
from saejax.parallel import own_rows
from saejax.runs.provenance import STORES, Provenance, verify_provenance
from saejax.store import Batches, BatchSource, StoreReader
from saejax.store.files import StoreFiles
from saejax.store.manifest import MANIFEST, Header, read_manifest
from saejax.text import Packer, Source, open_source
from saejax.through import TextBatches, Through, WithText
from saejax.through.loss import first_step, refuse
from saejax.trained import TrainedCoder, check_widths
from saejax.training import TrainConfig

# What of `Setting.needs` a training has not that reads activations from the running model.
_STREAMED = {"order": "needs a store, and capture.into=training reads none: set capture.into=store, or "}


def refuse_prefix(e: Experiment) -> None:
    """Raise ConfigError for an experiment that is about a prefix and no coder."""
    if e.prefix.source:
        raise ConfigError(
            f"The experiment {e.name} trains a prefix and no coder (prefix.source is {e.prefix.source}): run `saejax "
            "prefix` with this --config, or `saejax plan`, which says what it takes."
        )


@dataclasses.dataclass
class Workspace:
    """An experiment with what several stages need of it, loaded when first asked for; its coder's `fit.Materials`.

    Attributes:
        named: knows the hook points in place of a model that is not to be loaded.
        journal: where a stream from the model is recorded; None: in the experiment's run.
        loaded: {section: the model or text that it is about}, shared with all that is made by `dataclasses.replace`.
    """

    experiment: Experiment
    named: Named | None = None
    journal: Path | None = None
    loaded: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def lm(self) -> Model:
        config = self.experiment.lm
        if config not in self.loaded:
            if not config.model:
                raise ConfigError(
                    "lm.model is empty, and this needs the language model: name the one that was captured."
                )
            # Along "data" alone every device has the whole model. Then the mesh is not asked for: whoever evaluates may
            # have fewer devices than the training had. Each joined process has the whole model for its own work.
            mesh = self.experiment.capture.mesh or self.experiment.parallel.mesh
            spread = mesh and mesh[1] > 1 and jax.process_count() == 1
            self.loaded[config] = load_models(config, lm_mesh(self.experiment) if spread else None)
        model: Model = self.loaded[config]
        return model

    @property
    def source(self) -> Source:
        text = self.experiment.text
        if text not in self.loaded:
            # The model is asked for its tokenizer only where a chat template is needed: text alone loads in no time.
            chat = any(part.chat for part in text.parts)
            self.loaded[text] = open_source(text, self.lm.tokenizer if chat else None)
        source: Source = self.loaded[text]
        return source

    @property
    def packer(self) -> Packer:
        """Rows of the text; kept are the tokens that a capture stores, as far as the text says which."""
        e = self.experiment
        plain = Packer.of(self.source, self.lm.tokenizer, e.text)
        return SelectingPacker(**vars(plain), selection=e.capture)

    @property
    def sites(self) -> Sides:
        """(hook points read, hook points written), by their canonical names; each must be one that is captured.

        Raises:
            ConfigError: one is not captured, or it is not said what a transcoder writes.
        """
        e = self.experiment
        topology = TOPOLOGIES[e.coder.resolved().topology]
        origin = self.origin("train")
        captured = tuple(origin.hook_points) if origin else expand_hook_points(e.capture.hook_points, self.names)
        usual = captured if topology.stacked and topology.tied else captured[:1]
        reads = expand_hook_points(e.reads or ((e.hook_point,) if e.hook_point else usual), self.names)
        writes = expand_hook_points(e.writes or (reads if topology.tied else _mlp_outs(reads)), self.names)
        for name in (*reads, *writes):
            if name not in captured:
                where = "the store" if origin else "capture.hook_points"
                raise ConfigError(f"{name!r} is to be read or written, but is not in {where}: {', '.join(captured)}.")
        if topology.tied and writes != reads:
            raise ConfigError(f"The topology {e.coder.resolved().topology} writes what it reads: leave `writes` empty.")
        return reads, writes

    def build(self) -> Coder:
        """The coder of the experiment, for the widths of its hook points.

        Raises:
            ConfigError: settings that do not fit each other or the hook points, or would do nothing.
            DataError: a store made elsewhere whose hook points are not as wide as the model's.
        """
        if self.experiment.capture.into == "training":
            refuse_unused(self.experiment, _STREAMED)
        if self.experiment.train.through:
            refuse(self.experiment.train, self.experiment.parallel)
        e, widths, (reads, writes) = self.experiment, self.names.hook_points(), self.sites
        if origin := self.origin("train"):
            self._check_store("train", {name: origin.hook_points[name] for name in (*reads, *writes)})
        d_in, d_out = ([widths[n] for n in side] for side in (reads, writes))
        return coder_of(e, d_in, d_out)

    @property
    def names(self) -> Named:
        """The model, which knows the hook points and their widths; without one the store."""
        if self.named is not None:
            return self.named
        if self.experiment.lm.model:
            return self.lm
        if (header := self.origin("train")) is None:
            raise ConfigError(
                f"lm.model is empty, and {self.experiment.store_dir('train')} is no imported or merged store. Name the "
                "model to capture from, or with `store` the store to train on."
            )
        return StoreHookPoints(header)

    def origin(self, split: str) -> Header | None:
        """The header of a split's store, where a merge or an import made it; None where it is to be captured."""
        if split == "train" and self.experiment.capture.into == "training":
            return None  # no store is read, whatever lies there
        manifest = read_manifest(StoreFiles(self.experiment.store_dir(split)))
        made_elsewhere = manifest is not None and not {"merged", "imported"}.isdisjoint(manifest.header.identity)
        return manifest.header if manifest is not None and made_elsewhere else None

    def reader(self, split: str, hook_points: Sequence[str] = ()) -> StoreReader:
        """The store of a split, of the given hook points or of the coder's sites.

        A captured one is checked to come from this model, tokenizer and text; a merged or imported one to come from
        this model, as far as it says, and to be as wide.
        """
        names, path = hook_points or dict.fromkeys(itertools.chain(*self.sites)), self.experiment.store_dir(split)
        expected = self._expected(split)
        opened = StoreReader.open(path, list(names), expect=expected)
        if self.origin(split) is None:
            # Settings at their defaults are in no identity. Which process wrote which part is no choice of tokens.
            if others := [key for key in opened.identity if key not in expected and key != "parts"]:
                raise DataError(
                    f"The store {path} was captured with {', '.join(others)}, which this experiment leaves at its "
                    "default. Give the settings of the capture, or name another store (`store`)."
                )
            if (dtype := opened.layout.dtype) != (wanted := self.experiment.capture.layout(split).dtype):
                raise DataError(
                    f"The store {path} holds {dtype}, and capture.dtype asks for {wanted}. "
                    f"Give --config.capture.dtype={dtype}, or name another store (`store`)."
                )
        self._check_store(split, opened.hook_points)
        return opened

    def _check_store(self, split: str, widths: Mapping[str, int]) -> None:
        e = self.experiment
        other = f"the model {e.lm.model}" if e.lm.model else f"the store {e.store_dir('train')}"
        check_widths(f"The store {e.store_dir(split)}", widths, other, self.names.hook_points())

    def made_from(self) -> Provenance:
        """The provenance of the experiment's run, if it is trained now.

        Raises:
            DataError: it was made from something else before.
        """
        model = {"lm": self.lm.identity} if self.experiment.lm.model else {}
        return verify_stores(self.experiment, model)

    def verify_text_and_model(self) -> Provenance:
        """The run's provenance, with the text and the model that it is to be looked at with.

        Held-out text is what was not trained on, of the text that was captured and of no other.

        Raises:
            DataError: the run was made from another text or model.
        """
        e, now = self.experiment, {"lm": self.lm.identity, "text": self.source.identity}
        return verify_provenance(e.run, now, lambda: stores_provenance(e))

    def _expected(self, split: str) -> dict[str, Any]:
        e = self.experiment
        header = self.origin(split)
        if header is None:
            return store_identity(self.lm, self.source, e.text, split, e.capture)
        said = {"split": split} if "split" in header.identity else {}
        if not e.lm.model:
            return said
        named = {key: value for key, value in header.identity.get("lm", {}).items() if value}
        return said | ({"lm": {key: self.lm.identity.get(key) for key in named}} if named else {})

    def training(self, hook_points: Sequence[str] = (), rows: tuple[int, int] | None = None) -> BatchSource:
        """The training's batches, of the given hook points or of the coder's sites: from the store or the model.

        Of several processes each has `rows` [first, stop) of every batch.

        Raises:
            ConfigError: several processes, and no store to read from; or devices for a model that JAX does not run.
        """
        e, t = self.experiment, self.experiment.train
        if e.capture.into == "store":
            reader = self.reader("train", hook_points)
            how = t.block_chunks, rows, t.max_rows, t.shares, t.blocks_ahead, t.neighbours
            return Batches(reader, t.batch_size, e.seed, *how)
        if jax.process_count() > 1:
            raise ConfigError("capture.into=training is the work of one process: capture into a store first.")
        if e.capture.mesh and not self.lm.pure:
            raise ConfigError(
                "capture.mesh is about JAX's devices, and PyTorch runs this language model: leave it empty, and name "
                "its device by lm.device."
            )
        return stream_activations(
            self.journal or e.run.stream,
            self.lm,
            self.source,
            e.text,
            e.capture,
            lm_mesh(e),
            hook_points=hook_points or tuple(dict.fromkeys(itertools.chain(*self.sites))),
            batch_size=e.train.batch_size,
            max_rows=e.train.max_rows,
            seed=e.seed,
        )

    def data(self, hook_points: Sequence[str], mesh: Mesh | None, tell: Tell) -> Data:
        t, stored = self.experiment.train, self.experiment.capture.into == "store"
        rows = own_rows(mesh, t.batch_size, t.accumulate, t.neighbours) if mesh else None
        batches = self.training(hook_points, rows)
        if t.through:
            batches = WithText(batches, self._text(), first_step(t))
        if mesh and isinstance(batches, Batches) and t.neighbours > 1:
            tell(
                f"train: windows of {t.neighbours} neighbouring tokens: {batches.epoch_rows:,} activations an epoch, "
                f"{batches.used:.1%} of the store; the others stand alone"
            )
        heldout = self._heldout(tell) if mesh else self.reader("heldout", hook_points)
        return Data(batches, heldout, (lambda: self.reader("train")) if stored else None)

    def _heldout(self, tell: Tell) -> StoreReader | None:
        """The held-out activations; None where the training's were made elsewhere and there are no others."""
        path = self.experiment.store_dir("heldout")
        if self.origin("train") is None or StoreFiles(path).read(MANIFEST) is not None:
            return self.reader("heldout")
        for key in ("early_stop_patience", "keep_best"):
            if value := getattr(self.experiment.train, key):
                raise ConfigError(
                    f"train.{key} needs held-out activations, and there is no store at {path}. Make one (saejax store "
                    f"import {path} <files>), or leave train.{key}={value} away."
                )
        tell(f"train: there is no store at {path}, so nothing is validated during training")
        return None

    def with_train(self, train: TrainConfig) -> "Workspace":
        return self.of(dataclasses.replace(self.experiment, train=train))

    def of(self, experiment: Experiment) -> "Workspace":
        """The workspace of another experiment; both share what is loaded."""
        return dataclasses.replace(self, experiment=experiment)

    def rows(self) -> int:
        c, most = self.experiment.capture, self.experiment.train.max_rows
        if c.into == "training":
            return c.buffer_rows
        manifest = read_manifest(StoreFiles(self.experiment.store_dir("train")))
        stored = manifest.n_tokens if manifest else c.tokens
        return min(stored, most or stored)

    def beside(self, coder: Coder, sites: Sites, mesh: Mesh) -> Through | None:
        e = self.experiment
        if not e.train.through:
            return None
        lm, sinks = self.lm, e.capture.sinks
        return Through.of(e.train, sinks, lm, lm.placed(mesh), e.text.context_length, coder, sites, mesh)

    def _text(self) -> TextBatches:
        """The text of the second loss, from its beginning, whatever was captured of it."""
        e = self.experiment
        rows, identity = e.train.through_rows, store_identity(self.lm, self.source, e.text, "train", e.capture)
        identity = json.loads(json.dumps(identity | {"rows": rows, "seed": e.seed}))
        return TextBatches(self.packer, rows, e.seed, Journal(e.run.text, identity))

    def source_coder(self) -> TrainedCoder:
        return load(self.experiment.train.init_from)


@dataclasses.dataclass(frozen=True)
class StoreHookPoints:
    """The hook points of a store, for activations whose model is not at hand."""

    header: Header

    def hook_points(self) -> dict[str, int]:
        """{hook point: width}."""
        return self.header.hook_points

    def hook_point(self, name: str) -> str:
        """The name itself, or a ConfigError with the nearest."""
        if name not in self.header.hook_points:
            there = list(self.header.hook_points)
            raise ConfigError(f"The store has no hook point {name!r}.{nearest(name, there, listed=True)}")
        return name


def _mlp_outs(reads: tuple[str, ...]) -> tuple[str, ...]:
    """The mlp_out of each block read."""
    for name in reads:
        if name.rpartition(".")[2] not in ("mlp_in", "resid_mid"):
            raise ConfigError(
                f"What does the transcoder write that reads {name}? Set `writes`, or read mlp_in or resid_mid "
                "(then it writes the mlp_out of the block)."
            )
    return tuple(f"{name.rpartition('.')[0]}.mlp_out" for name in reads)


def verify_stores(e: Experiment, more: Provenance | None = None) -> Provenance:
    """The provenance of e's run, which is made from the stores of e as they are, and from `more`.

    Raises:
        DataError: it was made from something else.
    """
    stores = stores_provenance(e)
    return verify_provenance(e.run, stores | (more or {}), lambda: stores)


def stores_provenance(e: Experiment) -> Provenance:
    """The part of a provenance that the stores of an experiment say, those that are there and complete.

    Raises:
        DataError: a damaged manifest.
    """
    splits = STORES if e.capture.into == "store" else ("heldout",)  # else no store of the other is read
    manifests = {split: read_manifest(StoreFiles(e.store_dir(split))) for split in splits}
    there = {split: manifest for split, manifest in manifests.items() if manifest is not None and manifest.complete}
    identities = [manifest.header.identity for manifest in there.values()]
    stores = {
        split: {"store": e.store_dir(split), "rows": manifest.n_tokens, "fingerprint": manifest.fingerprint}
        for split, manifest in there.items()
    }
    return {
        **{split: stores.get(split, {}) for split in STORES},
        "lm": {
            key: value for identity in reversed(identities) for key, value in identity.get("lm", {}).items() if value
        },
        "text": next((identity["text"] for identity in identities if "text" in identity), {}),
    }
