"""Other libraries' names for our kernels, and their functions for the check kit (appendix "Check your kernel")."""
