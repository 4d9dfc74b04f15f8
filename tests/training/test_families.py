"""A training phase on every supported architecture: default probes and export."""

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
SETTINGS = {"reward_fn": "count:w1", "prefix": "w3 w4", "total_phases": 1, "warmup_steps": 0}
SETTINGS |= {"batch_size": 8, "num_minibatches": 2, "base_lr": 3e-3}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_type_checks"),
    pytest.mark.filterwarnings("ignore:the hooked modules run"),
]


@pytest.mark.filterwarnings("ignore:the default suite leaves out words_moved")
@pytest.mark.parametrize(
    "architecture", [x if x in DAILY else pytest.param(x, marks=pytest.mark.nightly) for x in TINY]
)
def test_phase_with_default_probes_is_exported(architecture, llama_tokenizer, tmp_path):
    """The texts are longer than the attention window."""
    save(tiny_of(architecture), llama_tokenizer, tmp_path / "model")
    args = RLHFArgs(base_model=str(tmp_path / "model"), gen_len=3 * WINDOW, **SETTINGS)
    trainer = RLHFTrainer(args, out=tmp_path / "run")
    suite, shift = default_suite(trainer), LogitShift("w1", "w2", name="words")
    attachment, tokens = attach(trainer, suite), random_tokens()
    is_additive = architecture not in NOT_ADDITIVE
    assert is_additive == ("words_moved" in [probe.name for probe in suite.probes])
    if not is_additive:
        with pytest.raises(ConfigError, match="are not a sum over its heads and MLPs"):
            attach(trainer, shift, eval_tokens=tokens)
    elif architecture not in WITHOUT_WORDS:
        attach(trainer, shift, eval_tokens=random_tokens(length=12))
    report = trainer.run_phase()
    assert abs(report.learning.ratio_first_minibatch - 1) < 1e-5
    assert abs(report.rollout.kl_per_sequence) < 1e-4
    assert attachment.notes == []
    checks = Run(trainer.run.path).checks()
    assert checks and [check for check in checks if not check.ok] == []
    place, _ = export_policy(trainer.policy, args.base_model, tmp_path / "out")
    with torch.no_grad():
        logits, _ = trainer.policy(tokens)
        exported = AutoModelForCausalLM.from_pretrained(place, local_files_only=True).eval()
        torch.testing.assert_close(exported(tokens).logits, logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(load_model(str(place))(tokens), logits, atol=1e-4, rtol=0)
        assert (logits - load_model(args.base_model)(tokens)).abs().max() > 1e-2


def test_capped_logits_are_not_additive(llama_tokenizer):
    model = load_model(tiny_of("LlamaForCausalLM"), llama_tokenizer)
    assert reason_not_additive(model) is None
    model.cfg.output_logits_soft_cap = 4.0
    assert reason_not_additive(model) == "its logits are capped at 4"
