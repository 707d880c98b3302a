"""Triton's interpreter, mended (chapter 4)."""

from __future__ import annotations

from functools import wraps


def restore_after_calls() -> None:
    """Let a process that has interpreted kernels compile others.

    While a kernel is interpreted, `triton.language` is replaced by the interpreter's. Triton (3.7.1) puts it back
    after a launch, but not what a call *inside* a kernel has replaced, such as one of `tl.sum`; then nothing can be
    compiled any more.
    """
    from triton.runtime import interpreter

    call = interpreter.InterpretedFunction.__call__
    if hasattr(call, "__wrapped__") or not hasattr(interpreter, "_LangPatchScope"):
        return  # mended already; or a Triton that keeps no list of what it replaced

    @wraps(call)
    def call_and_restore(self, *args, **kwargs):
        replaced = interpreter._patch_lang(self.fn)
        try:
            return call(self, *args, **kwargs)
        finally:
            replaced.restore()

    interpreter.InterpretedFunction.__call__ = call_and_restore
