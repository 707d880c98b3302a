"""Triton's interpreter, mended (chapter 4)."""

from __future__ import annotations

from functools import wraps


def restore_after_calls() -> None:
    """Let a process that has interpreted kernels compile others.

    The interpreter replaces functions of `triton.language` while it runs a kernel. After a launch Triton (3.7.1)
    restores them, except the functions that a call *inside* the kernel, such as `tl.sum`, has replaced. Then the
    process can compile no kernel any more.
    """
    from triton.runtime import interpreter

    call = interpreter.InterpretedFunction.__call__
    if hasattr(call, "__wrapped__") or not hasattr(interpreter, "_LangPatchScope"):
        return  # already mended, or this Triton keeps no list of replaced functions

    @wraps(call)
    def call_and_restore(self, *args, **kwargs):
        replaced = interpreter._patch_lang(self.fn)
        try:
            return call(self, *args, **kwargs)
        finally:
            replaced.restore()

    interpreter.InterpretedFunction.__call__ = call_and_restore
