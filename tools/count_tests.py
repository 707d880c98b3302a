"""Sum all runs of pytest in a log: python tools/count_tests.py LOG prints `N passed, N failed`.

Errors count as failed. Tests that were skipped, or that failed as expected, count as neither.
"""

import re
import sys
from collections import Counter
from pathlib import Path

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# "==== 1 failed, 12 passed, 2 warnings in 61.02s (0:01:01) ====", or the same without the frame (pytest -q)
SUMMARY = re.compile(r"(?:=+ )?((?:\d+ [a-z]+, )*\d+ [a-z]+) in [\d.]+s(?: \([^()]*\))?(?: =+)?")


def totals(log: str) -> tuple[int, int]:
    """Tests that passed and that failed, by all summary lines of pytest."""
    counts = Counter()
    for line in COLOUR.sub("", log).splitlines():
        if found := SUMMARY.fullmatch(line.strip()):
            for count in found[1].split(", "):
                number, word = count.split()
                counts[word.removesuffix("s")] += int(number)
    return counts["passed"], counts["failed"] + counts["error"]


if __name__ == "__main__":
    print("{} passed, {} failed".format(*totals(Path(sys.argv[1]).read_text(errors="replace"))))
