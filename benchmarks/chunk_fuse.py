"""The five steps of the original GLA, each timed alone, for chunks of 16, 32 and 64 tokens (bf16).

    python benchmarks/chunk_fuse.py [--out FILE]

Checks one head against the float64 references, then times. A step's bytes are those its programs ask for, the
whole form's its inputs and output once. Writes results/<gpu>-chunk-fuse.json, which chapter 12 draws its figures from.
It runs in the host's own Python and needs a GPU.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import run
import torch
from suites import Case, inputs, memory_floor_bytes

from gla_ref import gates, gla, results
from gla_ref import gla_chunk_fuse as reference
from gla_ref.rounding import budget, error, operands_in

SHAPES = [(8, 8192, 16, 128, 128), (32, 2048, 4, 256, 512)]  # the second has the notes' B, L and H
CHUNKS = (16, 32, 64)


def last_head(x: torch.Tensor) -> torch.Tensor:
    """The last head of the last sequence of x [B, T, H, D], in float64."""
    return x[-1:, :, -1:].double()


def measure(case: Case, C: int, x: dict, exact: torch.Tensor) -> list[dict]:
    """One record a step, and one for the whole form, whose error is held against that of an emulated run."""
    from gla_ref.kernels.original import gla_chunk_fuse as kernels
    from gla_ref.kernels.original.decay_cumsum import decay_cumsum

    q, k, v, g = (x[name].detach() for name in "qkvg")
    scale = case.K**-0.5
    b = decay_cumsum(g, C=C)
    q_g, k_g = kernels.qg_kg(q, k, b, scale, C)
    parts, _ = kernels.read_states(q_g, k_g, v, b, None, C)
    A = kernels.inner_scores(q, k, b, scale, C)
    calls = {
        "fwd_decay_cumsum": lambda: decay_cumsum(g, C=C),
        "prepare_qg_kg": lambda: kernels.qg_kg(q, k, b, scale, C),
        "fused_chunk_gla_fwd_kernel": lambda: kernels.read_states(q_g, k_g, v, b, None, C),
        "fwd_inner_chunk": lambda: kernels.inner_scores(q, k, b, scale, C),
        "combine": lambda: reference.combine(parts, A, v),
        "whole": lambda: kernels.gla_chunk_fuse(q, k, v, g, C=C)[0],
    }

    one = [last_head(y) for y in (q, k, v, g)]
    with operands_in(q.dtype):
        emulated, _ = gla.chunkwise_two_level(*(y.float() for y in one), C=C, c=C)
    allowed = budget(error(emulated.to(q.dtype), exact), q.dtype)
    q1, k1, v1, b1, q_g1, k_g1 = (last_head(y) for y in (q, k, v, b, q_g, k_g))
    S = torch.zeros(1, 1, case.K, case.V, dtype=torch.float64, device="cuda")
    A1, parts1 = A[:, -1:, -1:].double(), parts[:, -1:, :, -1:].double()
    errors = [
        error(b1, gates.chunk_cumsum(one[3], C, base2=True)),
        error(q_g1, reference.prepare_qg_kg(q1, k1, b1, scale, C)[0]),
        error(parts1.sum(0), reference.fused_chunk_gla_fwd(q_g1, k_g1, v1, b1, S, C)[0]),
        error(A1.sum(0), reference.fwd_inner_chunk(q1, k1, b1, scale, C)),
        error(last_head(calls["combine"]()), reference.combine(parts1, A1, v1)),
        error(last_head(calls["whole"]()), exact),
    ]
    sizes = {name: getattr(case, name) for name in ("B", "T", "H", "K", "V")}
    counted = reference.steps(**sizes, C=C)
    counted.append(None)
    records = []
    for (name, call), step, e in zip(calls.items(), counted, errors, strict=True):
        ms, samples = run.median_ms([call], 0.12)
        records.append(
            {
                "step": name,
                "C": C,
                **sizes,
                "dtype": case.dtype,
                "gates": case.gates,
                "ms": round(ms, 5),
                "bytes": step.bytes if step else memory_floor_bytes(case, "forward"),
                "error": e,
                "budget": None if step else allowed,
                "samples_ms": samples,
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks: expected an NVIDIA GPU, found none")
    environment = results.environment(torch.cuda.get_device_name()) | run.ceilings()
    print(json.dumps(environment), flush=True)
    records = []
    with torch.no_grad():
        for shape in SHAPES:
            case = Case("gla", *shape, gates="logsigmoid/16")
            x = inputs(case, 0)
            exact, _ = gla.recurrent(*(last_head(x[name]) for name in "qkvg"))
            for C in CHUNKS:
                for r in measure(case, C, x, exact):
                    records.append(r)
                    print(
                        f"{shape} C {C} {r['step']:28} {r['ms']:8.3f} ms"
                        f" {r['bytes'] / r['ms'] / 1e9:7.2f} TB/s  error {r['error']:.1e} of {r['budget']}",
                        flush=True,
                    )
            del x
            torch.cuda.empty_cache()
    path = args.out or results.file(f"{environment['gpu']} chunk fuse")
    results.write(path, environment, "steps", records)
    wrong = [r["C"] for r in records if r["budget"] and not r["error"] <= r["budget"]]
    sys.exit(f"beyond the budget at C = {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
