"""One forward pass of a PyTorch module, watched and edited at places, stopped at the last one that is wanted."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.lm.rows import Chunk

# What a model raises that does not take a mask or positions.
REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError)


class _Stop(Exception):
    """Ends a forward pass once everything wanted was seen."""


def run_chunk(
    module: Any, chunk: Chunk, places: Sequence[str], edits: Mapping[str, Callable[[Any], Any]] | None = None
) -> dict[str, Any]:
    """{place: tensor [B, T, d]} of one forward pass, which ends at the last place wanted, leaving no hooks behind."""
    missing = set(places)
    seen: dict[str, Any] = {}

    def visit(place: str, value: Any) -> Any:
        edit = (edits or {}).get(place)
        new = value if edit is None else edit(value)
        if place in missing:
            # A later module may change the tensor in place.
            seen[place] = new.reshape(*chunk.tokens.shape, -1).clone()
            missing.discard(place)
            if not missing:
                raise _Stop
        return None if edit is None else new

    visits = {p: functools.partial(visit, p) for p in {*places, *(edits or {})} if p}
    with contextlib.suppress(_Stop), watching(module, visits):
        result = _first_tensor(forward(module, chunk))
        if missing - {""}:
            raise DataError(f"The forward pass did not reach {', '.join(sorted(missing - {''}))}.")
        rows, length = chunk.tokens.shape
        if result is None or tuple(result.shape[:-1]) not in ((rows, length), (rows * length,)):
            shape = "no numbers" if result is None else str(list(result.shape))
            raise DataError(
                f"{type(module).__name__} gives {shape} for token ids [{rows}, {length}]; its forward must give one "
                "vector for each token."
            )
        seen[""] = result.reshape(*chunk.tokens.shape, -1)
    return seen


def result_of(module: Any, chunk: Chunk) -> np.ndarray:
    """The module's own result for each token, float32 [B, T, d]."""
    return run_chunk(module, chunk, [""])[""].float().cpu().numpy()


def results_for(module: Any, tokens_BT: np.ndarray) -> np.ndarray:
    """The module's own result for ids alone, float32 [B, T, d].

    Raises:
        DataError: it does not run on them.
    """
    try:
        return result_of(module, Chunk(tokens_BT, np.arange(tokens_BT.size).reshape(tokens_BT.shape)))
    except REFUSALS as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(" .:")
        shape = list(tokens_BT.shape)
        raise DataError(
            f"{type(module).__name__} does not run on token ids {shape} ({reason}). Give a module whose forward takes "
            "them alone."
        ) from None


@contextlib.contextmanager
def watching(module: Any, visits: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Calls {place: value -> replacement or None} whenever the module comes past; the hooks are gone afterwards."""

    def before(visit: Callable[[Any], Any], _: Any, args: Any, kwargs: Any) -> Any:
        flat = [*args, *kwargs.values()]
        at = next((i for i, value in enumerate(flat) if _is_values(value)), None)
        if at is None or (new := visit(flat[at])) is None:
            return None
        flat[at] = new
        return tuple(flat[: len(args)]), dict(zip(kwargs, flat[len(args) :], strict=True))

    def after(visit: Callable[[Any], Any], _: Any, __: Any, output: Any) -> Any:
        value = _first_tensor(output)
        new = None if value is None else visit(value)
        if new is None or not isinstance(output, tuple):
            return new
        return tuple(new if item is value else item for item in output)

    with contextlib.ExitStack() as stack:
        for place, visit in visits.items():
            path, _, side = place.rpartition(".")
            child = module.get_submodule(path)
            if side == "in":
                handle = child.register_forward_pre_hook(functools.partial(before, visit), with_kwargs=True)
            else:
                handle = child.register_forward_hook(functools.partial(after, visit))
            stack.callback(handle.remove)
        yield


@contextlib.contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """The module in eval mode, without dropout or gradients; afterwards each part is in the mode in which it was.

    What it keeps of a pass, as a mask, can still be trained with. (Of inference_mode it could not.)
    """
    import torch

    training = [part for part in module.modules() if part.training]
    try:
        if training:
            module.eval()
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


def _is_values(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and value.is_floating_point()


def _first_tensor(output: Any) -> Any:
    """The values in a module's result: a tensor, or the first one of a tuple or of a Hugging Face output."""
    if _is_values(output):
        return output
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((item for item in items if _is_values(item)), None)


def forward(module: Any, chunk: Chunk) -> Any:
    """One forward pass, which depends on nothing but the chunk."""
    _forget_lengths(module)
    inputs = _inputs_of(module, chunk)
    # transformers calls them input_ids; elsewhere they are the first argument, whatever its name.
    ids = [] if "input_ids" in _arguments(module) else [inputs.pop("input_ids")]
    return module(*ids, **inputs)


def _arguments(module: Any) -> frozenset[str]:
    return frozenset(inspect.signature(module.forward).parameters)


def _forget_lengths(module: Any) -> None:
    """Undo what a long document left behind: dynamic NTK keeps its frequencies until a short enough one comes."""
    for child in module.modules():
        if (start := vars(child).get("original_max_seq_len")) is None:
            continue
        for name in [name for name, n in vars(child).items() if name.endswith("max_seq_len_cached") and n != start]:
            kind = name.removesuffix("max_seq_len_cached")  # empty, or which of the model's layers
            setattr(child, name, start)
            setattr(child, f"{kind}inv_freq", getattr(child, f"{kind}original_inv_freq").clone())


def _inputs_of(module: Any, chunk: Chunk) -> dict[str, Any]:
    """The arguments of `module.forward` for a chunk; `choose_way` finds out whether it uses them."""
    import torch

    weight = next(module.parameters())
    takes = _arguments(module)
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(chunk.tokens).to(weight.device)}
    if chunk.mask is not None and "attention_mask" in takes:
        mask = torch.from_numpy(chunk.mask).to(weight.device)
        if mask.ndim == 4:  # added to the scores: that is what every attention takes
            lowest = torch.finfo(weight.dtype).min
            mask = torch.zeros_like(mask, dtype=weight.dtype).masked_fill(~mask, lowest)
        inputs["attention_mask"] = mask if mask.ndim == 4 else mask.long()
    if chunk.positions is not None and "position_ids" in takes:
        inputs["position_ids"] = torch.from_numpy(chunk.positions).to(weight.device)
    if "use_cache" in takes:
        inputs["use_cache"] = False
    return inputs
