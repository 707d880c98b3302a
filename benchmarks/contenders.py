"""The functions that are measured, by mechanism: ours, our pages, and peers (other libraries' functions).

A contender gets the case and its tensors and returns o, differentiable by autograd::

    @contender("linear_attention", peer=True)
    def fla_chunk(case, q, k, v, **_):
        ...
        return o

Imports stand inside the functions, so that a peer that is not installed is recorded as refusing, with its message.
Tensors come by name, as `gla_ref.mechanisms` has names and axes, and when packed, with cu_seqlens. First the ways to
register one, then each mechanism's.
"""

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch

from gla_ref.kernels.launch.hardware import CLASSES


@dataclass(frozen=True)
class Contender:
    """A function that is measured, the cases that it is for, and what it may do in them."""

    name: str
    call: Callable
    peer: bool = False  # another library's: its first call may search, and its errors are recorded without a trace
    directions: tuple[str, ...] = ("forward", "backward")
    packed: bool | None = None  # True: packed cases only, False: never packed, None: both
    limit_s: float = 60.0  # the first call's; a peer that autotunes may be given more
    named: bool = False  # only for cases that name it in `only`
    takes: Callable = lambda case: True  # whether it is for a case
    entry: str | None = None  # its name in gla_ref.FORMS, if a plan chooses its kernels
    options: dict = field(default_factory=dict)  # the entry's options


CONTENDERS: dict[str, list[Contender]] = {}


def contender(*mechanisms: str, name: str | None = None, **fields) -> Callable:
    """Register the decorated function for these mechanisms, under its own name unless one is given."""

    def register(call: Callable) -> Callable:
        for mechanism in mechanisms:
            CONTENDERS.setdefault(mechanism, []).append(Contender(name or call.__name__, call, **fields))
        return call

    return register


def form(mechanism: str, entry: str, **chosen) -> Callable:
    """A contender's body from an entry of gla_ref.FORMS."""

    def call(case, cu_seqlens=None, **tensors):
        from gla_ref import FORMS

        return FORMS[mechanism][entry](**tensors, cu_seqlens=cu_seqlens, **chosen)[0]

    return call


def function(module: str, name: str, **chosen) -> Callable:
    """A contender's body that calls a function of a module, which is imported then; of its results, o."""

    def call(case, **tensors):
        returned = getattr(importlib.import_module(module), name)(**tensors, **chosen)
        return returned[0] if isinstance(returned, tuple) else returned

    return call


def ours(mechanism: str, entry: str, **fields) -> None:
    """Register an entry of gla_ref.FORMS under its own name."""
    contender(mechanism, name=entry, entry=entry, **fields)(form(mechanism, entry))


def ours_with(mechanism: str, option: str, *values: str) -> None:
    """Register the kernel that "triton" plans for each value of an option, as triton_VALUE."""
    for value in values:
        options = {option: value}
        call = form(mechanism, "triton", **options)
        contender(mechanism, name=f"triton_{value}", named=True, entry="triton", options=options)(call)


def looped(mechanism: str, name: str, call: Callable, **fields) -> None:
    """Register what serving code without packing does: one call a sequence."""

    def loop(case, cu_seqlens=None, **tensors):
        # known on the host: the loop itself waits for nothing
        pieces = zip(*(x.split(case.lengths, 1) for x in tensors.values()), strict=True)
        return torch.cat([call(case, **dict(zip(tensors, piece, strict=True))) for piece in pieces], 1)

    contender(mechanism, name=name, packed=True, **fields)(loop)


def fits(gates=(None, "logsigmoid/16"), columns=0, few=False, sizes=(16, 32, 64, 128), hopper=False) -> Callable:
    """Whether a case is for a page, of `hopper` or another.

    A page whose programs own `columns` of a head's state is for enough heads, or for `few`: for fewer programs than
    two for each three of an H200's multiprocessors.
    """

    def takes(case) -> bool:
        if columns and (3 * -(-case.V // columns) * case.H * case.B < 2 * CLASSES["sm_90"].multiprocessors) != few:
            return False
        if hopper and (case.decode or case.dtype != "bfloat16"):
            return False
        return case.K in sizes and case.V in sizes and case.gates in gates and not case.state

    return takes


def page(mechanism: str, where: str, name: str = "page", **cases) -> None:
    """Register the forward page `MODULE.FUNCTION` of gla_ref.pages for the cases that it `fits`."""
    call = function(*f"gla_ref.pages.{where}".rsplit(".", 1))
    contender(mechanism, name=name, packed=False, directions=("forward",), takes=fits(**cases))(call)


# softmax attention

ours("softmax_attention", "triton")
looped("softmax_attention", "triton_loop", form("softmax_attention", "triton"))


def sdpa(backend: str) -> Callable:
    def call(case, q, k, v, **_):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            heads = (x.transpose(1, 2) for x in (q, k, v))
            o = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return o.transpose(1, 2)

    return call


contender("softmax_attention", name="sdpa_flash", peer=True, packed=False)(sdpa("FLASH_ATTENTION"))
contender("softmax_attention", name="sdpa_cudnn", peer=True, packed=False)(sdpa("CUDNN_ATTENTION"))
looped("softmax_attention", "sdpa_flash_loop", sdpa("FLASH_ATTENTION"), peer=True)


page("softmax_attention", "flash_attention.flash_attention")


# linear attention

ours("linear_attention", "triton")
ours("linear_attention", "triton_materialised", packed=False)
looped("linear_attention", "triton_loop", form("linear_attention", "triton"))
ours_with("linear_attention", "path", "fused", "segmented")
ours("simple_gla", "triton")


for op in ("chunk_linear_attn", "fused_chunk_linear_attn"):
    fla_linear = contender("linear_attention", name=f"fla_{op}", peer=True, limit_s=120)
    fla_linear(function("fla.ops.linear_attn", op, normalize=False))
fla_simple = contender("simple_gla", name="fla_chunk_simple_gla", peer=True, limit_s=120)
fla_simple(function("fla.ops.simple_gla", "chunk_simple_gla"))


@contender("linear_attention", "simple_gla", peer=True, packed=False)
def torch_chunkwise(case, q, k, v, g=None, **_):
    """Plain PyTorch: all chunks' own products at once, then a loop over their states."""
    C, scale = 64, case.K**-0.5
    B, T, H, K = q.shape
    N = -(-T // C)

    def chunks(x):
        x = torch.nn.functional.pad(x, (0,) * (2 * (x.ndim - 2)) + (0, N * C - T))
        return x.unflatten(1, (N, C)).movedim(3, 1)  # [B, H, N, C, ...]

    q, k, v = chunks(q), chunks(k), chunks(v)
    b = chunks(g.float()).cumsum(-1) if g is not None else q.new_zeros(B, H, N, C).float()
    decay = (b[..., :, None] - b[..., None, :]).tril().exp().tril()
    intra = (scale * (q @ k.mT) * decay).to(v.dtype) @ v
    last = b[..., -1:]
    kv = (k * (last - b).exp()[..., None].to(k.dtype)).mT @ v  # [B, H, N, K, V]
    S, states = torch.zeros_like(kv[:, :, 0]), []
    for n in range(N):
        states.append(S)
        S = S * last[:, :, n, :, None].exp().to(S.dtype) + kv[:, :, n]
    inter = scale * (q * b.exp()[..., None].to(q.dtype)) @ torch.stack(states, 2)
    return (intra + inter).movedim(1, 3).flatten(1, 2)[:, :T]


page("linear_attention", "linear_attention.linear_attention", columns=128)
page("linear_attention", "linear_attention_segments.linear_attention", name="page_segments", columns=128, few=True)


# gated linear attention

ours("gla", "triton")
ours_with("gla", "kernel", "portable", "hopper")


chunk_fuse = function("gla_ref.kernels.exhibits.gla_chunk_fuse", "gla_chunk_fuse")
contender("gla", name="gla_chunk_fuse", packed=False, directions=("forward",), named=True)(chunk_fuse)


class Pages(torch.autograd.Function):
    """The page of the forward pass and, for its gradient, the other one."""

    @staticmethod
    def forward(ctx, q, k, v, g):
        from gla_ref.pages.gla import gla

        ctx.save_for_backward(q, k, v, g)
        return gla(q, k, v, g)[0]

    @staticmethod
    def backward(ctx, do):
        from gla_ref.pages.gla_gradient import gla_gradient

        do.new_zeros(1)  # autograd's own thread must have used the GPU before descriptors can
        return gla_gradient(*ctx.saved_tensors, do)


@contender("gla", name="page", packed=False, takes=fits(columns=64))
def gla_page(case, q, k, v, g, **_):
    return Pages.apply(q, k, v, g)


page("gla", "gla_levels.gla", name="page_levels", gates=("logsigmoid/16", "-2", "1 % at -1e3"), columns=64)
page("gla", "gla_hopper.gla", name="page_hopper", gates=("logsigmoid/16",), sizes=(64, 128), hopper=True)
# its first call autotunes, for one to two minutes each way
contender("gla", name="fla_chunk_gla", peer=True, limit_s=200)(function("fla.ops.gla", "chunk_gla"))


def stepped(step: Callable) -> Callable:
    """A contender that decodes: one call a token, each with the state of the one before."""

    def call(case, **tensors):
        tensors = {n: tensors[n] for n in case.given}  # without boundaries
        heads = tensors["v"].shape[2]
        S = tensors["q"].new_zeros(case.B, heads, case.K, case.V, dtype=torch.float32)
        o = []
        for t in range(case.T):
            o_t, S = step(**{n: x[:, t : t + 1] for n, x in tensors.items()}, initial_state=S)
            o.append(o_t)
        return torch.cat(o, 1)

    return call


def our_step(mechanism: str) -> Callable:
    """One token of `triton_recurrent`."""

    def step(**tensors):
        from gla_ref import FORMS

        return FORMS[mechanism]["triton_recurrent"](**tensors)

    return step


def their_step(module: str, name: str, **names: str) -> Callable:
    """One token of a function of fla, with its names for ours where they differ."""

    def step(**tensors):
        own = getattr(importlib.import_module(module), name)
        return own(**{names.get(n, n): x for n, x in tensors.items()}, output_final_state=True)

    return step


def page_step(q, k, v, g, initial_state):
    from gla_ref.pages.gla_step import gla_step

    o, S = gla_step(*(x[:, 0] for x in (q, k, v, g)), initial_state)
    return o[:, None], S


STEPS = {  # by mechanism, besides our own: contender, function, whether it is a peer
    "gla": (
        ("page_recurrent", page_step, False),
        ("fla_fused_recurrent", their_step("fla.ops.gla", "fused_recurrent_gla", g="gk"), True),
    ),
    "gated_delta_rule": (
        ("fla_fused_recurrent", their_step("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"), True),
    ),
    "kda": (("fla_fused_recurrent", their_step("fla.ops.kda", "fused_recurrent_kda"), True),),
}
for mechanism, steps in STEPS.items():
    for name, step, is_peer in (("triton_recurrent", our_step(mechanism), False), *steps):
        contender(mechanism, name=f"{name}_steps", peer=is_peer, directions=("forward",), packed=False, named=True)(
            stepped(step)
        )


# the delta rules


def by_triton(call: Callable) -> Callable:
    """A call of fla that its own Triton kernels serve, where it would hand it to others if they are installed."""

    def alone(case, **tensors):
        with mock.patch.dict(os.environ, FLA_FLASH_QLA="0", FLA_TILELANG="0", FLA_FLASH_KDA="0"):
            return call(case, **tensors)

    return alone


DELTA_KERNELS = ("portable", "hopper_fused", "hopper_ahead")
for mechanism, module, op, kernels, options in (
    ("delta_rule", "fla.ops.delta_rule", "chunk_delta_rule", DELTA_KERNELS, {}),
    ("gated_delta_rule", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", DELTA_KERNELS, {}),
    ("kda", "fla.ops.kda", "chunk_kda", ("portable", "hopper"), {"safe_gate": True}),  # gates in [-5, 0]
):
    ours(mechanism, "triton")
    ours_with(mechanism, "kernel", *kernels)
    contender(mechanism, name=f"fla_{op}", peer=True, limit_s=200)(by_triton(function(module, op, **options)))
page("gated_delta_rule", "gated_delta_rule.gated_delta_rule")
page("gated_delta_rule", "gated_delta_rule_hopper.gated_delta_rule", name="page_hopper", sizes=(128,), hopper=True)


@contender("gated_delta_rule", peer=True, limit_s=200)
def flash_qla(case, g, **tensors):
    """FlashQLA, which fla calls where it is installed; its gradient takes gates in float32 only."""
    return function("flash_qla", "chunk_gated_delta_rule")(case, g=g.float(), **tensors)


@functools.lru_cache(maxsize=8)  # as many as there are sets of inputs; not timed, since a model makes its gates so
def factors(g, beta, ends: int) -> tuple:
    """g and beta as FlashInfer takes them, in float32: a gate is a factor, and the ends of packed sequences."""
    return g.float().exp().flatten(0, 1), beta.float().flatten(0, 1), torch.arange(ends, device=g.device) * g.shape[1]


@contender("gated_delta_rule", peer=True, packed=False, directions=("forward",), limit_s=400)
def flashinfer_gdn(case, q, k, v, g, beta, **_):
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    alpha, beta, ends = factors(g, beta, case.B + 1)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return chunk_gated_delta_rule(*flat, alpha, beta, cu_seqlens=ends).unflatten(0, (case.B, case.T))


page("kda", "kda.kda", gates=("weak", "middle", "strong", "trained", "copies"))


def cudnn_kda(case, q, k, v, g, beta, **_):
    """NVIDIA's kernel, which begins pieces of a text from an empty state where gates are strong in every channel."""
    from cudnn.linear_attention import kimi_delta_attention

    ends = case.T * torch.arange(case.B + 1, dtype=torch.int32, device=q.device)
    flat = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    o, _ = kimi_delta_attention(*flat, ends, scale=case.K**-0.5, output_final_state=False)
    return o.unflatten(0, (case.B, case.T))


def cudnn_kda_uncut(case, **tensors):
    """The same kernel with one piece a text: nothing is dropped."""
    from cudnn.linear_attention.hopper import cuda_host

    with mock.patch.object(cuda_host, "TARGET_CTAS", 1):
        return cudnn_kda(case, **tensors)


contender("kda", name="cudnn_kda", peer=True, packed=False, limit_s=200)(cudnn_kda)
contender("kda", name="cudnn_kda_uncut", peer=True, packed=False, directions=("forward",), limit_s=200)(cudnn_kda_uncut)
