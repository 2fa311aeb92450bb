"""Printing never ends a run: not a character that the terminal does not know, nor a closed pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any


class Steady:
    """A stream that takes all that is written: what it cannot encode is shown escaped.

    Once a write fails (nobody reads it, its disk is full), what follows goes nowhere.
    """

    def __init__(self, stream: Any) -> None:
        """Takes the stream to write to; None where the process has none."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes text, or what of it can be shown."""
        if self._stream is None:
            return len(text)
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            known = self._stream.encoding
            self.write(text.encode(known, "backslashreplace").decode(known))
        except (OSError, ValueError):  # a ValueError: of a closed one
            self._drop()
        return len(text)

    def flush(self) -> None:
        """Hands on what is held back."""
        if self._stream is None:
            return
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._drop()

    def _drop(self) -> None:
        """Leads the file behind the stream nowhere: else Python fails to flush it at its end."""
        with suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's."""
        return getattr(self._stream, name)


@contextmanager
def steady() -> Iterator[None]:
    """Inside, nothing that is printed fails, a reward function's prints neither."""
    out, err = Steady(sys.stdout), Steady(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):  # type: ignore[type-var]
        try:
            yield
        finally:
            out.flush()
            err.flush()
