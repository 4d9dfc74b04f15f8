"""The crosscoder: a planted feature is found, its checks hold, and faults fail them."""

from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlhf_lab.diffing import (
    ActivationStore,
    Crosscoder,
    CrosscoderRecord,
    collect_activations,
    fit_crosscoder,
    latent_scaling,
    record_crosscoder,
    relative_norms,
    spliced_kl,
)
from rlhf_lab.diffing.activation_store import TokenPlaces
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import HookedTransformer, load_model
from rlhf_lab.probes import ReelTruth
from tests.diffing.crosscoder_checks import check_crosscoder
from tests.diffing.faults_crosscoder import FAULTS
from tests.probes.planting import planted

pytestmark = pytest.mark.usefixtures("no_type_checks")

SITE = "blocks.1.hook_resid_mid"
K = 6


class Found(NamedTuple):
    """A crosscoder, what it was fitted to, and its record."""

    store: ActivationStore
    coder: Crosscoder
    record: CrosscoderRecord


def with_feature(direction: Tensor) -> HookedTransformer:
    """The bundled model with 4 units along a direction at one token in fifty, by what it read."""
    model, heard = load_model("reel-nano"), {}
    model.embed.register_forward_pre_hook(lambda module, given: heard.update(tokens=given[0]))

    def add(x, hook):
        return x + 4 * direction * is_planted(heard["tokens"])[..., None]

    model.hook_dict[SITE].add_hook(add, is_permanent=True)
    return model


def is_planted(tokens: Tensor) -> Tensor:
    return tokens.cumsum(1) % 50 == 7


@pytest.fixture(scope="module")
def direction() -> Tensor:
    direction = torch.randn(64, generator=torch.Generator().manual_seed(1))
    return direction / direction.norm()


@pytest.fixture(scope="module")
def models(direction) -> dict[str, HookedTransformer]:
    return {"base": load_model("reel-nano"), "tuned": with_feature(direction)}


@pytest.fixture(scope="module")
def reviews() -> Tensor:
    return ReelTruth().reviews(300, seed=0)[0]


@pytest.fixture(scope="module")
def by_tuned() -> Tensor:
    return torch.arange(300) % 3 == 0


@pytest.fixture(scope="module")
def fitted(models, reviews, by_tuned):
    """Collects, fits and records, with as many steps as asked for."""

    def make(steps: int, latents: int = 128) -> Found:
        store = ActivationStore(mb=3)
        collect_activations(store, models, reviews, SITE)
        coder = fit_crosscoder(store, latents, K, steps, 0, 256, show_progress=False)
        return Found(store, coder, recorded(store, coder, coder))

    def recorded(store, coder, control):
        kl = spliced_kl(coder, store, models, reviews[:32], SITE)
        return record_crosscoder(coder, store, models, SITE, K, kl, control, by_tuned)

    make.recorded = recorded
    return make


@pytest.fixture(scope="module")
def control(models, reviews) -> Crosscoder:
    store = ActivationStore(mb=3, models=("base",))
    collect_activations(store, {"base": models["base"]}, reviews, SITE)
    twice = store.beside_itself("base")
    assert torch.equal(twice.activations[:, 0], twice.activations[:, 1])
    return fit_crosscoder(twice, 128, K, 150, 0, 256, show_progress=False)


@pytest.fixture(scope="module")
def found(fitted, control) -> Found:
    found = fitted(1000)
    record = fitted.recorded(found.store, found.coder, control)
    return found._replace(record=record)


@pytest.mark.slow
def test_a_feature_of_the_tuned_model_alone_is_found_and_nothing_else(found, direction, reviews):
    coder, record = found.coder, found.record
    toward = record.decoder[:, 1] / record.decoder[:, 1].norm(dim=-1, keepdim=True)
    latent = int((toward @ direction).argmax())
    assert (toward[latent] @ direction) > 0.95 and record.rel_norm[latent] > 0.9
    assert record.tuned_only.tolist() == [latent] == record.candidates.tolist()
    fires = coder.encode(found.store.activations)[:, latent] > 0
    places = found.store.places
    truly = is_planted(reviews)[places.texts, places.positions]
    assert (fires & truly).sum() > 0.9 * max(fires.sum(), truly.sum())
    assert abs(record.nu_base[latent] / record.nu_tuned[latent]) < 0.1


@pytest.mark.slow
def test_the_checks_of_a_sound_crosscoder_hold_for_any_token_and_latent(
    found, models, reviews, by_tuned
):
    for seed in range(4):
        checks = check_crosscoder(
            found.record, found.coder, found.store, models, reviews, by_tuned, seed
        )
        assert len(checks) == 22
        assert not [check for check in checks if not check.ok]


@pytest.mark.slow
def test_nothing_of_base_beside_itself_is_tuned_only(found):
    assert len(found.record.control) > 30
    assert found.record.control.max() < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_checks(
    fault, found, fitted, control, models, reviews, by_tuned
):
    with ExitStack() as stack:
        stack.enter_context(planted(fault))
        made = fitted(40) if fault.run == "fit" else found
        record = fitted.recorded(made.store, made.coder, control)
    checks = check_crosscoder(record, made.coder, made.store, models, reviews, by_tuned)
    failed = {check.name for check in checks if not check.ok}
    if fault.run == "fit":  # forty steps leave the spliced KL as it is
        failed -= {"spliced KL relative to mean ablation"}
    assert failed


@pytest.mark.slow
def test_a_record_is_saved_with_its_control_and_checks(found, tmp_path):
    from rlhf_lab.training.checkpoint import load_checkpoint

    found.record.save(tmp_path / "record.safetensors")
    tensors, notes = load_checkpoint(tmp_path / "record.safetensors")
    assert torch.equal(tensors["control"], found.record.control)
    assert notes["crosscoder"]["models"] == ["base", "tuned"]
    assert [check["ok"] for check in notes["crosscoder"]["checks"]] == [True] * 3


def two_latents() -> Crosscoder:
    """A shared latent along the first axis, and a second along the other that only tuned writes."""
    coder = Crosscoder(torch.tensor([1.0, 2.0]), d_model=2, latents=2)
    coder.W_enc.data[0, 0, 0] = coder.W_enc.data[1, 1, 1] = 1.0
    coder.W_dec.data[0, 0, 0] = coder.W_dec.data[0, 1, 0] = 1.0
    coder.W_dec.data[1, 1, 1] = 3.0
    return coder.requires_grad_(False)


def store_of(base: list[list[float]], tuned: list[list[float]]) -> ActivationStore:
    store, n = ActivationStore(mb=1, dtype=torch.float32), torch.arange(len(base))
    store.add({"base": torch.tensor(base), "tuned": torch.tensor(tuned)}, TokenPlaces(n, n, n))
    return store


def test_encoding_and_decoding_by_hand():
    coder = two_latents()
    x = torch.tensor([[[2.0, 5.0], [4.0, 8.0]], [[-1.0, 0.0], [0.0, 0.5]]])
    # normalised: base as it is, tuned halved; latents read base's first and tuned's second number
    assert coder.encode(x).tolist() == [[2.0, 4.0], [0.0, 0.25]]
    # decoded in each model's own units: tuned's first is 2 x 2, its second 2 x 3 x 4
    assert coder.decode(coder.encode(x))[0].tolist() == [[2.0, 0.0], [4.0, 24.0]]
    coder.threshold.fill_(1.0)  # scores f (|d_base| + |d_tuned|) are 4, 12 and .75
    assert coder.encode(x).tolist() == [[2.0, 4.0], [0.0, 0.0]]
    assert relative_norms(coder).tolist() == [0.5, 1.0]


def test_a_latent_that_the_base_has_too_is_told_by_its_betas():
    coder = two_latents()
    # the second latent fires at tuned's second number t / 2; tuned has 3 of it, as is written
    tuned = [[0.0, t] for t in (2.0, 4.0, 6.0)]
    only_tuned = latent_scaling(coder, store_of([[0.0, 0.0]] * 3, tuned))
    # tuned holds t / 2 where the latent writes 3 t / 2: a third of it
    assert only_tuned[1].tolist() == pytest.approx([0.0, 1 / 3])
    shrunk = [[0.0, t / 2] for t in (2.0, 4.0, 6.0)]
    in_both = latent_scaling(coder, store_of(shrunk, tuned))
    assert in_both[1].tolist() == pytest.approx([1 / 3, 1 / 3])
    assert only_tuned[0].tolist() == [0.0, 0.0]  # never fires


def test_what_no_crosscoder_can_be_fitted_to_is_refused():
    store = store_of([[1.0, 2.0]], [[0.0, 0.0]])
    with pytest.raises(ConfigError, match="'tuned' are all 0"):
        fit_crosscoder(store, 4, 2, 1, 0, show_progress=False)
    with pytest.raises(ConfigError, match="k=5 is not between 1 and latents=4"):
        fit_crosscoder(store, 4, 5, 1, 0, show_progress=False)
    with pytest.raises(ConfigError, match="0 tokens of 2 models"):
        fit_crosscoder(ActivationStore(mb=1), 4, 2, 1, 0, show_progress=False)
    with pytest.raises(ConfigError, match="1 tokens of 1 models"):
        alone = ActivationStore(mb=1, models=("base",))
        one = torch.zeros(1).long()
        alone.add({"base": torch.ones(1, 2)}, TokenPlaces(one, one, one))
        fit_crosscoder(alone, 4, 2, 1, 0, show_progress=False)
    with pytest.raises(ConfigError, match="choose of base, tuned"):
        store.beside_itself("other")


def test_the_same_seed_gives_the_same_crosscoder_and_fitting_leaves_the_store_alone():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 2, generator=generator)
    store = store_of(x.tolist(), (x * 3).tolist())
    before, state = store.activations.clone(), torch.random.get_rng_state()
    one, same, other = (fit_crosscoder(store, 4, 2, 5, s, 16, False) for s in (1, 1, 2))
    assert torch.equal(one.W_dec, same.W_dec) and not torch.equal(one.W_dec, other.W_dec)
    assert torch.equal(store.activations, before)
    assert torch.equal(torch.random.get_rng_state(), state)
