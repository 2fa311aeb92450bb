"""The command line.

In a checkout `python -m trainer COMMAND --help`, where it is installed `ppokern COMMAND --help`.
"""

from __future__ import annotations

import os
import sys

# Threads that spin while they wait make two threads 6 times slower than one as soon as the machine
# has other work. OpenMP reads this once, when torch is loaded, so it is set first of all; an
# installed command has imported the package, and torch with it, by now, and has to begin again.
BEGIN_AGAIN = "OMP_WAIT_POLICY" not in os.environ and "torch" in sys.modules
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import importlib  # noqa: E402
from argparse import ArgumentError  # noqa: E402
from dataclasses import fields  # noqa: E402
from pathlib import Path  # noqa: E402

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings  # noqa: E402

from .config import (  # noqa: E402
    REFUSED,
    CheckFailed,
    DemoConfig,
    PPOConfig,
    RewardConfig,
    SFTConfig,
    Stopped,
    UserError,
)
from .printing import steady  # noqa: E402

MANY = ("sft", "reward", "ppo", "resume")  # those that torchrun may start
STAGES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "demo": DemoConfig}
# What each of the other commands does, and its arguments.
TOOLS = {
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
}
PRESETS = Path(__file__).parent / "presets"


def parser() -> ArgumentParser:
    """All commands and their options."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    top = ArgumentParser(
        prog="ppokern", description="SFT, reward model and PPO.", exit_on_error=False
    )
    commands = top.add_subcommands(dest="command")
    for name, config in STAGES.items():
        stage = ArgumentParser(exit_on_error=False)
        if name == "demo":
            stage.default_config_files = [str(PRESETS / "demo.yaml")]
        stage.add_argument(
            "--config", action="config", help="YAML file; options given beside it win."
        )
        stage.add_class_arguments(config)
        stage.add_argument(
            "--dry_run", action="store_true", help="Print what a run would take, and train nothing."
        )
        if name != "demo":
            stage.add_argument(
                "--overwrite", action="store_true", help="Replace the run that run_dir holds."
            )
        commands.add_subcommand(name, stage, help=(config.__doc__ or "").splitlines()[0])
    for name, (does, arguments) in TOOLS.items():
        tool = ArgumentParser(exit_on_error=False)
        for argument, says in arguments.items():
            required = {"required": True} if argument.startswith("--") else {}
            tool.add_argument(argument, help=says, **required)
        commands.add_subcommand(name, tool, help=does)
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after the program's name; those of the process where not given.

    Returns:
        Exit code: 0, 1 if a self-check stopped the run, 2 for a mistake of the caller's, 128 and
        its number for a signal.
    """
    if argv is None and BEGIN_AGAIN:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    with steady():
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    try:
        run(_read(argv))
    except UserError as error:
        return _failed(str(error), 2)
    except ArgumentError as error:
        reasons = {why for option, why in REFUSED.items() if option in str(error)}
        return _failed(": ".join([str(error), *reasons]), 2)
    except CheckFailed as error:
        return _failed(str(error), 1)
    except Stopped as stop:
        return _stopped(str(stop), stop.code)
    except KeyboardInterrupt:
        return _stopped("stopped", 130)
    return 0


def _read(argv: list[str] | None) -> Namespace:
    """The words of a command, and its file, each option of its type."""
    top = parser()
    try:
        return top.instantiate(top.parse_args(argv))
    except (ValueError, RecursionError) as error:  # bytes that are no text, numbers without an end
        raise UserError(
            f"--config: the file is not YAML in UTF-8 that can be read: {error}"
        ) from None


def _stopped(sentence: str, code: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(sentence, file=sys.stderr)
    return code


def _failed(sentence: str, code: int) -> int:
    print("error:", " ".join(sentence.split()), file=sys.stderr)
    return code


def run(args: Namespace) -> None:
    """Hands over to the file that bears the command's name; torch is loaded no earlier."""
    given = args[args.command]
    if args.command not in MANY and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(f"{args.command} is for one process: start it without torchrun")
    distributed = importlib.import_module(".distributed", __package__)
    with distributed.processes():
        importlib.import_module(".metrics", __package__).console.quiet = not distributed.first()
        _run(args, given)


def _run(args: Namespace, given: Namespace) -> None:
    command = importlib.import_module(f".{args.command}", __package__)
    if args.command in TOOLS:
        command.run(*(given[name.lstrip("-")] for name in TOOLS[args.command][1]))
    else:
        stage = STAGES[args.command]
        config = stage(**{option.name: given[option.name] for option in fields(stage)})
        if given.dry_run:
            importlib.import_module(".plan", __package__).show(config)
        elif args.command == "demo":
            command.run(config)
        else:
            spare = importlib.import_module(".checkpoint", __package__).spare
            for path in given.config or ():
                spare(Path(config.run_dir), {"config file": str(path)})
            command.run(config, given.overwrite)


if __name__ == "__main__":
    sys.exit(main())
