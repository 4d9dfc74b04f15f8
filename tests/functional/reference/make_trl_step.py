"""Writes trl_step.json: what three steps of TRL's PPOTrainer return on a tiny GPT-2.

It runs in the virtual environment of make_trl.py. The weights are a formula, so that the other
side can have the same ones; the last normalisation is the identity and stays so, and the embedding
is not tied to the unembedding.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from store import write
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

WORDS = 21
SHAPE = {"n_positions": 24, "n_ctx": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
SETTINGS = {
    "batch_size": 4,
    "mini_batch_size": 4,
    "ppo_epochs": 2,
    "learning_rate": 0.001,
    "adap_kl_ctrl": False,
    "init_kl_coef": 0.2,
    "cliprange": 0.05,
    "cliprange_value": 0.05,
    "vf_coef": 0.1,
    "gamma": 1.0,
    "lam": 0.95,
}
QUERIES = [[3, 7], [5, 9, 2], [11], [8, 8, 4, 1]]
RESPONSES = [[4, 6, 10], [1, 2], [20, 13, 5, 7, 9], [17]]
MASKS = [[1, 0, 1], [1, 1], [1, 0, 0, 1, 1], [1]]
SCORES = [[1.0, -0.5, 2.0, 0.25], [0.5, 1.5, -1.0, 0.0], [2.0, 0.0, 1.0, -2.0]]


def formula(model: torch.nn.Module, shift: float) -> None:
    """Give every parameter 0.3 sin(0.7 i + k + shift), k its place among the sorted names."""
    for k, (name, parameter) in enumerate(sorted(model.named_parameters())):
        i = torch.arange(parameter.numel(), dtype=torch.float64)
        noise = 0.3 * torch.sin(0.7 * i + k + shift).reshape(parameter.shape)
        is_gain = re.search(r"ln_\w+\.weight", name) is not None
        parameter.data = (noise + 1 if is_gain else noise).float()
    model.transformer.ln_f.weight.data.fill_(1.0)
    model.transformer.ln_f.bias.data.zero_()


def with_head(shift: float) -> AutoModelForCausalLMWithValueHead:
    """A GPT-2 with a value head, both by formula."""
    language_model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **SHAPE, **SPECIAL))
    formula(language_model, shift)
    model = AutoModelForCausalLMWithValueHead(language_model, summary_dropout_prob=0.0)
    head = model.v_head.summary
    head.weight.data = 0.2 * torch.sin(1.3 * torch.arange(16.0))[None]
    head.bias.data = torch.tensor([0.1])
    model.is_peft_model = False
    language_model.transformer.ln_f.requires_grad_(False)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """As many words as there are embeddings."""
    words = {"<|endoftext|>": 0} | {f"w{i}": i + 1 for i in range(WORDS - 1)}
    made = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|endoftext|>")


def as_tensors(rows: list[list[int]]) -> list[torch.Tensor]:
    """A tensor per row."""
    return [torch.tensor(row) for row in rows]


def steps(masks: list[list[int]] | None) -> list[dict[str, Any]]:
    """The scalar statistics of three steps."""
    config = PPOConfig(**SETTINGS, accelerator_kwargs={"cpu": True})
    policy, reference = with_head(0.0), with_head(0.05)
    trainable = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=SETTINGS["learning_rate"])
    trainer = PPOTrainer(config, policy, reference, tokenizer(), optimizer=optimizer)
    found = []
    for scores in SCORES:
        stats = trainer.step(
            as_tensors(QUERIES),
            as_tensors(RESPONSES),
            [torch.tensor(score) for score in scores],
            None if masks is None else as_tensors(masks),
        )
        scalars = {k: float(v) for k, v in stats.items() if np.ndim(v) == 0}
        found.append({k: v for k, v in scalars.items() if not k.startswith("time/")})
        found[-1]["objective/kl_dist"] = stats["objective/kl_dist"].tolist()
        found[-1]["of several numbers"] = sorted(k for k, v in stats.items() if np.ndim(v) > 0)
    return found


def main() -> None:
    """Write the file beside this one."""
    warnings.filterwarnings("ignore")
    made = {
        "versions": {"trl": "0.11.4", "transformers": "4.46.3", "torch": "2.13.0"},
        "given": {
            "settings": SETTINGS,
            "queries": QUERIES,
            "responses": RESPONSES,
            "masks": MASKS,
            "scores": SCORES,
        },
        "steps": {str(i): stats for i, stats in enumerate(steps(None))},
        "masked_steps": {str(i): stats for i, stats in enumerate(steps(MASKS))},
    }
    write(Path(__file__).with_name("trl_step.json"), made)


if __name__ == "__main__":
    main()
