"""Chats on the command line, as real processes: train, sample and sft with messages."""

import json

import pytest

from tests.tiny_models import tiny_chat

ASK, SAY = {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}


@pytest.fixture(scope="module")
def run(warm_python):
    """Runs one command in a process of its own."""
    return lambda *arguments: warm_python.run(["-m", "rlhf_lab", *map(str, arguments)])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a model, and conversations whose last turn is a user's or an answer."""
    place = tmp_path_factory.mktemp("chats")
    tiny_chat(place / "model")
    asked = [{"prompt": [ASK]}, {"prompt": "w4"}, {"prompt": [ASK, SAY, ASK]}]
    answered = [{"messages": [ASK, SAY]}] * 4
    for name, rows in (("asked", asked), ("answered", answered)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_a_run_in_a_chat_and_samples_of_it(run, place):
    settings = ["--base-model", place / "model", "--prompts", place / "asked.jsonl"]
    settings += ["--reward-fn", "count:w5", "--gen-len", 12, "--total-phases", 1]
    settings += ["--batch-size", 16, "--device", "cpu", "--system-prompt", "w9"]
    refused = run("train", "--out", place / "no", *settings)
    assert refused.returncode == 2 and "set chat=True (--chat)" in refused.stderr
    done = run("train", "--out", place / "run", "--chat", *settings)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (place / "run" / "samples.jsonl").open()]
    assert lines and all(line["prompt"].startswith("system w9 w0 user w") for line in lines)
    assert all(line["reward"] == line["response"].split().count("w5") for line in lines)
    shown = run("sample", place / "run", "-n", 2, "--prompt", "w1")
    assert shown.returncode == 0 and shown.stdout.count("w9 w0 user") == 2, shown.stderr


def test_a_model_answers_in_a_chat(run, place):
    asked = ["--prompt", "w1", "--gen-len", 4, "--device", "cpu"]
    done = run("sample", place / "model", "--chat", "--system-prompt", "w9", *asked)
    assert done.stdout.count("system w9 w0 user w1 w0 assistant") == 5, done.stderr
    refused = run("sample", place / "model", "--system-prompt", "w9", *asked)
    assert refused.returncode == 2 and "give --chat, too" in refused.stderr


def test_sft_learns_the_answers_of_conversations(run, place):
    few = ["--steps", 4, "--batch-size", 2, "--samples", 2, "--gen-len", 4, "--device", "cpu"]
    source = ["--texts", place / "answered.jsonl", "--column", "messages"]
    settings = ["--base-model", place / "model", "--out", place / "tuned", *few]
    done = run("sft", *source, "--chat", *settings)
    assert done.returncode == 0, done.stderr
    assert "held-out texts (2 tokens)" in done.stdout
    assert json.loads((place / "tuned" / "tuning.json").read_text())["chat"] is True
