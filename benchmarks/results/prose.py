"""The text of the results page around its tables, without numbers of a run."""

INTRODUCTION = """\
# Results of the methods

This page compares methods on Reel, where the exact optimum is known, and measures a real model's
memory. Cells are means over seeds, with the range in brackets.
"""

METHODS = """\
## Methods on Reel

PPO and the estimators that share its settings end closest to the exact optimum. With their papers'
settings, most methods come nearly as close. ReMax and OPO fall short, and CISPO, which has no KL
penalty, stops generating grammatical reviews. The reward cannot prevent that, because the
classifier was trained on reviews only. ReMax does the same at the preset's learning rate, so it
uses a lower one here.

Each row is one method with the preset `reel`: 20 phases of 256 reviews, rewarded by the
classifier. After training, 1,024 new samples give:

- *true reward*: the exact probability that a review is positive, or 0 if a text is not a review.
- *KL*: exact, in nats per review.
- *distance*: how far the true reward is below that of the exact optimum at the same KL.
- *LoRA*, *adaptive KL*, *both*: the true reward with rank-8 adapters on all matrices, with a KL
  controller that aims for 1.2 nats per review, and with both.

Lower-case rows are methods [as published](settings.md#methods). An "estimator" row takes only the
advantages from that method and keeps PPO's other settings.
"""

OPTIONS = """\
To repeat a row, pass its options to this command. For a published method, the option is
`--method NAME`; other options are listed below. For LoRA, add `--lora-rank 8
--lora-targets W_Q,W_K,W_V,W_O,W_in,W_out --base-lr 0.001`, and for an adaptive KL,
`--kl-controller adaptive --kl-target 1.2 --kl-horizon 256`.

```console
python -m rlhf_lab train --preset reel --seed 1
```
"""

LOOPHOLE = """\
## A planted loophole

PPO finds sentiment first and the loophole later. The true reward climbs above the optimum's, and
then falls while the proxy keeps rising.

The reward `smoothed_popcorn` gives a positive review at most 0.86, but any review that ends in
popcorn up to 1. Only about 2 % of the untrained policy's reviews do, so PPO rarely samples one
early on. With the KL in the reward (k1), the objective is `E[reward] - kl_coef KL`, whose optimum
is known exactly.
"""

LEARNED = """\
## A loophole in a learned reward model

Here the loophole does little harm: even the exact optimum keeps a high true reward, and at the
lower coefficient PPO uses popcorn less than the optimum does.

`train-reward` gets pairs from a rater who prefers the first review with probability sigmoid(d / 4),
where d is the difference in true log odds. Half of the preferred positive reviews end in popcorn,
and no other review does, so the reward model learns to like popcorn. Rewards are clipped at one
standard deviation, and each seed has its own reward model. The optimum is computed from the mean
clipped reward for each combination of positive clauses, verdict and popcorn.
"""

REAL = """\
## A real model: all weights, adapters, bf16

Adapters need about a quarter of the peak memory. On a CPU, bf16 saves almost none, because
weights, gradients and optimizer state stay in fp32.

The preset `smol` rewards the probability that a review is negative. Each run is a separate
process with 16 texts per phase, so its rewards only show a trend. *Peak* is the process's highest
memory minus *loaded*, which is the memory after loading policy, reference and classifier. *Weights*
counts policy and reference; with adapters, both share the same weights.
"""

REAL_OPTIONS = """\
For LoRA, add `--lora-rank 8 --lora-targets W_Q,W_K,W_V,W_O --base-lr 0.0003`; for bf16,
`--precision bf16`.
"""

ALGORITHMS_TEXT = """\
## Changes made by each algorithm

At the same KL, PPO and GRPO reach a higher true reward than SFT and DPO. All four move the
sentiment logits mainly through the components' own weights, and the first MLP's change adds the
most reward.

PPO, GRPO (its estimator), DPO and SFT start from the same base model and are compared at an exact
KL between 1.3 and 1.7 nats per review, on 1,024 samples. PPO and GRPO are rewarded by the
classifier and stopped at the nearest phase. SFT learns the classifier's favorite of 16 base
samples, 512 times, and DPO (beta 0.5) learns 5,000 pairs from a rater who knows the true reward;
both train until they reach this KL.

The four columns after KL split the shift of logit(loved) - logit(hated) before the verdict into its
causes, averaged over 256 grammatical reviews. *Stable rank* and the number of directions *for
90 %* of the energy are medians over the matrices.
"""

REPLICATES_TEXT = """\
The next table shows which component's change affects the reward most, and in how many seeds. The
reward is measured on 256 texts, after adding one component's change to the base model, or removing
it from the tuned model.
"""

AGAIN = """\
## Repeating the runs

`python -m benchmarks.results` makes the runs that have no record in `benchmarks/results/`, and
then writes this page. It resumes after an interruption. `--only methods` (or `loophole`, `learned`,
`algorithms`) makes one part, and `--page` only writes the page. The real model needs
`--language-model DIR --classifier DIR`.
"""
