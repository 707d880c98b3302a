"""`python -m gla_ref doctor`: what is installed here, which kernels would run, and are they right? (chapter 14)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

import torch
from tabulate import tabulate

from .. import FORMS, check
from ..kernels import find_device, plan, refusal
from ..kernels.launch.hardware import hardware_of
from ..kernels.launch.versions import KNOWN, MEASURED, release, standing, too_old
from ..mechanisms import MECHANISMS

# what is planned: (mechanism, sizes), a training step and a long sequence
CALLS = [
    *((name, {"B": 2, "T": 2048, "H": 8, "K": 128, "V": 128}) for name in FORMS),
    ("gla", {"B": 1, "T": 32768, "H": 4, "K": 64, "V": 64}),
]
# what is launched: more than one chunk and a rest, and small enough for the recurrence in float64
CASE = check.Case("doctor", B=1, T=100, H=2, K=64, V=64)


def versions() -> list[tuple[str, str]]:
    """(what, which) of all that decides how kernels are compiled and run."""
    rows = [("Python", platform.python_version()), ("PyTorch", torch.__version__)]
    triton = importlib.util.find_spec("triton") is not None
    rows.append(("Triton", importlib.metadata.version("triton") if triton else "not installed: there are no kernels"))
    rows.append(("Triton, known", ", ".join(map(str, KNOWN))))
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        count = torch.cuda.get_device_properties(0).multi_processor_count
        rows.append(("CUDA", str(torch.version.cuda)))
        rows.append(("GPU", f"{torch.cuda.get_device_name()}, sm_{major}{minor}, {count} multiprocessors"))
    return rows


def on_hopper(name: str) -> str | None:
    """Whether the Hopper kernels run with this Triton, and if not, what to install; None on other hardware."""
    from ..kernels.hopper import FASTER
    from ..kernels.hopper.gluon_names import missing

    if name != "sm_90":
        return None
    if lacking := missing():
        return (
            f"Hopper kernels do not run: this Triton has no {lacking}. Portable kernels run instead. "
            f"The Hopper kernels need one of the known versions: pip install triton=={MEASURED[-1]}"
        )
    runs = "Hopper kernels run: this Triton has every name of Gluon that they use."
    if release() < FASTER:
        newer = "{}.{}".format(*FASTER)
        runs += f" Gradients of GLA are slower than by Triton {newer}: pip install triton=={MEASURED[-1]}"
    return runs


def planned(device: str, dtype: torch.dtype) -> list[list]:
    """A row for each of CALLS: what would run here."""
    rows, hardware = [], hardware_of(torch.device(device))
    for mechanism, sizes in CALLS:
        axes, size_of = [x.axes for x in MECHANISMS[mechanism].arguments if not x.optional], {"HV": sizes["H"]} | sizes
        tensors = [torch.empty([size_of[a] for a in x.split()], dtype=dtype, device="meta") for x in axes]
        row = [mechanism, ", ".join(f"{n} = {size}" for n, size in sizes.items())]
        for direction in ("forward", "backward"):
            chosen = plan(mechanism, *tensors, direction=direction, hardware=hardware)
            row.append(f"{chosen.name}: {', '.join(launch.name for launch in chosen.launches)}")
        rows.append(row)
    return rows


def judged(mechanism: str, device: str, dtype: torch.dtype) -> tuple[str, bool]:
    """(a sentence, is it right?) of the chosen kernel of a mechanism, forward and backward, on one small case."""
    report = check.kernel(mechanism, FORMS[mechanism]["triton"], device=device, dtype=dtype, only=CASE)
    shares = [row.error / row.budget for row in report.rows if row.error is not None and row.budget]
    worst = f"largest error {max(shares):.2f} of what is allowed" if shares else "nothing could be compared"
    failures = "; ".join(
        f"{row.quantity}: {row.message or row.status}" for row in report.rows if row.status == "failed"
    )
    return f"{'right' if report.ok else f'WRONG ({failures})'}, {worst}", report.ok


def doctor() -> int:
    """Print all of it; 0 unless a kernel is wrong."""
    print(tabulate(versions(), tablefmt="plain"))
    if importlib.util.find_spec("triton") is None:
        return 0
    installed = importlib.metadata.version("triton")
    print(f"\n{standing(installed)}")
    if reason := too_old(installed):
        print(f"No kernel runs here: {reason}. The references run.")
        return 0
    device, dtype, sentence = find_device()
    if told := on_hopper(hardware_of(torch.device(device)).name):
        print(told)
    name = str(dtype).removeprefix("torch.")
    print(f"\n{sentence}\n\nWhat would run here, in {name}:\n")
    print(tabulate(planned(device, dtype), ["mechanism", "sizes", "forward", "backward"]))
    if device == "cpu":
        print("\nNothing was launched: the doctor launches kernels only on a GPU.")
        if reason := refusal():
            print(f"Kernels cannot be interpreted here: {reason}.")
        return 0
    print(f"\nEach once, with its gradients, against the float64 recurrence ({name}, T = {CASE.T}):\n")
    good = True
    for mechanism in dict.fromkeys(mechanism for mechanism, _ in CALLS):
        sentence, right = judged(mechanism, device, dtype)
        good &= right
        print(f"{mechanism:18} {sentence}")
    return 0 if good else 1
