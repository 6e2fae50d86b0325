"""The metric log: what a line holds, what a resume keeps, and that wandb can never stop a run."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from writer_rl.configs.schema import LoggingConfig
from writer_rl.trainer import metrics
from writer_rl.trainer.metrics import MetricLog, mask_secrets, read_jsonl, read_metrics, wandb_mode
from writer_rl.trainer.progress import duration, progress, stage

OFF = LoggingConfig(wandb="disabled")


class FakeRun:
    id = "abc123"

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


class FakeTable:
    def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
        self.columns, self.data = columns, [list(row) for row in data]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for the remote logging service."""
    run = FakeRun()
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> FakeRun:
        calls.append(options)
        if options["mode"] == "online" and state.online_fails:
            raise ConnectionError("no route")
        return run

    state = types.SimpleNamespace(run=run, calls=calls, online_fails=False)
    module = types.ModuleType("wandb")
    module.init, module.Table, module.Settings = init, FakeTable, lambda **options: options  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_SILENT", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("NETRC", "/nonexistent")
    return state


def sample(number: int) -> dict[str, Any]:
    return {
        "dialogue_id": f"d{number}",
        "trajectory_index": 1,
        "segment_index": 0,
        "prompt": "p",
        "completion": "c",
        "return": 0.5,
        "advantage": float("nan"),
        "rewards": {"memory": 0.4},
        "errors": [],
        "reference": [{"action": "NOOP"}],
    }


def test_a_line_holds_plain_numbers_and_counts_the_rest(tmp_path: Path) -> None:
    with MetricLog(tmp_path, OFF) as log:
        log.log(
            1,
            {
                "reward/memory_mean": np.float32(0.5),
                "policy/loss": float("nan"),
                "policy/grad_norm": float("inf"),
                "heldout/x": None,
            },
        )
        assert log.num_nonfinite == 2
        text = (tmp_path / "metrics.jsonl").read_text()
        assert text.endswith("\n"), "flushed while the run goes on"
    line = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert line.pop("time_s") >= 0
    assert line == {
        "step": 1,
        "reward/memory_mean": 0.5,
        "policy/loss": None,
        "policy/grad_norm": None,
        "heldout/x": None,
        "metrics/num_nonfinite": 2,
    }


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with MetricLog(tmp_path, OFF) as log, pytest.raises(ValueError, match="step is written by the log"):
        log.log(1, {"step": 2})


def test_resume_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    with MetricLog(tmp_path, OFF) as log:
        for step in (1, 2, 3):
            log.log(step, {"a/b": step})
            log.log_samples(step, [sample(step)])
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    lines[1]["time_s"] = 100.0
    log.path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "a/')
    with MetricLog(tmp_path, OFF, resume_step=2) as again:
        again.log(3, {"a/b": 30})
    rows = read_jsonl(log.path)
    assert [(row["step"], row["a/b"]) for row in rows] == [(1, 1), (2, 2), (3, 30)]
    assert rows[2]["time_s"] >= 100.0, "time goes on from where the run stopped"
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "update_000001.jsonl",
        "update_000002.jsonl",
    ]


def test_a_fresh_start_leaves_nothing_of_the_last_run(tmp_path: Path) -> None:
    with MetricLog(tmp_path, OFF) as log:
        log.log(0, {"a/b": 1})
        log.log_samples(1, [sample(1)])
    with MetricLog(tmp_path, OFF) as log:
        log.log(1, {"a/b": 2})
    assert [row["step"] for row in read_jsonl(log.path)] == [1]
    assert not list((tmp_path / "samples").iterdir())


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with MetricLog(tmp_path / "absent", OFF, enabled=False) as log:
        log.log(1, {"a/b": 1})
        log.log_samples(1, [sample(1)])
    assert not (tmp_path / "absent").exists()


def test_reader_merges_a_step_and_passes_over_damage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 2, "a": 1}\nnonsense\n[1]\n{"step": 1, "a": NaN}\n{"step": 2, "b": 3}\n{"a": 1}\n{"step": 2, "c"'
    )
    assert read_metrics(path) == [{"step": 1, "a": None}, {"step": 2, "a": 1, "b": 3}]
    assert read_metrics(tmp_path / "absent") == []


def test_sample_rows_keep_their_history(tmp_path: Path, service: types.SimpleNamespace) -> None:
    """Fault 31: the table shown last holds every update's rows, is a fresh object, and each update has its own file."""
    with MetricLog(tmp_path, LoggingConfig(wandb="offline")) as log:
        for step in (1, 2, 3):
            log.log_samples(step, [sample(step), sample(step)])
    tables = [entry[metrics.TABLE_KEY] for entry in service.run.logged]
    assert [len(table.data) for table in tables] == [2, 4, 6]
    assert len({id(table) for table in tables}) == 3
    assert [row[0] for row in tables[-1].data] == [1, 1, 2, 2, 3, 3]
    assert tables[0].columns[0] == "step"
    assert [len(read_jsonl(log.sample_file(step))) for step in (1, 2, 3)] == [2, 2, 2]
    assert read_jsonl(log.sample_file(2))[0]["advantage"] is None
    service.run.logged.clear()
    with MetricLog(tmp_path, LoggingConfig(wandb="offline"), resume_step=2) as log:
        log.log_samples(3, [sample(3)])
    assert [row[0] for row in service.run.logged[-1][metrics.TABLE_KEY].data] == [1, 1, 2, 2, 3]
    assert service.calls[-1]["id"] == "abc123", "a resumed run goes on under its own id"


def test_the_table_is_bounded_and_the_files_are_not(tmp_path: Path, service: types.SimpleNamespace) -> None:
    with MetricLog(tmp_path, LoggingConfig(wandb="offline")) as log:
        for step in range(1, 31):
            log.log_samples(step, [sample(step)] * 10)
    assert len(service.run.logged[-1][metrics.TABLE_KEY].data) == metrics.TABLE_ROWS == 200
    assert sum(len(read_jsonl(file)) for file in metrics.sample_files(tmp_path)) == 300


def test_missing_values_are_not_sent_as_zero(tmp_path: Path, service: types.SimpleNamespace) -> None:
    with MetricLog(tmp_path, LoggingConfig(wandb="offline")) as log:
        log.log(4, {"a/b": float("nan"), "a/c": 1.5})
    assert {k: v for k, v in service.run.logged[0].items() if k != "time_s"} == {
        "step": 4,
        "a/c": 1.5,
        "metrics/num_nonfinite": 1,
    }
    assert service.run.finished


def test_a_failing_service_is_named_once_and_training_goes_on(
    tmp_path: Path, service: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service.run, "log", lambda values: (_ for _ in ()).throw(OSError("disk full")))
    with MetricLog(tmp_path, LoggingConfig(wandb="offline")) as log:
        for step in (1, 2, 3):
            log.log(step, {"a/b": step})
            log.log_samples(step, [sample(step)])
    assert capsys.readouterr().err.count("wandb stopped working") == 1
    assert len(read_jsonl(log.path)) == 3


def test_no_connection_falls_back_to_offline(
    tmp_path: Path, service: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    service.online_fails = True
    with MetricLog(tmp_path, LoggingConfig(wandb="online"), config={"judge": {"api_key": "hidden"}}) as log:
        log.log(1, {"a/b": 1})
    assert [call["mode"] for call in service.calls] == ["online", "offline"]
    assert service.calls[0]["config"] == {"judge": {"api_key": "***"}}
    assert capsys.readouterr().err.count("cannot go online") == 1
    assert len(service.run.logged) == 1


def test_mode_is_online_only_with_a_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: types.SimpleNamespace
) -> None:
    assert wandb_mode("auto") == "offline"
    login = tmp_path / "netrc"
    login.write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    login.chmod(0o600)
    monkeypatch.setenv("NETRC", str(login))
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode("auto") == "offline", "a login for another server"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"
    assert wandb_mode("offline") == "offline"


def test_importing_the_log_does_not_import_wandb() -> None:
    import subprocess

    code = "import sys, writer_rl.trainer.metrics; sys.exit('wandb' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_secrets_are_masked_by_name() -> None:
    settings = {
        "HF_TOKEN": "t",
        "token": "t",
        "max_new_tokens": 4,
        "passwd": "",
        "list": [{"client_secret": "s"}],
        "key": "value",
    }
    assert mask_secrets(settings) == {
        "HF_TOKEN": "***",
        "token": "***",
        "max_new_tokens": 4,
        "passwd": "",
        "list": [{"client_secret": "***"}],
        "key": "value",
    }


@pytest.mark.slow
def test_real_wandb_offline_writes_below_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with MetricLog(tmp_path / "grpo", LoggingConfig(), config={"seed": 1}) as log:
        for step in (1, 2):
            log.log(step, {"reward/return_mean": 0.1 * step})
            log.log_samples(step, [sample(step)])
    assert list((tmp_path / "grpo" / "wandb").glob("offline-run-*/*.wandb"))
    assert (tmp_path / "grpo" / "wandb_run_id.txt").read_text().strip()


def test_progress_prints_lines_when_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("writer_rl.trainer.progress.LINE_EVERY_S", 0.0)
    with stage("score [all]"), progress("dialogues", total=4) as bar, progress("inner"):
        bar.advance(note="return 0.4")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "── score [all]"
    assert lines[1].startswith("dialogues: 1/4 · ")
    assert lines[1].endswith(" left · return 0.4")
    assert lines[-1].startswith("── score [all]: done in ")


def test_stage_says_where_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), stage("learn"):
        raise RuntimeError
    assert "learn: stopped after" in capsys.readouterr().err


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with stage("learn"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.96, "1 min 00 s"), (3599.6, "1 h 00 min"), (7384, "2 h 03 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
