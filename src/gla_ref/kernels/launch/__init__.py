"""The way from a call to its launches, for all mechanisms: checks, plan, program, autograd (chapter 14).

To launch a kernel you need plan.py alone: a plan function makes a `Draft`, calls `Draft.launch` and returns the plan. A
mechanism's file hands that function to `Planned` (program.py) and `with_state` (operator.py), as kernels/gla.py does
above its `gla`; neither depends on the kernel.
"""
