"""Settings that `train` rejects: names, models, devices, files, and one row per kind of rule."""

from pathlib import Path

import pytest

from tests.doors.door import TRAIN, refused

CASES = {
    "--kl-coef -0.1": ("kl_coef=-0.1", "0 or greater"),
    "--temperature nan": ("temperature=nan", "1e-6 or greater"),
    "--num-minibatches 3": ("batch_size=16", "num_minibatches=3", "divisor"),
    "--advantages grpo": ("advantages='grpo'", "samples_per_prompt=1", "at least 2"),
    "--gen-len 31": ("gen_len=31", "32"),
    "--preset real": ("preset='real'", "reel, smol"),
    "--value-head both": ("invalid choice", "both", "detached"),
    "--loggers tensorboard,mlflow": ("'mlflow'", "tensorboard"),
    "--device tpu": ("device='tpu'", "auto, cpu"),
    "--device meta": ("device='meta'", "auto, cpu"),
    "--device cuda:99": ("device='cuda:99'",),
    "--precision tf32": ("precision='tf32'", "fp32"),
    "--base-model=": ("base_model=''", "not empty"),
    "--base-model ./nowhere": ("./nowhere", "Choose a model directory"),
    "--base-model reel-sentiment": ("reel-sentiment", "language model"),
    "--reward-fn Sentiment": ("reward_fn='Sentiment'", "choose sentiment"),
    "--reward-fn count:": ("count:", "count:great"),
    "--reward-fn learned": ("reel-sentiment", "train-reward"),
    "--reward-model reel-nano": ("reel-nano",),
    "--positive-label splendid": ("splendid", "positive_label"),
    "--prompts nowhere.txt": ("prompts='nowhere.txt'", "No such file"),
    "--prompts .": ("prompts='.'", "is not a file"),
    "--value-head separate --critic-path reel-nano": ("reel-nano", "train-reward"),
    "--stop-tokens xyzzy": ("stop_tokens='xyzzy'", "not one token"),
    "--lora-rank 2 --lora-targets W_X": ("lora_targets", "'W_X'", "W_Q"),
}


@pytest.mark.parametrize("options", CASES)
def test_train_rejects_setting_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused([*TRAIN, "--out", "made", *options.split()], *CASES[options])
    assert not list(tmp_path.iterdir())
