"""Say what an experiment will take: memory, disk, time, cost, on devices that need not be there.

    saejax plan --config=quickstart
    saejax plan --config=models:llama-3-8b --device=h100 --devices=1,2,4,8 --deadline=12h --price=2.5
    saejax plan --config=gpt2_small --device=rtx4090 --devices=1 --json

Of the model only config.json is read. Every step is compiled for virtual devices and not run. Names the least devices
that fit and meet the deadline, and where nothing fits, the smallest change that does; then it exits with 1.
"""

import dataclasses
from json import dumps

from saejax.app.command import Command, Line
from saejax.core.settings import setting


@dataclasses.dataclass(frozen=True)
class Plan(Command, answers=True):
    device: str = setting(
        "",
        "a100-40gb, a100-80gb, h100, h200, b200, l40s, rtx6000, rtx6000-ada, rtx4090, tpu-v4, tpu-v5e, "
        "tpu-v5p, tpu-v6e, cpu, here (after `saejax calibrate`), or one of yours. Empty: here, else cpu.",
    )
    devices: tuple[int, ...] = setting((1, 8), "Numbers of devices to plan for.", low=1, high=1024)
    deadline: str = setting("", "The time that all stages may take, as 12h, 90min or 2d.")
    price: float = setting(0.0, "What one device costs for an hour, in any currency.", low=0, high=1e9)
    json: bool = setting(False, "Print the figures as JSON, in bytes and seconds.")

    def run(self, line: Line) -> int:
        from saejax.app.console import say
        from saejax.plan.command import content, plan

        made = plan(line.experiment, self.device, self.devices, self.deadline, self.price)
        for text in [dumps(content(made.estimates), indent=2)] if self.json else made.lines:
            say(text)
        return 0 if made.fits else 1
