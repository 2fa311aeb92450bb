"""The command `ppokern`, which is the trainer's; `python -m ppokern` alone says what is installed.

`info` and `--version` need no more than the ops do. The trainer lies in the package once that is
installed, in a clone beside it.
"""

import os
import sys
from importlib import import_module

from ppokern import __version__, _install


def main() -> int:
    """Run a command and return its exit code."""
    if sys.argv[1:] == ["--version"]:
        print("ppokern", __version__)
    elif sys.argv[1:] == ["info"]:
        report = import_module("ppokern.info").report()
        try:
            print(report, flush=True)
        except BrokenPipeError:  # `| head`; else Python fails to flush it once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        try:
            return import_module("ppokern.trainer.__main__").main()
        except ModuleNotFoundError as error:
            if error.name != "ppokern.trainer" and not _install.extras().get("trainer"):
                raise
            return _install.no_trainer(error)
    return 0


if __name__ == "__main__":
    sys.argv[1:] = sys.argv[1:] or ["info"]
    sys.exit(main())
