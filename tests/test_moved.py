"""Names of an earlier release: they warn, and give what they gave."""

import importlib
import subprocess
import sys

import pytest

from gla_ref import _moved

KERNELS = "gla_ref.kernels."


@pytest.mark.parametrize("old", _moved.MOVED)
def test_an_old_name_warns_and_gives_the_module(old):
    if old.startswith(KERNELS):
        pytest.importorskip("triton")
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {_moved.MOVED[old]};"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(_moved.MOVED[old])


def test_all_ways_to_import():
    """A package, a module in it, and a name in that, in a process that has not imported the new ones."""
    code = """
import gla_ref, warnings
warnings.simplefilter("ignore")
from gla_ref import costs
from gla_ref.exercises.gates import bias
import gla_ref.viz.anchor
from gla_ref.book.viz import anchor
assert gla_ref.viz.anchor is anchor and costs is gla_ref.costs
try:
    gla_ref.nothing
except AttributeError as error:
    assert str(error) == "module 'gla_ref' has no attribute 'nothing'"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
