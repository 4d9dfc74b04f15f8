"""Functions handed in as parts of the trainer: those that do not fit are refused in a sentence."""

import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.training.objective import Overrides

# what a stranger may hand in for a part, by a name that sounds like it
SOUNDS_LIKE = {
    "clipped_surrogate": (F.ppo_surrogate, F.gspo_surrogate, F.clip_fraction),
    "kl_penalty": (F.kl_per_token, F.calc_sampled_kl_penalty, F.kl_per_sequence),
    "entropy_bonus": (F.entropy_per_token,),
    "value_loss": (F.explained_variance, F.value_clip_fraction),
    "logprobs": (F.get_max_logprobs, F.generated_logits),
    "normalize_reward": (F.scale_rewards, F.penalize_responses),
}
FITS = {
    "clipped_surrogate": F.calc_clipped_surrogate_objective,
    "kl_penalty": F.calc_kl_penalty,
    "entropy_bonus": F.calc_entropy_bonus,
    "value_loss": F.calc_value_function_loss,
    "logprobs": F.get_logprobs,
    "normalize_reward": F.normalize_reward,
}


@pytest.mark.parametrize(
    ("part", "function"), [(part, f) for part, fs in SOUNDS_LIKE.items() for f in fs]
)
def test_a_function_that_does_not_fit_its_part_is_refused_in_one_sentence(part, function):
    with pytest.raises(ConfigError, match=rf"^{part} is called with \(.*{function.__name__}\("):
        Overrides.choose({part: function})


def test_functions_that_fit_are_taken_whatever_their_parameters_are_called():
    assert Overrides.choose(FITS) == Overrides()
    anything = {part: lambda *_: torch.zeros(()) for part in FITS}
    assert Overrides.choose(anything).kl_penalty is anything["kl_penalty"]
    mine = lambda new, old, a, eps, mask, normalize=True: (new - old).sum()
    assert Overrides.choose({"clipped_surrogate": mine}).clipped_surrogate is mine
    # torch's own functions cannot say what they take
    assert Overrides.choose({"kl_penalty": torch.add}).kl_penalty is torch.add


def test_no_part_of_the_trainer_bears_the_name_of_a_public_function_that_does_not_fit():
    parts = set(FITS) | {"advantages", "policy_loss", "kl_estimator"}
    namesakes = {part for part in parts if callable(getattr(F, part, None))}
    assert {p: getattr(F, p) for p in namesakes} == {p: FITS.get(p) for p in namesakes}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["clipped_surrogate", "kl_penalty", "entropy_bonus", "value_loss"])
def test_a_term_that_is_no_single_number_is_refused_in_one_sentence(part, make_trainer):
    per_token = lambda x, *_: x.flatten(1)
    trainer = make_trainer({part: per_token})
    with pytest.raises(ConfigError, match=rf"^{part} returned a tensor of shape \(.*one number"):
        trainer.run_phase()
    half = make_trainer({part: lambda *_: 0.5})
    with pytest.raises(ConfigError, match=f"^{part} returned 0.5. Return one number"):
        half.run_phase()


@pytest.mark.slow
def test_the_surrogate_of_each_token_drives_the_run_as_the_policys_loss(make_trainer):
    own = make_trainer({"policy_loss": F.ppo_surrogate}).run_phase()
    named = make_trainer(policy_loss="ppo").run_phase()
    assert own.clipped_surrogate == pytest.approx(named.clipped_surrogate, abs=1e-6)
    assert own.kl_per_sequence == named.kl_per_sequence
