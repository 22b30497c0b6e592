"""Say what an experiment will take: memory, disk, time, cost, on devices that need not be there.

    saejax plan --config=quickstart
    saejax plan --config=models:llama-3-8b --device=h100 --devices=1,2,4,8 --deadline=12h --price=2.5
    saejax plan --config=gpt2_small --device=rtx4090 --devices=1 --json

Of the model only config.json is read. Every step is compiled for virtual devices and not run. Names the least devices
that fit and meet the deadline, and where nothing fits, the smallest change that does; then it exits with 1.
"""

from json import dumps

from saejax.app.command import Command, Line
from saejax.core.files import write_json
from saejax.core.settings import setting
from saejax.plans.devices import PlanSettings


class Plan(PlanSettings, Command, answers=True):
    json: bool = setting(False, "Print the figures as JSON, in bytes and seconds.")
    out: str = setting("", "Write the figures and the text into this file too, as JSON.")

    def run(self, line: Line) -> int:
        from saejax.app.console import say
        from saejax.plans.command import plan_here

        made = plan_here(line.experiment, self)
        if self.out:
            write_json(self.out, vars(made))
        say(dumps(made.estimates, indent=2) if self.json else made.text)
        return 0 if made.fits else 1
