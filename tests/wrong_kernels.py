"""Wrong kernels that drop the state where gates are strong, each by a rule of its own."""

import torch

from gla_ref.check.mistakes._shipped import pieces_from_zero, right

PIECE = 96  # tokens


def by_average(g, at):
    """A cut by another bound: where the gates' mean over channels lets less than e^-60 through."""
    kept = g[:, :at].mean(-1).flip(1).cumsum(1) > -60.0
    return (at - 1 - kept.sum(1, keepdim=True)).clamp_min(0)


def cut_by_another_bound(q, k, v, g, beta, *, scale=None, initial_state=None):
    return pieces_from_zero(q, k, v, g, beta, scale=scale, initial_state=initial_state, start=by_average)


def in_pieces(q, k, v, g, beta, scale, S, warm):
    """A piece begins with the state before its last 16 tokens, or `warm` with what these alone make of nothing."""
    outs, before = [], S
    for at in range(0, q.shape[1], PIECE):
        x = [y[:, at : at + PIECE] for y in (q, k, v, g, beta)]
        if at and (g[:, at - 16 : at].sum(1) < -14).all(-1).any():
            last = [y[:, at - 16 : at] for y in (q, k, v, g, beta)]
            S = right(*last, scale=scale)[1] if warm else before
        outs.append(right(*x, scale=scale, initial_state=S)[0])
        before = right(*(y[:, :-16] for y in x), scale=scale, initial_state=S)[1]
        S = right(*x, scale=scale, initial_state=S)[1]
    return torch.cat(outs, 1), S


def state_of_16_tokens(q, k, v, g, beta, *, scale=None, initial_state=None):
    return in_pieces(q, k, v, g, beta, scale, initial_state, warm=True)


def state_16_tokens_old(q, k, v, g, beta, *, scale=None, initial_state=None):
    return in_pieces(q, k, v, g, beta, scale, initial_state, warm=False)


def cut_by_the_mean_head(q, k, v, g, *, scale=None, initial_state=None):
    """One gate a head; a piece begins from nothing where the last 64 gates of all heads together are strong."""
    outs, S = [], initial_state
    for at in range(0, q.shape[1], 64):
        S = S if not at or g[:, at - 64 : at].sum(1).mean() > -60 else torch.zeros_like(S)
        o, S = right(*(x[:, at : at + 64] for x in (q, k, v, g)), scale=scale, initial_state=S)
        outs.append(o)
    return torch.cat(outs, 1), S


OF_KDA = pieces_from_zero, cut_by_another_bound, state_of_16_tokens, state_16_tokens_old
DROPPED = {fn.__name__: ("kda", fn) for fn in OF_KDA} | {"cut_by_the_mean_head": ("simple_gla", cut_by_the_mean_head)}
