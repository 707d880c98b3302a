"""The tensors of each mechanism as data: their names, axes and roles (chapters 1 to 25).

References, kernels, the check kit, other libraries' names and the tests all read them here. A new mechanism is one more
entry, and one in each table of functions: FORMS, PLANNERS of the kernels, MECHANISMS of the kit, maps of over_ranks.
"""

from typing import NamedTuple

__all__ = ["MECHANISMS", "Argument", "Mechanism"]


class Argument(NamedTuple):
    """One tensor: its name, its axes (a word each, as in `B T H K`, of one size throughout a call), its role.

    A role is "token" (q, k, v and what has their dtype), "gate" (log gates in [-inf, 0]), "strength" (of writing, in
    [0, 2]) or "state" (what is handed from call to call, at least in float32; a cache has the tokens' dtype). What is
    optional is given by keyword or not at all.
    """

    name: str
    axes: str
    role: str
    optional: bool = False


class Mechanism(NamedTuple):
    """The arguments of a mechanism (tokens, gates, strengths, in the order of its functions) and its states.

    Several states are a tuple, as `initial_state` is then. In each pair of `multiples` the first axis is a multiple of
    the second: value heads of key heads.
    """

    arguments: tuple[Argument, ...]
    states: tuple[Argument, ...]
    multiples: tuple[tuple[str, str], ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the arguments of every call, in order."""
        return tuple(x.name for x in self.arguments if not x.optional)

    def named(self, role: str, optional: bool = True) -> tuple[str, ...]:
        """Names of the arguments with a role; without `optional`, only of arguments of every call."""
        return tuple(x.name for x in self.arguments if x.role == role and optional >= x.optional)


def _tokens(heads: str = "H") -> tuple[Argument, ...]:
    axes = {"q": "B T H K", "k": "B T H K", "v": f"B T {heads} V"}
    return tuple(Argument(name, a, "token") for name, a in axes.items())


STATE = (Argument("S", "N H K V", "state"),)
CACHE = (Argument("k_cache", "B T0 H K", "state"), Argument("v_cache", "B T0 H V", "state"))

BETA = Argument("beta", "B T HV", "strength")
WIDE_STATE = (Argument("S", "N HV K V", "state"),)
VALUE_HEADS = (("HV", "H"),)

MECHANISMS = {
    "softmax_attention": Mechanism(_tokens(), CACHE),
    "linear_attention": Mechanism(_tokens(), STATE),
    "simple_gla": Mechanism((*_tokens(), Argument("g", "B T H", "gate")), STATE),
    "gla": Mechanism(
        (*_tokens(), Argument("g", "B T H K", "gate"), Argument("g_v", "B T H V", "gate", optional=True)), STATE
    ),
    "delta_rule": Mechanism((*_tokens("HV"), BETA), WIDE_STATE, VALUE_HEADS),
    "gated_delta_rule": Mechanism((*_tokens("HV"), Argument("g", "B T HV", "gate"), BETA), WIDE_STATE, VALUE_HEADS),
    "kda": Mechanism((*_tokens("HV"), Argument("g", "B T HV K", "gate"), BETA), WIDE_STATE, VALUE_HEADS),
}
