"""The crosscoder: latents by hand, and a feature that is added to one model and found."""

from inspect import getclosurevars, unwrap

import pytest
import torch

from rlhf_lab.diffing import (
    ActivationStore,
    Crosscoder,
    collect_activations,
    fit_crosscoder,
    latent_scaling,
)
from rlhf_lab.diffing import crosscoder as module
from rlhf_lab.diffing.activation_store import TokenPlaces
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import load_model
from rlhf_lab.probes import ReelTruth

SITE, K = "blocks.1.hook_resid_mid", 6


def two_latents() -> Crosscoder:
    """A shared latent along the first axis, and one of tuned only along the second."""
    coder = Crosscoder(torch.tensor([1.0, 2.0]), d_model=2, latents=2)
    coder.W_enc.data[0, 0, 0] = coder.W_enc.data[1, 1, 1] = 1.0
    coder.W_dec.data[0, 0, 0] = coder.W_dec.data[0, 1, 0] = 1.0
    coder.W_dec.data[1, 1, 1] = 3.0
    return coder.requires_grad_(False)


def store_of(base: list[list[float]], tuned: list[list[float]]) -> ActivationStore:
    store, n = ActivationStore(mb=1, dtype=torch.float32), torch.arange(len(base))
    store.add({"base": torch.tensor(base), "tuned": torch.tensor(tuned)}, TokenPlaces(n + 5, n, n))
    return store


def test_encoding_and_decoding_match_hand_computed():
    """Tuned is halved; latents read base's first and tuned's second number."""
    coder = two_latents()
    x = torch.tensor([[[2.0, 5.0], [4.0, 8.0]], [[-1.0, 0.0], [0.0, 0.5]]])
    assert coder.encode(x).tolist() == [[2.0, 4.0], [0.0, 0.25]]
    # in each model's own units: tuned's first is 2 x 2, its second 2 x 3 x 4
    assert coder.decode(coder.encode(x))[0].tolist() == [[2.0, 0.0], [4.0, 24.0]]
    coder.threshold.fill_(1.0)  # scores f (|d_base| + |d_tuned|) are 4, 12 and .75
    assert coder.encode(x).tolist() == [[2.0, 4.0], [0.0, 0.0]]
    assert coder.norms().tolist() == [[1.0, 1.0], [0.0, 3.0]]


def test_latent_scaling_finds_a_latent_that_the_base_has_too():
    """Tuned has t / 2 and the latent writes 3 t / 2: a third of it."""
    tuned = [[0.0, t] for t in (2.0, 4.0, 6.0)]
    only_tuned = latent_scaling(two_latents(), store_of([[0.0, 0.0]] * 3, tuned))
    assert only_tuned[1].tolist() == pytest.approx([0.0, 1 / 3])
    in_both = latent_scaling(two_latents(), store_of([[0.0, t / 2] for _, t in tuned], tuned))
    assert in_both[1].tolist() == pytest.approx([1 / 3, 1 / 3])
    assert only_tuned[0].tolist() == [0.0, 0.0]  # never fires


@pytest.mark.slow
def test_fitting_is_seeded_and_raises_on_zeros():
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    store, state = store_of(x.tolist(), (x * 3).tolist()), torch.random.get_rng_state()
    one, same, other = (fit_crosscoder(store, 4, 2, 5, s, 16, False) for s in (1, 1, 2))
    assert torch.equal(one.W_dec, same.W_dec) and not torch.equal(one.W_dec, other.W_dec)
    assert torch.equal(torch.random.get_rng_state(), state)
    for empty in (ActivationStore(mb=1, models=["tuned"]), store_of([[1.0]], [[0.0]])):
        with pytest.raises(ConfigError, match="^No tokens, or only zeros of 'tuned'"):
            fit_crosscoder(empty, 4, 2, 1, 0, show_progress=False)


def test_threshold_is_the_mean_over_the_last_fifth_of_the_steps(monkeypatch):
    least = []

    def take_no_steps(coder, batch_loss, steps, *settings):
        for _ in range(steps):
            batch_loss()
        least.extend(getclosurevars(unwrap(batch_loss)).nonlocals["kept"])

    monkeypatch.setattr(module, "fit", take_no_steps)
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    coder = fit_crosscoder(store_of(x.tolist(), (x * 3).tolist()), 4, 2, 10, 0, 16, False)
    assert coder.threshold.item() == pytest.approx((least[8] + least[9]).item() / 2)
    assert least[8] != least[9] and len(least) == 10


def in_tuned(coder: Crosscoder) -> torch.Tensor:
    return coder.norms()[:, 1] / coder.norms().sum(1)


@pytest.mark.slow
def test_a_feature_of_the_tuned_model_is_found(no_type_checks):
    """4 units along a direction at one token in fifty; every check of fit and control holds."""
    noise = torch.randn(64, generator=torch.Generator().manual_seed(1))
    direction = torch.nn.functional.normalize(noise, dim=0)
    has_feature = lambda tokens: tokens.cumsum(1) % 50 == 7
    models, current = {name: load_model("reel-nano") for name in ("base", "tuned")}, {}
    models["tuned"].embed.register_forward_pre_hook(lambda _, args: current.update(tokens=args[0]))
    add = lambda x, hook: x + 4 * direction * has_feature(current["tokens"])[..., None]
    models["tuned"].hook_dict[SITE].add_hook(add, is_permanent=True)
    reviews, store = ReelTruth().reviews(300, seed=0)[0], ActivationStore(mb=3)
    collect_activations(store, models, reviews, SITE)
    coder = fit_crosscoder(store, 128, K, 2000, 0, 256, show_progress=False)
    norms, nu = in_tuned(coder), latent_scaling(coder, store)
    toward = coder.W_dec[:, 1] @ direction / coder.norms()[:, 1]
    latent = int(toward.argmax())
    assert toward[latent] > 0.95 and norms[latent] > 0.9
    assert abs(nu[latent] @ torch.tensor([1.0, -0.1])) < 0.1
    freq = (coder.encode(store.activations) > 0).float().mean(0)
    assert abs(freq.sum() / K - 1) < 0.25
    assert ((norms > 0.7) & (freq > 0)).nonzero()[:, 0].tolist() == [latent]
    fires, places = coder.encode(store.activations)[:, latent] > 0, store.places
    truly = has_feature(reviews)[places.texts, places.positions]
    assert (fires & truly).sum() > 0.9 * max(fires.sum(), truly.sum())
    twice = ActivationStore(mb=3)
    collect_activations(twice, dict.fromkeys(models, models["base"]), reviews, SITE)
    control = fit_crosscoder(twice, 128, K, 150, 0, 256, False)
    alive = (control.encode(twice.activations) > 0).any(0)
    assert in_tuned(control)[alive].max() < 0.7
