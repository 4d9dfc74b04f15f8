"""The activation store: its limit, a uniform sample, and its file."""

import pytest
import torch

from rlhf_lab.diffing import ActivationStore, collect_activations
from rlhf_lab.diffing.activation_store import TokenPlaces
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import load_model
from rlhf_lab.training.checkpoint import save_checkpoint

TOKEN = 28 / 2**20  # megabytes: 2 models of width 4 in 2 bytes, and 12 bytes for the place


def offer(store: ActivationStore, first: int, n: int, width: int = 4) -> ActivationStore:
    """Add tokens whose activations are their numbers, negative in the second model."""
    numbers = torch.arange(first, first + n)
    x = numbers[:, None].expand(n, width).float()
    store.add({"tuned": -x, "base": x}, TokenPlaces(numbers, numbers // 7, numbers % 7))
    return store


@pytest.fixture
def store() -> ActivationStore:
    return ActivationStore(mb=100 * TOKEN, seed=3)


def test_ten_times_the_tokens_stay_within_the_limit(store):
    for start in range(0, 1000, 50):
        offer(store, start, 50)
        assert store._rows.nbytes + store._places.nbytes <= store.mb * 2**20
    kept = store.places.ids
    assert (len(store), store.seen, len(kept.unique())) == (100, 1000, 100)
    assert abs(kept.double().mean() - 499.5) < 4 * 27.4  # 27.4: its standard deviation
    assert torch.equal(store.activations[:, 0, 0].long(), kept)
    assert torch.equal(store.activations[:, 1, 3].long(), -kept)
    assert torch.equal(store.places.texts, kept // 7)
    assert torch.equal(store.places.positions, kept % 7) and store.n_texts == 143


def test_the_sample_depends_on_the_seed_and_not_on_batches():
    def kept(seed, size):
        store = ActivationStore(mb=100 * TOKEN, seed=seed)
        for start in range(0, 600, size):
            offer(store, start, size)
        return store.activations

    assert torch.equal(kept(1, 600), kept(1, 1)) and torch.equal(kept(1, 600), kept(1, 40))
    assert not torch.equal(kept(1, 600), kept(2, 600))


@pytest.mark.parametrize("n", [0, 1, 300])
def test_a_file_continues_the_sample(store, tmp_path, n):
    if n:
        offer(store, 0, n)
    store.save(tmp_path / "store.safetensors")
    loaded = ActivationStore.load(tmp_path / "store.safetensors")
    assert (loaded.models, loaded.dtype, loaded.mb) == (store.models, torch.float16, store.mb)
    for each in (store, loaded):
        offer(each, n, 300)
    assert torch.equal(store.activations, loaded.activations)
    assert torch.equal(store.places.ids, loaded.places.ids)
    with pytest.raises(RunError, match="No checkpoint"):
        ActivationStore.load(tmp_path / "none.safetensors")
    save_checkpoint(tmp_path / "last.safetensors", {"x": torch.zeros(1)}, {"phase": 0})
    with pytest.raises(RunError, match="last.safetensors is a checkpoint. Use a file that Act"):
        ActivationStore.load(tmp_path / "last.safetensors")


def test_add_raises_on_overflow_and_too_little_memory(store):
    for value, error in ((70_000.0, r"up to 7e\+04"), (torch.nan, "not finite in torch.float16")):
        x = torch.tensor([[1.0] * 3 + [value]])
        with pytest.raises(ConfigError, match=error):
            store.add({"base": x, "tuned": x}, TokenPlaces(*torch.zeros(3, 1).long()))
    assert len(store) == 0
    with pytest.raises(ConfigError, match="must fit a token of 268 bytes"):
        offer(ActivationStore(mb=1e-4), 0, 1, width=64)


def test_padded_texts_match_forward_passes_of_each_model():
    models = {"base": load_model("reel-nano"), "tuned": load_model("reel-nano-b")}
    site = "blocks.0.hook_resid_post"
    tokens = torch.tensor([[0, 0, 1, 5, 9], [1, 7, 8, 9, 4]])
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    store = ActivationStore(mb=1)
    mask = torch.ones_like(real)
    mask[1, :2] = False
    collect_activations(store, models, tokens, site, mask, attention_mask=real)
    assert store.places.texts.tolist() == [0, 0, 0, 1, 1, 1]
    assert store.places.positions.tolist() == [2, 3, 4, 2, 3, 4]
    assert store.places.ids.tolist() == [1, 5, 9, 8, 9, 4]
    for i, model in enumerate(models.values()):
        _, cache = model.run_with_cache(torch.tensor([[1, 5, 9]]))
        assert torch.allclose(store.activations[:3, i].float(), cache[site][0], atol=2e-2)
    collect_activations(store, models, tokens[1:].repeat(70, 1), site)  # in two chunks
    assert store.places.texts[6:].equal(torch.arange(2, 72).repeat_interleave(5))
    for given, place in ((models, "hook_embed"), (models | {"other": models["base"]}, site)):
        with pytest.raises(ConfigError, match="The store is of .'base', 'tuned'. at blocks.0"):
            collect_activations(store, given, tokens, place)
