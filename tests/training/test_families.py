"""A training phase on every supported architecture: probes, adapters, export, resume."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import load_model
from rlhf_lab.models.export import export_policy
from rlhf_lab.models.residual_parts import reason_not_additive
from rlhf_lab.probes import LogitShift, Run, attach, default_suite
from rlhf_lab.training import RLHFTrainer
from tests.tiny_families import TINY, WINDOW, random_tokens, tiny_of
from tests.tiny_models import save

NOT_ADDITIVE = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM")
# learned positions, parallel blocks, rotary positions, and windows with norms after the parts
DAILY = ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM")
WITHOUT_WORDS = ("Qwen2ForCausalLM",)  # its tokenizer has no token for the tests' words
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_type_checks"),
    pytest.mark.filterwarnings("ignore:the hooked modules run"),
]


@pytest.fixture
def make_run(tmp_path, llama_tokenizer):
    """Makes short runs on a tiny model, whose texts are longer than its attention window."""
    numbers = itertools.count()

    def make(architecture: str, **changes: object) -> RLHFTrainer:
        directory = tmp_path / architecture
        if not directory.exists():
            save(tiny_of(architecture), llama_tokenizer, directory)
        settings = {
            "base_model": str(directory),
            "reward_fn": "count:w1",
            "prefix": "w3 w4",
            "total_phases": 1,
            "warmup_steps": 0,
            "batch_size": 8,
            "num_minibatches": 2,
            "gen_len": 3 * WINDOW,
            "base_lr": 3e-3,
        }
        return RLHFTrainer(RLHFArgs(**settings | changes), out=tmp_path / f"run{next(numbers)}")

    return make


def exported_logits(trainer: RLHFTrainer, out) -> None:
    """Compare logits of the exported policy in transformers with those of the policy."""
    place, _ = export_policy(trainer.policy, trainer.args.base_model, out)
    tokens = random_tokens()
    with torch.no_grad():
        ours = trainer.policy(tokens)[0]
        theirs = AutoModelForCausalLM.from_pretrained(place, local_files_only=True)
        torch.testing.assert_close(theirs.eval()(tokens).logits, ours, atol=1e-4, rtol=0)
        before = load_model(trainer.args.base_model)(tokens)
        torch.testing.assert_close(load_model(str(place))(tokens), ours, atol=1e-4, rtol=0)
    assert (ours - before).abs().max() > 1e-2


@pytest.mark.parametrize(
    "architecture", [x if x in DAILY else pytest.param(x, marks=pytest.mark.nightly) for x in TINY]
)
def test_phase_with_default_probes_is_exported(architecture, make_run, tmp_path):
    trainer = make_run(architecture)
    suite = default_suite(trainer)
    attachment = attach(trainer, suite)
    has_shift = architecture not in NOT_ADDITIVE + WITHOUT_WORDS
    if has_shift:
        shift = LogitShift("w1", "w2", name="words")
        attach(trainer, shift, eval_tokens=random_tokens(length=12))
    report = trainer.run_phase()
    assert abs(report.learning.ratio_first_minibatch - 1) < 1e-5
    assert abs(report.rollout.kl_per_sequence) < 1e-4
    assert attachment.notes == []
    run = Run(trainer.run.path)
    assert run.checks() and [check for check in run.checks() if not check.ok] == []
    assert ("words" in run.probes()) == has_shift
    exported_logits(trainer, tmp_path / "out")


@pytest.mark.parametrize("architecture", NOT_ADDITIVE)
def test_logit_shift_rejects_models_whose_heads_do_not_add_up(architecture, make_run):
    trainer = make_run(architecture)
    with pytest.raises(ConfigError, match="are not a sum over its heads and MLPs") as error:
        attach(trainer, LogitShift("w1", "w2"), eval_tokens=random_tokens())
    assert "\n" not in str(error.value)
    with pytest.warns(UserWarning, match="default suite leaves out words_moved: its "):
        suite = default_suite(trainer)
    assert "words_moved" not in [probe.name for probe in suite.probes]
    assert "words_moved" in [p.name for p in default_suite(make_run("Qwen3ForCausalLM")).probes]


def test_capped_logits_are_not_additive(llama_tokenizer):
    model = load_model(tiny_of("LlamaForCausalLM"), llama_tokenizer)
    assert reason_not_additive(model) is None
    model.cfg.output_logits_soft_cap = 4.0
    assert reason_not_additive(model) == "its logits are capped at 4"
