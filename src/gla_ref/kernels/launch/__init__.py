"""How a call becomes launches, whatever the mechanism: checks, plan, program, autograd (chapter 14)."""
