"""The command line.

In a checkout `python -m trainer COMMAND --help`, where it is installed `ppokern COMMAND --help`.
"""

from __future__ import annotations

import os
import sys

# Threads that spin while they wait make two threads 6 times slower than one as soon as the machine
# has other work. OpenMP reads this once, when torch is loaded, so it is set first of all.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import importlib
from argparse import ArgumentError
from dataclasses import fields
from pathlib import Path
from typing import Any

from ppokern import __version__, _install

try:
    from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(_install.no_trainer(error))

from .config import CheckFailed, Stopped, UserError
from .options import STAGES, StageParser, explained, in_file
from .printing import steady

MANY = ("sft", "reward", "ppo", "resume")  # those that torchrun may start
# What each of the other commands does, and its arguments.
TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "resume": (
        "Goes on with a run from its newest whole checkpoint.",
        {"run_dir": "Folder of a run of any stage."},
    ),
    "sample": (
        "What the policy writes, beside what it wrote before.",
        {"run_dir": "Folder of a PPO run.", "--prompt": "What is to be gone on with."},
    ),
    "report": (
        "Curves and samples: report.png and report.html.",
        {"run_dir": "Folder of a run of any stage, finished or not."},
    ),
    "smollm2": (
        "Writes a pretrained model, SmolLM2-135M-Instruct, and questions for it.",
        {"out": "Folder to write to."},
    ),
    "export": (
        "Copies the model that a run has trained to a plain transformers folder.",
        {"run_dir": "Folder of a run of any stage.", "out": "Folder to make."},
    ),
    "info": ("What is installed, what of it runs here, and why not the rest.", {}),
}
PRESETS = Path(__file__).parent / "presets"


NO_SURPRISE: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}


def parser(command: str, explain: bool = False) -> ArgumentParser:
    """All commands; the options of one, explained or not: more takes longer than a mistake should.

    Args:
        command: the one that was given.
        explain: whether help is wanted, for which the sources of config.py are read.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=explain)
    does = "SFT, reward model and PPO. `ppokern COMMAND --help` has the options of a command."
    top = ArgumentParser(prog="ppokern", description=does, version=__version__, **NO_SURPRISE)
    commands = top.add_subcommands(dest="command")
    for name, config in STAGES.items():
        stage = StageParser(config, **NO_SURPRISE)
        if name == command:
            _add_options(stage, demo=name == "demo")
        commands.add_subcommand(name, stage, help=(config.__doc__ or "").splitlines()[0])
    for name, (does, arguments) in TOOLS.items():
        tool = ArgumentParser(**NO_SURPRISE)
        for argument, says in arguments.items():
            required = {"required": True} if argument.startswith("--") else {}
            tool.add_argument(argument, help=says, **required)
        commands.add_subcommand(name, tool, help=does)
    return top


def _add_options(stage: StageParser, demo: bool) -> None:
    stage.add_argument("--config", action="config", help="YAML file; options given beside it win.")
    stage.add_class_arguments(stage.stage)
    stage.add_argument(
        "--dry_run", action="store_true", help="Print what a run would take, and train nothing."
    )
    if demo:
        stage.default_config_files = [str(PRESETS / "demo.yaml")]
        stage.epilog = (
            "Options of the three stages: --sft.NAME, --reward_model.NAME and --ppo.NAME, "
            "as `ppokern sft --help`, `reward --help` and `ppo --help` list them."
        )
    else:
        stage.add_argument(
            "--overwrite", action="store_true", help="Replace the run that run_dir holds."
        )


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after the program's name; those of the process where not given.

    Returns:
        Exit code: 0, 1 if a self-check stopped the run, 2 for a mistake of the caller's, 128 and
        its number for a signal.
    """
    words = sys.argv[1:] if argv is None else argv
    with steady():
        return _main(words)


def _main(words: list[str]) -> int:
    command = next((word for word in words if not word.startswith("-")), "")
    try:
        top = parser(command, explain=not {"-h", "--help"}.isdisjoint(words))
        run(_read(top, words))
    except UserError as error:
        return _failed(str(error), 2)
    except ArgumentError as error:
        return _failed(explained(error, words), 2)
    except CheckFailed as error:
        return _failed(str(error), 1)
    except Stopped as stop:
        return _stopped(str(stop), stop.code)
    except KeyboardInterrupt:
        return _stopped("stopped", 130)
    return 0


def _read(top: ArgumentParser, words: list[str]) -> Namespace:
    """The words of a command, and its file, each option of its type."""
    try:
        return top.instantiate(top.parse_args(words))
    except (ValueError, RecursionError) as error:  # bytes that are no text, numbers without an end
        raise UserError(
            f"the file of --config is not YAML in UTF-8 that can be read{in_file(words)}: {error}"
        ) from None


def _stopped(sentence: str, code: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(sentence, file=sys.stderr)
    return code


def _failed(sentence: str, code: int) -> int:
    print("error:", " ".join(sentence.split()), file=sys.stderr)
    return code


def run(args: Namespace) -> None:
    """Hands over to the file that bears the command's name.

    Torch is loaded no earlier, and transformers: a mistake in the options is told before that.
    """
    command, given = args.command, args[args.command]
    if command == "info":
        print(importlib.import_module("ppokern.info").report())
        return
    if command not in MANY and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(f"{command} is for one process: start it without torchrun")
    arguments = [given[name.lstrip("-")] for name in TOOLS.get(command, ("", {}))[1]]
    if stage := STAGES.get(command):
        config = stage(**{option.name: given[option.name] for option in fields(stage)})
        config.check()
        arguments = [config] if command == "demo" else [config, given.overwrite]
    distributed = importlib.import_module(".distributed", __package__)
    with distributed.processes():
        console = importlib.import_module(".metrics", __package__).console
        console.quiet = not distributed.first()
        if stage and given.dry_run:
            importlib.import_module(".plan", __package__).show(config)
            return
        if stage or command == "resume":
            console.print(_installed(), markup=False, highlight=False)
        if stage:
            spare = importlib.import_module(".checkpoint", __package__).spare
            for path in given.config or ():
                spare(Path(config.run_dir), {"config file": str(path)})
        importlib.import_module(f".{command}", __package__).run(*arguments)


def _installed() -> str:
    try:
        return importlib.import_module("ppokern.info").line()
    except ValueError as error:  # a backend by name that is not here
        raise UserError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
