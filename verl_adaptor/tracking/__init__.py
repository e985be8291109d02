"""What a run leaves behind: metrics, samples, a summary, a log and a report.

::

    DIR/
      metrics.jsonl   one JSON object a step, always written
      samples.json    completions before and after training
      summary.json    the outcome
      train.log       progress and warnings, as plain lines
      report.html     everything above on one self-contained page
      tensorboard/    and what the other sinks keep

Two runs with one seed write the same ``metrics.jsonl`` but for the keys that `is_timing` names, and so does a run that
was interrupted and resumed.
"""

from __future__ import annotations

from verl_adaptor.tracking.environment import environment
from verl_adaptor.tracking.records import is_timing, read_rows
from verl_adaptor.tracking.report import require_report, write_report
from verl_adaptor.tracking.tracker import Tracker

__all__ = ["Tracker", "environment", "is_timing", "read_rows", "require_report", "write_report"]
