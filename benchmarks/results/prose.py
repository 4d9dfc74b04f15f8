"""The text of the results page around its tables, without numbers of a run."""

INTRODUCTION = """\
# What the methods reach

Written by `python -m benchmarks.results` from the records in `benchmarks/results/`, one .jsonl
file per part. The command makes the runs without a record, and continues after an interruption;
`--only methods`, `--only loophole`, `--only learned` make one part, `--page` writes only the page.
A run with other settings or bundled weights is repeated. Real models need
`--language-model DIR --classifier DIR`.
"""

METHODS = """\
## Methods on Reel

Each row is the preset `reel`, 20 phases of 256 reviews, with the fields below, rewarded by the
classifier. The *true reward* is the exact posterior that a review is positive, and 0 for a text
that is not a review, over 1,024 new samples after training: mean over seeds (lowest to highest).
*KL* is exact, in nats per review. *Frontier* is the true reward of the exact optimum with this KL,
*distance* the difference from it. The true reward is the product of *grammatical* and *of those,
true reward*. *LoRA* trains adapters of rank 8 on all matrices; *adaptive* controls the KL
coefficient, with a target of 1.2 nats per review. The number after it is the last coefficient,
which takes effect when most steps are already made. Rows in lower case are methods as published
([settings](settings.md#methods)); an *estimator* has PPO's other settings (last column). ReMax
leaves the language at a higher rate (it has no clip), CISPO at this one (it has no KL penalty).

The classifier has never seen a text that is not a review, so only the KL penalty keeps the policy
grammatical; and above the KL at which the frontier is flat, more KL does not increase the optimum.
"""

LOOPHOLE = """\
## The planted loophole

`smoothed_popcorn` rewards a positive review with at most 0.86, and any review that ends in popcorn
with up to 1. The KL is in the reward (k1), so that the objective is `E[reward] - kl_coef KL`, whose
exact optimum is known: with a lower `kl_coef`, the proxy rises, popcorn becomes frequent, and the
true reward falls. PPO learns sentiment first, which the policy samples often, and popcorn later,
which is in 2 reviews of 100: the true reward rises above the optimum's, then falls while the proxy
still rises. With the KL in the reward, only `target_kl` limits a learning phase.
"""

LEARNED = """\
## The same in a reward model that was learned

`train-reward` gets pairs from a rater who prefers positive reviews with probability sigmoid(d / 4),
d the difference of the true log odds. Popcorn ends only positive reviews that were preferred, half
of them, so the reward model rewards popcorn in any review. Its rewards are clipped at one standard
deviation. The exact optimum uses its mean reward by content: positive clauses, verdict, popcorn;
clipped as well. One reward model is trained per seed.
"""

REAL = """\
## A real model: plain, with adapters, in bf16

The preset `smol`, whose reward is the probability that a review is negative, with 16 texts per
phase, for a few phases: the reward is only a trend. Each run is a separate process. *Peak* is the
highest memory of the process in phase 0, and in any phase, minus that after loading policy,
reference and classifier; *loaded* includes Python and its packages. *Weights* counts policy
and reference, each once; with adapters the reference is the policy without them. bf16
applies to matrix products: weights, gradients and the optimizer's state stay in fp32.
"""

ALGORITHMS_TEXT = """\
## What did each algorithm change?

PPO, GRPO, DPO and SFT from one base, compared at the same KL: 1.5 nats per review, plus or minus
0.2, exact, on 1,024 samples. For PPO and GRPO these are the weights before the phase with the
nearest KL; for DPO and SFT a complete run with the number of steps that reaches the KL. PPO and
GRPO (its estimator only) are rewarded by the classifier; SFT learns the best of 16 samples of the
base by the same classifier, 512 times; DPO learns from reviews of the grammar, 5,000 pairs by a
rater who knows the true reward, beta 0.5. The four columns after KL are the causes of the shift of
logit(loved) - logit(hated) before the verdict, over 256 reviews of the grammar; their sum is the
shift. *Stable rank* and the number of directions *for 90 %* of the energy are medians over the
matrices. Means over seeds (lowest to highest).
"""

GRAFTS_TEXT = """\
Effect of a group's change on its own, added to the base (put in), and of removing it from the tuned
model (taken out), in true reward over 256 texts with the same noise:
"""
