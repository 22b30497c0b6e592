"""The batch size of train.batch_size=0: the largest power of two that the training and its devices have room for."""

from collections.abc import Callable, Sequence

import jax

from saejax.core.errors import ConfigError
from saejax.core.host import available_memory

_SIZES = tuple(2**i for i in range(8, 17))

# Fewer steps than this learn badly, and an epoch of fewer batches is hardly shuffled.
_STEPS, _BATCHES = 1000, 8

# Of a device's free memory, or the machine's where that is the device: validation, the next batch and copies for
# checkpoints need some too, and on a CPU everything else that runs.
_SHARE, _SHARE_OF_HOST = 0.85, 0.5

# A program that gives its (compiled) step's bytes on one device.
Needs = Callable[[int], int]


def find(tokens: int, rows: int, parts: int, shares: int, needs: Needs, room: int) -> tuple[int, str]:
    """(the largest of 256, 512, ..., 65,536 whose step fits into `room` bytes, why it is not larger, in words).

    The step is compiled for two or three sizes. A training has at least 1,000 steps and the store at least 8 batches,
    as far as a batch of 256 allows.

    Args:
        tokens: activations to train on.
        rows: of the store.
        parts: a batch must divide among so many: devices along "data" x train.accumulate x train.neighbours.
        shares: and among so many.
        needs: batch size -> bytes that its step takes on one device.
        room: bytes that it may take.

    Raises:
        ConfigError: there is no such size.
    """
    fitting = [size for size in _SIZES if size % parts == 0 and size % shares == 0 and size // parts > 1]
    if not fitting:
        raise ConfigError(
            f"train.batch_size=0 looks for a power of two, and none up to {_SIZES[-1]:,} divides into {parts} parts "
            f"(devices along data x train.accumulate x train.neighbours) and {shares} train.shares. Set "
            "train.batch_size."
        )
    if min(tokens, rows) < fitting[0]:
        raise ConfigError(
            f"train.batch_size=0 looks for {fitting[0]:,} or more, and there are {min(tokens, rows):,} activations "
            "(train.tokens, or rows of the store). Set train.batch_size."
        )
    bounds = {
        f"a larger batch leaves fewer than {_STEPS:,} steps of train.tokens": tokens // _STEPS,
        f"a larger batch is more than 1/{_BATCHES} of the store": rows // _BATCHES,
        "saejax looks no further": fitting[-1],
    }
    why, bound = min(bounds.items(), key=lambda item: item[1])
    sizes = [size for size in fitting if size <= bound] or fitting[:1]
    fits = _largest_fitting(sizes, needs, room)
    if fits is None:
        raise ConfigError(
            f"train.batch_size=0 found no size: the step of {sizes[0]:,} activations takes more than the "
            f"{room / 1e6:,.1f} MB of a device that it may. Lower coder.d_sae, raise train.accumulate, or spread the "
            "latents over devices (parallel.mesh)."
        )
    size, bytes_ = fits
    if size < sizes[-1]:
        why = "the step of twice as many does not fit"
    return size, f"its step takes {bytes_ / 1e6:,.1f} of {room / 1e6:,.1f} MB of a device; {why}"


def _largest_fitting(sizes: Sequence[int], needs: Needs, room: int) -> tuple[int, int] | None:
    """(the largest of the rising sizes that fits, its bytes); the last is tried first, then the middle of the rest."""
    low, high, best, tried = 0, len(sizes) - 1, None, len(sizes) - 1
    while low <= high:
        if (bytes_ := needs(sizes[tried])) <= room:
            best, low = (sizes[tried], bytes_), tried + 1
        else:
            high = tried - 1
        tried = (low + high) // 2
    return best


def room_on(devices: Sequence[jax.Device]) -> int:
    """Bytes that a step may take on each of these devices.

    Raises:
        ConfigError: neither the devices nor the system say how much memory there is.
    """
    known = [stats for device in devices if (stats := device.memory_stats()) and "bytes_limit" in stats]
    if known:
        return int(min(_SHARE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)) for stats in known))
    if not (free := available_memory()):
        raise ConfigError(
            "train.batch_size=0 needs to know the memory, and nothing here says it. Set train.batch_size."
        )
    return int(_SHARE_OF_HOST * free / len(devices))
