"""Wrong kernels that drop the state where gates are strong, each by a rule of its own; one more is in the museum."""

import torch

from gla_ref.check.mistakes._shipped import right


def cut(strong, state):
    """A kernel in pieces of 96 tokens. Where the gates before a piece are `strong`, it begins with a wrong `state`."""

    def kernel(*tokens, scale=None, initial_state=None):
        outs, S = [], initial_state
        for at in range(0, tokens[0].shape[1], 96):
            early, piece = [x[:, :at] for x in tokens], [x[:, at : at + 96] for x in tokens]
            if at:
                S = right(*early, initial_state=initial_state)[1]
                S = state(S, early, initial_state) if strong(early[3]) else S
            outs.append(right(*piece, scale=scale, initial_state=S)[0])
        return torch.cat(outs, 1), right(*tokens, initial_state=initial_state)[1]

    return kernel


def in_all_channels(g):
    return (g[:, -16:].sum(1) < -14).all(-1).any()


def zeros(S, early, first):
    return torch.zeros_like(S)


DROPPED = {
    "by another bound": ("kda", cut(lambda g: g[:, -64:].mean(-1).sum(1).mean() < -60, zeros)),
    "a state of 16 tokens": ("kda", cut(in_all_channels, lambda S, x, first: right(*(y[:, -16:] for y in x))[1])),
    "a state 16 tokens old": (
        "kda",
        cut(in_all_channels, lambda S, x, first: right(*(y[:, :-16] for y in x), initial_state=first)[1]),
    ),
    "by the mean head": ("simple_gla", cut(lambda g: g[:, -64:].sum(1).mean() < -60, zeros)),
}
