"""The text of the results page around its tables, without numbers of a run."""

INTRODUCTION = """\
# Results of the methods

`python -m benchmarks.results` makes the runs that have no record in `benchmarks/results/`, resumes
after an interruption, and writes this page. `--only methods`, `--only loophole` or `--only learned`
makes one part, `--page` only writes the page. Real models need
`--language-model DIR --classifier DIR`.
"""

METHODS = """\
## Methods on Reel

One row is one method with the preset `reel`: 20 phases of 256 reviews, all weights trained, a
constant KL coefficient, and the classifier's reward. Cells are means over seeds (lowest to
highest), measured on 1,024 new samples after training:

- *true reward*: the exact probability that a review is positive; 0 if a text is not a review.
- *KL*: exact, in nats per review. *distance*: true reward of the exact optimum with this KL, minus
  the true reward.
- *LoRA*: true reward with adapters of rank 8 on all matrices. *adaptive KL*: with a controller
  whose target is 1.2 nats per review. *both*: with adapters and controller.

Rows in lower case are methods as published ([settings](settings.md#methods)). A row "estimator"
keeps PPO's other settings, except those in its command. The classifier was trained on reviews only,
so its reward does not keep the policy grammatical. CISPO, published without a KL penalty, leaves
the language, as ReMax does at a higher learning rate.
"""

VARIANTS = """\
These commands make the rows. For LoRA, add `--lora-rank 8
--lora-targets W_Q,W_K,W_V,W_O,W_in,W_out --base-lr 0.001`; for an adaptive KL, `--kl-controller
adaptive --kl-target 1.2 --kl-horizon 256`.
"""

LOOPHOLE = """\
## A planted loophole

`smoothed_popcorn` gives a positive review a reward of at most 0.86, and any review that ends in
popcorn a reward of up to 1. The KL is in the reward (k1), so the objective is
`E[reward] - kl_coef KL`, whose optimum is known exactly: as `kl_coef` falls, the proxy rises,
popcorn becomes frequent, and the true reward falls. PPO learns sentiment first, because the policy
samples it often. It learns popcorn, which is in 2 of 100 reviews, later: the true reward rises
above that of the optimum and then falls while the proxy still rises.
"""

LEARNED = """\
## A loophole in a learned reward model

`train-reward` gets pairs from a rater who prefers the first review with probability sigmoid(d / 4),
where d is the difference of the true log odds. Half of the preferred positive reviews, and no
others, end in popcorn, so the reward model rewards popcorn in any review. Rewards are clipped at
one standard deviation. The exact optimum uses the mean clipped reward by content (positive
clauses, verdict, popcorn). Each seed has its own reward model.
"""

REAL = """\
## A real model: all weights, adapters, bf16

The preset `smol` rewards the probability that a review is negative. Sixteen texts per phase for a
few phases show only a trend. Each run is a separate process. *Peak* is the highest memory of the
process minus that after loading policy, reference and classifier (*loaded*, with Python and its
packages). *Weights* counts policy and reference; with adapters, the reference is the policy
without them. In bf16, weights, gradients and optimizer state stay in fp32.

For LoRA, add `--lora-rank 8 --lora-targets W_Q,W_K,W_V,W_O --base-lr 0.0003` to the command below;
for bf16, `--precision bf16`.
"""

ALGORITHMS_TEXT = """\
## Changes made by each algorithm

PPO, GRPO (its estimator), DPO and SFT train the same base model and are compared at a KL of 1.5
plus or minus 0.2 nats per review, exact, on 1,024 samples. For PPO and GRPO, the weights before
the phase with the nearest KL are used. DPO and SFT are complete runs whose number of steps reaches
this KL. PPO and GRPO are rewarded by the classifier. SFT learns the best of 16 samples of the base
by the same classifier, 512 times. DPO (beta 0.5) learns 5,000 pairs of reviews of the grammar from
a rater who knows the true reward.

The four columns after KL are the causes of the shift of logit(loved) - logit(hated) before the
verdict, over 256 reviews of the grammar, and sum to it. *Stable rank* and the number of directions
*for 90 %* of the energy are medians over the matrices. Cells are means over seeds (lowest to
highest).
"""

REPLICATES_TEXT = """\
The first component by each measure, and in how many seeds. The relative change is the norm of a
component's change over the norm of its weights. Reward is measured on 256 texts with the same
noise, with one component's change added to the base model or removed from the tuned model.
"""
