"""Judges of the exercises on gradients of gates: the closed form, and how it is summed (chapter 15)."""

from torch.nn import functional as F

from ... import simple_gla
from ...gradients.gla import backward
from . import Wrong, exercise
from ._compare import call, close, draw, hold, locate, results, reverse_sum
from ._predict import ask, numbers


@exercise("ex-gradients-first", "derive")
def first(answer):
    mistakes = {
        "Summed over the rows, which have a gate each; sum over the columns, V.": lambda S, dS: (S * dS).sum(-2),
        "Sum over the columns: all of a row share its gate.": lambda S, dS: S * dS,
        "Summed over everything: each row has a gate of its own.": lambda S, dS: (S * dS).sum(),
        "S_0 is missing: its gradient alone is no path.": lambda S, dS: dS.sum(-1),
        "The sign: a larger gate lets more of S_0 through.": lambda S, dS: -(S * dS).sum(-1),
        "It is 0 only without S_0: paths that begin there cross token 1.": lambda S, dS: 0 * S.sum(-1),
    }
    key, value, state = (1, 5, 2, 3), (1, 5, 2, 4), (1, 2, 3, 4)
    q, k, g, v, do, S_0, D = draw(9, key, key, key, value, value, state, state)
    found = backward(q, k, v, -g.abs(), do, D, initial_state=S_0)
    case = S_0, found.d_initial_state
    hold(answer, [case], lambda *_: found.dg[:, 0], mistakes, {"dg_1": "B H K"})


@ask("ex-gradients-stored")
def stored():
    q, k, v, do, noise = draw(11, *5 * [(1, 512, 1, 8)])
    found = backward(q, k, v, F.logsigmoid(noise) / 16, do)
    dq, dk = (x.bfloat16().double() for x in (found.dq, found.dk))
    off = reverse_sum(q * dq - k * dk, 1) - found.dg
    share = (off.square().mean() / found.dg.square().mean()).sqrt().item()
    mistakes = [
        (
            "much smaller",
            "The terms stay the rounded ones, however exact the sum: stored and summed this way, "
            f"dg is off by {share:.1%} at T = 512 already.",
        ),
        ("much larger", "Each number is rounded once, as each operand of a product is."),
    ]
    hint = 'Expected one of "much smaller", "about as large" and "much larger".'
    options = ["much smaller", "about as large", "much larger"]
    return numbers("The error is", "about as large", mistakes, hint, options=options)


def _sums(terms, end, read, wrote):
    """Mistakes in a gate's gradient: the sum of `terms` from its token on, and `end`, the final state's part."""
    return {
        "The sum runs from the start; paths that cross a gate end at t or later.": (
            lambda *x: terms(*x).cumsum(1) + end(*x)
        ),
        "Token t's own term, i = t, is missing.": (lambda *x: reverse_sum(terms(*x), 1) - terms(*x) + end(*x)),
        "The sum over the later tokens is missing.": lambda *x: terms(*x) + end(*x),
        f"The sign: {read} counts paths, and {wrote} takes away those that do not cross t.": (
            lambda *x: end(*x) - reverse_sum(terms(*x), 1)
        ),
    }


@exercise("ex-gradients-scalar", "implement")
def scalar(answer):
    def channels(q, k, dq, dk, S, D):
        return reverse_sum(q * dq - k * dk, 1) + (S * D).sum(-1)[:, None]

    def terms(q, k, dq, dk, S, D):
        return (q * dq - k * dk).sum(-1)

    def end(q, k, dq, dk, S, D):
        return (S * D).sum((-2, -1))[:, None]

    mistakes = {
        "There is one gate for all channels: its gradient is the sum over them.": channels,
        **_sums(terms, end, "q dq", "k dk"),
        "The final state is missing: it adds the sum of S_T * D.": (lambda *x: reverse_sum(terms(*x), 1)),
    }
    key, value, state = (2, 6, 2, 3), (2, 6, 2, 4), (2, 2, 3, 4)
    q, k, noise, v, do, S_0, D = draw(12, key, key, key, value, value, state, state)
    g = -noise[..., 0].abs()
    _, S_T = simple_gla.recurrent(q, k, v, g, initial_state=S_0)
    wide = g[..., None].expand(key)  # the same gate for all channels: their gradients add up
    dq, dk, _, dg, *_ = backward(q, k, v, wide, do, D, initial_state=S_0)
    case = q, k, dq, dk, S_T, D
    hold(answer, [case], lambda *_: dg.sum(-1), mistakes, {"dg": "B T H"})


@ask("ex-gradients-pairs")
def pairs():
    n, t, end = 64, 20, 32
    every = [(i, j) for i in range(1, n + 1) for j in range(1, i)]
    crossing = sum(j < t <= i for i, j in every)
    later = sum(j >= t for i, j in every)
    to_end = sum(t <= j <= end for i, j in every)
    inside = sum(j >= t and i <= end for i, j in every)
    right = [crossing, later, to_end, inside]
    mistakes = [
        ([t * (n - t + 1), ..., ..., ...], "Token 20's own write does not pass its gate: the writers are 1 to 19."),
        ([crossing - t + 1, ..., ..., ...], "Token 20 reads what has passed its gate: the readers are 20 to 64."),
        ([..., later + n - t + 1, ..., ...], "A token with itself is no pair of two tokens: leave out i = j."),
        ([..., later, inside, ...], "Paths that leave the chunk are in the term S' * R too, and k dk takes them away."),
        ([..., later, to_end, to_end], "Path by path, a write after the gate for a later chunk does not count."),
    ]
    hint = "Count rows times columns of the rectangle; n tokens have n (n - 1) / 2 pairs; the chunk is tokens 17 to 32."
    names = ["pairs that cross", "to the end of the sequence", "to the end of the chunk", "path by path"]
    return numbers(names, right, mistakes, hint)


@exercise("ex-gradients-same", "implement")
def same(answer):
    def terms(q, k, g, dP, low, taken=1.0):
        b = g.cumsum(0)
        r = b[-1] / 2
        x, y, dP = low(q * (b - r).exp()), low(k * (r - b).exp()), low(dP)
        return x * (dP @ y) - taken * y * (dP.T @ x)

    mistakes = {
        "The sum over the later tokens is missing.": terms,
        "The sum runs from the start; it goes from t to the chunk's end.": lambda *x: terms(*x).cumsum(0),
        "The sign: the reader's side counts, the writer's is taken away.": lambda *x: -right(*x),
        "The writer's side is missing: pairs that lie wholly after t are to be taken away.": (
            lambda *x: reverse_sum(terms(*x, taken=0.0))
        ),
    }

    def right(*x):
        return reverse_sum(terms(*x))

    def low(x):
        return x.bfloat16().to(x.dtype)

    q, k, noise, do, v = draw(14, (16, 3), (16, 3), (16, 3), (16, 4), (16, 4))
    case = q, k, -noise.abs() / 4, (do @ v.T).tril(-1)
    hold(answer, [(*case, lambda x: x)], right, mistakes, {"dg": "T K"})
    want, exact = right(*case, low), right(*case, lambda x: x)
    (found,) = results(call(answer, *case, low), [want], ("dg",))
    if close(found, exact):
        raise Wrong("Nothing is rounded: low belongs around the operands of both products.")
    left = (found[0].abs().max() / want.abs().max()).item()
    if left > 1e-6:
        raise Wrong(
            f"All pairs lie after token 1, so its row must cancel; {left:.0e} of the largest entry "
            "is left. A factor stands rounded on one side and unrounded on the other."
        )
    if not close(found, want):
        raise Wrong(f"Other factors are rounded. {locate('dg', 'T K', found, want)}")
