"""A model of the time that many GPUs take for one text: bytes at the memory's speed, messages at a link's (chapter 25).

The model simulates; it does not measure. A GPU only moves the necessary bytes, at its memory's published speed. A
message costs a fixed time, which was measured, and its bytes at the link's published speed. All predictions of chapter
25 come from this model, and `context_parallel` chooses its exchange by the same formulas, which are in
:mod:`gla_ref.over_ranks.links`. The measurements are in the records of benchmarks/scaling.py.

One GPU alone and one GPU among many do the same work: each finds its own sum, and then walks. With few heads a GPU
alone cuts its text into segments that fill the GPU, so it makes the sums of its segments too. All kernels are as fast
as the memory here, while a rank's maps may come from a slower kernel than the sums of segments (chapter 25 has both).
"""

from typing import NamedTuple

from ..over_ranks.links import LINKS, Wire, gather_seconds, pipeline_seconds

__all__ = [
    "GLA",
    "H200",
    "Machine",
    "Sizes",
    "Task",
    "Wire",
    "exchange",
    "gather_seconds",
    "pipeline_seconds",
    "ring_attention",
    "schedule",
]


class Machine(NamedTuple):
    """Hosts of GPUs of one kind.

    Attributes:
        memory: bytes per second of a GPU's memory.
        products: operations per second in 16 bits.
        near: the wire between two GPUs of one host.
        far: the wire between two hosts, for each GPU.
        host: GPUs per host.
    """

    memory: float
    products: float
    near: Wire
    far: Wire
    host: int

    @property
    def rings(self) -> Wire:
        """Rings over hosts, one for each GPU's network, as one wire, whose hop is their mean hop."""
        hop = self.near.hop + (self.far.hop - self.near.hop) / self.host
        return Wire(self.far.message, hop, min(self.near.bandwidth, self.host * self.far.bandwidth))


#: an H200 SXM in a DGX H200. The vendor publishes 4.8 TB/s and 989 TFLOP/s (dense, bfloat16), and 400 Gbit/s of
#: network for each GPU. A message between hosts is taken to cost as much as one inside a host; 5 µs per hop between
#: hosts is an assumption
H200 = Machine(4.8e12, 989e12, LINKS["nccl"], LINKS["nccl"]._replace(hop=5e-6, bandwidth=50e9), 8)


class Sizes(NamedTuple):
    """A layer: heads H of K x V, tokens in 16 bits, states in 32.

    Attributes:
        tensors: the tensors that a walk moves: of the size of q (q, k and the gates), and of the size of v (v and o).
        sums: the tensors that the pass for a piece's own sum moves.
        decay: numbers per head besides the state.
    """

    H: int = 16
    K: int = 128
    V: int = 128
    tensors: tuple[int, int] = (3, 2)
    sums: tuple[int, int] = (2, 1)
    decay: int = 128

    def bytes(self, tokens: int, tensors: tuple[int, int]) -> int:
        """Bytes of tensors with so many tokens."""
        return 2 * tokens * self.H * (tensors[0] * self.K + tensors[1] * self.V)

    @property
    def state(self) -> int:
        """Bytes of the state of all heads."""
        return 4 * self.H * self.K * self.V

    @property
    def map(self) -> int:
        """Bytes of the state and the decay."""
        return 4 * self.H * (self.K * self.V + self.decay)


#: gated linear attention with 16 heads of 128 x 128
GLA = Sizes()


def exchange(way: str, ranks: int, sizes: Sizes, machine: Machine, blocks: int | None = None) -> float:
    """Return the seconds from the ranks' own sums until the last rank has the state that comes into its piece.

    Args:
        way: "all-gather" or "pipeline".
        ranks: the number of GPUs, in hosts of `machine.host`.
        sizes: the sizes of the layer.
        machine: the hosts and wires.
        blocks: the number of blocks of heads that a pipeline sends one after another; None takes the fastest number.

    Raises:
        ValueError: there is no such way.
    """
    wire = machine.rings if ranks > machine.host else machine.near
    if way not in ("all-gather", "pipeline"):
        raise ValueError(f"way: expected all-gather or pipeline, got {way!r}")
    if ranks == 1:
        return 0.0
    if way == "all-gather":
        return gather_seconds(wire, ranks, sizes.map)
    return _pipeline(ranks, sizes, machine, blocks or _blocks(ranks, sizes, machine))


def _blocks(ranks: int, sizes: Sizes, machine: Machine) -> int:
    """Return the number of blocks, a power of 2, with which a pipeline is fastest."""
    return min((b for b in (1, 2, 4, 8, 16) if b <= sizes.H), key=lambda b: _pipeline(ranks, sizes, machine, b))


def _pipeline(ranks: int, sizes: Sizes, machine: Machine, blocks: int) -> float:
    """Simulate a pipeline: a wire sends one block at a time, and a rank sends on each block that has arrived.

    Among ranks of one host that is :func:`pipeline_seconds`.
    """
    come = [0.0] * blocks
    for r in range(1, ranks):
        wire, free = machine.near if r % machine.host else machine.far, 0.0
        for b in range(blocks):
            free = come[b] = max(come[b], free) + wire.message + sizes.state / blocks / wire.bandwidth
    return come[-1]


class Task(NamedTuple):
    """A rank's task with its start and end in seconds: "sum", "exchange" or "walk"."""

    job: str
    rank: int
    start: float
    stop: float


def schedule(way: str, tokens: int, ranks: int, sizes: Sizes = GLA, machine: Machine = H200) -> list[Task]:
    """Return the schedule of a layer's forward pass over `tokens` in equal pieces; one rank stands for one GPU alone.

    `way` is "one after another", or one of :func:`exchange`.

    Raises:
        ValueError: there is no such way.
    """
    own, walk = _forward(tokens // ranks, sizes, machine)
    tasks, wire = [], machine.near if ranks <= machine.host else machine.far
    hop, blocks = wire.message + sizes.state / wire.bandwidth, _blocks(ranks, sizes, machine)
    for r in range(ranks):
        if way == "one after another":
            start = r * (own + walk + hop)
            tasks += [Task("exchange", r, start - hop, start)] if r else []
            tasks += [Task("sum", r, start, start + own), Task("walk", r, start + own, start + own + walk)]
            continue
        known = r + 1 if way == "pipeline" else ranks  # the number of ranks that a rank waits for, itself included
        come = own + exchange(way, known, sizes, machine, blocks)
        tasks += [Task("sum", r, 0.0, own), Task("exchange", r, own, come), Task("walk", r, come, come + walk)]
    return tasks


def _forward(tokens: int, sizes: Sizes, machine: Machine) -> tuple[float, float]:
    """(seconds of its own sum, seconds of its walk) for a GPU with so many tokens."""
    return tuple(sizes.bytes(tokens, x) / machine.memory for x in (sizes.sums, sizes.tensors))


def ring_attention(tokens: int, ranks: int, sizes: Sizes = GLA, machine: Machine = H200) -> tuple[float, int]:
    """Return (seconds, bytes that a rank sends) of causal softmax attention forward, with keys and values round a ring.

    In each round a rank multiplies its queries with the keys it has while the next keys arrive. Half of all pairs are
    in the future; the ranks share the other half evenly, as the best schedules do.
    """
    piece = tokens // ranks
    wire, sent = machine.far if ranks > machine.host else machine.near, 2 * piece * sizes.H * (sizes.K + sizes.V)
    products = 2 * piece * tokens * sizes.H * (sizes.K + sizes.V) / 2 / machine.products
    each = max(products / ranks, wire.hop + sent / wire.bandwidth if ranks > 1 else 0.0)
    return ranks * each, (ranks - 1) * sent
