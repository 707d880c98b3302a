"""A command in a process of its own; only the verdict that the process writes counts (appendix "Check your kernel").

A stranger's kernel may end the process that it runs in, with status 0 too; it may abort the process, or hang in it. So
the command runs in a child, whose last act is to write its exit status into a file. The parent believes that file only.
If a child ends in the midst of a case, the parent notes that, and another child goes on with the next one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import NoReturn, TextIO

VARIABLE = "GLA_REF_CHILD"  # in a child's environment: the folder of its files
FILES = ("verdict", "place", "hang")
BEFORE = ("", "import")  # places of a child that has called nothing yet
GRACE = 10.0  # seconds beyond the time limit, in which a child that can go on reports the hanging call itself

folder: Path | None = None  # that of this process, where it is a child


def run(argv: list[str], kernel: str, seconds: float, again: bool = True) -> int:
    """The exit status that a child wrote down, which runs `python -m gla_ref` with these arguments.

    If the child wrote none, its case becomes a finding of the next child, unless not `again`. If that ends in the same
    place, or nothing was called yet, a sentence on stderr says how it ended and where, and the status is 2.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # subprocess.call then kills the child
    with tempfile.TemporaryDirectory() as own:

        def read(name: str) -> str:
            path = Path(own, name)
            return path.read_text() if path.exists() else ""

        before = set(BEFORE)
        while True:
            try:
                status = subprocess.call([sys.executable, "-m", "gla_ref", *argv], env=os.environ | {VARIABLE: own})
            except KeyboardInterrupt:
                print(f"python -m gla_ref: interrupted (at {read('place') or 'start'})", file=sys.stderr)
                return 128 + signal.SIGINT
            verdict, place, hang = (read(name) for name in FILES)
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            but = f"it did not within {seconds:g} s" if hang else f"its process ended with {how}"
            if verdict or place in before or not again:
                break
            before.add(place)
            if place not in kept(Path(own)):
                row = {"case": place, "quantity": "call", "status": "failed", "kind": "breaks"}
                keep(place, [row | {"message": f"expected to return, but {but}"}], Path(own))
    if verdict:
        return int(verdict)
    sentence = f"kernel: expected {kernel} to return, but {but} (at {place or 'start'})"
    print(f"python -m gla_ref: error: {sentence}", file=sys.stderr)
    return 2


def begin() -> bool:
    """Return whether this process is such a child; the processes that it starts are not."""
    global folder
    if VARIABLE in os.environ:
        folder = Path(os.environ.pop(VARIABLE))
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it ends without a traceback
    return folder is not None


def at(place: str) -> None:
    """Note in a child what it does next."""
    if folder:
        (folder / "place").write_text(place)


def keep(case: str, rows: list[dict], own: Path | None = None) -> None:
    """Note the rows of a case for the children to come."""
    with open((own or folder) / "rows", "a") as file:
        file.write(json.dumps([case, rows]) + "\n")


def kept(own: Path | None = None) -> dict[str, list[dict]]:
    """The rows by case that children before have noted."""
    file = (own or folder) / "rows"
    return dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}


def limit(seconds: float) -> None:
    """End this child so many seconds and GRACE from now, even if a thread holds Python's lock all the time."""
    if folder:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=hang())


@cache
def hang() -> TextIO:
    """The file that faulthandler writes into when it ends this child; open all the time, as it must be."""
    return open(folder / "hang", "w")


def beat(seconds: float) -> None:
    """Put the end of this child off again and again, as long as some thread can take Python's lock."""

    def forever():
        while True:
            limit(seconds)
            time.sleep(1)

    if folder:
        threading.Thread(target=forever, daemon=True).start()


def finish(status: int) -> NoReturn:
    """End this child with a verdict; nothing that the kernel has left behind, such as a thread, can hold that up."""
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / "verdict").write_text(str(status))
    os._exit(status)
