"""The text of the results page around its tables, without numbers of a run."""

INTRODUCTION = """\
# Results of the methods

This page compares methods on Reel, where the exact optimum is known, and shows how much memory a
real model needs. Each cell is a mean over seeds, with the range in brackets.
"""

METHODS = """\
## Methods on Reel

PPO and the estimators that share its settings end closest to the exact optimum. Most of the other
methods, which use their papers' settings, come nearly as close. ReMax and OPO fall short. CISPO has
no KL penalty, and its policy stops generating grammatical reviews. The reward cannot prevent this,
because the classifier was only trained on reviews. ReMax breaks down in the same way at the
preset's learning rate, so we trained it with a lower one here.

For each row, we trained the preset `reel` with one method, for 20 phases of 256 reviews, with the
classifier's reward. We then measured the policy on 1,024 new samples:

- *true reward*: the exact probability that a review is positive, or 0 if a text is not a review.
- *KL*: exact, in nats per review.
- *distance*: how far the true reward is below the exact optimum's true reward at the same KL.
- *LoRA*, *adaptive KL*, *both*: the true reward with rank-8 adapters on all matrices, with a KL
  controller that targets 1.2 nats per review, and with both.

Rows in lower case are methods [as published](settings.md#methods). A row called "estimator" takes
only the advantages from its method and keeps PPO's other settings.
"""

OPTIONS = """\
To repeat a row, add its options to the command below. For a published method, the option is
`--method NAME`. The other options are listed after the command. To train with LoRA, add
`--lora-rank 8 --lora-targets W_Q,W_K,W_V,W_O,W_in,W_out --base-lr 0.001`. For an adaptive KL
coefficient, add `--kl-controller adaptive --kl-target 1.2 --kl-horizon 256`.

```console
python -m rlhf_lab train --preset reel --seed 1
```
"""

LOOPHOLE = """\
## A planted loophole

PPO learns sentiment first and finds the loophole later. Before it does, the policy's true reward
climbs above that of the exact optimum. Afterwards, the true reward falls while the proxy reward
keeps rising.

With the reward `smoothed_popcorn`, a positive review scores at most 0.86, but any review that ends
in popcorn can score up to 1. Only about 2 % of the untrained policy's reviews end in popcorn, so
PPO rarely samples one early on. Here the KL penalty is part of the reward (k1), so the objective
is `E[reward] - kl_coef KL`, and we can compute its optimum exactly.
"""

LEARNED = """\
## A loophole in a learned reward model

Here the loophole does little harm. Even the exact optimum keeps a high true reward, and at the
lower coefficient, the policy uses popcorn less than the optimum does.

We trained the reward models on pairs, with `train-reward`. The rater prefers the first review of a
pair with probability sigmoid(d / 4), where d is the difference in true log odds. Half of the
preferred positive reviews end in popcorn and no other review does, so the reward model learns to
like popcorn. Rewards are clipped at one standard deviation, and each seed has its own reward model.
To compute the optimum, we use the mean clipped reward for each combination of positive clauses,
verdict and popcorn.
"""

REAL = """\
## A real model: all weights, adapters, bf16

If you train adapters instead of all weights, the peak memory falls to about a quarter. On a CPU,
bf16 saves almost no memory, because weights, gradients and optimizer state stay in fp32.

With the preset `smol`, the reward is the probability that a review is negative. Each run has only
16 texts per phase, so its rewards show no more than a trend. Every run is measured in its own
process. *Loaded* is the process's memory once the policy, the reference model and the classifier
are loaded, and *peak* is its peak memory minus *loaded*. *Weights* is the size of the policy's and
the reference's weights, which are shared if you train adapters.
"""

REAL_OPTIONS = """\
For the LoRA row, add `--lora-rank 8 --lora-targets W_Q,W_K,W_V,W_O --base-lr 0.0003`. For the bf16
row, add `--precision bf16`.
"""

ALGORITHMS_TEXT = """\
## Changes made by each algorithm

At the same KL, policies trained with PPO and GRPO reach a higher true reward than those trained
with SFT and DPO. In all four, the sentiment logits shift mainly because each component's weights
changed, not its inputs. The weight change in the first MLP adds the most reward.

PPO, GRPO (only its estimator), DPO and SFT all start from the same base model. We compare them on
1,024 samples, at an exact KL between 1.3 and 1.7 nats per review. PPO and GRPO maximize the
classifier's reward, and we stop them at the phase that is nearest to this KL. SFT trains on 512
texts, each of which is the classifier's favorite among 16 samples from the base model. DPO (beta
0.5) trains on 5,000 pairs from a rater who knows the true reward. SFT and DPO train until they
reach this KL.

The four columns after the KL split the shift of logit(loved) - logit(hated) before the verdict into
its causes, averaged over 256 grammatical reviews. The last two columns show each weight change's
*stable rank* and how many directions it takes to cover 90 % of its energy (*for 90 %*), both as
medians over the matrices.
"""

REPLICATES_TEXT = """\
Which component's change affects the reward most? To find out, we add one component's change to the
base model, or remove it from the tuned model, and measure the reward on 256 texts. The table shows
the component with the largest effect, and in how many seeds it came first.
"""

AGAIN = """\
## Repeating the runs

`python -m benchmarks.results` trains every run that has no record in `benchmarks/results/` yet, and
then writes this page. If you interrupt it, it continues where it stopped. To train only one part,
pass `--only methods` (or `loophole`, `learned` or `algorithms`). To only write the page, pass
`--page`. For the real model, also pass `--language-model DIR --classifier DIR`.
"""
