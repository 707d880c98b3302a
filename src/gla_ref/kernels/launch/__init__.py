"""The way from a call to its launches, for all mechanisms: checks, plan, program, autograd (chapter 13).

To launch a kernel you need plan.py alone: a plan function makes a `Draft`, calls `Draft.launch` and returns the plan. A
mechanism's file declares the record of a call, its tensors and options by name, and hands record and plan function to
`Planned` (program.py) and `with_state` (operator.py), as kernels/gla.py does above its `gla`. Nothing here depends on
the mechanism.
"""
