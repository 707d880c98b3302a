"""Each room: a bug, the test that it passed, and the cases that catch it (appendix "Bugs that shipped")."""

from collections.abc import Callable
from dataclasses import dataclass

from ... import linear_attention
from .._cases import Case
from ..mistakes import _shipped as bugs
from ..mistakes._shipped import C, chunked, right


@dataclass(frozen=True)
class Ordinary:
    """A test that a wrong kernel passes: one problem, against the recurrence, within one tolerance.

    Attributes:
        case: the problem.
        only: the quantities that it compares; all if empty.
        fn: how the test calls the kernel, if not under the contract.
        reference: what the test compares with, if not the recurrence.
    """

    case: Case
    only: tuple[str, ...] = ()
    fn: Callable | None = None
    reference: Callable | None = None


@dataclass(frozen=True)
class Room:
    """A bug that a public library shipped.

    Attributes:
        number: of the room.
        title: of its story.
        mechanism: a key of `gla_ref.check.MECHANISMS`.
        fn: the bug made again, a kernel under the contract of that mechanism.
        step: the function that contains the wrong line.
        name: the diagnosis that the kit must give.
        cases: the cases of the quick level that are run; at least one fails.
        shown: the case and the quantity of its picture.
        test: an ordinary test that the kernel passes.
    """

    number: int
    title: str
    mechanism: str
    fn: Callable
    step: Callable
    name: str
    cases: tuple[str, ...]
    shown: tuple[str, str]
    test: Ordinary


SIZES = {"B": 2, "H": 4, "K": 32, "V": 32}

ROOMS = (
    Room(
        1,
        "The model that found the bug in its own attention",
        "simple_gla",
        chunked(keys=bugs.decay_along_channels),
        bugs.decay_along_channels,
        "writes' decay laid along channels",
        ("length 1", "length 7", "length 145"),
        ("length 145", "o"),
        Ordinary(Case(T=C, **SIZES), only=("o",)),
    ),
    Room(
        2,
        "Square, so nobody noticed it was on its side",
        "gla",
        chunked(read=bugs.read_on_its_side),
        bugs.read_on_its_side,
        "states read as V x K, carried right",
        ("square", "no initial state"),
        ("no initial state", "o"),
        Ordinary(Case(T=C, state=False, **SIZES)),
    ),
    Room(
        3,
        "The defendant was also on the jury",
        "linear_attention",
        bugs.times_the_right_sum,
        bugs.sum_of_keys,
        "normaliser summed over heads instead of time",
        ("length 7", "length 65"),
        ("length 65", "o"),
        Ordinary(
            Case(T=100, state=False, **SIZES),
            fn=bugs.normalised(right),
            reference=bugs.normalised(linear_attention.recurrent),
        ),
    ),
    Room(
        4,
        "Zero is not nothing",
        "simple_gla",
        chunked(pairs=bugs.rows_that_fill_up),
        bugs.rows_that_fill_up,
        "rows that fill up a chunk have a decay",
        ("gate -0.2", "gate -1e3"),
        ("gate -1e3", "dk"),
        Ordinary(Case(T=2 * C, gate="-20", **SIZES)),
    ),
    Room(
        5,
        "The bug that wins the benchmark",
        "softmax_attention",
        bugs.mask_for_groups_of_4,
        bugs.mask_for_groups_of_4,
        "mask for groups of 4",
        ("length 1", "length 65"),
        ("length 65", "o"),
        Ordinary(Case(T=1, past=100, **SIZES)),
    ),
    Room(
        6,
        "A gate of exactly one erases everything",
        "gla",
        chunked(pairs=bugs.one_taken_for_zero),
        bugs.one_taken_for_zero,
        "decay of 1 taken for 0",
        ("gate zero", "gate -1"),
        ("gate zero", "o"),
        Ordinary(Case(T=4 * C, **SIZES)),
    ),
    Room(
        7,
        "Fixed once, copied for twenty months",
        "gla",
        chunked(carry=bugs.summed_over_the_wrong_axis),
        bugs.summed_over_the_wrong_axis,
        "chunk states summed over the wrong axis",
        ("length 1", "length 145"),
        ("length 145", "o"),
        Ordinary(Case(T=C, state=False, **SIZES)),
    ),
    Room(
        8,
        "One is none",
        "gla",
        chunked(seen=bugs.one_is_none),
        bugs.one_is_none,
        "the first chunk does not read the initial state, only where there is one sequence",
        ("square", "one packed sequence"),
        ("one packed sequence", "o"),
        Ordinary(Case(T=2 * C + 9, **SIZES)),
    ),
    Room(
        9,
        "Your neighbour's forgetting",
        "gla",
        chunked(begin=bugs.decayed_by_a_neighbour),
        bugs.decayed_by_a_neighbour,
        "decays counted from the chunk's start, not the sequence's",
        ("packed with other boundaries", "packed"),
        ("packed", "o"),
        Ordinary(Case(T=4 * C, ends=(0, C, 3 * C, 4 * C), **SIZES | {"B": 1})),
    ),
    Room(
        10,
        "The snapshot of somebody else",
        "gla",
        bugs.snapshot_of_somebody_else,
        bugs.snapshot_of_somebody_else,
        "state from the pack's chunk grid",
        ("length 7", "packed"),
        ("packed", "S"),
        Ordinary(Case(T=200, ends=(0, 200), **SIZES | {"B": 1})),
    ),
    Room(
        11,
        "The log said the fix was applied",
        "gated_delta_rule",
        bugs.only_the_convolution_is_told,
        bugs.only_the_convolution_is_told,
        "packed sequences leak into each other",
        ("one packed sequence", "packed with other boundaries"),
        ("packed with other boundaries", "o"),
        Ordinary(
            Case(T=200, ends=(0, 200), state=False, loss="o", **SIZES | {"B": 1}),
            only=("o", "dq", "dk", "dv", "dg", "dbeta"),
        ),
    ),
    Room(
        12,
        "The logarithm that wanted to be a power",
        "simple_gla",
        bugs.wrong_where_packed,
        bugs.logarithm_for_the_power,
        "dk with the log decay for the decay",
        ("length 7", "one packed sequence"),
        ("one packed sequence", "dk"),
        Ordinary(Case(T=200, **SIZES)),
    ),
    Room(
        13,
        "The test that took the strong gates out",
        "gla",
        chunked(pairs=bugs.anchor_one_token_late),
        bugs.anchor_one_token_late,
        "anchor of a sub-chunk one token late: it overflows",
        ("gate -20", "gate -1e3"),
        ("gate -1e3", "o"),
        Ordinary(Case(T=100, gate="-64", **SIZES)),
    ),
    Room(
        14,
        "Identical is fine, similar is fatal",
        "kda",
        chunked(inverse=bugs.doubled_in_float16, C=16),
        bugs.doubled_in_float16,
        "triangle inverted by doubling with operands in float16",
        ("length 7", "keys alike 0.99", "keys alike, strengths up to 2"),
        ("keys alike, strengths up to 2", "o"),
        Ordinary(Case(T=100, gate="zero", alike=1.0, beta=1.0, **SIZES), only=("o", "S")),
    ),
    Room(
        15,
        "It wanted α and got its logarithm",
        "gla",
        bugs.takes_alpha,
        bugs.takes_alpha,
        "log gate taken for alpha",
        ("length 1", "length 7"),
        ("length 7", "o"),
        Ordinary(Case(T=100, **SIZES), fn=lambda q, k, v, g, **options: bugs.takes_alpha(q, k, v, g.exp(), **options)),
    ),
    Room(
        16,
        "WXYZ WXYZ is not WWXX",
        "gated_delta_rule",
        chunked(grouped=bugs.tiled),
        bugs.tiled,
        "value heads grouped wrongly: h reads key head h mod H",
        ("value heads of one key head", "value heads"),
        ("value heads", "o"),
        Ordinary(Case(T=200, groups=4, **SIZES | {"H": 1})),
    ),
    Room(
        17,
        "The formula in the paper",
        "gated_delta_rule",
        chunked(pairs=bugs.causal_mask_alone),
        bugs.causal_mask_alone,
        "Gamma left out of the scores: pairs not decayed",
        ("gate zero", "gate -1"),
        ("gate -1", "o"),
        Ordinary(Case(T=200, gate="zero", **SIZES), only=("o", "S", "dq", "dk", "dv", "dbeta")),
    ),
    Room(
        18,
        "All heads took head 0's watch over the border",
        "gla",
        bugs.gates_of_head_0_go_back,
        bugs.gates_of_head_0_go_back,
        "gate of head 0 shared by all heads, where the gradient of the state crosses the border between two ranks",
        ("length 1", "length 7"),
        ("length 7", "dk"),
        Ordinary(Case(T=2 * C, **SIZES | {"H": 1})),
    ),
    Room(
        19,
        "The bound that forgot to rotate",
        "kda",
        bugs.pieces_from_zero,
        bugs.start_of,
        "state dropped where gates are strong",
        ("length 65", "gate -1", "hand-over"),
        ("hand-over", "o"),
        Ordinary(Case(T=4 * C, gate="-1", **SIZES)),
    ),
)
