"""The way from a call to its launches, for all mechanisms: checks, plan, program, autograd (chapter 13).

To plan a launch you need plan.py alone: a plan function makes a `Draft`, calls `Draft.launch` and returns the plan. A
mechanism's file declares the record of a call, its tensors and options by name, and hands record and plan function to
`Planned` (program.py) and `with_state` (operator.py), as kernels/gla.py does above its `gla`. Nothing here knows a
mechanism's equations; `with_state` expects q, v and a K x V state, `Draft.gradient_of_o` do and scale.
"""
