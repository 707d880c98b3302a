"""Judges of the exercises on a fully fused kernel for Hopper (chapter 22)."""

from .._roles import Step, end, play
from . import exercise
from ._compare import hold, variants
from ._predict import ask, choice


def _shared(C, K, V, stages, extra=lambda C, K, V: K * V + C * C + C * V, gates=3, size=2, all_staged=False):
    ring, more = gates * C * K + C * V, extra(C, K, V)
    return size * (stages * (ring + more) if all_staged else stages * ring + more)


@exercise("ex-hopper-shared", "derive")
def shared(answer):
    mistakes = {
        "A number in 16 bits has two bytes.": dict(size=1),
        "S, P and o have one tile each: only tiles that are loaded ahead have stages.": dict(all_staged=True),
        "The gates are missing: a stage has q, k, g and v.": dict(gates=2),
        "S is missing: the product with q reads a 16-bit copy of it.": dict(extra=lambda C, K, V: C * C + C * V),
        "P is missing: it goes to the product with v through shared memory.": dict(extra=lambda C, K, V: K * V + C * V),
        "o is missing: it waits there for the copy engine.": dict(extra=lambda C, K, V: K * V + C * C),
        "That is the ring of stages alone; S, P and o need room, too.": dict(extra=lambda C, K, V: 0),
        "P has a row and a column for each token of a chunk, not for each channel.": dict(
            extra=lambda C, K, V: K * V + C * K + C * V
        ),
    }
    cases = [(48, 96, 160, 3), (64, 128, 128, 2), (32, 128, 64, 1)]
    hold(answer, cases, _shared, variants(_shared, mistakes), {"bytes": ""})


def _rounds(i, stages, stage=lambda i, n: i % n, j=lambda i, n: i // n, loader=1, transformer=0):
    parity = j(i, stages) & 1
    return stage(i, stages), parity ^ loader, parity ^ transformer


@exercise("ex-hopper-parity", "implement")
def parity(answer):
    mistakes = {
        "A barrier belongs to a stage: a phase is a round of that stage, i // stages, not i.": dict(j=lambda i, n: i),
        "The loader waits for the round before: its parity is the other one.": dict(loader=0),
        "The two parities are exchanged: the transformer waits for this round, the loader for the one before.": dict(
            loader=0, transformer=1
        ),
        "The transformer waits for this round's bytes, not for those of the round before.": dict(transformer=1),
        "A stage is i % stages; i // stages is the round.": dict(stage=lambda i, n: i // n),
    }
    cases = [(i, stages) for stages in (2, 3) for i in range(7)]
    axes = {"stage": "", "empty": "", "ready": ""}
    hold(answer, cases, _rounds, variants(_rounds, mistakes), axes)


def _end(load, transform, multiply, n, stages, more=0):
    """When all is done; `more` stages than there are."""
    lasts = {"load": load, "transform": transform, "multiply": multiply}

    def waits(i):
        room = Step("multiply", i - stages - more)
        return {"load": [room], "transform": [Step("load", i)], "multiply": [Step("transform", i)]}

    return end(play([[Step(job, i) for i in range(n)] for job in lasts], lasts, waits))


@exercise("ex-hopper-end", "implement")
def last(answer):
    mistakes = {
        "That is one job after the other: chunks are not in work at the same time.": (
            lambda load, transform, multiply, n, stages: n * (load + transform + multiply)
        ),
        "The first chunk still has to pass the two other jobs.": (
            lambda load, transform, multiply, n, stages: n * max(load, transform, multiply)
        ),
        "The loader has to wait for room: chunk i needs the stage of chunk i - stages.": dict(more=99),
        "There is one stage less than you use: chunk i waits for chunk i - stages.": dict(more=1),
    }
    cases = [(4.0, 3.0, 3.0, 6, 1), (4.0, 3.0, 3.0, 6, 2), (2.0, 1.0, 5.0, 7, 3), (6.0, 5.0, 7.0, 5, 2)]
    hold(answer, cases, _end, variants(_end, mistakes), {"end": ""})


@ask("ex-hopper-fences")
def fences():
    why = {
        "a": "Threads wrote that tile, and the product reads shared memory by a path of its own.",
        "b": "The barrier counts the bytes that the copy engine has written; threads that waited for it see them.",
        "c": "Threads wrote the masked scores, and the next product reads them.",
        "d": "Threads wrote that tile, and the copy engine reads it.",
        "e": "Registers are the thread's own: no other thread reads them.",
        "f": "A load may be answered after all threads have met, and the copy engine does not wait for answers.",
    }
    return choice("Steps with a fence", "acdf", why)
