"""What an experiment trains, put together from its settings, whoever trains it.

Every door (the stage, `saejax.train`, a sweep, `saejax truth`, a plan, a preflight, a calibration) has its coder from
`coder_of`, so that none can leave a setting out. What a door has no use for, it refuses by name.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from saejax.app.experiment import Experiment
from saejax.coders import Coder, build
from saejax.core.errors import ConfigError
from saejax.core.settings import Setting


def coder_of(e: Experiment, d_in: Sequence[int], d_out: Sequence[int]) -> Coder:
    """The coder that `e` trains, for the widths of the hook points that it reads and writes.

    Raises:
        ConfigError: settings that do not fit each other or the widths.
    """
    return build(e.coder, d_in, e.train.steps, d_out, e.train.neighbours, e.train.tokens)


def refuse_unused(e: Experiment, lacks: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting that would do nothing where a training lacks what it needs (`Setting.needs`).

    Args:
        lacks: {what is not there: the middle of the sentence "train.key=value ... set it to its default"}.
    """
    for section in (e.coder.resolved(), e.train):
        for field in dataclasses.fields(section):
            known: Setting = field.metadata["setting"]
            value, usual = getattr(section, field.name), field.default if known.base is None else known.base
            missing = next((need for need in known.needs if need in lacks), None)
            if missing and value and value != usual:
                raise ConfigError(f"{section.section}.{field.name}={value} {lacks[missing]}set it to {usual!r}.")
