"""Triton's interpreter, mended (chapter 4)."""

from __future__ import annotations

import threading
from functools import wraps
from types import SimpleNamespace

TURN = threading.RLock()  # held by the thread that interprets a kernel


def mend() -> None:
    """Let threads interpret kernels in turn, in half of the time, and leave `triton.language` as it was.

    The interpreter has one grid for the whole process, and replaces functions of `triton.language` while it runs a
    kernel. It replaces them again at each call *inside* the kernel, such as `tl.sum`, which takes half of its time, and
    after the launch Triton (3.7.1) does not restore those replacements: then the process can compile no kernel any
    more. Here a launch replaces them once for each module that its functions come from, and restores all of them.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    launch, replace = interpreter.GridExecutor.__call__, interpreter._patch_lang
    if hasattr(launch, "__wrapped__"):
        return  # mended already
    replaced = {}  # by the globals of a function: what `replace` returned, in this launch

    @wraps(launch)
    def launch_in_turn(self, *args, **kwargs):
        with TURN:
            try:
                return launch(self, *args, **kwargs)
            finally:
                while replaced:
                    _, scope = replaced.popitem()
                    if scope is not None:  # some versions of Triton restore nothing
                        scope.restore()

    def replace_once(function):
        names = function.__globals__
        if id(names) not in replaced:
            languages = [x for x in names.values() if x is tl or x is tl.core]
            unpatched = any(tl.core.is_builtin(x.load) for x in languages)
            replaced[id(names)] = replace(function) if unpatched else None
        return SimpleNamespace(restore=lambda: None)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_in_turn, replace_once
