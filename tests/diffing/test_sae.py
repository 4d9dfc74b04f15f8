"""Dictionaries of SAELens: loaded where it is installed, refused in a sentence elsewhere."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file

from rlhf_lab.diffing import load_sae
from rlhf_lab.errors import ConfigError, LoadError

INSTALLED = importlib.util.find_spec("sae_lens") is not None
CONFIG = {
    "architecture": "standard",
    "d_in": 3,
    "d_sae": 2,
    "dtype": "float32",
    "device": "cpu",
    "apply_b_dec_to_input": True,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": {"sae_lens_version": "6.54.12", "hook_name": "blocks.1.hook_resid_post"},
}
WEIGHTS = {
    "W_enc": torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]),
    "b_enc": torch.tensor([0.0, -1.0]),
    "W_dec": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 2.0]]),
    "b_dec": torch.tensor([1.0, 0.0, 0.0]),
}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "cfg.json").write_text(json.dumps(CONFIG))
    save_file(WEIGHTS, tmp_path / "sae_weights.safetensors")
    return tmp_path


@pytest.mark.process  # importing it starts one
@pytest.mark.skipif(not INSTALLED, reason="needs sae-lens")
def test_a_dictionary_reads_and_writes_by_hand(directory):
    found = load_sae(directory)
    x = torch.tensor([[3.0, 4.0, 9.0], [0.0, 0.5, 0.0]])
    # less the bias of the decoder: [2, 4, 9] and [-1, .5, 0]
    assert found.encode(x).tolist() == [[2.0, 3.0], [0.0, 0.0]]
    assert found.decode(found.encode(x)).tolist() == [[3.0, 3.0, 6.0], [1.0, 0.0, 0.0]]
    assert found.cfg.metadata.hook_name == "blocks.1.hook_resid_post"
    assert torch.equal(found.W_dec, WEIGHTS["W_dec"]) and not found.W_dec.requires_grad


@pytest.mark.process  # importing it starts one
@pytest.mark.skipif(not INSTALLED, reason="needs sae-lens")
def test_load_raises_on_a_broken_dictionary(directory):
    (directory / "cfg.json").write_text("{}")
    with pytest.raises(LoadError, match="is not a dictionary of SAELens"):
        load_sae(directory)


@pytest.mark.skipif(INSTALLED, reason="sae-lens is installed")
def test_load_raises_without_the_package(directory):
    with pytest.raises(ConfigError, match="pip install sae-lens"):
        load_sae(directory)
