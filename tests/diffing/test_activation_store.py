"""The activation store: its bound, what it keeps, and how it is saved."""

import pytest
import torch
from safetensors import safe_open

from rlhf_lab.diffing import ActivationStore, collect_activations
from rlhf_lab.diffing.activation_store import TokenPlaces
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import load_model

BOTH = ("base", "tuned")


def places(numbers) -> TokenPlaces:
    numbers = torch.as_tensor(numbers)
    return TokenPlaces(numbers, numbers // 7, numbers % 7)


def shown(store: ActivationStore, first: int, n: int, width: int = 4) -> None:
    """Tokens whose activations are their numbers, negative in the second model."""
    numbers = torch.arange(first, first + n)
    x = numbers[:, None].expand(n, width).float()
    store.add({"tuned": -x, "base": x}, places(numbers))


@pytest.fixture
def store() -> ActivationStore:
    # 2 models of width 4 in 2 bytes, and 12 bytes for the place: 28 bytes a token, 100 tokens
    return ActivationStore(mb=2800 / 2**20, seed=3)


def test_the_megabytes_are_a_bound_for_ten_times_as_much_and_each_token_has_its_chance(store):
    for start in range(0, 1000, 50):
        shown(store, start, 50)
        assert store.nbytes <= store.mb * 2**20
    assert (len(store), store.capacity, store.seen) == (100, 100, 1000)
    kept = store.places.ids
    assert len(kept.unique()) == 100
    # uniform over 0..999: the mean of 100 has a standard deviation of 27
    assert abs(kept.double().mean() - 499.5) < 4 * 27.4


def test_each_row_is_that_of_its_token_in_both_models(store):
    shown(store, 0, 500)
    numbers = store.places.ids
    assert torch.equal(store.activations[:, 0, 0].long(), numbers)
    assert torch.equal(store.activations[:, 1, 3].long(), -numbers)
    assert torch.equal(store.places.texts, numbers // 7)
    assert torch.equal(store.places.positions, numbers % 7)


def test_what_is_kept_depends_on_the_seed_and_not_on_the_batches():
    def kept(seed, cut):
        store = ActivationStore(mb=2800 / 2**20, seed=seed)
        for start in range(0, 600, cut):
            shown(store, start, cut)
        return store.activations

    assert torch.equal(kept(1, 600), kept(1, 1))
    assert torch.equal(kept(1, 600), kept(1, 40))
    assert not torch.equal(kept(1, 600), kept(2, 600))


def test_every_token_is_kept_equally_often():
    # 4 of 12 tokens, 1,000 times: each a third of the time, standard deviation .0149
    often = torch.zeros(12)
    for seed in range(1000):
        store = ActivationStore(mb=4 * 28 / 2**20, seed=seed)
        shown(store, 0, 5)
        shown(store, 5, 7)
        often[store.places.ids] += 1
    assert (often / 1000 - 1 / 3).abs().max() < 4.5 * 0.0149


def test_a_store_goes_on_from_its_file_as_if_nothing_had_happened(store, tmp_path):
    shown(store, 0, 300)
    store.save(tmp_path / "store.safetensors")
    again = ActivationStore.load(tmp_path / "store.safetensors")
    assert (again.models, again.dtype, again.mb) == (store.models, store.dtype, store.mb)
    for each in (store, again):
        shown(each, 300, 300)
    assert torch.equal(store.activations, again.activations)
    assert torch.equal(store.places.ids, again.places.ids)
    with safe_open(tmp_path / "store.safetensors", framework="pt") as file:
        assert file.get_tensor("activations").dtype == torch.float16


def test_an_empty_store_and_one_token_are_saved_too(store, tmp_path):
    store.save(tmp_path / "empty.safetensors")
    assert len(ActivationStore.load(tmp_path / "empty.safetensors")) == 0
    shown(store, 0, 0)
    shown(store, 5, 1)
    store.save(tmp_path / "one.safetensors")
    assert ActivationStore.load(tmp_path / "one.safetensors").places.ids.tolist() == [5]


def test_what_does_not_fit_is_refused_in_a_sentence(store):
    shown(store, 0, 3)
    x = torch.zeros(2, 4)
    with pytest.raises(ConfigError, match="are of base, but the store is for base, tuned"):
        store.add({"base": x}, places([0, 1]))
    with pytest.raises(ConfigError, match=r"'tuned' have the shape \(2, 5\), not \(2, 4\)"):
        store.add({"base": x, "tuned": torch.zeros(2, 5)}, places([0, 1]))
    with pytest.raises(ConfigError, match=r"reach 7e\+04, which dtype=torch.float16 cannot hold"):
        store.add({"base": x, "tuned": x + 70_000}, places([0, 1]))
    with pytest.raises(ConfigError, match="nan or inf"):
        store.add({"base": x, "tuned": x * torch.nan}, places([0, 1]))
    assert len(store) == 3


def test_settings_that_make_no_store_are_refused():
    with pytest.raises(ConfigError, match="holds no token of 2 models of width 64"):
        shown(ActivationStore(mb=1e-4), 0, 1, width=64)
    for mb in (0, -1, float("nan"), True):
        with pytest.raises(ConfigError, match="mb="):
            ActivationStore(mb=mb)
    with pytest.raises(ConfigError, match="names that differ"):
        ActivationStore(mb=1, models=("base", "base"))
    with pytest.raises(ConfigError, match="cannot be stored"):
        ActivationStore(mb=1, dtype=torch.int8)


def test_a_file_that_is_no_store_is_refused(tmp_path):
    with pytest.raises(RunError, match="No checkpoint"):
        ActivationStore.load(tmp_path / "none.safetensors")


def test_activations_of_two_models_are_those_of_their_forwards_on_padded_texts():
    models = {"base": load_model("reel-nano"), "tuned": load_model("reel-nano-b")}
    tokens = torch.tensor([[0, 0, 1, 5, 9], [1, 7, 8, 9, 4]])
    there = torch.tensor([[False, False, True, True, True], [True] * 5])
    wanted = torch.tensor([[True] * 5, [False, True, False, True, True]])
    store = ActivationStore(mb=1)
    collect_activations(store, models, tokens, "blocks.0.hook_resid_post", wanted, there)
    assert store.places.ids.tolist() == [1, 5, 9, 7, 9, 4]
    assert store.places.texts.tolist() == [0, 0, 0, 1, 1, 1]
    assert store.places.positions.tolist() == [2, 3, 4, 1, 3, 4]
    for i, name in enumerate(BOTH):
        _, cache = models[name].run_with_cache(tokens[:1, 2:])
        alone = cache["blocks.0.hook_resid_post"][0]
        assert torch.allclose(store.activations[:3, i].float(), alone, atol=2e-2)
    collect_activations(store, models, tokens[1:], "blocks.0.hook_resid_post")
    assert store.places.texts.tolist()[6:] == [2] * 5
    with pytest.raises(ConfigError, match="choose one of"):
        collect_activations(store, models, tokens, "blocks.0.attn.hook_z")


@pytest.mark.slow
def test_a_run_that_wants_ten_times_as_much_stays_within_the_bound(tmp_path):
    from rlhf_lab import RLHFArgs, RLHFTrainer

    args = RLHFArgs(preset="reel", total_phases=3, batch_size=32, num_minibatches=2, seed=1)
    trainer = RLHFTrainer(args, out=tmp_path / "run")
    store = ActivationStore(mb=0.0625)

    @trainer.on("after_score")
    def keep(ctx):
        models = {"base": ctx.reference, "tuned": ctx.policy}
        samples = ctx.rollout.samples
        collect_activations(store, models, samples.tokens, "blocks.0.hook_resid_mid")
        assert store.nbytes <= 0.0625 * 2**20

    trainer.train()
    wanted = store.seen * (2 * 64 * 2 + 12)
    assert wanted >= 10 * 0.0625 * 2**20 and store.nbytes <= 0.0625 * 2**20
    store.save(tmp_path / "store.safetensors")
    assert (tmp_path / "store.safetensors").stat().st_size <= 0.0625 * 2**20 + 8192
