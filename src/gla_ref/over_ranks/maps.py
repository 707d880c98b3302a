"""The algebra of pieces and segments: how a run of tokens changes the state that crosses it (chapter 25).

A piece is the run of tokens that a rank has. A segment is a part of a piece, often all of it.

    S_right = M S_left + X          M, X from k, v and the gates of the piece alone
    R_left  = M^T R_right + A       R the gradient of S; A from q, do and the gates of the piece alone

For gated linear attention M is the decay of the whole piece, diag(e^b): K numbers per head (one number for a scalar
gate; the number 1 without gates). For the delta rules M is a K x K matrix, the state that the rule makes from the
identity.
"""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..chunks import decayed, heads_first
from ..gates import decay_from_start, decay_to_end

Tokens = dict[str, Tensor]


def border_kernels() -> ModuleType:
    """The kernels of maps, imported when a call first needs them: the package runs without Triton."""
    from ..kernels.portable import border

    return border


class Maps(NamedTuple):
    """The maps S -> M S + X of n consecutive segments.

    M is a product of decays `[N, n, H, K or 1, 1]` and `[N, n, H, 1, V]`, or one matrix `[N, n, H, K, K]`; X is
    `[N, n, H, K, V]`.
    """

    M: tuple[Tensor, ...]
    X: Tensor

    @property
    def decays(self) -> bool:
        """Whether M is a product of decays."""
        return self.M[0].shape[-1] == 1

    def one(self, i: int) -> "Maps":
        """The map of segment i, without the axis of segments."""
        return Maps(tuple(m[:, i] for m in self.M), self.X[:, i])

    def heads(self, some: slice) -> "Maps":
        """The maps of some heads."""
        return Maps(tuple(m[:, :, some] for m in self.M), self.X[:, :, some])

    @property
    def by_kernels(self) -> bool:
        """Whether kernels run through these maps: they know decays of rows, but none of columns."""
        return self.X.is_cuda and self.X.dtype == torch.float32 and self.decays and len(self.M) == 1

    def through(self, S: Tensor) -> Tensor:
        """M S, of maps without the axis of segments or with a state for each segment."""
        first, *more = self.M
        if not self.decays:
            return first @ S
        S = first * S
        for m in more:
            S = m * S
        return S

    def after(self, S: Tensor) -> Tensor:
        """M S + X, of a map that `in_turn` yields."""
        return self.through(S) + self.X if self.decays else torch.baddbmm(self.X, *self.M, S)

    def in_turn(self, backwards: bool) -> Iterator["Maps"]:
        """Yield each segment's map; for a matrix M, heads are joined as one batch, `[N H, K, K]` and `[N H, K, V]`."""
        if self.decays:
            parts = [m.unbind(1) for m in (*self.M, self.X)]
        else:
            parts = [m.transpose(0, 1).flatten(1, 2).unbind(0) for m in (*self.M, self.X)]
        for *M, X in zip(*(reversed(x) if backwards else x for x in parts), strict=True):
            yield Maps(tuple(M), X)

    def run(self, S: Tensor, backwards: bool = False) -> tuple[Tensor, Tensor]:
        """Return the states that come into each segment `[N, n, H, K, V]`, and the state that leaves the last one."""
        if self.by_kernels and self.X.shape[1] > 1:
            return border_kernels().crossed(self.X, self.M, S, backwards)
        states, shape = [], S.shape
        S = S if self.decays else S.flatten(0, 1)
        for m in self.in_turn(backwards):
            states.append(S.view(shape))
            S = m.after(S)
        return torch.stack(states[::-1] if backwards else states, 1), S.view(shape)

    def composed(self, backwards: bool = False) -> "Maps":
        """The map of all segments together."""
        N, n, H = self.X.shape[:3]
        if n == 1:
            return self
        (M, X), *later = self.in_turn(backwards)
        for m in later:
            M = tuple(a * b if self.decays else a @ b for a, b in zip(m.M, M, strict=True))
            X = m.after(X)
        *M, X = (x.reshape(N, 1, H, *x.shape[-2:]) for x in (*M, X))
        return Maps(tuple(M), X)


class Walk(NamedTuple):
    """The form that walks pieces, and its options.

    Attributes:
        form: a form of the mechanism, from FORMS.
        kernel: whether `form` is a kernel, and takes tokens in their own precision.
        scale: factor on q.
        dtype: the dtype of states and maps.
    """

    form: Callable
    kernel: bool
    scale: float
    dtype: torch.dtype

    def resumed(self, x: Tokens, S: Tensor, prepared: Sequence[Tensor], cu: Tensor | None) -> tuple[Tensor, Tensor]:
        """Walk tokens from the states S; `prepared` is a field of the `WrittenMap` of these tokens."""
        if not prepared:
            return self.form(**x, scale=self.scale, initial_state=S, cu_seqlens=cu)
        from ..kernels.kda import Resume

        return Resume.apply(*(x[name] for name in ("q", "k", "v", "g", "beta")), S, *prepared, self.scale)

    def heads_first(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """Return a tensor as [B, H, T, D] in the precision of states; None for None."""
        columns = (x if x is None or x.ndim == 4 else x[..., None] for x in tensors)  # gates of heads
        return [None if x is None else heads_first(x.to(self.dtype)) for x in columns]


class WrittenMap(NamedTuple):
    """The map of rows of tokens, from left to right, and by-products of the walk that has found it.

    Attributes:
        map: without the axis of segments.
        kept: tensors by name that `read_map` need not find again; empty unless asked for.
        prepared: tensors for `Walk.resumed`; empty if that starts anew.
    """

    map: Maps
    kept: dict[str, Tensor]
    prepared: Sequence[Tensor] = ()


def write_map(walk: Walk, x: Tokens, keep: bool = False) -> WrittenMap:
    """Find the map of rows of tokens from k, v and gates. No exponent is above 0.

    For this map a kernel reads k, v and g, which the walk of the piece reads again. For a delta rule it walks V + K
    columns, not V; then `keep` keeps M and what each token reads of each row of the state on the left, `[B, T, HV, K]`.
    """
    q, k, v, g, g_v = (x.get(name) for name in ("q", "k", "v", "g", "g_v"))
    if "beta" in x:
        if walk.kernel:
            X, M, reads, prepared = border_kernels().written(q, k, v, g, x["beta"], scale=walk.scale, reads=keep)
        else:
            prepared, V = (), v.shape[-1]
            o, S = _of_identity(walk, x)
            X, M, reads = S[..., :V], S[..., V:], o[..., V:]
        return WrittenMap(Maps((M,), X), {"M": M, "reads": reads} if keep else {}, prepared)
    if walk.kernel and g_v is None:
        X, decay = border_kernels().added(k, v, g)
        return WrittenMap(Maps(_decays(walk, x, decay), X), {})
    k, v, of_k, of_v = walk.heads_first(k, v, g, g_v)
    X = decayed(k, of_k, decay_to_end).mT @ decayed(v, of_v, decay_to_end)
    return WrittenMap(Maps(_decays(walk, x), X), {})


def read_map(walk: Walk, x: Tokens, do: Tensor) -> Maps:
    """Find the map (M^T, A) of rows of tokens, from right to left, from q, do and gates (for a delta rule from k too).

    x may also have the `kept` tensors of the `WrittenMap` of the same tokens.
    """
    q, g, g_v = x["q"], x.get("g"), x.get("g_v")
    if "beta" in x:
        kept = x if "reads" in x else write_map(walk, x, keep=True).kept
        M, reads = kept["M"].mT, kept["reads"]
        if walk.kernel:
            return Maps((M,), border_kernels().added(reads, do)[0])
        return Maps((M,), heads_first(reads).mT @ heads_first(do.to(walk.dtype)))
    if walk.kernel and g_v is None:
        A, decay = border_kernels().added(q, do, g, backwards=True)
        return Maps(_decays(walk, x, decay), walk.scale * A)
    q, do, of_q, of_do = walk.heads_first(q, do, g, g_v)
    A = decayed(walk.scale * q, of_q, decay_from_start).mT @ decayed(do, of_do, decay_from_start)
    return Maps(_decays(walk, x), A)


def _decays(walk: Walk, x: Tokens, rows: Tensor | None = None) -> tuple[Tensor, ...]:
    """M of gated linear attention, the decay over a piece; `rows` [B, H, K] are the decays of rows if known."""
    g, g_v = x.get("g"), x.get("g_v")
    B, _, H, _ = x["k"].shape
    if rows is None:
        rows = x["k"].new_ones(B, H, dtype=walk.dtype) if g is None else g.sum(1, dtype=walk.dtype).exp()
        rows = rows[..., None] if rows.ndim == 2 else rows  # [B H 1], or [B H K]
    return (rows[..., None],) if g_v is None else (rows[..., None], g_v.sum(1, dtype=walk.dtype).exp()[..., None, :])


def _of_identity(walk: Walk, x: Tokens) -> tuple[Tensor, Tensor]:
    """Walk a delta rule over its values and K more columns without values, which start from the identity.

    The rule changes each column of a state by itself, so these columns end as M of S -> M S + X.
    """
    x = {name: y.to(walk.dtype) for name, y in x.items()}
    (B, _, HV, V), K = x["v"].shape, x["k"].shape[-1]
    S = F.pad(torch.eye(K, dtype=walk.dtype, device=x["v"].device), (V, 0)).expand(B, HV, K, V + K)
    return walk.form(**x | {"v": F.pad(x["v"], (0, K))}, scale=walk.scale, initial_state=S)
