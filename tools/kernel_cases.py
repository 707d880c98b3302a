"""The calls whose kernels compile_kernels.py compiles: a table of cases, and how each is planned without a GPU."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import torch

from gla_ref.kernels import gla, plan, steps
from gla_ref.kernels.launch.hardware import CLASSES, Hardware
from gla_ref.kernels.launch.plan import Draft, Plan, spec_of
from gla_ref.kernels.launch.program import Planned
from gla_ref.kernels.portable import border
from gla_ref.mechanisms import MECHANISMS, Argument


def both_directions(case: "Case", hardware: Hardware, given: dict) -> list[Plan]:
    """The kernels that you call, forward and backward."""
    given |= {name: x for name in ("path", "kernel") if (x := getattr(case, name))}
    tensors = [given.pop(name) for name in MECHANISMS[case.mechanism].required]
    return [plan(case.mechanism, *tensors, direction=d, hardware=hardware, **given) for d in ("forward", "backward")]


def planned_by(function: Planned, hardware: Hardware, given: dict) -> list[Plan]:
    """One planned function of the fields of a call; None for a field that is not given."""
    call = function.record(**{name: given.get(name) for name in function.record._fields})
    return [function.plan(hardware, function.specs(call))]


def one_token(case: "Case", hardware: Hardware, given: dict) -> list[Plan]:
    """The kernel that decodes."""
    planned = {"gla": steps.gla_forward, "kda": steps.kda_forward}.get(case.mechanism, steps.delta_forward)
    return planned_by(planned, hardware, given)


def frozen_gates(case: "Case", hardware: Hardware, given: dict) -> list[Plan]:
    """The gradient of GLA on Hopper, without that of the gates."""
    options = {"do": given["v"], "path": case.path, "kernel": "hopper", "need_dg": False}
    return planned_by(gla.backward, hardware, given | options)


def borders(case: "Case", hardware: Hardware, given: dict) -> list[Plan]:
    """The maps of a piece, with and without its reads; of a decay, both ways, and the message of eight segments."""
    q, k, v, g, beta = (spec_of(n, given.get(n)) for n in ("q", "k", "v", "g", "beta"))
    if beta:
        calls = (border.Written(q, k, v, g, beta, 1.0, reads) for reads in (True, False))
        return [border.plan_written(hardware, call) for call in calls]
    rows, N, H, K, V = k.shape[3] if len(g.shape) == 4 else 1, 2, *given["initial_state"].shape[1:]
    found = []
    for backwards in (False, True):
        draft = Draft(hardware)
        part, decay = draft.spec("part", 8 * N, H, K, V), draft.spec("rows", 8 * N, H, rows)
        own = border.plan_composed(hardware, part, decay, 8, 1.0, backwards)
        messages = draft.spec("messages", 4, *own.outputs[0].shape)
        shapes = (N, H, rows, 1), (N, H, K, V)
        found += [
            border.plan_added(hardware, border.Added(k, v, g, backwards)),
            own,
            border.plan_entered(hardware, messages, 1, shapes, 1.0, backwards),
        ]
    return found


def of_page(case: "Case", hardware: Hardware, given: dict) -> list[Plan]:
    """The launch of the page's launcher."""
    plan_page = plan_gla_page if case.mechanism == "gla" else plan_delta_page
    return [plan_page(hardware, *(spec_of(n, given[n]) for n in MECHANISMS[case.mechanism].required))]


def plan_gla_page(hardware: Hardware, q, k, v, g) -> Plan:
    """The launch of the page `gla_hopper`, whose launcher needs tensors on a GPU."""
    from gla_ref.kernels.hopper.tiles import box  # not where Gluon is missing
    from gla_ref.pages import gla_hopper as page

    (B, T, H, K), V, C = q.shape, v.shape[3], page.C.value
    draft = Draft(hardware, q, k, v, g)
    o, S = draft.like("o", v), draft.new("S", B, H, K, V)
    boxes = box(q, C, K), box(k, C, K), box(v, C, V), box(g, C, K), box(o, C, V)
    draft.launch(
        page.walk, B * H, *boxes, S, None, T, H, K**-0.5, K, V, 2 if K == 128 else 3, num_warps=K // 16, maxnreg=128
    )
    return draft.plan("page", o, S)


def plan_delta_page(hardware: Hardware, q, k, v, g, beta) -> Plan:
    """The launch of the page `gated_delta_rule_hopper`."""
    from gla_ref.kernels.hopper.tiles import box
    from gla_ref.pages import gated_delta_rule_hopper as page

    (B, T, HV, V), (H, K), C = v.shape, q.shape[2:], page.C.value
    draft = Draft(hardware, q, k, v, g, beta)
    o, S, strong = draft.like("o", v), draft.new("S", B, HV, K, V), draft.new("strong", B * HV, dtype=torch.int32)
    boxes = box(q, C, K), box(k, C, K), box(v, C, V), g, beta, box(o, C, V)
    for exact in (0, 1):
        rest = S, strong, T, HV, HV // H, K**-0.5, 0
        draft.launch(page.walk, B * HV, *boxes, *rest, EXACT=exact, num_warps=8, maxnreg=128)
    return draft.plan("page", o, S)


@dataclass(frozen=True)
class Case:
    """One call: its sizes and dtypes, its options, and how its launches are planned.

    Attributes:
        mechanism: a key of MECHANISMS.
        K, V: channels of a head.
        dtype: the dtype of the tokens.
        gates: the dtype of gates and write strengths; None for that of the tokens.
        planned: `(case, class of GPU, tensors by name) -> plans`.
        T: the number of tokens.
        path: how sequences are walked; None where the mechanism has no such option.
        kernel: the kernel to ask for; None lets the plan choose.
        two_sided: whether there are gates on values too.
        state: whether there is an initial state.
        packed: whether the batch is two packed sequences.
        shared: whether two value heads read each key head.
        few: whether there are so few heads that Hopper's programs are narrow.
    """

    mechanism: str
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    gates: str | None = None
    _: KW_ONLY
    planned: Callable = both_directions
    T: int = 240
    path: str | None = "fused"
    kernel: str | None = None
    two_sided: bool = False
    state: bool = True
    packed: bool = False
    shared: bool = False
    few: bool = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the call by name, without memory."""
        kind, gates = MECHANISMS[self.mechanism], self.gates or self.dtype
        B, H = 1 if self.few or self.packed else 16, 1 if self.few else 16
        sizes = {"B": B, "T": self.T, "H": H, "HV": H * (1 + self.shared), "K": self.K, "V": self.V}
        sizes["N"] = 2 if self.packed else B
        dtypes = {"token": self.dtype, "gate": gates, "strength": gates, "state": "float32"}

        def meta(x: Argument) -> torch.Tensor:
            shape = [sizes[axis] for axis in x.axes.split()]
            return torch.empty(shape, dtype=getattr(torch, dtypes[x.role]), device="meta")

        given = {x.name: meta(x) for x in kind.arguments if self.two_sided or not x.optional}
        if self.packed:
            given["cu_seqlens"] = torch.empty(3, dtype=torch.int32, device="meta")
        if self.state:
            given["initial_state"] = meta(*kind.states)
        return given

    def plans(self, arch: int) -> list[Plan]:
        """The plans of the call for a class of GPU."""
        return self.planned(self, CLASSES[f"sm_{arch}"], self.tensors())


# in every class, each with heads of 64 and of 128 channels and in three dtypes
EVERYWHERE = {
    "softmax_attention": Case("softmax_attention", path=None, state=False),
    "linear_attention": Case("linear_attention"),
    "simple_gla": Case("simple_gla"),
    "gla": Case("gla"),
    "gla g_v": Case("gla", two_sided=True),
    "gla_step": Case("gla", planned=one_token, T=1),
    "gla_border": Case("gla", planned=borders),
    "delta_rule": Case("delta_rule", kernel="portable"),
    "gated_delta_rule": Case("gated_delta_rule", kernel="portable"),
    "gated_delta_rule segmented": Case("gated_delta_rule", kernel="portable", path="segmented"),
    "kda": Case("kda", kernel="portable"),
    "gated_delta_rule_step": Case("gated_delta_rule", planned=one_token, T=1),
    "kda_step": Case("kda", planned=one_token, T=1),
}
CASES = {
    f"{name} {D} {dtype}": replace(case, K=D, V=D, dtype=dtype)
    for name, case in EVERYWHERE.items()
    for D in (64, 128)
    for dtype in ("bfloat16", "float16", "float32")
}
gated = partial(Case, "gated_delta_rule")
hopper = partial(Case, kernel="hopper")
# each Hopper kernel of the delta rules runs them, its name before theirs; the fused one not those in segments
DELTA = {
    "": gated(128, 128, "bfloat16", "float32", shared=True),
    " packed": gated(128, 128, "float16", "float32", packed=True),
    " 64": gated(64, 64, "bfloat16", packed=True),
    " 64/128": gated(64, 128, "bfloat16", "float32"),
    " 128/64": Case("delta_rule", 128, 64, "float16"),
    " no gates": Case("delta_rule", 128, 128, "bfloat16", "float32", packed=True),
}
SEGMENTS = {
    " few": gated(64, 128, "bfloat16", "float32", few=True),
    " segments": gated(128, 128, "bfloat16", "float32", path="segmented", packed=True),
    " segments few": gated(128, 128, "bfloat16", "float32", path="segmented", few=True),
    " segments 64": Case("delta_rule", 64, 64, "bfloat16", "float32", path="segmented"),
    " segments 64/128": gated(64, 128, "float16", "bfloat16", path="segmented", packed=True, few=True),
}
# for sm_90 besides
WIDE = {
    **{f"delta fused{what}": replace(case, kernel="hopper_fused") for what, case in DELTA.items()},
    **{f"delta ahead{what}": replace(case, kernel="hopper_ahead") for what, case in (DELTA | SEGMENTS).items()},
    **{f"delta hopper back{what}": replace(case, kernel="hopper") for what, case in (DELTA | SEGMENTS).items()},
    "softmax wide": Case("softmax_attention", 256, 256, "bfloat16", path=None, state=False),
    "softmax packed": Case("softmax_attention", 128, 64, "bfloat16", path=None, state=False, packed=True),
    "linear wide": Case("linear_attention", 256, 512, "bfloat16"),
    "linear segments": Case("linear_attention", 128, 128, "bfloat16", path="segmented"),
    "linear materialised": Case("linear_attention", 64, 64, "bfloat16", path="materialised"),
    "linear packed": Case("linear_attention", 64, 128, "bfloat16", packed=True),
    "simple wide": Case("simple_gla", 256, 512, "bfloat16", "float32"),
    "simple float32 gates": Case("simple_gla", 128, 128, "bfloat16", "float32"),
    "gla wide": Case("gla", 256, 512, "bfloat16"),
    "gla wide float16": Case("gla", 256, 512, "float16"),
    "gla segments": Case("gla", 64, 128, "bfloat16", path="segmented"),
    "gla packed": Case("gla", 64, 128, "bfloat16", packed=True),
    "gla packed 128": Case("gla", 128, 64, "bfloat16", packed=True),
    "gla float32 gates": Case("gla", 64, 128, "bfloat16", "float32"),
    "gla float32 gates 128": Case("gla", 128, 128, "float16", "float32", packed=True),
    "gla segments 128": Case("gla", 128, 128, "bfloat16", path="segmented"),
    "gla tiles float16": Case("gla", 128, 512, "float16", "bfloat16", packed=True),
    "gla hopper": hopper("gla", 128, 128, "bfloat16"),
    "gla hopper 64": hopper("gla", 64, 64, "bfloat16", path="segmented"),
    "gla hopper 64/128": hopper("gla", 64, 128, "bfloat16", "float16", packed=True),
    "gla hopper 128/64": hopper("gla", 128, 64, "bfloat16", packed=True, path="segmented"),
    "gla hopper float32 gates": hopper("gla", 128, 128, "bfloat16", "float32"),
    "gla hopper float32 gates 64": hopper("gla", 64, 64, "float16", "float32", packed=True, path="segmented"),
    "gla hopper frozen gates": Case("gla", 128, 128, "bfloat16", planned=frozen_gates),  # a gradient without dg
    "gla hopper frozen gates 64": Case("gla", 64, 64, "bfloat16", planned=frozen_gates, packed=True),
    "gla hopper plain": hopper("gla", 128, 128, "bfloat16", state=False),  # launches the page
    "gla hopper plain 64": hopper("gla", 64, 64, "bfloat16", state=False),
    "gla hopper plain 64/128": hopper("gla", 64, 128, "bfloat16", state=False),
    "gla hopper plain 128/64": hopper("gla", 128, 64, "bfloat16", state=False),
    "gla hopper page": Case("gla", 128, 128, "bfloat16", planned=of_page),
    "gla hopper page 64": Case("gla", 64, 64, "bfloat16", planned=of_page),
    "delta hopper page": gated(128, 128, "bfloat16", "float32", planned=of_page, shared=True),
    "kda hopper": hopper("kda", 128, 128, "bfloat16", "float32", shared=True),
    "kda hopper packed": hopper("kda", 128, 128, "bfloat16", packed=True),
    "kda hopper segments": hopper("kda", 64, 64, "bfloat16", path="segmented"),
    "kda hopper 64/128": hopper("kda", 64, 128, "bfloat16", "float32", packed=True),
    "kda hopper 128/64": hopper("kda", 128, 64, "bfloat16", "float16"),
    "kda wide": Case("kda", 256, 512, "bfloat16", "float32", kernel="portable"),
    "kda wide float16": Case("kda", 256, 256, "float16", kernel="portable", packed=True),
    "kda packed": Case("kda", 128, 64, "bfloat16", kernel="portable", packed=True, path="segmented", shared=True),
    "gla float32 g_v": Case("gla", 64, 128, "float32", two_sided=True),
    "border wide": Case("gla", 256, 512, "bfloat16", planned=borders),
    "border simple": Case("simple_gla", 128, 128, "bfloat16", "float32", planned=borders),
    "border delta": gated(128, 128, "bfloat16", "float32", planned=borders),
    "border delta shared": gated(64, 256, "float16", "float32", planned=borders, shared=True),
    "border kda": Case("kda", 128, 128, "bfloat16", "float32", planned=borders),
    "border kda shared": Case("kda", 64, 256, "float16", "float32", planned=borders, shared=True),
    "delta wide": gated(256, 512, "bfloat16", "float32", kernel="portable"),
    "delta wide float16": Case("delta_rule", 256, 256, "float16", kernel="portable"),
    "delta wide segments": gated(256, 256, "bfloat16", "float32", kernel="portable", path="segmented"),
    "delta packed": gated(128, 64, "bfloat16", kernel="portable", packed=True, path="segmented"),
    "delta shared heads": gated(128, 128, "bfloat16", "float32", kernel="portable", shared=True),
    # rows that are no multiples of 16 bytes, which Triton does not prefetch
    "delta odd values": Case("delta_rule", 40, 36, "bfloat16", few=True),
    "delta odd values packed": gated(72, 100, "float16", packed=True),
    "delta odd": gated(60, 60, "bfloat16", "float32", few=True),
    "gla odd": Case("gla", 60, 100, "bfloat16", few=True),
    "step wide": Case("gla", 256, 512, "bfloat16", "float32", planned=one_token, T=1, two_sided=True, packed=True),
}
