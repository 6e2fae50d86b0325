"""The run report: complete and partial runs, hostile text, no outside address, and the page as a browser draws it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from writer_rl.configs.errors import InputError
from writer_rl.trainer import report
from writer_rl.trainer.report_figures import moving_mean, series

HOSTILE = '</pre><script>alert("x")</script><img src=x onerror=alert(1)> {{ 7 * 7 }} $x_1$ & <b>'
COMPONENTS = ("json", "schema", "dup", "stop", "memory", "phi", "chain", "valid", "qa_gain", "penalty")


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.02, "high": mean + 0.02}


def make_run(root: Path, num_updates: int = 30) -> Path:
    """A whole run with numbers that move, gaps, a damaged line and chat text that tries to break out."""
    run = root / "synthetic"
    (run / "sft").mkdir(parents=True)
    (run / "grpo" / "samples").mkdir(parents=True)
    (run / "evaluation").mkdir()
    (run / "config.yaml").write_text(
        "name: synthetic\nseed: 42\nmodel: {path: 'package:smollm2-135m'}\nreward: {rules: fixed}\n"
        "grpo: {group_size: 8, kl_guard: old, kl_guard_nats: 0.02}\njudge: {api_key: very-secret-value}\n"
    )
    sft = [
        {"step": i, "loss": 2.0 * math.exp(-i / 15) + 0.05, "learning_rate": 1e-4 * i / 40, "epoch": i / 20}
        for i in range(1, 41)
    ]
    sft += [
        {"step": i, "eval_loss": 2.1 * math.exp(-i / 15) + 0.1, "eval_valid_frac": min(1.0, i / 30)}
        for i in (10, 20, 30, 40)
    ]
    (run / "sft" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sft))
    (run / "sft" / "summary.json").write_text(json.dumps({"num_rows": 320, "wall_s": 812.5, "eval_loss": 0.1}))
    lines = []
    for i in range(1, num_updates + 1):
        wave = 0.02 * math.sin(i)
        row: dict[str, object] = {
            "step": i,
            "time_s": 60.0 * i,
            "reward/return_mean": 0.35 + 0.006 * i + wave,
            "reward/return_std": 0.08,
        }
        for k, name in enumerate(COMPONENTS):
            sign = -0.1 if name == "penalty" else 1.0
            row[f"reward/{name}_mean"] = sign * (0.4 + 0.01 * i + 0.03 * math.sin(i + k))
            row[f"reward/{name}_std"] = 0.06 * abs(sign)
        row |= {
            "group/zero_variance_frac": 0.2,
            "group/num_trained_samples": 40 + i % 5,
            "policy/kl_ref_nats": 0.001 * i,
            "policy/kl_old_nats": 0.002 + wave / 20,
            "policy/clip_low_frac": 0.01,
            "policy/clip_high_frac": 0.02,
            "policy/ratio_mean": 1 + wave,
            "policy/loss": wave,
            "policy/grad_norm": 0.5 + wave,
            "policy/learning_rate": 2e-5,
            "policy/skipped_steps": int(i == 7),
            "sampler/mismatch_kl_nats": 0.003,
            "sampler/mismatch_abs_nats": 0.01,
            "sampler/ratio_mean": 1.001,
            "completion/tokens_mean": 60 + i / 3,
            "completion/truncated_frac": 0.01,
            "time/rollout_s": 22.0,
            "time/reward_s": 1.5,
            "time/learn_s": 30.0 + wave,
            "time/sync_s": 0.8,
            "time/update_s": 56.0,
            "throughput/rollout_tokens_per_s": 150.0,
            "throughput/learn_tokens_per_s": 280.0,
        }
        if i % 5 == 0:
            row |= {"heldout/memory_mean": 0.5 + 0.004 * i, "heldout/memory_std": 0.1}
        if i == 3:
            row["reward/return_mean"] = None
        lines.append(json.dumps(row))
    lines.insert(4, '{"step": 5, "reward/retu')
    lines.insert(6, '{"step": 2, "policy/loss": NaN}')
    (run / "grpo" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step in (1, 15, 30):
        rows = [
            {
                "step": step,
                "dialogue_id": f"d{step}",
                "trajectory_index": j,
                "segment_index": 1,
                "prompt": [
                    {"role": "system", "content": "Keep the memory."},
                    {"role": "user", "content": "Roster: Ana, Ben\n" * 120 + HOSTILE},
                ],
                "completion": json.dumps(
                    {
                        "actions": [
                            {
                                "action": "ADD",
                                "owner": "Ana",
                                "source": "Ben",
                                "layer": "per_speaker_core",
                                "kind": "fact",
                                "content": "Ana bakes bread.",
                            },
                            {"action": "UPDATE", "entry_id": "e3", "content": f"Meeting moved to {10 + j}:00."},
                        ]
                    }
                )
                if j
                else HOSTILE,
                "return": 0.2 + 0.1 * j,
                "advantage": j - 1.5,
                "rewards": {"memory": 0.4, "valid": 1.0, "chain": None},
                "errors": [] if j else ["invalid JSON: " + HOSTILE],
                "reference": [
                    {
                        "action": "ADD",
                        "owner": "Ana",
                        "source": "Ana",
                        "layer": "per_speaker_core",
                        "kind": "fact",
                        "content": "Ana bakes bread on Sundays.",
                    }
                ],
            }
            for j in range(4)
        ]
        (run / "grpo" / "samples" / f"update_{step:06d}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    arms = {
        arm: {
            "num_dialogues": 48,
            "state_score": interval(s),
            "phi": interval(s - 0.02),
            "owner_error": interval(e),
            "source_error": interval(e / 2),
            "layer_error": interval(0.03),
            "validity": interval(0.98),
            "qa": interval(s - 0.1),
            "qa_gain": interval(s - 0.3),
            "update_precision": interval(0.7),
            "update_recall": interval(0.6),
            "records_per_segment": interval(2.1),
            "per_owner_kind": {"person": interval(s + 0.02), "GROUP": interval(s - 0.1)},
        }
        for arm, s, e in (("base", 0.2, 0.3), ("sft", 0.6, 0.12), ("rl", 0.66, 0.08), ("reference", 1.0, 0.02))
    }
    arms["s1_only"] = {"num_dialogues": 48, "qa": interval(0.31)}
    (run / "evaluation" / "summary.json").write_text(
        json.dumps(
            {
                "arms": arms,
                "differences": [
                    {
                        "a": "rl",
                        "b": "sft",
                        "metric": "state_score",
                        "mean": 0.06,
                        "low": 0.02,
                        "high": 0.1,
                        "num_dialogues": 48,
                    },
                    {
                        "a": "rl",
                        "b": "sft",
                        "metric": "qa",
                        "mean": 0.01,
                        "low": -0.02,
                        "high": 0.04,
                        "num_dialogues": 48,
                    },
                ],
                "budget": {"recall_n": 40, "s1_top_k": 10},
                "settings": {"temperature": 0.0},
            }
        )
    )
    questions = [
        {"arm": "rl", "question_id": f"q{i}", "failure": kind}
        for i, kind in enumerate(["", "formation", "retrieval", "answer", "formation"])
    ]
    (run / "evaluation" / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> report.ReportFiles:
    return report.write_report(make_run(tmp_path_factory.mktemp("run")))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_whole_run_gives_every_figure_and_table(whole: report.ReportFiles) -> None:
    names = {image.stem for image in whole.images}
    assert names == {
        "evaluation_state",
        "evaluation_owners",
        "reward_return",
        "reward_components",
        "heldout_memory",
        "groups",
        "policy_kl",
        "policy_clip",
        "sampler",
        "optimiser",
        "completions",
        "time",
        "throughput",
        "sft_loss",
        "sft_schedule",
    }
    for image in whole.images:
        assert image.read_bytes().startswith(b"\x89PNG")
    html = whole.page.read_text()
    assert '0.660<span class="interval">[0.640, 0.680]</span>' in html
    assert '0.080<span class="interval">[0.060, 0.100]</span>' in html
    assert '<td class="clear">+0.060 [+0.020, +0.100]</td>' in html
    assert "<td>+0.010 [-0.020, +0.040]</td>" in html, "an interval around 0 is not set in bold"
    assert "+0.060, 95 % interval [+0.020, +0.100], above 0: RL improved the memory." in html
    assert "not run" not in html
    for label in (
        "valid JSON",
        "no duplicates",
        "stops in time",
        "update chain",
        "QA gain",
        "penalty",
        "gradient norm",
    ):
        assert label in html, label
    assert "very-secret-value" not in html


def test_hostile_text_stays_text(whole: report.ReportFiles) -> None:
    html = whole.page.read_text()
    assert "&lt;script&gt;alert" in html
    assert "{{ 7 * 7 }}" in html
    parser = _Tags()
    parser.feed(html)
    assert not [tag for tag, _ in parser.tags if tag in ("script", "img", "iframe", "link", "object", "b")]
    assert not [attrs for _, attrs in parser.tags if any(name.startswith("on") for name in attrs)]


def test_page_names_no_outside_address(whole: report.ReportFiles) -> None:
    html = whole.page.read_text()
    assert not re.findall(r"https?://|src=|@import|url\((?!#)", html.replace("&lt;img src=x", ""))
    references = re.findall(r'href="([^"]*)"', html)
    assert references
    assert all(reference.startswith("#") for reference in references)
    ids = set(re.findall(r'\bid="([^"]*)"', html))
    assert {reference[1:] for reference in references} <= ids


@pytest.mark.parametrize("missing", ["sft", "grpo", "evaluation", "config.yaml"])
def test_missing_part_is_named(tmp_path: Path, missing: str) -> None:
    run = make_run(tmp_path, 2)
    shutil.rmtree(run / missing) if (run / missing).is_dir() else (run / missing).unlink()
    html = report.write_report(run).page.read_text()
    assert ("not run" in html) == (missing != "config.yaml")
    assert report.main([str(run)]) == 0


def test_empty_run_and_damaged_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name, text in {
        "config.yaml": "- not\n- an object",
        "grpo/metrics.jsonl": '{"step": "x"}\n[1]\n\x00\n{"step": 1, "reward/return_mean": "high"}',
        "evaluation/summary.json": '{"arms": {"rl": {"state_score": "good", "per_owner_kind": 3}, "x": 4}, "differences": 5, "budget": []}',
        "evaluation/questions.jsonl": '{"arm": null, "failure": 3}',
        "sft/summary.json": "{",
        "sft/metrics.jsonl": "",
        "grpo/samples/update_000001.jsonl": '{"return": "no", "rewards": 3, "errors": {"a": 1}, "completion": 5, "prompt": [1]}',
    }.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    files = report.write_report(run)
    assert files.images == ()
    assert "Evaluation: not run." in files.page.read_text()


def test_no_run_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no directory"):
        report.write_report(tmp_path / "absent")
    with pytest.raises(InputError, match="holds no run"):
        report.write_report(tmp_path)


def test_gaps_are_not_zeros() -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": 3.0}]
    assert series(rows, "a") == ([1.0, 4.0], [1.0, 3.0])
    assert moving_mean([1.0, 2.0, 6.0], 3) == [1.5, 3.0, 4.0]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.01, 0.1, "RL improved"),
        (-0.1, -0.01, "RL made the memory worse"),
        (-0.1, 0.1, "no difference can be claimed"),
    ],
)
def test_verdict_follows_the_interval(low: float, high: float, words: str) -> None:
    item = {
        "a": "rl",
        "b": "sft",
        "metric": "state_score",
        "mean": (low + high) / 2,
        "low": low,
        "high": high,
        "num_dialogues": 9,
    }
    assert words in report.verdict({"differences": [item]})
    flipped = {**item, "a": "sft", "b": "rl", "mean": -item["mean"], "low": -high, "high": -low}  # type: ignore[operator]
    assert report.verdict({"differences": [flipped]}) == report.verdict({"differences": [item]})


def test_samples_are_the_extremes_of_an_update() -> None:
    rows = [{"return": value, "dialogue_id": str(value), "completion": '{"actions": []}'} for value in (0.5, 0.1, 0.9)]
    chosen = report.chosen_samples({3: rows})
    assert [(row["step"], row["dialogue_id"], row["completion"]) for row in chosen] == [
        (3, "0.9", "[]"),
        (3, "0.1", "[]"),
    ]


def test_summary_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, 10)
    assert report.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "GRPO return over 9 updates" in out
    assert "SFT + RL" in out
    assert str(run / "report" / "index.html") in out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_browser_draws_the_page(tmp_path: Path, whole: report.ReportFiles) -> None:
    page = whole.page
    shot = tmp_path / "page.png"
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1200,9000",
        f"--screenshot={shot}",
        page.as_uri(),
    ]
    done = subprocess.run(
        command, capture_output=True, timeout=110, env={**os.environ, "HOME": str(tmp_path)}, check=False
    )
    assert shot.exists(), done.stderr.decode()[-2000:]
    assert shot.stat().st_size > 100_000
