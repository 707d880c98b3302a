"""A model of the links between ranks: the time that a message and an exchange take (chapter 25)."""

from typing import NamedTuple


class Wire(NamedTuple):
    """A way from one GPU to the next.

    Attributes:
        message: seconds per message of any size that the host starts.
        hop: seconds per message inside a collective, which needs no host.
        bandwidth: bytes per second in one direction.
    """

    message: float
    hop: float
    bandwidth: float


#: by the backend of the group. "nccl" is NVLink between two GPUs of one host; the vendor publishes the bandwidth, as
#: 900 GB/s in both directions together; a message was measured between two H100s (benchmarks/scaling.py), and NCCL took
#: 60 µs by the clock, however small the message; a hop is an assumption. "gloo" is a CPU's loop-back, as orders of
#: magnitude
LINKS = {"nccl": Wire(60e-6, 2e-6, 450e9), "gloo": Wire(message=1.5e-4, hop=1.5e-4, bandwidth=1e9)}


def gather_seconds(wire: Wire, ranks: int, map_bytes: int) -> float:
    """Seconds of an all-gather in a ring: every rank receives the maps of all other ranks."""
    return wire.message + (ranks - 1) * (wire.hop + map_bytes / wire.bandwidth)


def pipeline_seconds(wire: Wire, ranks: int, state_bytes: int, blocks: int) -> float:
    """Seconds until the last rank has the last block; blocks follow each other from rank to rank."""
    return (ranks + blocks - 2) * (wire.message + state_bytes / blocks / wire.bandwidth)
