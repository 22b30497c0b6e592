"""`saejax <command>`: the table and its help, what is refused, experiments by name, `saejax new`."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT, one_device
from tiny.covering import rest_in

from saejax import __version__, commands
from saejax.app import experiments
from saejax.app.experiment import Experiment, experiment
from saejax.app.new_experiment import next_command, write_new
from saejax.commands import COMMANDS
from saejax.core.errors import ConfigError
from saejax.experiment import default_config

SOURCES = [
    f"{name}:{preset}" if preset else name
    for name in experiments.names()
    for preset in ("", *experiments.presets(name))
]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with nothing in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saejax(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of `saejax <words>`, in this process: for what ends before flags are parsed."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/saejax", *words])
    try:
        commands.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def in_a_process(folder: Path, *arguments: str, module: str = "saejax") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_saejax_alone_lists_every_command(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert saejax(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    for name in COMMANDS:
        (line,) = [line for line in said.splitlines() if line.split()[:1] == [name]]
        assert line.endswith(f" {COMMANDS[name].summary()}") and len(line) <= 120
    assert "saejax quickstart " in said and "saejax new mine --from=quickstart " in said


def test_every_command_says_what_it_does_and_how_it_is_called() -> None:
    for name, command in COMMANDS.items():
        first, blank, example, *_ = command.text().splitlines()
        assert first.endswith(".") and not blank and example.startswith(f"    saejax {name}"), name
        assert max(map(len, command.text().splitlines())) <= 120, name


_HELLO = '''"""Greet somebody.

    saejax hello --name=you

Nothing else happens.
"""

from saejax.app.command import Command, Line
from saejax.core.settings import setting


class Hello(Command, takes="words"):
    name: str = setting("you", "Who is greeted.")
    times: int = setting(1, "How often.", low=1)

    def run(self, line: Line) -> None:
        print(f"hello {self.name} " * self.times)
'''


def test_a_new_command_is_one_file(tmp_path: Path) -> None:
    """In a copy of the package: no other file is touched."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "saejax", tmp_path / "saejax", copy_function=os.symlink, ignore=ignored)
    (tmp_path / "saejax" / "commands" / "hello.py").write_text(_HELLO)
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom saejax.commands import main\nmain()"

    def hello(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    assert "  hello        Greet somebody.\n" in hello("--help").stdout
    assert hello("hello", "--name=me", "--times=2").stdout == "hello me hello me \n"
    assert "  --times: How often. (default: 1)" in hello("hello", "--help").stdout
    wrong = hello("hello", "--times=0")
    assert (wrong.returncode, wrong.stderr) == (2, "error: --times is 0; it must be at least 1.\n")
    assert "Did you mean 'name'" in hello("hello", "--nme=x").stderr


def test_every_launch_script_is_a_command() -> None:
    scripts = {path.stem for path in ROOT.glob("launch/*.py")} - {"__init__", "make_demo_lm", "make_recall_lm"}
    assert scripts == set(COMMANDS) - {"quickstart", "experiments", "new"}
    for name in scripts:
        text = (ROOT / "launch" / f"{name}.py").read_text()
        assert text.startswith(f'"""`saejax {name}`, from a checkout."""\n') and "launch(__file__)" in text


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert saejax(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"saejax {__version__}\n" and __version__[0].isdigit()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "There is no command 'trian'. Did you mean 'train'?"),
        (["quikstart:tiny"], "There is no command 'quikstart'. Did you mean 'quickstart'?"),
        (["--config=quickstart"], "Name a command before '--config=quickstart', as in: saejax pipeline"),
        (["train:tiny"], "'train:tiny' names no experiment; give --config=<experiment>:tiny."),
        (["quickstart:tiny", "--config=coders"], "'quickstart:tiny' names no experiment; give --config"),
        (["help", "nothing"], "There is no command 'nothing'."),
        (["load", "runs/x"], "load is no command but a part of the library: import saejax; saejax.load(...)"),
    ],
)
def test_a_wrong_command_is_one_line_with_the_nearest(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert saejax(monkeypatch, *words) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {message}") and said.err.count("\n") == 1 and said.out == ""


def test_a_command_shows_its_own_help(tmp_path: Path) -> None:
    shown = in_a_process(tmp_path, "evaluate", "--config=nowhere.py", "--help")
    assert shown.returncode == 0 and shown.stderr == ""
    assert shown.stdout.startswith(COMMANDS["evaluate"].text()) and "saejax evaluate --config=q" in shown.stdout
    flags = shown.stdout.partition("\nflags:\n")[2]
    assert flags.startswith("  --config: Experiment file, or the name") and "  --[no]redo: Evaluate again" in flags
    assert "hook_point" not in flags, "a flag of another command"
    launched = in_a_process(tmp_path, "--help", module="launch.evaluate")
    assert launched.returncode == 1, "as absl's own help"
    assert "    python -m launch.evaluate --config=configs/quickstart.py [--redo]\n" in launched.stdout
    assert launched.stdout.partition("\nflags:\n")[2] == flags


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("quickstart:tyny",), 2, "error: configs/quickstart.py has no preset 'tyny'. Did you mean 'tiny'?\n"),
        (("train", "--config.trian.lr=1"), 2, "error: Unknown key config.trian. Did you mean 'train'?\n"),
        (("new", "mine", "--fro=x"), 2, "error: Unknown flag --fro. Did you mean 'from'?\n"),
        (("experiments", "--all"), 2, "error: Unknown flag --all. There are none.\n"),
        (("report", "--config=coders:jumprelu"), 1, "error: There is no run in runs/coders-jumprelu."),
    ],
)
def test_what_a_newcomer_gets_wrong_in_an_empty_folder(
    words: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    done = in_a_process(tmp_path, *words)
    assert done.returncode == code
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1 and done.stdout == ""
    assert not any(tmp_path.iterdir())


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    for words in ([], ["store", "--help"]):
        command = [sys.executable, "-m", "saejax", *words]
        done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (1, b"")
    os.close(write)


# --- experiments by name --------------------------------------------------------------------------


def test_the_shipped_experiments_are_found_by_name_in_an_empty_folder(empty: Path) -> None:
    there = str(ROOT / "configs" / "quickstart.py")
    for text in ("quickstart", "quickstart.py", "configs/quickstart.py"):
        assert experiments.find(text) == there and experiments.find(f"{text}:tiny") == f"{there}:tiny"
    assert experiments.find("coders:jumprelu+fast").endswith("coders.py:jumprelu+fast")
    for wrong in ("quikstart", "elsewhere/quikstart.py", "configs/quikstart.py:tiny"):
        with pytest.raises(ConfigError, match=r"No config file '.*quikstart.*Did you mean 'quickstart'\?"):
            experiments.find(wrong)
    with pytest.raises(ConfigError, match="There are: coders, gpt2_small"):
        experiments.find("zzz")


def test_a_file_at_the_path_wins(empty: Path) -> None:
    (empty / "configs").mkdir()
    for name in ("quickstart.py", "configs/quickstart.py", "mine.py"):
        (empty / name).touch()
        assert experiments.find(f"{name}:x") == f"{name}:x"
    assert experiments.find("mine") == "mine.py"
    assert experiments.find("quickstart") == str(ROOT / "configs" / "quickstart.py"), "a name is the shipped one's"


def test_a_shipped_experiment_as_settings() -> None:
    assert experiment(experiments.shipped("quickstart", "tiny")).name == "quickstart-tiny"
    with pytest.raises(ConfigError, match=r"no shipped experiment 'quikstart'\. Did you mean 'quickstart'"):
        experiments.shipped("quikstart")
    with pytest.raises(ConfigError, match="model_diff has no presets; leave :tiny away"):
        experiments.shipped("model_diff", "tiny")


def test_the_list_shows_every_experiment_and_preset() -> None:
    said = experiments.listing()
    for name in experiments.names():
        assert f"\n{name} " in f"\n{said}" and all(preset in said for preset in experiments.presets(name))
    assert "From text to an evaluated SAE with nothing but this package" in said


# --- saejax new -----------------------------------------------------------------------------------


SHIPPED_STORES = {
    experiment(experiments.shipped(name, preset)).store_dir(split)
    for name, _, preset in (source.partition(":") for source in SOURCES)
    for split in ("train", "heldout")
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_new_file_is_the_same_experiment_under_its_own_name(source: str, empty: Path) -> None:
    path = write_new("mine", source)
    name, _, preset = source.partition(":")
    original = experiments.shipped(name, preset)
    shared, original.name, original.store = original.store, "mine", ""
    written = experiment(experiments.settings(experiments.load(path)))
    assert written == experiment(original)
    # With another model or text it would fill the shipped experiments' store, and they would be refused.
    assert not {written.store_dir(split) for split in ("train", "heldout")} & SHIPPED_STORES
    lines = path.read_text().splitlines()
    also = f"Its store is its own. --config.store={shared} reads what {source} captured."
    assert (also in lines) == bool(shared) and len(also) <= 120
    assert lines[0] == f'"""mine, made from {source}.' and f"    {next_command(path)} [--config.train.lr=3e-4]" in lines
    studied = original.study.behaviours != default_config().study.behaviours
    command = {"sweep": "sweep", "study": "study", "truth": "truth", "latentwire": "prefix"}.get(
        name.partition("_")[0], "study" if studied else "pipeline"
    )
    assert next_command(path) == f"saejax {command} --config=mine.py"
    settings = [line.split(" = ")[0].strip() for line in lines if line.startswith("    c.")]
    assert len(set(settings)) == len(settings), "one line for each setting"
    sections = [key.split(".")[1] for key in settings if key.count(".") == 2]
    fields = list(Experiment.__dataclass_fields__)
    assert sections == sorted(sections, key=fields.index), "grouped, in the order of the reference"


def test_the_new_file_is_readable(empty: Path) -> None:
    text = write_new("mine", "quickstart:tiny").read_text()
    assert (
        '    c.name = "mine"\n\n    c.capture.tokens = 32_768\n' in text
        and "--config.store=quickstart-tiny reads" in text
    )
    # Of an edited file another one can be made, and a store that the user has named is meant.
    path = empty / "mine.py"
    path.write_text(text.replace("c.coder.k = 24", 'c.coder.k = 7\n    c.store = "ours"'))
    second = write_new("second", "mine.py").read_text()
    assert "c.coder.k = 7\n" in second and 'c.store = "ours"\n' in second


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine", r"mine\.py is there already; .*--force"),
        ("", "The name is ''; it must be up to 100 letters"),
        ("a/b", "The name is 'a/b'"),
        ("mine.py", r"The name is 'mine\.py'.*such as mine"),
        ("-x", "The name is '-x'"),
        ("x" * 101, "up to 100 letters"),
        ("numpy", r"numpy\.py would hide the Python module 'numpy'"),
        ("coders", "'coders' is the name of a shipped experiment"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, message: str, empty: Path) -> None:
    (empty / "mine.py").write_text("kept")
    with pytest.raises(ConfigError, match=message) as caught:
        write_new(name, "quickstart")
    assert "\n" not in str(caught.value)
    assert [path.name for path in empty.iterdir()] == ["mine.py"] and (empty / "mine.py").read_text() == "kept"


def test_new_overwrites_where_it_is_told_to_and_says_what_is_next(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("old")
    done = in_a_process(tmp_path, "new", "mine", "--from=sweep_expansion", "--force")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "wrote mine.py; next: saejax sweep --config=mine.py\n"
    wrong = in_a_process(tmp_path, "new", "--from=quickstart")
    assert wrong.returncode == 2 and wrong.stderr == (
        "error: Give one name, got 0, as in: saejax new mine --from=quickstart\n"
    )


_SWALLOWING = """
import signal, sys, time
from saejax.app import cli
from saejax.app.command import Command
from tiny.signalled import late

class Swallowing(Command, takes="words"):
    def run(self, line):
        work()

def work():
    late(int(sys.argv[1]))
    print("the handler ran", flush=True)
    if sys.argv[2] == "wait":
        time.sleep(60)
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        pass
    raise RuntimeError("what a library made of it")

cli.run(Swallowing, ["x"])
"""


@pytest.mark.parametrize(
    ("number", "then", "code"),
    rest_in(
        "ci",
        [(signal.SIGTERM, "wait", 75), (signal.SIGINT, "wait", 130), (signal.SIGUSR1, "fail", 75)],
        [(signal.SIGTERM, "wait", 75)],
    ),
)
def test_a_command_ends_by_a_signal_that_a_finalizer_swallows(number: int, then: str, code: int) -> None:
    """Every command runs in `cli.run`: the exception was lost there, and the command went on to its end."""
    done = subprocess.run(
        [sys.executable, "-c", _SWALLOWING, str(int(number)), then],
        env=one_device() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    said = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    assert (done.returncode, done.stdout) == (code, "the handler ran\n"), done.stderr
    assert done.stderr == f"\n{said}; the same command continues where it was\n"


@pytest.mark.soak
def test_a_signal_amid_an_evaluation_ends_with_its_code_and_not_in_a_crash(tmp_path: Path) -> None:
    """At the interpreter's own end JAX crashed in three of four (SIGSEGV in place of 75), which no job survives."""
    whole = [sys.executable, "-m", "saejax", "pipeline", "--config=quickstart:tiny"]
    subprocess.run(whole, cwd=tmp_path, check=False, capture_output=True)
    again = [sys.executable, "-m", "saejax", "evaluate", "--config=quickstart:tiny", "--redo"]
    for number, code in [(signal.SIGTERM, 75), (signal.SIGINT, 130)] * 3:
        more = ["--config.eval.tokens=500000", "--config.eval.batch_rows=16"]
        with subprocess.Popen([*again, *more], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert "tokens/s" in process.stderr.readline()  # the first batches are done, and more are under way
            process.send_signal(number)
            said = process.stderr.read()
        assert (process.returncode, "Fatal" in said) == (code, False), said
