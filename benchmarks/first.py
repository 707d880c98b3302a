"""Time the first kernels of chapter 4 beside PyTorch, into benchmarks/results/<gpu>-first.json.

    python benchmarks/first.py [--out FILE]

Adds two vectors of 2^26 numbers, and takes the softmax of 16,384 rows of 4,096, both in float32: by the page
`gla_ref.pages.first`, by PyTorch's function and, for the softmax, by three lines of PyTorch. Each is compared with
float64 before it is timed. `floor_ms` is the time of its bytes, read once and written once, at the speed of a copy.
It runs in the host's own Python and needs a GPU, for some five seconds.
"""

import argparse
import json
import sys
from pathlib import Path

import run
import torch

from gla_ref import results
from gla_ref.pages import first
from gla_ref.rounding import error

KEY = ("kernel", "contender")
N, ROWS, DEVICE = 2**26, (16384, 4096), "cuda"


def softmax_in_pytorch(x):
    """Chapter 4's three lines."""
    m = x.amax(1, keepdim=True)
    e = (x - m).exp()
    return e / e.sum(1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the JSON file to merge into")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("first: expected a GPU, found none")
    environment = results.environment(torch.cuda.get_device_name()) | run.ceilings()
    rows, x, y = torch.randn(ROWS, device=DEVICE), *torch.randn(2, N, device=DEVICE)
    softmaxes = {"page": first.softmax_rows, "torch": lambda x: x.softmax(1), "three lines": softmax_in_pytorch}
    found = []
    for kernel, tensors, exact, contenders in (
        ("add", (x, y), lambda x, y: x + y, {"page": first.add, "torch": torch.add}),
        ("softmax", (rows,), lambda x: x.softmax(1), softmaxes),
    ):
        truth = exact(*(a[:64].double() for a in tensors))
        floor = 4 * (len(tensors) + 1) * tensors[0].numel() / environment["copy_gb_s"] / 1e6
        for name, call in contenders.items():
            if (off := error(call(*tensors)[:64], truth)) > 1e-5:
                sys.exit(f"first: expected {kernel} of {name} to be right, got an error of {off:.1e}")
            ms, _ = run.median_ms([lambda call=call, tensors=tensors: call(*tensors)])
            found.append({"kernel": kernel, "contender": name, "ms": ms, "floor_ms": floor})
            print(json.dumps(found[-1]), flush=True)
    results.merge(args.out or results.file(f"{environment['gpu']} first"), environment, "first", found, KEY)


if __name__ == "__main__":
    main()
