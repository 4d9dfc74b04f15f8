"""The card of a saved policy: metrics and settings of the run, and YAML of the hub."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.repocard import metadata_load

from rlhf_lab.models import export_policy
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.model_card import write_run_card
from rlhf_lab.training.resume import load_policy
from tests.small_runs import DEVICE


def card(directory: Path) -> str:
    return (directory / "README.md").read_text(encoding="utf-8")


def read_settings(directory: Path) -> dict[str, Any]:
    return json.loads(re.search(r"```json\n(.*?)```", card(directory), flags=re.DOTALL)[1])


@pytest.fixture(scope="module")
def finished(runs) -> RLHFTrainer:
    return runs("plain").trainer


def test_front_matter_metrics_and_settings_match_the_run(finished, tmp_path):
    policy, args = load_policy(finished.run.path)
    exported = tmp_path / "policy"
    export_policy(policy, args.base_model, exported)
    write_run_card(finished.run, exported)
    lines, final = finished.run.read("metrics.jsonl"), finished.run.read_info()["final"]
    for directory, library in ((finished.run.path, "rlhf_lab"), (exported, "transformers")):
        assert metadata_load(directory / "README.md") == {
            "library_name": library,
            "pipeline_tag": "text-generation",
            "license": "mit",
            "tags": ["rlhf", "rlhf_lab", "ppo"],
        }
        text = card(directory)
        assert "\n- learning phases: 5\n" in text and f"Load with `{library}." in text
        for name in ("mean_reward", "kl_per_sequence"):
            assert f"- {name}: {lines[0][name]:.4g} -> {final[name]:.4g}" in text
        settings = read_settings(directory)
        assert settings.pop("device") == DEVICE
        expected = finished.args.to_dict() | {"device": None}
        assert settings == {k: v for k, v in expected.items() if v not in (None, "")}
    write_run_card(finished.run, exported, "phase_000002")
    kls = [line["kl_per_sequence"] for line in lines]
    assert f"- kl_per_sequence: {kls[0]:.4g} -> {kls[2]:.4g}" in card(exported)


def test_card_follows_the_run_and_names_custom_components(runs):
    first, *_, last = runs("plain").cards
    assert "- learning phases: 0" in first and "mean_reward:" not in first
    assert "- learning phases: 5" in last and "mean_reward:" in last
    settings = read_settings(runs("dynamic sampling").path)
    assert settings["reward_fn"] == "custom" and "reward_model" not in settings
    path = runs("schedule with state").path
    settings = read_settings(path)
    assert settings["policy"] == "custom" and "base_model" not in settings
    assert metadata_load(path / "README.md")["license"] == "unknown"


def test_card_names_a_hub_id_and_no_private_directory(finished, tmp_path, reel_args):
    run = type(finished.run)(Path(shutil.copytree(finished.run.path, tmp_path / "run")))

    def write(**changes: Any) -> dict[str, Any]:
        run.write_info(run.read_info() | {"args": reel_args(**changes).to_dict()})
        write_run_card(run)
        return metadata_load(run.path / "README.md")

    metadata = write(base_model="org/model", method="grpo")
    assert (metadata["base_model"], metadata["license"]) == ("org/model", "unknown")
    assert metadata["tags"][-1] == "grpo"
    directory = tmp_path / "secret"
    directory.mkdir()
    schema = f"json_schema:{directory}/schema.json"
    paths = {"base_model": str(directory), "prompts": str(directory / "prompts.txt")}
    assert "base_model" not in write(**paths, reward_fn=f"learned,{schema}", reward_model="m")
    settings = read_settings(run.path)
    assert (settings["base_model"], settings["prompts"]) == ("secret", "prompts.txt")
    assert settings["reward_fn"] == "learned,json_schema:schema.json"
    assert str(tmp_path) not in card(run.path)


def test_readme_from_elsewhere_is_kept(finished, tmp_path):
    (tmp_path / "README.md").write_text("my notes on rlhf_lab")
    write_run_card(finished.run, tmp_path)
    assert card(tmp_path) == "my notes on rlhf_lab"
