"""Hopper kernels played on the CPU, from their own source: PyTorch stands in for Gluon.

Each role of a program is a coroutine. Wherever it calls Gluon, chance decides who goes on,
and when a copy begins or ends. A tile holds NaN from the moment its copy is asked for; a copy out of a tile reads
when it likes. A product reads its operands when it is issued and again when it is waited for, and both must be the
same; its sums are out of reach until then. So an order of steps that the barriers allow and that would change a
result is seen, and so are roles that wait for each other for ever, barriers that get more arrivals than they count or
are not invalidated, products and copies that read what threads have written without a fence, and copies that fill
what threads have written or read without one. Not seen: warps of one role that run ahead of each other, layouts.
"""

import contextlib
import random
import types
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import CUDA, anywhere
from triton.experimental.gluon import language
from triton.experimental.gluon._runtime import GluonJITFunction

from gla_ref.kernels.hopper import gluon_names
from gla_ref.kernels.launch.plan import Box, Launch, Make, Plan, Spec

LACKS = gluon_names.missing()
gluon = pytest.mark.skipif(LACKS is not None, reason=f"this Triton has no {LACKS}")
played_here = pytest.mark.skipif(CUDA or LACKS is not None, reason="played on a CPU, where there is Gluon")


HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(CUDA and not HOPPER or LACKS is not None, reason="needs Gluon, and a Hopper GPU or none")


def on_hopper(test):
    """A test that needs a GPU of compute capability 9.0."""
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


def everywhere(test):
    """A test of kernels that are played on a CPU, and run on a Hopper GPU."""
    return anywhere(hopper(test))


class Play:
    """One program while it runs: whose turn it is, barriers, copies under way."""

    def __init__(self, pid: int, seed: int, ignored: tuple[int, int] | None):
        self.pid, self.chance, self.ignored, self.bars = pid, random.Random(seed), ignored, []
        self.haste = self.chance.choice((0.9, 0.1, 0.01, 0.001))  # how likely a copy ends before a role's next step
        self.slow = {}  # of each role: whether it goes on only when no copy and no other role can
        self.hub, self.waiting, self.turn = None, {}, None
        self.phases, self.missing, self.under_way = {}, {}, []
        self.counts, self.arrived = {}, {}  # by barrier: arrivals that end a phase, and arrivals in this phase
        self.unfenced = {}  # {(bytes that threads have reached, the role): "wrote" or "read"}
        self.own = SimpleNamespace(role=None, products=[])  # of the prologue, or of a kernel without roles

    def pause(self, until=None):
        """Let chance decide who goes on; come back when it is this role's turn and `until()`."""
        me = self.own.role
        if me is None:  # before the roles begin
            while until and not until():
                self.finish_one()
            return
        self.waiting[me] = until
        self.choose()
        if self.turn != me:
            self.hub.switch()

    def finish_one(self):
        _, end = self.under_way.pop(self.chance.randrange(len(self.under_way)))
        end()

    def choose(self):
        while True:
            ready = [r for r, until in self.waiting.items() if until is None or until()]
            eager = [r for r in ready if not self.slow.setdefault(r, self.chance.random() < 0.3)]
            if self.under_way and (not eager or self.chance.random() < self.haste):
                self.finish_one()
            elif ready:
                self.turn = self.chance.choice(eager or ready)
                return
            else:
                raise AssertionError(f"all wait: {list(self.waiting)}")

    def run(self, roles):
        from greenlet import getcurrent, greenlet  # a GPU host, where nothing is played, may lack it

        self.hub = getcurrent()
        roles = {f"{function.__name__} {i}": partial(function, *args) for i, (function, args) in enumerate(roles)}
        running = {role: greenlet(work) for role, work in roles.items()}
        each = {role: SimpleNamespace(role=role, products=[]) for role in roles}
        before, self.waiting = self.own, dict.fromkeys(roles)
        self.choose()
        while self.waiting:
            role = self.turn
            self.own = each[role]
            running[role].switch()  # comes back when it is another's turn, or with the role's error
            if running[role].dead:
                del self.waiting[role]
                if self.waiting:
                    self.choose()
        self.own = before
        while self.under_way:
            self.finish_one()


PLAY: Play = None


def me() -> str:
    return PLAY.own.role or "the prologue"


class Tile:
    """Shared memory."""

    def __init__(self, x):
        self.x, self.shape, self.dtype = x, list(x.shape), x.dtype

    def index(self, i):
        return Tile(self.x[int(i)])

    def reshape(self, shape):
        return Tile(self.x.view(*shape))

    def permute(self, axes):
        return Tile(self.x.permute(*axes))

    def slice(self, start, length, dim=0):
        return Tile(self.x.narrow(dim, start, length))

    def span(self):
        """(allocation, its first byte, the one after its last)."""
        first = self.x.storage_offset() * self.x.itemsize
        size = 1 + sum((n - 1) * s for n, s in zip(self.x.shape, self.x.stride(), strict=True))
        return self.x.untyped_storage().data_ptr(), first, first + size * self.x.itemsize

    def check_fenced(self, filled=False):
        base, first, stop = self.span()
        for ((other, a, b), role), how in PLAY.unfenced.items():
            apart = other != base or stop <= a or b <= first
            assert apart or (how == "read" and not filled), (
                f"{'filled' if filled else 'read'} without a fence of {role}, which {how} it"
            )

    def reinterpret(self, dtype, shape, layout):
        return Tile(self.x.reshape(-1).view(dtype).view(*shape))

    def load(self, layout):
        PLAY.pause()
        PLAY.unfenced.setdefault((self.span(), me()), "read")
        return self.x.clone()

    def store(self, x):
        PLAY.pause()
        assert list(x.shape) == self.shape and x.dtype == self.dtype, (x.shape, x.dtype, self.shape, self.dtype)
        self.x.copy_(x)
        PLAY.unfenced[self.span(), me()] = "wrote"


class Pointer:
    """Into a tensor; `dtype.element_ty` as of Triton's pointers."""

    def __init__(self, x, at=0):
        self.x, self.at, self.dtype = x, at, SimpleNamespace(element_ty=x.dtype)

    def __add__(self, at):
        return Pointer(self.x, self.at + at)


class Descriptor:
    """A tensor [B, T, H, D] in boxes, as the copy engine takes it."""

    def __init__(self, x, box: Box):
        self.x, self.dtype, self.layout = x.transpose(1, 2), x.dtype, None
        bytes_ = torch.Size(box.block).numel() * x.dtype.itemsize
        self.block_type = SimpleNamespace(shape=list(box.block), nbytes=bytes_)

    def overlap(self, at):
        """(what of the tensor, what of the tile) a box at these coordinates is; nothing of what lies beyond."""
        part = self.x[tuple(slice(int(i), int(i) + n) for i, n in zip(at, self.block_type.shape, strict=True))]
        return part, tuple(map(slice, part.shape))


class Sums:
    """The sums of a product under way."""

    def __init__(self, x):
        self.x = x


class Registers:
    """A first operand of a product in registers, which threads may not change while it runs."""

    def __init__(self, x):
        self.x, self.check_fenced = x, lambda: None


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    a = Registers(a) if isinstance(a, torch.Tensor) else a
    a.check_fenced()
    b.check_fenced()
    begun = a.x.float() @ b.x.float()
    acc = acc.x if isinstance(acc, Sums) else acc
    sums = Sums(acc + begun if use_acc else begun)
    PLAY.own.products.append((sums, lambda: torch.equal(begun.nan_to_num(), (a.x.float() @ b.x.float()).nan_to_num())))
    return sums if is_async else warpgroup_mma_wait(0, [sums])


def warpgroup_mma_wait(n, deps):
    PLAY.pause()
    while len(PLAY.own.products) > n:
        _, same = PLAY.own.products.pop(0)
        assert same(), "a product's operand changed while it ran"
    under_way = [sums for sums, _ in PLAY.own.products]
    assert not any(x is y for x in deps for y in under_way), "used before it was waited for"
    found = tuple(x.x if isinstance(x, Sums) else x for x in deps)  # what is no product passes as it is
    return found[0] if len(found) == 1 else found


def mma_v2(a, b, acc, precision=None):
    assert a.dtype == b.dtype and (a.dtype == torch.float32) == (precision == "tf32")
    if precision == "tf32":  # the tensor cores do not read the last 13 bits
        a, b = ((x.contiguous().view(torch.int32) & -8192).view(torch.float32) for x in (a, b))
    return acc + a.float() @ b.float()


def cut(x):
    """The kernel's rounding by integers; PyTorch names the reinterpretation differently."""
    return (x.contiguous().view(torch.int32) + 32768 & -65536).view(torch.float32)


def fence():
    PLAY.unfenced = {(span, role): how for (span, role), how in PLAY.unfenced.items() if role != me()}


def fence_of_stores():
    """A fence that does not count for reads: a copy that fills what this role has read is too early still."""
    PLAY.unfenced = {x: how for x, how in PLAY.unfenced.items() if how == "read" or x[1] != me()}


def key(bar):
    return bar.x.data_ptr()


def wait(bar, parity):
    def over():
        return PLAY.phases[key(bar)] & 1 != int(parity)

    n, i = PLAY.ignored or (0, 0)
    PLAY.pause(None if PLAY.ignored and key(bar) == key(PLAY.bars[n].index(i)) else over)


def arrive(bar, count=1):
    PLAY.pause()
    PLAY.arrived[key(bar)] += count
    assert PLAY.arrived[key(bar)] <= PLAY.counts[key(bar)], "more arrivals than a phase has"
    if PLAY.arrived[key(bar)] == PLAY.counts[key(bar)]:
        PLAY.arrived[key(bar)] = 0
        PLAY.phases[key(bar)] += 1


def init(bar, count):
    PLAY.phases[key(bar)] = PLAY.arrived[key(bar)] = 0
    PLAY.counts[key(bar)] = count


def invalidate(bar):
    del PLAY.phases[key(bar)]


def expect(bar, number):
    assert not PLAY.missing.get(key(bar)), "bytes of the round before are missing"
    PLAY.missing[key(bar)] = number


def load_box(box, at, bar, tile):
    part, where = box.overlap(at)
    tile.check_fenced(filled=True)
    tile.x.fill_(torch.nan)

    def end():
        tile.x.zero_()
        tile.x[where] = part
        PLAY.missing[key(bar)] -= box.block_type.nbytes
        if not PLAY.missing[key(bar)]:
            PLAY.phases[key(bar)] += 1

    PLAY.under_way.append((None, end))
    PLAY.pause()


def store_box(box, at, tile):
    part, where = box.overlap(at)
    tile.check_fenced()
    PLAY.under_way.append((me(), lambda: part.copy_(tile.x[where])))
    PLAY.pause()


def store_wait(pendings):
    own = me()
    PLAY.pause(lambda: all(role != own for role, _ in PLAY.under_way))


def scan(x, axis, function, reverse=False):
    rows = [list(y.unbind(axis)) for y in (x if isinstance(x, tuple) else (x,))]
    order = list(zip(*rows, strict=True))[:: -1 if reverse else 1]
    found = [order[0]]
    for row in order[1:]:
        both = function(*found[-1], *row)
        found.append(both if isinstance(both, tuple) else (both,))
    made = tuple(torch.stack(y, axis) for y in zip(*found[:: -1 if reverse else 1], strict=True))
    return made if isinstance(x, tuple) else made[0]


def load(p, mask=None, other=0):
    if mask is None:
        return p.x.view(-1)[p.at]
    at, mask = torch.broadcast_tensors(torch.as_tensor(p.at), mask)
    return torch.where(mask, p.x.view(-1)[torch.where(mask, at, 0)], torch.tensor(other, dtype=p.x.dtype))


def store(p, x, mask=None):
    PLAY.pause()
    at, mask, x = torch.broadcast_tensors(p.at, torch.tensor(True) if mask is None else mask, x)
    p.x.view(-1)[at[mask]] = x[mask].to(p.x.dtype)


def allocate(dtype, shape, layout):
    tile = Tile(torch.empty(shape, dtype=dtype))
    if dtype.is_floating_point:
        tile.x.fill_(torch.nan)
    if dtype == torch.int64:
        PLAY.bars.append(tile)
    return tile


def layout(*args):
    """A call that no result depends on."""


LANGUAGE = SimpleNamespace(
    float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16,
    int8=torch.int8, int32=torch.int32, int64=torch.int64,
    BlockedLayout=layout, SliceLayout=layout, NVMMADistributedLayout=layout, NVMMASharedLayout=layout,
    SwizzledSharedLayout=layout, DotOperandLayout=layout, DistributedLinearLayout=layout,
    constexpr=lambda x: x, static_range=range,
    program_id=lambda axis: torch.tensor(PLAY.pid),
    cdiv=lambda x, y: -(-x // y),
    minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
    maximum=lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)),
    arange=lambda start, stop, layout=None: torch.arange(start, stop),
    zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    full=lambda shape, x, dtype, layout=None: torch.full(shape, x, dtype=dtype),
    zeros_like=torch.zeros_like, where=torch.where, exp2=torch.exp2,
    log2=torch.log2, floor=torch.floor, ceil=torch.ceil, abs=torch.abs, join=lambda x, y: torch.stack([x, y], -1),
    split=lambda x: x.unbind(-1),
    sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis),
    convert_layout=lambda x, layout: x, associative_scan=scan, load=load, store=store,
    allocate_shared_memory=allocate,
    warp_specialize=lambda roles, warps, registers: PLAY.run(roles),
)  # fmt: skip
STANDS_IN = {
    "gl": LANGUAGE,
    "LOG2E": 1.4426950408889634,
    "mbarrier": SimpleNamespace(
        MBarrierLayout=layout, init=init, invalidate=invalidate, expect=expect, arrive=arrive, wait=wait
    ),
    "tma": SimpleNamespace(store_wait=store_wait),
    "copy_in": load_box,
    "copy_out": store_box,
    "reinterpret": lambda x, dtype, shape, layout: x.reinterpret(dtype, shape, layout),
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "mma_v2": mma_v2,
    "cut": cut,
    "fence_async_shared": fence,
    "fence": fence,
    "barrier": lambda: None,
}


def played(kernel: GluonJITFunction):
    """A Gluon kernel as a function of Python, with all Gluon functions that it calls."""
    spaces = {}  # of each module, by the identity of its own names

    def space_of(names):
        if id(names) not in spaces:
            space = spaces[id(names)] = {**names, **STANDS_IN}
            for name, x in names.items():
                if isinstance(x, language.constexpr):
                    space[name] = x.value
                elif isinstance(x, GluonJITFunction) and name not in STANDS_IN:
                    space[name] = plain(x.fn)
        return spaces[id(names)]

    def plain(f):
        return types.FunctionType(f.__code__, space_of(f.__globals__), f.__name__, f.__defaults__)

    return plain(kernel.fn)


@contextlib.contextmanager
def bfloat16_interpreted():
    """Let Triton's interpreter multiply and round bfloat16: by itself, it multiplies bits as integers and cuts off."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self, x, kind):
        if kind.scalar != tl.bfloat16 or x.dtype.scalar == tl.bfloat16:
            return cast(self, x, kind)
        low = torch.tensor(x.data).to(torch.bfloat16).view(torch.int16)
        return TensorHandle(low.numpy().view(np.uint16), tl.bfloat16)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    InterpreterBuilder.cast_impl = rounded
    try:
        yield
    finally:
        InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = dot, cast


def play(plan: Plan, inputs: dict[str, torch.Tensor], seed=0, ignored=None) -> list[torch.Tensor | None]:
    """A plan's results of its inputs, called by their specs' names.

    Gluon's kernels are played; of Triton's `mend_gradient` and `mend` are left out, others are interpreted.
    `ignored`: (kernel, which of its allocations of barriers, which of them) at which nobody waits.
    """
    global PLAY
    tensors = dict(inputs)
    for step in plan.steps:
        if isinstance(step, Make):
            args = [tensors[x.name] if isinstance(x, Spec) else x for x in step.args]
            made = torch.zeros if step.zero else torch.empty
            new = step.function(*args) if step.function else made(step.tensor.shape, dtype=step.tensor.dtype)
            if not (step.zero or step.function) and new.is_floating_point():
                new.fill_(torch.nan)
            tensors[step.tensor.name] = new
        elif isinstance(step, Launch) and isinstance(step.kernel, GluonJITFunction):
            function, args = played(step.kernel), []
            for x in step.args:
                if isinstance(x, Spec):
                    x = Pointer(tensors[x.name].view(-1))
                elif isinstance(x, Box):
                    x = Descriptor(tensors[x.tensor.name].as_strided(x.tensor.shape, x.tensor.strides), x)
                args.append(x)
            for pid in range(step.grid[0]):
                PLAY = Play(pid, seed + pid, ignored[1:] if ignored and ignored[0] == step.name else None)
                function(*args)
                assert not PLAY.phases, f"{step.name}: {len(PLAY.phases)} barriers were not invalidated"
        elif step.name not in ("mend", "mend_gradient"):
            args = [tensors[x.name] if isinstance(x, Spec) else x for x in step.args]
            with bfloat16_interpreted():
                step.kernel[step.grid](*args, **step.options)
    return [None if x is None else tensors[x.name] for x in plan.outputs] + [tensors.get("strong")]


def anybody_waits(play):
    """Whether leaving out a wait shows: in some order of steps a result changes, or a role's products.

    `play(seed)` plays all waits without a seed, and with one all but that wait.
    """
    right = play()
    for seed in range(20):
        try:
            made = play(seed)
        except (AssertionError, RuntimeError):
            return True
        if not all(torch.equal(y, right[n]) for n, y in made.items()):
            return True
    return False
