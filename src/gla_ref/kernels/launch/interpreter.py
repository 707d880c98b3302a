"""Triton's interpreter, mended (chapter 4)."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace

TURN = threading.RLock()  # held by the thread that interprets a kernel


def mend() -> None:
    """Let threads interpret kernels in turn and faster, and leave `triton.language` as it was.

    The interpreter has one grid for the whole process, and replaces functions of `triton.language` while it runs a
    kernel. It replaces them again at each call *inside* the kernel, such as `tl.sum`, which takes long, and after the
    launch Triton (3.7.1) does not restore those replacements: then the process can compile no kernel any more. Here a
    launch replaces them once for each module that its functions come from, and restores all of them.

    Much of the remaining time goes into types: the shape of each value is checked anew (here once a shape), and each
    int32 sum and product is repeated in int64 for an assertion that only a debugging interpreter makes.

    An argument from 2^31 up to 2^32 is an int64 to compiled kernels. The interpreter says so too but keeps a uint32,
    which a shift takes for a negative number.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    launch, replace, convert = interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter._implicit_cvt
    if hasattr(launch, "__wrapped__"):
        return  # mended already
    replaced = {}  # by the globals of a function: what `replace` returned, in this launch

    @functools.wraps(launch)
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

    def convert_wide(x):
        value = convert(x)
        if isinstance(x, int) and x >> 31 == 1:
            value.handle.data = value.handle.data.astype("int64")
        return value

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_in_turn, replace_once
    interpreter._implicit_cvt = convert_wide
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
    of_numpy = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: of_numpy(tl.uint64 if dtype.scalar.is_ptr() else dtype.scalar)
    remember(tl.block_type, lambda element, shape: (id(element), *shape))
    remember(tl.tensor, lambda _, x: (id(x.scalar), *x.shape) if x.is_block() else id(x), "handle", "type")


def remember(cls: type, key: Callable, *own: str) -> None:
    """Let objects copy fields worked out for an equal key before; `own` are the first arguments, all by position.

    A key may have the identity of an object that one of these fields holds, since the fields are kept.
    """
    init, known = cls.__init__, {}

    @functools.wraps(init)
    def initialise(self, *args):
        at = key(*args)
        if at not in known:
            init(self, *args)
            known[at] = {name: x for name, x in vars(self).items() if name not in own}
        vars(self).update(known[at], **dict(zip(own, args, strict=False)))

    cls.__init__ = initialise
