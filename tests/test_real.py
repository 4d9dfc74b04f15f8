"""A real pretrained language model, trained through the command line against a real classifier."""

import json
import subprocess
import sys

import pytest


@pytest.mark.process
def test_a_real_model_trains_from_the_command_line(real_models, tmp_path):
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "rlhf_lab", "train", "--preset", "smol", "--out", str(run)),
        *("--base-model", str(real_models / "smollm2")),
        *("--reward-model", str(real_models / "minilm-sentiment")),
        *("--batch-size", "4", "--num-minibatches", "2", "--gen-len", "8"),
        *("--total-phases", "2", "--warmup-steps", "1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert first["kl_per_sequence"] == 0.0 < second["kl_per_sequence"]
    assert abs(first["ratio_first_minibatch"] - 1) < 1e-3
    assert first["gold_reward"] is None
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 12
    assert all(sample["text"].startswith("This movie was really") for sample in samples)
    assert all(0 < sample["reward"] < 1 for sample in samples)
    assert json.loads((run / "run.json").read_text())["final"]["samples"] == 16
