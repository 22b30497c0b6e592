"""The host's part: text to tokens, activations to disk and back, programs to compile. By measurement or by default.

The defaults are what `saejax calibrate` found on 2 cores of a server (AMD EPYC, 2026-11-23), rounded; a machine with
more cores is quicker.
"""

import dataclasses

from saejax.plan.devices import Device


@dataclasses.dataclass(frozen=True)
class Host:
    """Seconds of the host's work.

    Attributes:
        token: to read and pack one token of text.
        stored_byte: to permute, hash and write one byte of a store.
        read_byte: to read, shuffle and hand over one byte of a batch.
        step: around each train step.
        save: to write one checkpoint, as far as the training waits for it.
        latent: to look at one latent for the report's pages.
        start: to start a stage: imports, the model, compilation.
    """

    token: float = 2e-6
    stored_byte: float = 1e-8
    read_byte: float = 2e-9
    step: float = 1e-3
    save: float = 0.5
    latent: float = 5e-3
    start: float = 30.0

    @classmethod
    def of(cls, device: Device) -> "Host":
        """What was measured on a device's machine, defaults for the rest."""
        known = {field.name for field in dataclasses.fields(cls)}
        found = device.measured.get("host", {})
        return cls(**{name: float(value) for name, value in found.items() if name in known})
