"""Plans bound to compiled kernels, and the look-up that finds them again (chapter 14)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType, SimpleNamespace

import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from ..hopper.gluon_names import descriptor
from .hardware import hardware_of
from .plan import Box, Launch, Make, Plan, Spec, spec_of
from .versions import release

MOST = 512  # programs that a function keeps; lengths may change from call to call for ever
# each launch asks for multiply-adds that round once, as all measured kernels have them: Triton 3.9 warns where nobody
# asks, and 3.10 will leave them out there
FUSED = {"enable_fp_fusion": True}
THREAD = threading.local()  # has the names of devices that a thread has worked on


class Mock:
    """As much of a tensor as Triton's compiler asks for."""

    def __init__(self, spec: Spec):
        self.dtype, self.address = spec.dtype, 0 if spec.aligned else 8

    def data_ptr(self) -> int:
        return self.address


def describe(box: Box, base):
    numbers = list(box.shape), list(box.strides), list(box.block)
    return TensorDescriptor(base, *numbers) if box.layout is None else descriptor(base, *numbers, box.layout)


def compile_launch(launch: Launch):
    """The compiled kernel of a launch, for Triton's current target; nothing is launched."""
    args = []
    for x in launch.args:
        if isinstance(x, Box):
            x = describe(x, Mock(x.tensor))
        args.append(Mock(x) if isinstance(x, Spec) else x)
    return launch.kernel.warmup(*args, grid=launch.grid, **FUSED, **launch.options)


def variant(launch: Launch, device: torch.device) -> tuple:
    """What of a launch is compiled into its kernel: for equal variants the compiled kernel is the same.

    Of numbers, Triton compiles in whether they are 1, multiples of 16 and larger than 32 bits; of those that a kernel
    declares `do_not_specialize`, only the last (but never of tuples).
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
    """The places of a kernel's constants, and of its other parameters with whether they are not specialised."""
    places = list(enumerate(kernel.params))
    return (
        [i for i, p in places if p.is_constexpr],
        [(i, p.do_not_specialize) for i, p in places if not p.is_constexpr],
    )


COMPILED: dict[tuple, Callable] = {}  # kernels by their variants
# Python keeps one module for all of Triton's launchers, which bear one name; loading one again changes it in place.
# Two threads that load at once may both get the later one's function, for arguments of another kernel.
LOADING = threading.Lock()


def compiled(launches: list[Launch], device: torch.device, twins: Callable[[], list[Launch]]) -> list:
    """The kernels of launches. Those that are new are compiled side by side: Triton would do it one by one.

    With them `twins`, which later calls will want.
    """
    variants = [variant(launch, device) for launch in launches]
    found = [COMPILED.get(v) for v in variants]
    if None not in found:
        return found
    wanted = zip(variants, launches, strict=True)
    more = [(variant(x, device), x) for x in twins()]
    new = {v: x for v, x in [*wanted, *more] if v not in COMPILED}

    def compile_new(launch: Launch):
        with torch.cuda.device(device):
            kernel = compile_launch(launch)
            with LOADING:
                _ = kernel.run  # its launcher, which Triton compiles and loads as well
            return kernel

    with ThreadPoolExecutor() as pool:
        COMPILED.update(zip(new, pool.map(compile_new, new.values()), strict=True))
    return [COMPILED[v] for v in variants]


class Program:
    """A plan with its kernels, to be called with its inputs.

    Tensors are let go after the last step that has them.
    """

    def __init__(self, plan: Plan, device: torch.device, twins: Callable[[], list[Launch]] = list):
        self.plan, self.device = plan, device
        self.cuda = str(device) if device.type == "cuda" else ""
        places = {x.name: i for i, x in enumerate(plan.inputs, 1) if x is not None}
        first = count = len(plan.inputs) + 1  # the place of the first tensor made
        kernels = iter(compiled(plan.launches, device, twins) if self.cuda else ())
        runs, last = [], {}  # the step that uses a tensor last
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

    def __call__(self, inputs: tuple) -> list[Tensor | None]:
        if self.cuda:
            if torch._C._cuda_getDevice() != self.device.index:
                with torch.cuda.device(self.device):
                    return self(inputs)
            if not hasattr(THREAD, self.cuda):
                # descriptors want a context, which a thread's first work for the runtime gives it
                torch.zeros(1, device=self.device)
                setattr(THREAD, self.cuda, True)
        # in the place of tensors that are not given; those who launch look there for the stream
        values = [torch._C._cuda_getCurrentRawStream(self.device.index) if self.cuda else None, *inputs]
        for step, done in self.steps:
            step(values)
            for place in done:
                values[place] = None
        return [values[place] if place else None for place in self.results]


def _maker(step: Make, places: dict, device: torch.device) -> Callable[[list], None]:
    """Make a tensor, as a function of the list of all tensors, which it adds to."""
    function, shape, dtype = step.function, step.tensor.shape, step.tensor.dtype
    if function is None:

        def make(values):
            kind = torch.zeros if step.zero else torch.empty
            values.append(kind(shape, dtype=dtype, device=device))

        return make
    args = [(places[x.name], None) if isinstance(x, Spec) else (None, x) for x in step.args]

    def compute(values):
        own = [x if place is None else values[place] for place, x in args]
        values.append(function(*own))

    return compute


def launcher(launch: Launch, places: dict, kernel) -> Callable[[list], None]:
    """A launch as a function of the list of all tensors; interpreted where there is no compiled kernel."""
    if kernel is None:
        return by_triton(launch, places, functools.partial(launch.kernel[launch.grid], **FUSED, **launch.options))

    def plain():
        return by_triton(launch, places, kernel[(*launch.grid, 1, 1)[:3]])

    return direct(launch, places, kernel, plain) or plain()


def by_triton(launch: Launch, places: dict, run: Callable) -> Callable[[list], None]:
    """Launch as Triton does; `run` takes the kernel's arguments."""
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


ADDRESSES = 64  # of which a launch keeps descriptors
DIRECT = (3, 6), (3, 9)  # releases of Triton whose C function `direct` calls


def direct(launch: Launch, places: dict, kernel, plain: Callable) -> Callable[[list], None] | None:
    """Launch by the C function that Triton comes to in the end, which saves half of the time (lab/host.md).

    A descriptor says where a tensor is and nothing of what is there, so those of the last addresses are kept. Only
    for versions of Triton that this was read in and measured with: None for any other. Where a profiler counts
    launches, the function that `plain` makes launches instead.
    """
    run, hooks = kernel.run, triton.knobs.runtime
    if release() not in DIRECT or run.global_scratch_size or run.profile_scratch_size:
        return None
    metas = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    template, tensors, boxes = [], [], []
    for x in launch.args:
        kind = type(x)
        if kind is Box:  # the C function takes it, its shape and its strides
            boxes.append((len(template), places[x.tensor.name], x, next(metas, None), {}))
            template += [None, *x.shape, *x.strides]
        elif kind is Spec:
            tensors.append((len(template), places[x.name]))
            template.append(None)
        else:
            template.append(x)
    call = run.launch
    if boxes:  # it is inside a function that makes descriptors
        inside = [cell.cell_contents for cell in call.__closure__ or ()]
        call = next((f for f in inside if isinstance(f, BuiltinFunctionType)), None)
        if call is None or any(meta is None for *_, meta, _ in boxes):
            return None
    grid, function = (*launch.grid, 1, 1)[:3], kernel.function
    # kinds of launch; the kernel; what and who profiles (three); scratch memory for the kernel and for a profiler
    kinds, scratch = (run.launch_cooperative_grid, run.launch_pdl), (None, None)
    told = kernel.packed_metadata, None, None, None
    apart = release() == (3, 6)  # later the kernel's arguments are one, after their types
    fixed = (*scratch, *told) if apart else (*told, *scratch, run.arg_annotations, run.kernel_signature)
    unused = () if apart else (None,)  # make_tensordesc_arg takes one more argument

    def start(values):
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return plain()(values)
        args = template.copy()
        for i, place in tensors:
            args[i] = values[place].data_ptr()
        for i, place, box, meta, known in boxes:
            address = values[place].data_ptr()
            descriptor = known.get(address)
            if descriptor is None:
                if len(known) >= ADDRESSES:
                    known.clear()
                # as much of a TensorDescriptor as is asked for, without the checks of its constructor
                of = {"base": values[place], "shape": box.shape, "strides": box.strides, "padding": "zero"}
                of = SimpleNamespace(**of, round_f32_to_tf32=False)
                descriptor, *_ = nvidia.make_tensordesc_arg(of, meta, *unused)
                known[address] = descriptor
            args[i] = descriptor
        call(*grid, values[0], function, *kinds, *fixed, *(args if apart else (args,)))

    return start


class Planned:
    """A function of tensors that is planned once a signature.

    Attributes:
        plan: `(hardware, *specs, *options) -> Plan`, pure.
        names: of the tensors, which come first among the arguments.
        options: names of the rest.
        check: called with the arguments of a new signature; raises what is wrong with them.
        twin: specs of tensors of another length, whose kernels are to be compiled too.
    """

    def __init__(
        self,
        plan: Callable[..., Plan],
        names: tuple[str, ...],
        options: tuple[str, ...],
        check: Callable | None = None,
        twin: Callable[..., list[Spec | None]] | None = None,
    ):
        self.plan, self.names, self.options = plan, names, options
        self.check, self.twin = check, twin
        self.programs, self.lock = {}, threading.Lock()

    def find(self, args: tuple) -> Program:
        """The program of these arguments.

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        try:
            key = signature(args, len(self.names))
            program = self.programs.get(key)
        except (AttributeError, TypeError):  # no tensor, or an option that is no option
            if self.check:
                self.check(*args)
            raise
        if program is None:
            if self.check:
                self.check(*args)
            program = self.remember(key, args)
        return program

    def remember(self, key: tuple, args: tuple) -> Program:
        tensors, options = args[: len(self.names)], args[len(self.names) :]
        specs, device = list(map(spec_of, self.names, tensors)), tensors[0].device
        hardware = hardware_of(device)

        def twins() -> list[Launch]:
            return self.plan(hardware, *self.twin(*specs), *options).launches if self.twin else []

        program = Program(self.plan(hardware, *specs, *options), device, twins)
        with self.lock:
            while len(self.programs) >= MOST:
                del self.programs[next(iter(self.programs))]
            self.programs[key] = program
        return program

    def __call__(self, *args) -> list[Tensor | None]:
        return self.find(args)(args[: len(self.names)])


def signature(args: tuple, tensors: int) -> tuple:
    """All that decides how a call with these tensors and options runs, to be looked up: no values, no addresses."""
    return (
        *[
            x if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16 == 0)
            for x in args[:tensors]
        ],
        *args[tensors:],
    )
