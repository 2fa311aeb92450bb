"""How runs end by signals, and beside one another: what a person sees, and what is left.

    python tests/trainer/ends.py FOLDER

Prints what came as JSON. Each run is a fork of this process, which imports torch once and trains
nothing itself (see crash.py); signals, kills and locks are real.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from crash import differences, forked, make_stages

from trainer import __main__ as cli
from trainer.config import PPOConfig
from trainer.metrics import RunLog

SLOW = """
import os
import time
from pathlib import Path

HERE = Path(__file__).parent


def held(prompts, completions):
    (HERE / "asked").touch()
    while (HERE / "hold").exists():
        time.sleep(0.01)
    return [len(text) / 9 for text in completions]
"""
WAITING = """
import time
from pathlib import Path

Path(__file__).with_name("imported").touch()
time.sleep(60)
"""


class Started:
    """A command in a fork."""

    def __init__(self, argv: list[str], log: Path, signum: int = 0) -> None:
        """Once it has written its third line of metrics it gets a signal, if that is asked for."""
        self.log = log
        self.pid = forked(lambda: self._work(argv, signum), log)

    def _work(self, argv: list[str], signum: int) -> None:
        inner = RunLog.write

        def write(log: RunLog, step: int, *rest: Any) -> None:
            inner(log, step, *rest)
            if step == 3 and signum:
                os.kill(os.getpid(), signum)

        RunLog.write = write
        code = cli.main(argv)
        sys.stdout.flush()
        os._exit(code)

    def wait_for(self, come: Callable[[], bool]) -> None:
        """Waits until something has come of it, a minute at most."""
        ends = time.monotonic() + 60
        while not come():
            assert time.monotonic() < ends, self.log.read_text()
            time.sleep(0.002)

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def runs(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it printed."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), self.log.read_text()


def main(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    stages = make_stages(folder)
    (folder / "slow.py").write_text(SLOW)
    (folder / "waiting.py").write_text(WAITING)
    found: dict[str, Any] = {}

    def start(name: str, *argv: str, signum: int = 0) -> Started:
        return Started(list(argv), folder / f"{name}.log", signum)

    for stage, (_, config) in stages.items():
        short: Any = {"updates": 5} if stage == "ppo" else {"steps": 8}
        config = dataclasses.replace(config, **short)
        path = folder / f"{stage}.yaml"
        path.write_text(yaml.safe_dump(dataclasses.asdict(config)))
        uncut = folder / "uncut" / stage
        found[f"{stage} uncut"] = start(
            stage, stage, f"--config={path}", f"--run_dir={uncut}"
        ).end()

    sent = {"sft": signal.SIGINT, "reward": signal.SIGTERM, "ppo": signal.SIGINT}
    for stage, signum in sent.items():
        run_dir = folder / f"{stage} cut"
        argv = [stage, f"--config={folder}/{stage}.yaml", f"--run_dir={run_dir}"]
        found[f"{stage} cut"] = start(f"{stage} cut", *argv, signum=signum).end()
        found[f"{stage} kept"] = sorted(x.name for x in (run_dir / "checkpoints").iterdir())
        found[f"{stage} left"] = (run_dir / "lock").exists()
        found[f"{stage} resumed"] = start(f"{stage} resumed", "resume", str(run_dir)).end()
        found[f"{stage} differences"] = differences(folder / "uncut" / stage, run_dir)

    config = stages["ppo"][1]
    slow = dataclasses.replace(
        config, rewards={f"{folder}/slow.py:held": 1.0}, critic="", updates=3, save_every_updates=1
    )
    assert isinstance(slow, PPOConfig)
    (folder / "slow.yaml").write_text(yaml.safe_dump(dataclasses.asdict(slow)))
    live, hold, asked = folder / "live", folder / "hold", folder / "asked"
    argv = ["ppo", f"--config={folder}/slow.yaml", f"--run_dir={live}"]

    def held(name: str, *argv: str) -> Started:
        """Started, and held in its reward function."""
        asked.unlink(missing_ok=True)
        hold.touch()
        run = start(name, *argv)
        run.wait_for(asked.exists)
        return run

    run = held("live", *argv)
    beside = {
        "a resume": ["resume", str(live)],
        "an overwriting one": [*argv, "--overwrite"],
        "one by a link": [*argv[:2], f"--run_dir={folder}/link", "--overwrite"],
    }
    (folder / "link").symlink_to(live)
    was = sorted((x.name, x.stat().st_ino) for x in live.iterdir())
    for name, command in beside.items():
        found[name] = start(name, *command).end()
    found["untouched"] = was == sorted((x.name, x.stat().st_ino) for x in live.iterdir())
    found["pid"] = run.pid
    run.signal(signal.SIGKILL)
    run.end()
    found["a lock is left"] = (live / "lock").exists()

    run = held("two resumes", "resume", str(live))
    found["the second resume"] = start("second resume", "resume", str(live)).end()
    run.signal(signal.SIGTERM)
    time.sleep(0.3)
    found["waits after one signal"] = run.runs()
    run.signal(signal.SIGTERM)
    began = time.monotonic()
    found["two signals"] = run.end()
    found["two signals took"] = time.monotonic() - began
    hold.unlink()
    found["after all"] = start("after all", "resume", str(live)).end()

    early = ["ppo", f"--config={folder}/slow.yaml", f"--run_dir={folder}/new/early"]
    run = start("early", *early, json.dumps({f"{folder}/waiting.py:f": 1}).join(["--rewards=", ""]))
    run.wait_for((folder / "imported").exists)
    run.signal(signal.SIGINT)
    found["early"] = run.end()
    found["early left"] = (folder / "new").exists()
    return found


if __name__ == "__main__":
    # a shell starts what runs in the background with it ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(json.dumps(main(Path(sys.argv[1]))))
