"""A language model with dictionaries in it: runs as it is, runs with changed latents, and many of these at once.

    inside = Interventions(lm, {"mlp": sae})
    clean = inside.run(tokens)
    steered = inside.run(tokens, {"mlp": added(123, 5.0)})
    effects = inside.many(tokens, [{"mlp": zero(f)} for f in range(100)], logit_difference(-1, yes, no))

Shape letters: N interventions, R rows, S tokens, V vocabulary, F latents, G groups of them, D width.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from saejax.core.errors import ConfigError
from saejax.interventions.change import Change, added, stacked
from saejax.interventions.checks import Changes, checked_changes, checked_errors, checked_tokens, named, placed
from saejax.interventions.inside import Inside, n_groups, reads_all, together
from saejax.interventions.metrics import Measure, as_argument
from saejax.kernels.batch import DATA
from saejax.lm import LanguageModel
from saejax.parallel import tree_shardings
from saejax.trained import TrainedCoder

# Interventions that run at once, on each device.
_CHANGES_AT_ONCE = 16


@flax.struct.dataclass
class Run:
    """The values seen in one pass.

    Attributes:
        logits: [R, S, V].
        latents: {dictionary: [R, S, F], or [R, S, G, F] of a cross-layer transcoder}, before its changes.
        errors: {dictionary: {hook point that it writes: [R, S, D]}}: what it does not explain there, before its
            changes.
        captured: {hook point: value}, after all changes, of what was asked for.
    """

    logits: jax.Array
    latents: dict[str, jax.Array]
    errors: dict[str, dict[str, jax.Array]]
    captured: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Interventions:
    """A language model and named dictionaries at its hook points.

    Attributes:
        lm: one that JAX runs.
        dictionaries: {name of your choice: dictionary}.
        mesh: `many` shares interventions out over its axis "data"; parameters lie along "latent".

    Raises:
        ConfigError: no dictionary; a hook point that the model does not have; two dictionaries that write one.
        DataError: a dictionary of another model: of another width there, or another tokenizer.
    """

    lm: LanguageModel
    dictionaries: Mapping[str, TrainedCoder]
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dictionaries", placed(self.lm, self.dictionaries))

    def named(self, name: str) -> TrainedCoder:
        """The dictionary of this name. Raises ConfigError where there is none."""
        return named(self.dictionaries, name)

    def run(
        self,
        tokens_RS: Any,
        changes: Changes | None = None,
        errors: str | Mapping[str, Mapping[str, jax.Array]] = "own",
        held: Mapping[str, jax.Array] | None = None,
        capture: Sequence[str] = (),
    ) -> Run:
        """One pass, with the changes.

        Args:
            changes: {dictionary: its change, or several, one after the other}.
            errors: "own", what a dictionary does not explain stays; "none", it is left out; or those of another run,
                {dictionary: {hook point: [R, S, D]}}, as in its `errors`. Dictionaries that are not named keep theirs.
            held: {hook point: value} to keep as given, as attention patterns and norms' scales of a clean run
                (`frozen`): what is then left is what a change does directly.
            capture: hook points to return.

        Raises:
            ConfigError: a dictionary, hook point or kind of errors that is not there.
            DataError: tokens, latents or positions that do not exist.
        """
        tokens_RS = checked_tokens(self.lm, tokens_RS)
        changes = checked_changes(self.dictionaries, changes or {}, tokens_RS.shape)
        kind, error_values = checked_errors(self.dictionaries, errors)
        tokens_RS = jnp.asarray(tokens_RS)
        return self._run(*self.params, tokens_RS, changes, error_values, dict(held or {}), kind, tuple(capture))

    def frozen(self, tokens_RS: Any) -> dict[str, jax.Array]:
        """{hook point: value} of attention patterns and norms' scales in a run as it is, for `held`."""
        return self.run(tokens_RS, capture=self.lm.inner_points()).captured

    def many(
        self,
        tokens_RS: Any,
        changes: Sequence[Changes],
        measure: Measure,
        errors: str | Mapping[str, Mapping[str, jax.Array]] = "own",
        held: Mapping[str, jax.Array] | None = None,
        at_once: int = 0,
    ) -> Any:
        """`measure(logits [R, S, V])` of each of N interventions on the same rows, [N, ...]; `blocks` in one piece."""
        parts = list(self.blocks(tokens_RS, changes, measure, errors, held, at_once))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def blocks(
        self,
        tokens_RS: Any,
        changes: Sequence[Changes],
        measure: Measure,
        errors: str | Mapping[str, Mapping[str, jax.Array]] = "own",
        held: Mapping[str, jax.Array] | None = None,
        at_once: int = 0,
    ) -> Iterator[Any]:
        """Results of `many`, block after block as they are known.

        One program runs all blocks: interventions are vmapped, and shared out over the mesh's axis "data". It is kept
        for other rows and changes of the same shapes; a measure of your own must then be the same function. What comes
        before the first change is computed once a block. Every intervention changes the same dictionaries, as many
        times; whoever leaves one alone gives a change of no effect (`scaled(0, 1.0)`).

        Args:
            at_once: interventions in a block; 0 takes 16 for each device.

        Raises:
            ConfigError: no intervention, or dictionaries that some change and others do not.
        """
        tokens_RS = checked_tokens(self.lm, tokens_RS)
        if not changes:
            raise ConfigError("There is nothing to do: give one intervention or more.")
        listed = [checked_changes(self.dictionaries, one, tokens_RS.shape) for one in changes]
        kinds = {tuple((name, len(each)) for name, each in sorted(one.items())) for one in listed}
        if len(kinds) > 1:
            raise ConfigError(
                f"The interventions change different dictionaries ({'; '.join(map(str, sorted(kinds)))}); give those "
                "that leave one alone a change of no effect, scaled(0, 1.0)."
            )
        together_N = {
            name: [stacked([one[name][i] for one in listed]) for i in range(len(listed[0][name]))] for name in listed[0]
        }
        n, (kind, errors_given) = len(listed), checked_errors(self.dictionaries, errors)
        data = self.mesh.shape[DATA] if self.mesh else 1
        size = -(-min(at_once or _CHANGES_AT_ONCE * data, n) // data) * data

        program, weights = as_argument(measure), self.params
        rest = jnp.asarray(tokens_RS), errors_given, dict(held or {}), kind
        for start in range(0, n, size):
            # The last block is filled up with its last intervention.
            at = np.minimum(np.arange(start, start + size), n - 1)
            part = jax.tree.map(lambda leaf, at=at: leaf[at], together_N)
            if self.mesh is not None:
                part = jax.device_put(part, NamedSharding(self.mesh, PartitionSpec(DATA)))
            result = self._block(program, part, *weights, *rest)
            yield jax.tree.map(lambda leaf, start=start: np.asarray(leaf)[: n - start], result)

    @property
    def params(self) -> tuple[Any, dict[str, dict[str, jax.Array]]]:
        """Those of the language model, and of the dictionaries by name: what a program of one's own takes."""
        return self._lm_params, self._params

    def gradient(
        self,
        name: str,
        measure: Measure,
        delta: tuple[jax.Array, dict[str, jax.Array]],
        tokens_RS: Any,
        held: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """d (sum of the measure over rows) / d delta: what is added to one dictionary's latents and errors, in the
        shapes of a `Run`. Nothing is checked.
        """
        tokens_RS = jnp.asarray(tokens_RS)
        return self._gradient(delta, name, as_argument(measure), *self.params, tokens_RS, dict(held))

    @functools.cached_property
    def kept(self) -> dict[Any, Any]:
        """Programs of `steered`, by dictionary and first token."""
        return {}

    # --- one pass -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _lm_params(self) -> Any:
        return self.lm.params if self.mesh is None else self.lm.placed(self.mesh)

    @functools.cached_property
    def _params(self) -> dict[str, dict[str, jax.Array]]:
        params = {}
        for name, sae in self.dictionaries.items():
            arrays = {key: jnp.asarray(value, jnp.float32) for key, value in sae.params.items()}
            if self.mesh is not None:
                arrays = jax.device_put(arrays, tree_shardings(self.mesh, arrays, sae.coder.logical_axes()))
            params[name] = arrays
        return params

    @functools.cached_property
    def _run(self) -> Callable[..., Run]:
        return jax.jit(self._forward, static_argnums=(6, 7))

    @functools.cached_property
    def _block(self) -> Callable[..., Any]:
        def block(measure: Measure, changes_N: Any, lm_params: Any, params: Any, tokens_RS: Any, *rest: Any) -> Any:
            def one(changes: Any) -> Any:
                return measure(self._forward(lm_params, params, tokens_RS, changes, *rest).logits)

            return jax.vmap(one)(changes_N)

        return jax.jit(block, static_argnums=7)

    @functools.cached_property
    def _gradient(self) -> Callable[..., Any]:
        def moved(delta: Any, name: str, measure: Measure, lm_params: Any, params: Any, tokens: Any, held: Any) -> Any:
            latents, errors = delta
            flat = latents.reshape(*latents.shape[:2], -1)
            changes = {name: [added(jnp.arange(flat.shape[-1]), flat)]}
            return measure(self._forward(lm_params, params, tokens, changes, {}, held, extra=errors).logits).sum()

        return jax.jit(jax.grad(moved), static_argnums=1)

    def _forward(
        self,
        lm_params: Any,
        params: Mapping[str, Any],
        tokens_RS: jax.Array,
        changes: Mapping[str, Sequence[Change]],
        given: Mapping[str, Mapping[str, jax.Array]],
        held: Mapping[str, jax.Array],
        errors: Literal["own", "none"] = "own",
        capture: tuple[str, ...] = (),
        extra: Mapping[str, jax.Array] | None = None,
    ) -> Run:
        first = self._latents_first(lm_params, params, tokens_RS)
        insides = {
            name: Inside(sae, params[name], changes.get(name, ()), given.get(name, errors), first.get(name, {}))
            for name, sae in self.dictionaries.items()
        }
        seen: dict[str, jax.Array] = {}

        def held_at(value: jax.Array, _: jax.Array) -> jax.Array:
            return value

        def look(name: str, value: jax.Array) -> jax.Array:
            return seen.setdefault(name, value)

        edits = together(
            {name: functools.partial(held_at, value) for name, value in held.items()},
            {name: functools.partial(look, name) for sae in self.dictionaries.values() for name in sae.sites.writes},
            *(inside.edits() for inside in insides.values()),
            {name: functools.partial(jnp.add, value) for name, value in (extra or {}).items()},
        )
        logits, captured = self._apply(lm_params, tokens_RS, capture, edits)
        own = {
            name: {point: inside.error(i, seen[point]) for i, point in enumerate(inside.sae.sites.writes)}
            for name, inside in insides.items()
        }
        groups = {name: [inside.latents[g] for g in range(n_groups(inside.sae))] for name, inside in insides.items()}
        latents = {name: jnp.stack(f, axis=2) if len(f) > 1 else f[0] for name, f in groups.items()}
        return Run(logits, latents, own, captured)

    def _latents_first(self, lm_params: Any, params: Mapping[str, Any], tokens_RS: jax.Array) -> dict[str, Any]:
        """{crosscoder: {0: its latents in a run as it is}}."""
        wanted = {name: sae for name, sae in self.dictionaries.items() if reads_all(sae)}
        if not wanted:
            return {}
        points = tuple({point for sae in wanted.values() for point in sae.sites.reads})
        _, captured = self._apply(lm_params, tokens_RS, points, {})
        latents = {}
        for name, sae in wanted.items():
            x_RSLD = jnp.stack([captured[point] for point in sae.sites.reads], axis=2)
            f = sae.coder.encode(dict(params[name]), x_RSLD.reshape(-1, *x_RSLD.shape[2:]).astype(jnp.float32))
            latents[name] = {0: f.dense().reshape(*x_RSLD.shape[:2], -1)}
        return latents

    def _apply(self, lm_params: Any, tokens_RS: jax.Array, capture: Sequence[str], edits: Any) -> Any:
        rows, length = tokens_RS.shape
        positions = jnp.broadcast_to(jnp.arange(length)[None], (rows, length))
        return self.lm.apply(lm_params, tokens_RS, positions, jnp.zeros_like(positions), capture, edits)
