"""A pretrained Llama (SmolLM2) and a pretrained classifier.

One run with the default probes is killed in its second phase and resumed; it is reported on, and
its exported policy is read by transformers.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_lab.training.resume import load_policy

pytestmark = [pytest.mark.process, pytest.mark.slow]


def lab(*arguments: str | Path, cwd: Path) -> str:
    """Run a command of the package and return what it printed."""
    command = [sys.executable, "-m", "rlhf_lab", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def resumed(real_models, place) -> str:
    """The output of `resume` of a run that was killed when its first phase was saved."""
    models = ["--base-model", real_models / "smollm2"]
    models += ["--reward-model", real_models / "minilm-sentiment", "--lora-rank", 4]
    sizes = "--batch-size 8 --num-minibatches 2 --gen-len 8 --total-phases 3 --warmup-steps 1"
    flags = [*models, *sizes.split(), "--save-every", 1, "--keep-checkpoints", 0, "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_lab", "train", "--preset", "smol", "--probes"]
        + list(map(str, flags)),
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


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_killed_run_resumes_to_its_end(resumed, place):
    assert "continuing" in resumed
    metrics, samples = (read_lines(place / "run" / f"{n}.jsonl") for n in ("metrics", "samples"))
    assert [line["phase"] for line in metrics] == [0, 1, 2]
    assert metrics[0]["kl_per_sequence"] == 0.0 < metrics[2]["kl_per_sequence"]
    assert all(abs(line["ratio_first_minibatch"] - 1) < 1e-3 for line in metrics)
    assert metrics[0]["true_reward"] is None
    assert all(sample["text"].startswith("This movie was really") for sample in samples)
    assert all(0 < sample["reward"] < 1 for sample in samples)
    checks = read_lines(place / "run/probes/checks.jsonl")
    assert checks and all(check["ok"] for check in checks)
    lab("report", "run", cwd=place)
    info = json.loads((place / "run/run.json").read_text())
    assert info["status"] == "finished" and info["final"]["samples"] == 32


def test_export_has_the_log_probs_of_transformers(resumed, place):
    assert "reloaded with transformers" in lab("export", "run", "exported", cwd=place)
    policy, _ = load_policy(place / "run")
    model = AutoModelForCausalLM.from_pretrained(str(place / "exported"), local_files_only=True)
    tokens = policy.base_model.tokenizer("This movie was really great", return_tensors="pt")
    with torch.no_grad():
        found = model.eval()(tokens.input_ids).logits.log_softmax(-1)
        expected = policy(tokens.input_ids)[0].log_softmax(-1)
    likely = expected > -10
    torch.testing.assert_close(found[likely], expected[likely], atol=2e-4, rtol=0)
    assert found.argmax(-1).equal(expected.argmax(-1))
