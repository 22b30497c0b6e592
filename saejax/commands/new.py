"""Write a shipped experiment into the current folder as a file to edit.

    saejax new mine --from=quickstart[:preset]

Writes mine.py: one line for every setting that differs from its default. The experiment is the same but for its name
and its store, which is its own: --config.store=quickstart reads what quickstart captured.
"""

from saejax.app.command import Command, Line
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


class New(Command, takes="words"):
    from_: str = setting("quickstart", "A shipped experiment or a file, with an optional :preset.")
    force: bool = setting(False, "Overwrite a file that is there.")

    def run(self, line: Line) -> None:
        from saejax.app.new_experiment import next_command, write_new

        if len(line.words) != 1:
            raise ConfigError(f"Give one name, got {len(line.words)}, as in: saejax new mine --from=quickstart")
        path = write_new(line.words[0], self.from_, self.force)
        print(f"wrote {path}; next: {next_command(path)}")
