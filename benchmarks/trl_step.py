"""TRL's step-based PPOTrainer (0.11.4, the last with it) as a contestant.

The KL penalty is exact and inside the reward; Adam is AdamW here, as with all contestants. The
entropy is computed for its statistics.
"""

from collections.abc import Callable

import torch
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

from benchmarks.peer import count, encode_prompt, load_tokenizer
from benchmarks.worker import Clock, Setup, serve

SCORING = ("forward_pass", "compute_rewards", "compute_advantages")


def make_trainer(setup: Setup) -> PPOTrainer:
    """Make the trainer, with the minibatches and passes of the others."""
    config = PPOConfig(
        batch_size=setup["batch_size"],
        mini_batch_size=setup["batch_size"] // setup["num_minibatches"],
        ppo_epochs=setup["passes"],
        kl_penalty="full",
        max_grad_norm=1.0,
        adap_kl_ctrl=False,
        seed=setup["seed"],
        accelerator_kwargs={"cpu": setup["device"] == "cpu"},
    )
    policy, reference = (
        AutoModelForCausalLMWithValueHead.from_pretrained(
            setup["model"], summary_dropout_prob=0.0
        ).to(setup["device"])
        for _ in range(2)
    )
    for model in (policy, reference):
        model.is_peft_model = False
        model.pretrained_model.generation_config.eos_token_id = None
    reference.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-5)
    return PPOTrainer(config, policy, reference, load_tokenizer(setup), optimizer=optimizer)


def load(setup: Setup) -> Callable[[Clock], None]:
    """Load a trainer; returns a function that generates, scores and steps once."""
    trainer = make_trainer(setup)
    prompt = torch.tensor(encode_prompt(setup, trainer.tokenizer), device=setup["device"])
    queries = [prompt.clone() for _ in range(setup["batch_size"])]
    options = {
        "do_sample": True,
        "top_k": setup["top_k"],
        "max_new_tokens": setup["gen_len"],
        "pad_token_id": trainer.tokenizer.pad_token_id,
    }

    def phase(clock: Clock) -> None:
        responses = trainer.generate(
            queries, batch_size=len(queries), return_prompt=False, **options
        )
        clock.lap("rollout/sampling")
        if any(len(response) != setup["gen_len"] for response in responses):
            raise SystemExit("some responses are shorter than gen_len")
        scores = [torch.tensor(n) for n in count(setup, trainer.tokenizer.batch_decode(responses))]
        clock.lap("rollout/scoring")
        stats = trainer.step(queries, responses, scores)
        clock.lap("learning/steps")
        scoring = sum(float(stats[f"time/ppo/{name}"]) for name in SCORING)
        clock.stages["rollout/scoring"] += scoring
        clock.stages["learning/steps"] -= scoring

    return phase


if __name__ == "__main__":
    serve(load, ("torch", "transformers", "trl", "accelerate"))
