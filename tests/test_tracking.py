"""The tracking room: exact metrics, resume without doubled steps, sinks, progress, and a report that stands alone."""

from __future__ import annotations

import io
import json
import logging
import math
import operator
import subprocess
import sys
from html.parser import HTMLParser
from itertools import accumulate
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_adaptor.config import TrackingConfig
from verl_adaptor.errors import BackendNotInstalled, ConfigError
from verl_adaptor.tracking import Tracker, environment, is_timing, read_rows, write_report
from verl_adaptor.tracking.charts import running_mean
from verl_adaptor.tracking.memory import WINDOW, MemoryWatch
from verl_adaptor.tracking.progress import ProgressDisplay
from verl_adaptor.tracking.records import to_json

BARE = TrackingConfig(sinks=(), report=False)
LOGGER = logging.getLogger("verl_adaptor")


def make(folder, config=BARE, *, steps=10, **options):
    return Tracker(config, folder, total_steps=steps, stream=io.StringIO(), **options)


def metrics_of(step):
    return {"reward/mean": 1 / (step + 3), "kl/reference": 1e-7 * step, "tokens": 100 + step, "time/step": 0.5}


# --- metrics.jsonl ---------------------------------------------------------------------------------------------------


@example({"time/step": 1e308})
@example({"time/step": -1e308})
@given(st.dictionaries(st.text(min_size=1).filter(lambda key: key != "step"), st.floats() | st.integers(0, 10**12)))
def test_metrics_round_trip_exactly_as_strict_json(tmp_path_factory, metrics):
    folder = tmp_path_factory.mktemp("run")
    with make(folder) as tracker:
        tracker.log(3, metrics)
    (line,) = (folder / "metrics.jsonl").read_text("utf-8").split("\n")[:-1]
    strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(strict) == ["step", *metrics]
    (row,) = read_rows(folder / "metrics.jsonl")
    assert {key: repr(value) for key, value in row.items()} == {"step": "3"} | {k: repr(v) for k, v in metrics.items()}


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "reward/me', b'{"step": 6}', b"\0\0\0"])
def test_resumed_file_equals_the_uninterrupted_one(tmp_path, torn):
    with make(tmp_path / "whole") as whole:
        for step in range(11):
            whole.log(step, metrics_of(step))
    with make(tmp_path / "cut") as cut:
        for step in range(6):
            cut.log(step, metrics_of(step))
    with cut.metrics_path.open("ab") as file:
        file.write(torn)
    with make(tmp_path / "cut", resume_step=4) as resumed:
        for step in range(5, 11):
            resumed.log(step, metrics_of(step) | {"time/step": 9.9})

    def without_times(path):
        return [{key: value for key, value in row.items() if not is_timing(key)} for row in read_rows(path)]

    assert without_times(resumed.metrics_path) == without_times(whole.metrics_path)
    assert resumed.metrics_path.read_bytes().splitlines()[:5] == whole.metrics_path.read_bytes().splitlines()[:5]
    assert not list(tmp_path.rglob("*.writing"))


def test_truncation_while_running_goes_on_in_the_new_file(tmp_path):
    with make(tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, metrics_of(step))
        tracker.truncate_after(1)
        tracker.log(2, {"reward/mean": 0.0})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_line_broken_in_the_middle_is_refused_by_number(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ConfigError, match="line 2"):
        make(tmp_path, resume_step=3)


def test_a_last_line_without_its_end_is_lost_and_reported(tmp_path, caplog):
    """Whole JSON without the newline: kept, the next line would be glued to it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 3}')
    with make(tmp_path, resume_step=3) as tracker:
        assert "ends at step 1, but the run resumes after step 3" in caplog.text
        tracker.log(4, {})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 4]


def test_a_second_run_never_overwrites_the_first(tmp_path):
    with make(tmp_path) as tracker:
        tracker.log(1, {})
    with pytest.raises(ConfigError, match=r"already holds a run of 1 steps.*--resume"):
        make(tmp_path)


def test_log_refuses_doubled_steps_and_what_is_no_number(tmp_path):
    with make(tmp_path) as tracker:
        tracker.log(1, {})
        for step, metrics, error in [
            (1, {}, ValueError),
            (2, {"step": 2.0}, ValueError),
            (2, {"reward/mean": "0.5"}, TypeError),
        ]:
            with pytest.raises(error):
                tracker.log(step, metrics)
        tracker.log(2, {})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_folder_that_cannot_be_is_refused_with_the_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*--output"):
        make(tmp_path / "file" / "run")


def test_samples_and_summary_are_kept_as_given(tmp_path):
    with make(tmp_path) as tracker:
        tracker.samples("before", [{"prompt": "1+1=", "response": "3", "reward": 0.0}])
        tracker.samples("after", [{"prompt": "1+1=", "response": "2", "reward": 1.0}])
        tracker.summary({"reward_after": 1.0, "reward_gain_interval": (0.5, math.nan)})
        with pytest.raises(ConfigError, match="'before' or 'after'"):
            tracker.samples("during", [])
    samples = json.loads((tmp_path / "samples.json").read_text())
    assert (samples["before"][0]["response"], samples["after"][0]["response"]) == ("3", "2")
    assert json.loads((tmp_path / "summary.json").read_text())["reward_gain_interval"] == [0.5, "NaN"]


def test_numpy_and_torch_values_become_built_ins():
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    values = {"a": np.float32(0.5), "b": torch.tensor([1, 2]), "c": np.int64(3), "d": (True, None)}
    assert json.loads(to_json(values)) == {"a": 0.5, "b": [1, 2], "c": 3, "d": [True, None]}


# --- sinks -----------------------------------------------------------------------------------------------------------


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def on_disk():
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("reward/mean")]

    config = BARE.replace(sinks=("tensorboard",))
    with make(tmp_path, config) as tracker:
        for step in range(1, 6):
            tracker.log(step, {"reward/mean": float(step)})
        assert on_disk() == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]  # before close: a kill loses no step
    with make(tmp_path, config, resume_step=3) as tracker:
        for step in range(4, 8):
            tracker.log(step, {"reward/mean": 10.0 * step})
    assert on_disk() == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60), (7, 70)]


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in that keeps what a W&B run is told."""
    module = ModuleType("wandb")
    module.inits, module.rows, module.codes = [], [], []

    def init(**options):
        module.inits.append(options)
        return SimpleNamespace(
            log=lambda row, step: module.rows.append((step, row)),
            finish=lambda exit_code: module.codes.append(exit_code),
        )

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


class FakeMLflow(ModuleType):
    """A stand-in for MLflow that appends metrics and overwrites tags, as the service does."""

    def __init__(self):
        super().__init__("mlflow")
        self.metrics, self.tags, self.status, self.runs = [], {}, [], 0
        self.MlflowClient = lambda: self
        self.entities = ModuleType("mlflow.entities")
        self.entities.Metric = lambda key, value, timestamp, step: (key, value, step)
        self.entities.RunTag = lambda key, value: (key, value)

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return "7"

    def create_run(self, experiment_id, run_name):
        assert experiment_id == "7"
        self.runs += 1
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run{self.runs}"))

    def get_run(self, run_id):
        return SimpleNamespace(data=SimpleNamespace(tags=dict(self.tags)))

    def update_run(self, run_id, status):
        self.status.append(status)

    def log_batch(self, run_id, metrics, tags):
        assert run_id == "run1"
        self.metrics += metrics
        self.tags.update(tags)

    def set_terminated(self, run_id, status):
        self.status.append(status)


@pytest.fixture
def mlflow(monkeypatch):
    module = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", module.entities)
    return module


def run_interrupted_and_resumed(folder, config):
    with make(folder, config) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": step / 2})
    with make(folder, config, resume_step=1) as tracker:
        for step in (2, 3, 4):
            tracker.log(step, {"reward/mean": step / 2})
        tracker.summary({})


def test_wandb_resumes_the_same_run_and_learns_how_it_ended(tmp_path, wandb):
    run_interrupted_and_resumed(tmp_path, BARE.replace(sinks=("wandb",), project="sums"))
    first, second = wandb.inits
    assert first["id"] == second["id"] and first["project"] == "sums"
    assert wandb.rows[0] == (1, {"reward/mean": 0.5}) and wandb.rows[-1] == (4, {"reward/mean": 2.0})
    assert wandb.codes == [1, 0]


def test_mlflow_resumes_the_same_run_and_gets_no_step_twice(tmp_path, mlflow):
    run_interrupted_and_resumed(tmp_path, BARE.replace(sinks=("mlflow",)))
    assert mlflow.metrics == [("reward/mean", step / 2, step) for step in (1, 2, 3, 4)]
    assert mlflow.status == ["RUNNING", "KILLED", "RUNNING", "FINISHED"]


@pytest.mark.parametrize(
    ("sink", "module", "command"),
    [
        ("tensorboard", "torch.utils.tensorboard", "pip install 'tensorboard>="),
        ("wandb", "wandb", "pip install 'verl-adaptor[wandb]'"),
        ("mlflow", "mlflow", "pip install 'verl-adaptor[mlflow]'"),
    ],
)
@pytest.mark.parametrize("found", [None, ModuleType("a folder of that name")])
def test_a_missing_sink_is_refused_before_any_work(tmp_path, monkeypatch, sink, module, command, found):
    monkeypatch.setitem(sys.modules, module, found)
    with pytest.raises(BackendNotInstalled) as refusal:
        make(tmp_path / "run", BARE.replace(sinks=(sink,)))
    assert command in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_sink_that_fails_to_open_leaves_nothing_behind(tmp_path, wandb, mlflow, monkeypatch):
    def refuse(name):
        raise OSError("no route to the server")

    monkeypatch.setattr(mlflow, "create_experiment", refuse, raising=False)
    before = (LOGGER.level, list(LOGGER.handlers))
    with pytest.raises(OSError, match="no route"):
        make(tmp_path, BARE.replace(sinks=("wandb", "mlflow")))
    assert (LOGGER.level, LOGGER.handlers) == before
    assert wandb.codes == [1]


# --- progress and log ------------------------------------------------------------------------------------------------


def test_plain_lines_are_throttled_and_say_how_long_it_takes():
    stream, clock = io.StringIO(), iter(x / 2 for x in range(1000))
    display = ProgressDisplay(60, stream=stream, clock=lambda: next(clock))
    row = {"reward/mean": 0.5123, "kl/reference": 0.00314, "tokens_per_second": 1234.4, "time/step": 1.0}
    lines = [display.update(step, row) for step in range(1, 61)]
    display.close()
    assert lines[11] == "step 12/60 reward 0.512 kl 0.0031 tok/s 1234 eta 0:00:48"
    shown = stream.getvalue().splitlines()
    assert shown[0] == lines[0] and shown[-1] == lines[-1] and 2 < len(shown) < len(lines)
    assert "\x1b" not in stream.getvalue()


def test_progress_survives_steps_without_the_usual_metrics():
    display = ProgressDisplay(60, stream=io.StringIO())
    assert display.update(0, {"eval/reward": math.nan}) == "step 0/60 held-out nan"
    assert display.update(1, {"time/step": math.nan}).startswith("step 1/60")
    display.expect(61)  # an asynchronous run takes as many as its batches turn out
    assert display.update(60, {}).startswith("step 60/61")


def test_a_terminal_gets_a_live_line_and_notes_above_it():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    display = ProgressDisplay(3, stream=stream)
    display.update(2, {"reward/mean": 0.25})
    display.note("warning: look here")
    display.close()
    display.close()
    assert "\x1b[" in stream.getvalue()
    assert "reward 0.250" in stream.getvalue() and "warning: look here" in stream.getvalue()


def test_train_log_holds_progress_and_warnings_and_logging_is_left_as_found(tmp_path):
    """Law I10, in a process of its own: whether warnings reach the terminal depends on who else has handlers."""
    script = """
import logging, sys
from verl_adaptor.config import TrackingConfig
from verl_adaptor.tracking import Tracker
logger, root = logging.getLogger("verl_adaptor"), logging.getLogger()
found = (logger.level, logger.propagate, logger.handlers[:], root.level, root.handlers[:])
tracker = Tracker(TrackingConfig(sinks=(), report=False), sys.argv[1], total_steps=2)
tracker.log(1, {"reward/mean": 0.5})
logging.getLogger("verl_adaptor.ppo").warning("mismatch %s", 0.2)
logging.getLogger("verl_adaptor.ppo").info("checkpoint saved")
tracker.close(); tracker.close()
assert found == (logger.level, logger.propagate, logger.handlers[:], root.level, root.handlers[:])
heavy = {"torch", "transformers", "matplotlib", "jinja2", "wandb", "mlflow"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["step 1/2 reward 0.500", "warning: mismatch 0.2"]
    log = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in log] == [
        "INFO step 1/2 reward 0.500",
        "WARNING mismatch 0.2",
        "INFO checkpoint saved",
    ]


# --- report ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page shows, and every address it could load."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.text = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        loads = ("src", "href", "xlink:href", "srcset", "action", "data", "poster", "background")
        self.addresses += [value for name, value in attributes if name in loads]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def report_run(tmp_path_factory):
    """A finished run with all that a report can show, and text that would break a careless page."""
    pytest.importorskip("jinja2"), pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("runs") / "sums<&>"
    with make(folder) as tracker:
        tracker.log(0, {"eval/reward": 0.1})
        for step in range(1, 70):
            tracker.log(
                step,
                {
                    "reward/mean": 0.1 + 0.005 * step,
                    "reward/std": 0.2,
                    "actor/entropy": math.nan if step == 5 else 2 - 0.01 * step,
                    "actor/loss": math.inf if step == 6 else 0.1,
                    "critic/loss": math.nan,
                    "kl/coef": 0.05,
                    "actor/skipped": int(step in (8, 9)),
                    "tokens": 1000,
                    "time/rollout": 2.0,
                    "time/update_actor": 1.0,
                    "time/step": 4.0,
                },
            )
        nasty = "<script>alert(1)</script><img src='http://evil.example/x.png'>"
        tracker.samples("before", [{"prompt": "1+1=", "response": nasty, "reward": 0.0, "finish_reason": "length"}])
        tracker.samples("after", [{"prompt": "1+1=", "response": "two & done", "reward": 1.0}])
        tracker.summary(
            {
                "reward_before": 0.1, "reward_after": 0.45, "reward_gain_interval": [0.31, 0.39], "eval_prompts": 200,
                "steps": 69, "train_seconds": 276.0, "tokens_per_second": 250.0, "seed": 7,
                "model": {"parameters": 612352}, **environment(),
            }
        )  # fmt: skip
    (folder / "config.yaml").write_text("seed: 7\nppo: {clip: 0.2}\n")
    return folder


def test_report_loads_nothing_and_runs_nothing(report_run):
    html = write_report(report_run).read_text("utf-8")
    page = Page(html)
    assert all(address.startswith("#") for address in page.addresses), page.addresses
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "url(" not in html.replace("url(#", "") and "@import" not in html
    assert "<script>alert(1)</script>" in page.text and "sums<&>" in page.text


def test_report_says_what_happened(report_run):
    page = Page(write_report(report_run).read_text("utf-8"))
    for expected in (
        "0.100→0.450", "+0.350", "95 % interval 0.310 to 0.390", "4 min 36 s", "69\u202f000", "612\u202f352",
        "Before training", "two & done", "finish reason: length", "ppo: {clip: 0.2}", "rollouts", "held-out",
        "2 updates were skipped", "left out of the charts there: actor/entropy, actor/loss, critic/loss",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert (page.text.count("50.0 %"), page.text.count("25.0 %")) == (1, 2)  # rollout; update and unaccounted time


def test_report_leaves_out_what_was_not_measured(report_run):
    html = write_report(report_run).read_text("utf-8")
    page = Page(html)
    assert html.count("opacity: 0.13") == 1  # the band of one standard deviation, around the reward alone
    assert "Entropy" in page.text and page.tags.count("svg") == 4  # reward, entropy, policy loss, times
    for absent in ("KL to reference", "Value loss", "KL coefficient", "Log-prob mismatch"):
        assert absent not in page.text


def test_report_is_repeatable_and_leaves_matplotlib_as_found(report_run):
    import matplotlib

    before = dict(matplotlib.rcParams)
    first, second = (write_report(report_run).read_bytes() for _ in range(2))
    assert first == second
    assert dict(matplotlib.rcParams) == before


def test_report_shows_the_evaluation_before_training_as_step_0(tmp_path):
    with make(tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        unfinished = write_report(tmp_path).read_text("utf-8")
        tracker.summary({"reward_before": 0.1, "reward_after": 0.2})
    legend = "</i>held-out</span>"
    assert legend not in unfinished and legend in write_report(tmp_path).read_text("utf-8")


def test_report_of_a_run_that_has_not_begun_says_so(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path)
    make(tmp_path).close()
    assert "No step has been recorded yet" in Page(write_report(tmp_path).read_text("utf-8")).text


def test_report_of_an_unfinished_step_draws_the_one_point(tmp_path):
    with make(tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.5, "reward/std": math.nan, "time/rollout": 1.0})
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert "The run has not finished" in page.text and page.tags.count("svg") == 2


@pytest.mark.parametrize(("interval", "verdict"), [([-0.1, 0.3], "no clear change"), (["NaN", "NaN"], "+0.100")])
def test_report_does_not_claim_more_than_the_interval(tmp_path, interval, verdict):
    with make(tmp_path) as tracker:
        tracker.summary({"reward_before": 0.1, "reward_after": 0.2, "reward_gain_interval": interval})
    text = Page(write_report(tmp_path).read_text("utf-8")).text
    assert verdict in text and ("interval" in text) == ("NaN" not in interval)


def test_a_missing_report_extra_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(BackendNotInstalled, match=r"pip install 'verl-adaptor\[report\]'"):
        make(tmp_path / "run", BARE.replace(report=True))
    assert not (tmp_path / "run").exists()


@given(st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), max_size=200))
def test_running_mean_stays_within_the_curve_and_passes_over_gaps(curve):
    known = [value for value in curve if not math.isnan(value)]
    for value in running_mean(curve):
        assert math.isnan(value) or min(known) - 1e-6 <= value <= max(known) + 1e-6
    assert running_mean([0.25] * 100) == pytest.approx([0.25] * 100)


def test_environment_names_versions_and_machine():
    found = environment()
    assert set(found) == {"versions", "machine"}
    assert {"python", "verl_adaptor", "torch", "transformers"} <= set(found["versions"])
    assert found["machine"]["cores"] >= 1 and found["machine"]["cpu"]
    assert json.loads(to_json(found)) == found


@given(
    losses=st.lists(st.integers(1, 40), min_size=2 * WINDOW, max_size=2 * WINDOW),
)
@settings(max_examples=50)
def test_c25_memory_that_does_not_come_back_is_told_once_and_what_comes_and_goes_is_not(losses) -> None:
    def warnings(free: list[int], total_steps: int) -> list[str]:
        rows, told = iter(free), []
        watch = MemoryWatch(lambda: next(rows))
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logger = logging.getLogger("verl_adaptor.tracking.memory")
        logger.addHandler(handler)
        try:
            for step in range(1, len(free) + 1):
                watch.look(step, total_steps)
        finally:
            logger.removeHandler(handler)
        return told

    mib = 2**20
    shrinking = [mib * value for value in accumulate(losses, operator.sub, initial=8000)]
    [sentence] = warnings(shrinking, total_steps=100_000)
    assert "MiB a step and would be out at about step" in sentence
    assert not warnings(shrinking, total_steps=len(shrinking))  # the end comes first
    comes_and_goes = [mib * (8000 + (value if number % 2 else -value)) for number, value in enumerate(losses)]
    assert not warnings(comes_and_goes, total_steps=100_000)
