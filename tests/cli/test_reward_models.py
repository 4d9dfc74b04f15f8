"""Reward models with one logit on the command line, as real processes."""

import json

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.tiny_models import chat_tokenizer, randomize, save, tiny_chat


@pytest.mark.process
def test_a_reward_model_of_one_label_pays_a_run_and_texts(warm_python, tmp_path):
    run = lambda *given: warm_python.run(["-m", "rlhf_lab", *map(str, given), "--device", "cpu"])
    model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                    num_attention_heads=4, max_position_embeddings=64, num_labels=1, pad_token_id=3)
    )  # fmt: skip
    randomize(model, 4)
    judge = save(model, chat_tokenizer(), tmp_path / "judge")
    base = tiny_chat(tmp_path / "base")
    settings = ["--base-model", base, "--reward-model", judge, "--prefix", "w1", "--gen-len", 6]
    settings += ["--batch-size", 8, "--total-phases", 1, "--out", tmp_path / "run"]
    done = run("train", "--chat", *settings)
    assert done.returncode == 0, done.stderr
    assert "rewarding the logit of" in done.stdout + done.stderr
    line = json.loads((tmp_path / "run" / "samples.jsonl").open().readline())
    asked = ["--reward-model", judge, "--prompt", "w1 "]
    scored = run("score", line["response"].strip(), *asked)
    assert float(scored.stdout.split("\t")[0]) == pytest.approx(line["reward"], abs=1e-3)
    refused = run("score", "w2", "--reward-model", judge)
    assert refused.returncode == 2 and "score --prompt TEXT" in refused.stderr
