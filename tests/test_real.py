"""A real pretrained Llama and a real classifier, through the doors that a user takes.

One run trains with the default probes, is killed in its second phase, and goes on; what it wrote is
exported, reported on and read by plain transformers. SFT, DPO and a TRL-style step start anew.
"""

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

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer

pytestmark = [pytest.mark.process, pytest.mark.slow]
PROBES = "text_heatmap run_health kl_by_position value_lens step_ledger weight_delta logit_shift"


def lab(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the package in a process of its own; it must end well."""
    command = [sys.executable, "-m", "rlhf_lab", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def resumed(real_models, place) -> subprocess.CompletedProcess[str]:
    """`resume` of a run that was killed by SIGKILL once its first phase was saved."""
    options = {
        "--base-model": real_models / "smollm2",
        "--reward-model": real_models / "minilm-sentiment",
        "--lora-rank": 4,
        "--batch-size": 8,
        "--num-minibatches": 2,
        "--gen-len": 8,
        "--total-phases": 3,
        "--warmup-steps": 1,
        "--save-every": 1,
        "--keep-checkpoints": 0,
        "--out": "run",
    }
    flags = [str(part) for pair in options.items() for part in pair]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_lab", "train", "--preset", "smol", "--probes", *flags],
        cwd=place,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 900
    while not (place / "run/checkpoints/last.safetensors").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return lab("resume", "run", cwd=place)


def test_a_run_that_was_killed_goes_on_to_its_end(resumed, place):
    assert "continuing" in resumed.stdout
    metrics = [json.loads(line) for line in (place / "run/metrics.jsonl").open()]
    assert [line["phase"] for line in metrics] == [0, 1, 2]
    assert metrics[0]["kl_per_sequence"] == 0.0 < metrics[2]["kl_per_sequence"]
    assert all(abs(line["ratio_first_minibatch"] - 1) < 1e-3 for line in metrics)
    assert metrics[0]["true_reward"] is None
    samples = [json.loads(line) for line in (place / "run/samples.jsonl").open()]
    assert all(sample["text"].startswith("This movie was really") for sample in samples)
    assert all(0 < sample["reward"] < 1 for sample in samples)
    info = json.loads((place / "run/run.json").read_text())
    assert info["status"] == "finished" and info["final"]["samples"] == 32


def test_every_default_probe_records_and_the_report_shows_it(resumed, place):
    lab("report", "run", cwd=place)
    page = (place / "run/report.html").read_text(encoding="utf-8")
    missing = [name for name in PROBES.split() if name not in page]
    assert not missing
    checks = [json.loads(line) for line in (place / "run/probes/checks.jsonl").open()]
    assert checks and all(check["ok"] for check in checks)
    recorded = {path.stem for path in (place / "run/probes/records").iterdir()}
    assert recorded == set(PROBES.split())
    notes = place / "run/probes/notes.jsonl"
    assert not notes.exists() or "refused" not in notes.read_text()
    suite = json.loads((place / "run/probes/suite.json").read_text())
    assert suite["eval_tokens"][0] > 8  # texts of the run's own, not its one prompt


def test_the_trained_llama_is_exported_and_plain_transformers_agrees(resumed, place):
    from transformers import AutoModelForCausalLM

    from rlhf_lab.training.restore import load_policy

    done = lab("export", "run", "exported", cwd=place)
    assert "reloaded with transformers" in done.stdout
    policy, _ = load_policy(place / "run")
    plain = AutoModelForCausalLM.from_pretrained(str(place / "exported"), local_files_only=True)
    tokens = policy.base_model.tokenizer("This movie was really great", return_tensors="pt")
    with torch.no_grad():
        found = plain.eval()(tokens.input_ids).logits.log_softmax(-1)
        expected = policy(tokens.input_ids)[0].log_softmax(-1)
    likely = expected > -10
    torch.testing.assert_close(found[likely], expected[likely], atol=2e-4, rtol=0)
    assert found.argmax(-1).equal(expected.argmax(-1))


def test_sft_on_texts_keeps_what_it_learned(real_models, place):
    lines = ["An awful film.", "A great film, and I mean it.", "I slept.", "Superb."] * 5
    (place / "reviews.txt").write_text("\n".join(lines), encoding="utf-8")
    base = real_models / "smollm2"
    fitting = ["--steps", 3, "--batch-size", 4, "--learning-rate", "1e-4", "--samples", 0]
    done = lab(
        *("sft", "--texts", "reviews.txt", "--base-model", base, "--out", "tuned"),
        *fitting,
        cwd=place,
    )
    assert "written to tuned" in done.stdout
    moved = load_file(place / "tuned/model.safetensors")
    before = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    gap = (moved[name].float() - before[name].float()).abs().max()
    assert 0 < gap < 0.01


def test_dpo_on_pairs_writes_a_model(real_models, place):
    pairs = [
        {"chosen": f"A great film number {i}.", "rejected": f"Awful film {i}."} for i in range(20)
    ]
    text = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (place / "pairs.jsonl").write_text(text, encoding="utf-8")
    fitting = ["--steps", 2, "--batch-size", 4, "--samples", 0, "--lora-rank", 2]
    done = lab(
        *("dpo", "--pairs", "pairs.jsonl", "--base-model", real_models / "smollm2"),
        *("--out", "preferring", *fitting),
        cwd=place,
    )
    assert "written to preferring" in done.stdout
    assert os.path.getsize(place / "preferring/model.safetensors") > 5e8


def test_a_step_as_in_trl(real_models, tmp_path):
    args = RLHFArgs(
        preset="smol",
        base_model=str(real_models / "smollm2"),
        reward_model=str(real_models / "minilm-sentiment"),
        batch_size=4,
        num_minibatches=2,
        gen_len=8,
        total_phases=2,
        warmup_steps=0,
        keep_checkpoints=0,
    )
    trainer = RLHFTrainer(args, out=tmp_path / "run")
    tokenizer = trainer.policy.base_model.tokenizer
    queries = [tokenizer(text, return_tensors="pt").input_ids[0] for text in ["A film"] * 4]
    responses = trainer.generate(queries)
    report = trainer.step(queries, responses, [0.1, 0.9, 0.4, 0.6])
    assert abs(report.learning.ratio_first_minibatch - 1) < 1e-3
    assert abs(report.rollout.kl_per_sequence) < 1e-3
