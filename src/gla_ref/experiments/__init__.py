"""Experiments as programs: what mixers remember, predict and forget (chapter 19).

    python -m gla_ref.experiments mqar --device cuda --seeds 3
    python -m gla_ref.experiments report FILE

Each but `decoding`, which times them, trains the models of :mod:`gla_ref.models`; each writes one JSON file of
records. An interrupted program goes on where it was when it is called again; two programs may share a file of records
and divide its runs. On another host it goes on with the runs that the file of records lacks: take the file along, and
the folder of texts, which `python -m gla_ref.experiments texts` makes once. Trials choose a learning rate for every
group of runs, on validation data; they are no results. `mqar --preset live` is learned in some ten seconds a run on a
CPU. The tests run tiny settings on a CPU.
"""

from . import decoding, language, mqar
from ._report import Interval, holm, interval, results_of, settings_of, table, welch

#: modules with `Settings`, `runs(settings, seeds)` and `carry_out(run, place)`, by the name of the experiment
#:
#: :meta hide-value:
EXPERIMENTS = {"mqar": mqar, "language": language, "decoding": decoding}

__all__ = ["EXPERIMENTS", "Interval", "holm", "interval", "results_of", "settings_of", "table", "welch"]
