"""Plans bound to compiled kernels, and the look-up that finds them again (chapter 13)."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType, SimpleNamespace
from typing import NamedTuple, get_type_hints

import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from .checks import looks_at_values
from .hardware import hardware_of
from .interpreter import mend
from .plan import Box, Launch, Make, Plan, Spec, spec_of
from .versions import release

if triton.knobs.runtime.interpret:
    mend()

MOST = 512  # programs that a function keeps: every call may have a new length
# each launch asks for fused multiply-adds, which all measured kernels use: Triton 3.9 warns if a launch does not ask,
# Triton 3.10 will compile such a launch without them
FUSED = {"enable_fp_fusion": True}
THREAD = threading.local()  # attributes: the devices that a thread has used


class Mock:
    """The attributes of a tensor that Triton's compiler reads."""

    def __init__(self, spec: Spec):
        self.dtype, self.address = spec.dtype, 0 if spec.aligned else 8

    def data_ptr(self) -> int:
        return self.address


def describe(box: Box, base):
    """A tensor as the copy engine sees it; boxes of Gluon's kernels have a layout in shared memory."""
    numbers = list(box.shape), list(box.strides), list(box.block)
    if box.layout is None:
        return TensorDescriptor(base, *numbers)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as WithLayout

    return WithLayout(base, *numbers, box.layout)


def compile_launch(launch: Launch):
    """Compile the kernel of a launch for Triton's current target; launch nothing."""
    args = []
    for x in launch.args:
        if isinstance(x, Box):
            x = describe(x, Mock(x.tensor))
        args.append(Mock(x) if isinstance(x, Spec) else x)
    return launch.kernel.warmup(*args, grid=launch.grid, **FUSED, **launch.options)


def variant(launch: Launch, device: torch.device) -> tuple:
    """Return the properties of a launch that Triton compiles into the kernel: equal variants share a compiled kernel.

    Triton compiles in whether an integer is 1, a multiple of 16, and larger than 32 bits. For a parameter that a kernel
    declares `do_not_specialize`, Triton compiles in only the third, but tuples are specialised all the same.
    """
    kernel, _, args, options = launch
    constants, rest = _parameters(kernel)
    key = [kernel.fn, device, *options.items(), *[args[i] for i in constants]]
    for i, varying in rest:
        x = args[i]
        kind = type(x)
        if kind is Spec:
            x = x.dtype, x.aligned
        elif kind is Box:
            x = x.tensor.dtype, x.block
        elif kind is tuple:
            x = _kinds(x)
        elif kind is int:
            x = x < 2**31 if varying else (x == 1, x % 16 == 0, x < 2**31)
        elif x is not None:
            x = kind
        key.append(x)
    return tuple(key)


@functools.lru_cache(MOST)
def _kinds(numbers: tuple[int, ...]) -> tuple:
    return tuple([(n == 1, n % 16 == 0, n < 2**31) for n in numbers])


@functools.cache
def _parameters(kernel) -> tuple[list[int], list[tuple[int, bool]]]:
    """Return the places of a kernel's constants, and (place, do_not_specialize) of its other parameters."""
    places = list(enumerate(kernel.params))
    return (
        [i for i, p in places if p.is_constexpr],
        [(i, p.do_not_specialize) for i, p in places if not p.is_constexpr],
    )


COMPILED: dict[tuple, Callable] = {}  # kernels by their variants
# All of Triton's launchers are modules of one name, so Python keeps one module, and loading another launcher changes it
# in place. If two threads load at once, both may get the later launcher, which takes another kernel's arguments.
LOADING = threading.Lock()


def compiled(launches: list[Launch], device: torch.device, twins: Callable[[], list[Launch]]) -> list:
    """Return the kernels of launches; compile new ones in parallel, where Triton would compile one after another.

    Compile with them the kernels of `twins`, which later calls will launch.
    """
    variants = [variant(launch, device) for launch in launches]
    kernels = [COMPILED.get(v) for v in variants]
    if None not in kernels:
        return kernels
    wanted = zip(variants, launches, strict=True)
    more = [(variant(x, device), x) for x in twins()]
    new = {v: x for v, x in [*wanted, *more] if v not in COMPILED}

    def compile_new(launch: Launch):
        with torch.cuda.device(device):
            return loaded(compile_launch(launch))

    with ThreadPoolExecutor() as pool:
        COMPILED.update(zip(new, pool.map(compile_new, new.values()), strict=True))
    return [COMPILED[v] for v in variants]


def loaded(kernel):
    """Return the kernel with its launcher.

    Raises:
        triton.runtime.errors.OutOfResources: the kernel does not fit the GPU; Triton raises it once, and gives the
            calls that follow a launcher that raises it.
    """
    with LOADING:
        run = kernel.run  # Triton compiles and loads the launcher here
    if isinstance(run, functools.partial):
        run()
    return kernel


class Program:
    """A plan with its compiled kernels: a function of a call with the plan's signature.

    A program lets go of a tensor after the last step that uses the tensor.
    """

    def __init__(self, plan: Plan, device: torch.device, twins: Callable[[], list[Launch]] = list):
        self.plan, self.device = plan, device
        self.cuda = str(device) if device.type == "cuda" else ""
        self.inputs = len(plan.inputs)
        places = {x.name: i for i, x in enumerate(plan.inputs, 1) if x is not None}
        first = count = self.inputs + 1  # the place of the first tensor that a step makes
        kernels = iter(compiled(plan.launches, device, twins) if self.cuda else ())
        runs, last = [], {}  # last: place of a tensor to the last step that uses it
        for i, step in enumerate(plan.steps):
            if type(step) is Launch:
                used = step.tensors
                runs.append(launcher(step, places, next(kernels, None)))
            else:
                used = [x for x in step.args if type(x) is Spec]
                runs.append(_maker(step, places, device))
                places[step.tensor.name] = count
                count += 1
            for x in used:
                last[places[x.name]] = i
        self.results = [0 if x is None else places[x.name] for x in plan.outputs]
        done = [[] for _ in runs]
        for place, i in last.items():
            if place >= first and place not in self.results:
                done[i].append(place)
        self.steps = list(zip(runs, done, strict=True))

    def __call__(self, call: tuple) -> list[Tensor | None]:
        if self.cuda:
            if torch._C._cuda_getDevice() != self.device.index:
                with torch.cuda.device(self.device):
                    return self(call)
            if not hasattr(THREAD, self.cuda):
                # descriptors need a context; a thread gets its context with its first call of the runtime
                torch.zeros(1, device=self.device)
                setattr(THREAD, self.cuda, True)
        # place 0 stands for tensors that are not given, and holds the stream, which launches read
        values = [torch._C._cuda_getCurrentRawStream(self.device.index) if self.cuda else None, *call[: self.inputs]]
        for step, done in self.steps:
            step(values)
            for place in done:
                values[place] = None
        return [values[place] if place else None for place in self.results]


def _maker(step: Make, places: dict, device: torch.device) -> Callable[[list], None]:
    """Return a function that makes a tensor and appends it to the list of all tensors."""
    function, shape, dtype = step.function, step.tensor.shape, step.tensor.dtype
    if function is None:

        def make(values):
            kind = torch.zeros if step.zero else torch.empty
            values.append(kind(shape, dtype=dtype, device=device))

        return make
    args = [(places[x.name], None) if isinstance(x, Spec) else (None, x) for x in step.args]

    def compute(values):
        arguments = [x if place is None else values[place] for place, x in args]
        values.append(function(*arguments))

    return compute


def launcher(launch: Launch, places: dict, kernel) -> Callable[[list], None]:
    """Return a launch as a function of the list of all tensors; interpret the kernel if it is not compiled."""
    if kernel is None:
        return by_triton(launch, places, functools.partial(launch.kernel[launch.grid], **FUSED, **launch.options))

    def plain():
        return by_triton(launch, places, kernel[(*launch.grid, 1, 1)[:3]])

    return direct(launch, places, kernel, plain) or plain()


def by_triton(launch: Launch, places: dict, run: Callable) -> Callable[[list], None]:
    """Return a launch through `run`, Triton's own launcher, which takes the kernel's arguments."""
    constants = [None if isinstance(x, Spec | Box) else x for x in launch.args]
    tensors = [(i, places[x.name]) for i, x in enumerate(launch.args) if isinstance(x, Spec)]
    boxes = [(i, places[x.tensor.name], x) for i, x in enumerate(launch.args) if isinstance(x, Box)]

    def start(values):
        args = constants.copy()
        for i, place in tensors:
            args[i] = values[place]
        for i, place, box in boxes:
            args[i] = describe(box, values[place])
        run(*args)

    return start


ADDRESSES = 64  # descriptors that a box keeps, one for each address
DIRECT = (3, 6), (3, 9)  # releases of Triton whose C function `direct` calls


class Descriptors:
    """Descriptors of a box as the C function takes them, by address: a descriptor holds an address and no values."""

    def __init__(self, box: Box, meta: dict):
        self.box, self.meta, self.known = box, meta, {}
        self.more = () if release() == (3, 6) else (None,)  # an argument that later releases take

    def of(self, x: Tensor):
        """The descriptor of a tensor."""
        address = x.data_ptr()
        descriptor = self.known.get(address)
        if descriptor is None:
            if len(self.known) >= ADDRESSES:
                self.known.clear()
            # the attributes of a TensorDescriptor that Triton reads, without its constructor's checks
            given = {"base": x, "shape": self.box.shape, "strides": self.box.strides, "padding": "zero"}
            given = SimpleNamespace(**given, round_f32_to_tf32=False)
            descriptor, *_ = nvidia.make_tensordesc_arg(given, self.meta, *self.more)
            self.known[address] = descriptor
        return descriptor


@functools.cache
def c_function(launch: Callable) -> Callable | None:
    """The C function that a kernel's `run.launch` calls; None if there is none.

    For a kernel with descriptors `launch` is a Python function: it makes them and calls the C function, its `launcher`.
    """
    if isinstance(launch, BuiltinFunctionType):
        return launch
    return inspect.getclosurevars(launch).nonlocals.get("launcher")


def direct(launch: Launch, places: dict, kernel, plain: Callable) -> Callable[[list], None] | None:
    """Return a launch through the C function that Triton's launcher calls, in half of the time (lab/calls.md).

    Return None for releases of Triton that are not in DIRECT. While a profiler counts launches, the function that
    `plain` makes launches the kernel.
    """
    run, hooks = kernel.run, triton.knobs.runtime
    if release() not in DIRECT or run.global_scratch_size or run.profile_scratch_size:
        return None
    call, metas = c_function(run.launch), getattr(kernel.metadata, "tensordesc_meta", None) or ()
    if call is None or None in metas or len(metas) != sum(isinstance(x, Box) for x in launch.args):
        return None
    metas, template, tensors, boxes = iter(metas), [], [], []
    for x in launch.args:
        if isinstance(x, Box):  # the C function takes a descriptor, then shape and strides
            boxes.append((len(template), places[x.tensor.name], Descriptors(x, next(metas))))
            template += [None, *x.shape, *x.strides]
        elif isinstance(x, Spec):
            tensors.append((len(template), places[x.name]))
            template.append(None)
        else:
            template.append(x)
    grid, function = (*launch.grid, 1, 1)[:3], kernel.function
    # kinds of launch; the kernel, and three arguments for profilers; scratch memory for the kernel and for a profiler
    kinds, scratch = (run.launch_cooperative_grid, run.launch_pdl), (None, None)
    told = kernel.packed_metadata, None, None, None
    apart = release() == (3, 6)  # later releases take the kernel's arguments as one list, after their types
    fixed = (*scratch, *told) if apart else (*told, *scratch, run.arg_annotations, run.kernel_signature)

    def start(values):
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return plain()(values)
        args = template.copy()
        for i, place in tensors:
            args[i] = values[place].data_ptr()
        for i, place, descriptors in boxes:
            args[i] = descriptors.of(values[place])
        call(*grid, values[0], function, *kinds, *fixed, *(args if apart else (args,)))

    return start


class Planned:
    """A function of tensors that is planned once for each signature.

    Attributes:
        plan: `(hardware, call) -> Plan`, pure; the call has a Spec for each tensor.
        record: the NamedTuple of a call: its tensors, annotated `Tensor` or `Tensor | None`, then its options.
        check: raises an error if an argument does not fit; takes a call with a new signature, and every call where
            `looks_at_values` says so.
        twin: returns a call of tensors of another length, whose kernels are compiled with the first ones.
    """

    def __init__(
        self,
        plan: Callable[..., Plan],
        record: type[NamedTuple],
        check: Callable | None = None,
        twin: Callable | None = None,
    ):
        self.plan, self.record, self.check, self.twin = plan, record, check, twin
        self.kinds = get_type_hints(record)
        self.tensors = sum(kind in (Tensor, Tensor | None) for kind in self.kinds.values())
        self.programs, self.lock = {}, threading.Lock()

    def specs(self, call: NamedTuple) -> NamedTuple:
        """A call as `plan` takes it."""
        names = self.record._fields[: self.tensors]
        return call._replace(**{n: spec_of(n, x) for n, x in zip(names, call, strict=False)})

    def find(self, call: NamedTuple) -> Program:
        """Return the program for a call.

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        n = self.tensors
        try:  # the signature: all properties that decide how a call runs, no values and no addresses
            key = (
                *[
                    x if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16 == 0)
                    for x in call[:n]
                ],
                *call[n:],
            )
            program = self.programs.get(key)
        except (AttributeError, TypeError):  # an argument is no tensor, or an option cannot be a key
            if self.check:
                self.check(call)
            raise
        if self.check and (program is None or looks_at_values(call[0])):
            self.check(call)
        return program or self.remember(key, call)

    def remember(self, key: tuple, call: NamedTuple) -> Program:
        specs, device = self.specs(call), call[0].device
        hardware = hardware_of(device)

        def twins() -> list[Launch]:
            return self.plan(hardware, self.twin(specs)).launches if self.twin else []

        program = Program(self.plan(hardware, specs), device, twins)
        with self.lock:
            while len(self.programs) >= MOST:
                del self.programs[next(iter(self.programs))]
            self.programs[key] = program
        return program

    def __call__(self, call: NamedTuple) -> list[Tensor | None]:
        return self.find(call)(call)


def of_parameters(plan: Callable[..., Plan]) -> Callable[..., list[Tensor | None]]:
    """A planned function of named tensors and options: the parameters of `plan`, annotated as those of a record."""
    _, *names = inspect.signature(plan).parameters
    kinds = get_type_hints(plan)
    record = NamedTuple(plan.__name__, [(name, kinds[name]) for name in names])
    planned = Planned(lambda hardware, call: plan(hardware, *call), record)
    return lambda **given: planned(record(**given))
