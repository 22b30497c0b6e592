"""`TorchModel`: packed rows through a PyTorch model, with what capture, evaluation and analysis ask of one."""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.core.arrays import as_array
from saejax.core.config import nearest, typed
from saejax.core.errors import ConfigError, DataError
from saejax.lm.display import model_html
from saejax.lm.forward import Begin, Edit, Forward
from saejax.lm.points import ADDED
from saejax.lm.rows import WAYS, Chunk, check_ids, check_length, is_longer
from saejax.lm.shape import ModelShape
from saejax.lm.torch_hooks.hooks import evaluating, run_chunk
from saejax.text import PackedRows, Tokenizer

_CPU_ROWS = 32
_MOST_ROWS = 512


@dataclasses.dataclass(frozen=True)
class TorchShape(ModelShape):
    """The sizes of a model that PyTorch runs, and its hook points: the names in blocks, then the places of modules.

    Attributes:
        widths: {hook point: width}.
    """

    widths: dict[str, int] = dataclasses.field(default_factory=dict, kw_only=True, compare=False, repr=False)

    def hook_points(self) -> dict[str, int]:
        return self.widths

    def hook_point(self, name: str) -> str:
        """The name itself, or a ConfigError with the nearest; a loaded model may know more names."""
        if name not in self.widths:
            raise ConfigError(f"The plan finds no hook point {name!r} in the model.{nearest(name, self.widths)}")
        return name


@dataclasses.dataclass(frozen=True)
class TorchModel:
    """A PyTorch model with its tokenizer and hook points; made by `from_module` or `load_torch`.

    Attributes:
        module: on its device; it runs in eval mode, and is left in the mode in which it was.
        identity: as a `LanguageModel`'s, with backend torch; part of a store's identity.
        widths: {place: width}, in the order in which the model passes them.
        aliases: {blocks.{i}.<name>: place}.
        synonyms: {name in TransformerLens: <name>}.
        causal: a token's values do not depend on later tokens.
        predicts: what it gives has the vocabulary's width.
        versions: of its parameters, as they were when it was measured.
        way, long_way: of keeping documents apart, of `saejax.lm.rows.WAYS`: in rows of up to `window` tokens, and in
            longer ones, where a 4-D mask would undo the model's own window of attention, or was not tried.
        window: tokens.
        longest_mixed: documents of up to so many tokens share a forward pass, as those ways say; a longer one shares it
            with documents of its own length alone, because the model's frequencies follow the longest.
    """

    module: Any
    tokenizer: Tokenizer
    identity: dict[str, Any]
    config: TorchShape
    widths: dict[str, int]
    aliases: dict[str, str]
    synonyms: Mapping[str, str]
    causal: bool
    predicts: bool
    versions: tuple[tuple[int, int], ...]
    way: str
    long_way: str
    window: int
    longest_mixed: int

    pure = False
    params: Any = dataclasses.field(default_factory=dict, init=False)

    def hook_points(self) -> dict[str, int]:
        """{hook point: width}: the names in blocks first, then every module's places."""
        return self.config.widths

    def hook_point(self, name: str) -> str:
        """The canonical name of a hook point; a module's path alone is its `.out`, TransformerLens names are accepted.

        Raises:
            ConfigError: it does not exist; the message has the nearest that does.
        """
        match = re.fullmatch(r"(blocks\.\d+)\.(.+)", name)
        canonical = f"{match[1]}.{self.synonyms.get(match[2], match[2])}" if match else name
        there = self.hook_points()
        for candidate in (canonical, f"{name}.out"):
            if candidate in there:
                return candidate
        close = difflib.get_close_matches(canonical, there, n=1, cutoff=0.3)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        kinds = ", ".join(dict.fromkeys(alias.split(".")[2] for alias in self.aliases))
        blocks = f"blocks.0 to blocks.{self.config.n_layer - 1}, with {kinds}, and " if kinds else ""
        raise ConfigError(
            f"The model has no hook point {name!r}.{hint} There are {blocks}the paths of its modules with .in or .out "
            f"({', '.join(list(self.widths)[:3])}, ...)."
        )

    def _place(self, name: str) -> str:
        name = self.hook_point(name)
        return self.aliases.get(name, name)

    def __repr__(self) -> str:
        weight, family = next(self.module.parameters()), type(self.module).__name__
        dtype = str(weight.dtype).removeprefix("torch.")
        return self.config.in_one_line(self, family, f"torch on {weight.device}", dtype)

    def _repr_html_(self) -> str:
        return model_html(self)

    def run(
        self,
        tokens_BS: Any,
        positions_BS: Any = None,
        segments_BS: Any = None,
        capture: Sequence[str] = (),
        edits: Mapping[str, Edit] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """tokens [B, S] -> (logits [B, S, V], {hook point: activation [B, S, d]}); see `apply`."""
        return self.apply({}, tokens_BS, positions_BS, segments_BS, capture, edits)

    def apply(
        self,
        params: Any,
        tokens: Any,
        positions: Any = None,
        segments: Any = None,
        capture: Sequence[str] = (),
        edits: Mapping[str, Edit] | None = None,
        begin: Begin | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """(logits [R, S, V], {hook point: [R, S, d]}) of packed rows, as JAX arrays; `params` is not used.

        A model without logits gives its last hidden state. An edit maps [R, S, d] to [R, S, d], once for each chunk of
        rows, and must change each document alone. Its values replace what a module reads or gives.
        """
        assert begin is None, "start_of names no place"
        tokens_RS, positions_RS, segments_RS = _full(tokens, positions, segments)
        places = {name: self._place(name) for name in capture}
        changes = {self._place(name): edit for name, edit in (edits or {}).items()}
        if len(changes) < len(edits or {}):
            raise ConfigError(f"Two edits at one hook point under two names: {', '.join(edits or {})}. Compose them.")
        seen = self._run(tokens_RS, positions_RS, segments_RS, ["", *places.values()], changes)
        # The last hidden state or the logits, under the name of the model itself.
        arrays = {place: jnp.asarray(value.float().cpu().numpy()) for place, value in seen.items()}
        arrays = {place: value.reshape(*tokens_RS.shape, -1) for place, value in arrays.items()}
        return arrays[""], {name: arrays[place] for name, place in places.items()}

    def activations(self, text: str, hook_point: str) -> np.ndarray:
        """Activations [S, d] float32 of one text at one hook point, the model's bos in front."""
        ids = self.tokenizer.bos + self.tokenizer.encode_behind_bos([typed(str, text, "activations: text")])[0]
        check_length("The text has", len(ids), self.config.context_length)
        place = self._place(hook_point)
        return self._run(*_full([ids]), [place], {})[place].float().cpu().numpy()

    def start_of(self, names: Sequence[str]) -> str:
        return self.config.start_of(names)

    def measures_loss(self, names: Sequence[str]) -> bool:
        """True where the logits predict the next token and an edit at these hook points reaches them.

        At resid_mid it would reach the norm that reads it, but not the residual stream.
        """
        predicts = self.causal and (self.predicts or self._head() is not None)
        return predicts and not any(self.hook_point(name).endswith(".resid_mid") for name in names)

    def _head(self) -> Any:
        head = getattr(self.module, "get_output_embeddings", lambda: None)() or getattr(self.module, "lm_head", None)
        if head is None and self.predicts:  # what gave the last values as wide as the vocabulary
            size = self.config.vocab_size
            ends = [at for at, width in self.widths.items() if at.endswith(".out") and width == size]
            head = self.module.get_submodule(ends[-1].removesuffix(".out")) if ends else None
        return head if self.causal else None

    def into_residual(self, hook_point: str, rows_FD: np.ndarray) -> np.ndarray | None:
        """The rows, at the names in blocks whose sums were seen; None at other places: what they are is not known."""
        names = {place: name for name, place in self.aliases.items()}
        place = self._place(hook_point)
        return rows_FD if names.get(place, place).rpartition(".")[2] in ADDED else None

    def readout(self) -> tuple[jax.Array, jax.Array] | None:
        """(scale of the final norm [D], W_U [D, V]), float32; None for a model that does not predict the next token.

        The final norm is the last module outside the layers that text comes past, is called a norm and has the model's
        width. Its scale is measured: of +-1 in turn, whose mean is 0 and mean square 1, it gives the scale and its
        bias.
        """
        import torch

        head = self._head()
        W_DV = getattr(head, "W_U", None)  # of TransformerLens, whose norms have w
        if W_DV is None and getattr(head, "weight", None) is not None:
            W_DV = head.weight.T
        if W_DV is None:
            return None
        W_U_DV = jnp.asarray(W_DV.detach().float().cpu().numpy())
        norms = [
            module
            for name, module in self.module.named_modules()
            if "norm" in type(module).__name__.lower()
            and not re.search(r"\.\d+\.", name)
            and f"{name}.out" in self.widths
        ]
        weights = ((norm, getattr(norm, "weight", getattr(norm, "w", W_DV))) for norm in norms)
        norms = [norm for norm, weight in weights if weight.shape == W_DV.shape[:1]]
        if not norms:
            return jnp.ones(len(W_U_DV)), W_U_DV
        sign_D = torch.ones_like(W_DV[:, 0])
        sign_D[1::2] = -1
        with torch.no_grad():
            scale_D = sign_D * (norms[-1](sign_D) - norms[-1](-sign_D)) / 2
        return jnp.asarray(scale_D.float().cpu().numpy()), W_U_DV

    def placed(self, mesh: Mesh) -> Any:
        return self.params

    def rows_that_fit(self, names: Sequence[str], length: int) -> int:
        """Rows of `length` tokens for a capture: the most, of 512, 256, ..., that the GPU holds; on a CPU 32."""
        if self._device().type != "cuda":
            return _CPU_ROWS
        places = [self._place(name) for name in names]

        def attempt(rows: int) -> None:
            tokens_RS = np.ones((rows, length), np.int32)
            self._run(*_full(tokens_RS), places, {})

        return find_batch_rows(attempt, _MOST_ROWS)

    def make_forward(self, names: Sequence[str], shape: tuple[int, int], mesh: Mesh) -> Forward:
        """packed rows [R, S] -> ({hook point: bfloat16 [R S, d]}, finite bool [R S]), zeros at padding.

        The model runs no further than the last hook point. On a GPU the results are still under way when this returns;
        whoever reads them (`np.asarray`) waits.
        """
        import torch

        places = {name: self._place(name) for name in names}

        def forward(packed: PackedRows) -> Any:
            try:
                seen = self._run(packed.tokens, packed.positions, packed.segments, list(places.values()), {})
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                raise DataError(
                    f"The GPU has no memory for {len(packed.tokens)} rows of {packed.tokens.shape[1]} tokens. Lower "
                    "capture.batch_rows, or set it to 0 to have it found."
                ) from None
            rounded = {place: value.to(torch.bfloat16) for place, value in seen.items()}
            finite = torch.stack([torch.isfinite(value).all(-1) for value in rounded.values()]).all(0)
            stored = {place: to_host(value) for place, value in rounded.items()}
            return {name: stored[place] for name, place in places.items()}, to_host(finite)

        return forward

    def _run(
        self,
        tokens_RS: np.ndarray,
        positions_RS: np.ndarray,
        segments_RS: np.ndarray,
        places: Sequence[str],
        edits: Mapping[str, Edit],
    ) -> dict[str, Any]:
        """{place: tensor [R S, d]} of packed rows, zeros at padding; the place "" is the model's own result."""
        import torch

        if self.versions != versions(self.module):
            raise DataError(
                f"The weights of {self.identity.get('model', type(self.module).__name__)} have changed since load_lm, "
                "and its identity names the old ones. Load it again: lm = load_lm(module, tokenizer)."
            )
        check_ids("tokens", tokens_RS, self.config.vocab_size)
        check_ids("positions", np.where(segments_RS >= 0, positions_RS, 0), self.config.context_length)
        count = tokens_RS.size
        out: dict[str, Any] = {}
        with evaluating(self.module):
            for chunk in self._chunks(tokens_RS, positions_RS, segments_RS):
                at = torch.from_numpy(chunk.at.ravel()).to(self._device())
                changes = {place: _edit(edit, place, at, tokens_RS.shape) for place, edit in edits.items()}
                for place, value in run_chunk(self.module, chunk, places, changes).items():
                    full = out.setdefault(place, value.new_zeros(count, value.shape[-1]))
                    full[at[at >= 0]] = value.reshape(-1, value.shape[-1])[at >= 0]
            if not out:  # padding alone
                widths = self.widths | {"": self.config.vocab_size}
                out = {place: torch.zeros(count, widths[place], device=self._device()) for place in places}
        return out

    def _chunks(self, tokens_RS: np.ndarray, positions_RS: np.ndarray, segments_RS: np.ndarray) -> Iterator[Chunk]:
        """Rows that go through the model at once; together, all the documents."""
        way = self.way if tokens_RS.shape[1] <= self.window else self.long_way
        alone_RS = is_longer(segments_RS, self.longest_mixed)
        for name, part_RS in ((way, ~alone_RS), ("equal", alone_RS)):
            if part_RS.any():
                yield from WAYS[name](tokens_RS, positions_RS, np.where(part_RS, segments_RS, -1), self.causal)

    def _device(self) -> Any:
        return next(self.module.parameters()).device


def versions(module: Any) -> tuple[tuple[int, int], ...]:
    """(which, how often PyTorch has written into it) of each parameter."""
    return tuple((id(p), 0 if p.is_inference() else p._version) for p in module.parameters())


def _full(tokens: Any, positions: Any = None, segments: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed rows as numpy arrays; by default one document a row."""
    tokens_RS = np.asarray(as_array(tokens, "tokens"))
    positions_RS = np.arange(tokens_RS.shape[1])[None].repeat(len(tokens_RS), 0) if positions is None else positions
    segments_RS = np.zeros_like(tokens_RS) if segments is None else segments
    return tokens_RS, np.asarray(positions_RS), np.asarray(segments_RS)


def _edit(edit: Edit, place: str, at: Any, shape: tuple[int, int]) -> Callable[[Any], Any]:
    """The edit of packed rows [R, S, d] as one of a chunk's values; what is padding stays."""
    import torch

    def change(value: Any) -> Any:
        rows = value.reshape(-1, value.shape[-1])
        full = rows.new_zeros(shape[0] * shape[1], rows.shape[1])
        full[at[at >= 0]] = rows[at >= 0]
        values_RSD = jnp.asarray(full.float().cpu().numpy()).reshape(*shape, -1)
        edited = np.array(edit(values_RSD), np.float32)
        if edited.shape != values_RSD.shape:
            raise ConfigError(f"The edit at {place} made {edited.shape} of {values_RSD.shape}; it must keep the shape.")
        new = torch.from_numpy(edited).reshape(full.shape).to(full)
        # `at` is -1 at padding, which takes some row and does not keep it.
        return torch.where((at >= 0)[:, None], new[at], rows).reshape(value.shape)

    return change


def find_batch_rows(attempt: Callable[[int], object], start: int) -> int:
    """The largest of start, start / 2, ... with which `attempt` does not run out of memory."""
    rows = start
    while rows:
        try:
            attempt(rows)
            return rows
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        # Only here, where the failed attempt's tensors are no longer held by its traceback.
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows //= 2
    raise DataError("The GPU has no memory for a single row. Lower text.context_length, or set lm.dtype=bfloat16.")


def out_of_memory(error: RuntimeError) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)


class _OnItsWay:
    """An array that is being copied from the GPU; numpy waits for it."""

    def __init__(self, value: Any):
        import torch

        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._done.synchronize()
        return np.asarray(as_array(self._host), dtype)


def to_host(value: Any) -> Any:
    return _OnItsWay(value) if value.is_cuda else as_array(value)
