"""Adapters in PEFT's format on the command line, as real processes."""

import json

import pytest
from safetensors.torch import load_file


@pytest.mark.process
def test_an_adapter_is_exported_and_trained_on(warm_python, tmp_path):
    run = lambda *given: warm_python.run(["-m", "rlhf_lab", *map(str, given)])
    few = ["--total-phases", 1, "--batch-size", 8, "--gen-len", 4, "--device", "cpu"]
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "adapter"
    assert run("train", "--lora-rank", 2, "--out", first, *few).returncode == 0
    done = run("export", first, out, "--adapter")
    assert done.returncode == 0 and "in PEFT's format for reel-nano" in done.stdout, done.stderr
    assert {path.name for path in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "reel-nano" and config["peft_type"] == "LORA"
    assert all("lora_" in name for name in load_file(out / "adapter_model.safetensors"))
    trained = run("train", "--adapter-from", out, "--out", second, *few)
    assert trained.returncode == 0, trained.stderr
    assert json.loads((second / "run.json").read_text())["args"]["adapter_from"] == str(out)
    again = run("export", second, tmp_path / "again", "--adapter")
    assert again.returncode == 0, again.stderr
    refused = run("train", "--adapter-from", first, "--out", tmp_path / "no", *few)
    assert refused.returncode == 2 and "is not a PEFT adapter" in refused.stderr
    clash = run("train", "--adapter-from", out, "--lora-rank", 2, "--out", tmp_path / "no", *few)
    assert clash.returncode == 2 and "leave one of the two out" in clash.stderr
