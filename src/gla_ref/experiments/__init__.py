"""Experiments as programs: what mixers remember, predict and forget (chapter 19).

    python -m gla_ref.experiments mqar --device cuda --seeds 3
    python -m gla_ref.experiments report FILE

Each but `decoding`, which times them, trains the models of :mod:`gla_ref.models`; each writes one JSON file of
records. An interrupted program goes on where it was when it is called again; two programs may share a file of records
and divide its runs. On another host it goes on with the runs that the file of records lacks: take the file along, and
the folder of texts, which `python -m gla_ref.experiments texts` makes once. Trials choose a learning rate for every
group of runs, on validation data; they are no results. `mqar --preset live` is learned in some ten seconds a run on a
CPU. The tests run tiny settings on a CPU.

A run meets the files in this order::

    __main__.py                         the command: an experiment's settings, and which of its runs to carry out
    mqar.py, language.py, decoding.py   the experiments: Settings, all runs, and carry_out(run, place)
    runs.py                             what a run is, and the place where it is carried out
    _driver.py                          all runs in turn: which are done, which wait, a record of each
    _rates.py                           the learning rate of a run, chosen by trials
    training.py                         a task is learned, with checkpoints; trained_gates.py looks at the gates
    _report.py                          records as intervals and tables
"""

from . import decoding, language, mqar
from ._report import Interval, holm, interval, results_of, settings_of, table, welch

#: modules with `Settings`, `runs(settings, seeds)` and `carry_out(run, place)`, by the name of the experiment
#:
#: :meta hide-value:
EXPERIMENTS = {"mqar": mqar, "language": language, "decoding": decoding}

__all__ = ["EXPERIMENTS", "Interval", "holm", "interval", "results_of", "settings_of", "table", "welch"]
