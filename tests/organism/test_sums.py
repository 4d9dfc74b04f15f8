"""Sums: texts, and every exact quantity against brute force over all texts of a sum."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import informative_fraction, pass_at_k
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism import sums
from rlhf_lab.organism.grammar import decode
from rlhf_lab.organism.sums import SUMS_IDS, SUMS_REWARDS, SUMS_WORDS, WRITERS, SumsGrammar
from tests.organism.sums_oracle import all_texts, as_tokens, read_digits, writer_law

FULL = SumsGrammar()
MINI = SumsGrammar(
    columns=2,
    p_writer=(0.2, 0.3, 0.5),
    p_writer_long_carry=(0.1, 0.1, 0.8),
    p_digits=(0.3, 0.7),
    typical_opener=0.5,
    careful_slip=0.05,
    blurt_slip=0.2,
    forget=0.7,
    sure=0.1,
)
GRAMMARS = [MINI, *(replace(MINI, p_writer=p) for p in ((0.0, 1.0, 0.0), (1.0, 0.0, 0.0)))]
GRAMMARS += [replace(MINI, p_writer=(0.3, 0.2, 0.5), forget=0.1)]  # two ways to the modal answer
GRAMMARS += [FULL, replace(FULL, unreachable=True)]
# long with and without a carry, short with and without, and digits where a slip wraps around
PAIRS = [(17, 25), (31, 42), (7, 8), (2, 5), (0, 0), (40, 10), (5, 45), (99, 0), (48, 51), (65, 7)]
LONGER = [(6, 9), (57, 88), (999, 1), (1234, 5678), (1111, 8080)]
EXACT = [reward for reward in SUMS_REWARDS.values() if isinstance(reward, sums.SumsReward)]
PROMPT = "0 0 0 6 + 0 0 0 9 ="
RIGHT = "so 6 9 0 1 5 ; 0 0 1 0 1 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 1 5"


def make_sums(grammar, pairs):
    return grammar.make_problems(*np.array(pairs).T)


@pytest.mark.parametrize("writer", [None, *WRITERS])
def test_sample_writes_the_texts_of_the_oracle(writer):
    n = 1200
    problems = make_sums(MINI, [pair for pair in PAIRS for _ in range(n)])
    sample = MINI.sample(problems, np.random.default_rng(0), writer)
    latents, wrong = sample.latents, sample.latents.error | sample.latents.dropped
    assert not latents.dropped[latents.writer != 1].any()
    rows = zip(np.array(SUMS_WORDS)[sample.tokens], sample.mask, latents.writer, wrong, strict=True)
    found = [(" ".join(row[mask]), z, tuple(marks)) for row, mask, z, marks in rows]
    for k, pair in enumerate(PAIRS):
        counts, law = Counter(found[n * k : n * (k + 1)]), Counter()
        for text in all_texts(MINI, *pair):
            if writer in (None, WRITERS[text.writer]):
                law[text.words, text.writer, text.wrong] += text.probability
        assert counts.keys() <= law.keys()
        for key, mass in law.items():
            p = mass / law.total()
            assert abs(counts[key] - n * p) <= 5 * (n * p * (1 - p)) ** 0.5 + 1


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_exact_values_match_brute_force(grammar):
    pairs = PAIRS if grammar.columns == 2 else LONGER
    problems = make_sums(grammar, pairs)
    functions = (sums.outcomes, sums.modal_answer, sums.solve_probability)
    cells, modes, p = (function(grammar, problems) for function in functions)
    by_writer = sums.writer_solve_probability(grammar, problems)
    for k, pair in enumerate(pairs):
        (prompt,), texts = sums.make_prompts(problems[[k]]), all_texts(grammar, *pair)
        mass, answers, rewards = np.zeros(18), Counter(), Counter()
        for text in texts:
            mass[text.cell] += text.probability
            answers[text.answer] += text.probability
            parse = grammar.parse(f"{prompt} {text.words.removesuffix(' <eos>')}")
            assert ((parse.a, parse.b), parse.opener) == (pair, text.words[:2])
            assert (parse.right, parse.units, parse.sure) == (text.right, text.units, text.sure)
            assert parse.answer == text.answer
            assert parse.steps == (text.writer < 2) == (not parse.direct)
            assert parse.faithful == (parse.steps and not any(text.wrong))
            assert parse.dropped == sum(text.wrong) * (text.writer == 1)
            for reward in EXACT:
                rewards[reward] += text.probability * reward.score(parse)
        by_grade = mass.reshape(3, 3, 2).sum(2)
        prior = writer_law(grammar, *pair)
        assert cells.mass[k] == pytest.approx(mass, abs=1e-12)
        assert by_writer[k] * prior == pytest.approx(by_grade[:, 0], abs=1e-12)
        assert p[k] == pytest.approx(by_grade[:, 0].sum(), abs=1e-12)
        assert answers[modes[k]] == pytest.approx(max(answers.values()), abs=1e-12)
        for reward, expected in rewards.items():
            assert cells.mass[k] @ reward.score(cells) == pytest.approx(expected, abs=1e-12)


def test_problems_have_digits_and_carries():
    rng, grammar = np.random.default_rng(2), replace(FULL, p_digits=(0.1, 0.2, 0.3, 0.4))
    drawn = grammar.problems(3000, rng)
    lengths = [len(str(n)) for n in drawn.a]
    assert lengths == [len(str(n)) for n in drawn.b] and (drawn.a + drawn.b < 10**4).all()
    np.testing.assert_allclose(np.bincount(lengths)[1:] / 3000, grammar.p_digits, atol=0.04)
    for name, numbers in (("a", drawn.a), ("b", drawn.b), ("sum", drawn.a + drawn.b)):
        digits = [read_digits(number, 4) for number in numbers]
        assert getattr(drawn, f"{name}_digits").tolist() == digits
    some = make_sums(FULL, [(6, 9), (999, 1), (1000, 1), (12, 34), (1, 9000)])
    assert some.n_carries.tolist() == [1, 3, 0, 0, 0] and some.is_long.tolist() == [0, 0, 1, 0, 1]
    for carry in (True, False):
        kept = FULL.problems(200, rng, digits=[2, 4], carry=carry)
        assert len(kept) == 200 and ((kept.n_carries > 0) == carry).all()
        assert {len(str(n)) for n in kept.a} == {2, 4}
    assert len(FULL.problems(0, rng)) == 0


# responses to 6 + 9: answer, dropped carries, first false column, properties, and rewards
READ = [
    (RIGHT, 15, 0, None, "steps faithful", "exact process units format hole"),
    # the carry of 1 is dropped in column 1, and the answer copies it
    (RIGHT.replace("0 0 1 0 1 ;", "0 0 0 0 0 ;").replace("# 0 0 1", "# 0 0 0"),
     5, 1, 1, "steps", "units format"),
    # right, but the step of column 2 is read from nowhere
    (RIGHT.replace("; 0 0 0 0 0 ; 0", "; 1 4 0 0 0 ; 0") + " sure",
     15, 0, 2, "steps sure", "exact units format hole"),
    ("ok 6 8 0 1 4 ; 0 0 1 0 1 ; 1 4 0 0 0 ; 0 0 0 0 0 ; # 0 0 1 4", 14, 0, 0, "steps", "format"),
    (RIGHT.replace("#", "sure #"), 15, 0, None, "", "exact units hole"),
    ("hm # 0 0 1 5 sure", 15, 0, None, "direct sure", "exact units hole"),
    ("hm # 0 0 0 4 sure", 4, 0, None, "direct sure", "hole"),
    ("hm # 0 0 0 5", 5, 0, None, "direct", "units"),
    ("hm 6 # 0 0 1 5", 15, 0, None, "", "exact units hole"),
    ("# 0 0 0 1 # 0 0 1 5", 15, 0, None, "", "exact units hole"),
    ("0 0 1 5 # 0 0 1 4", 14, 0, None, "", ""),
    *((words, None, 0, None, "", "") for words in ("hm # 0 0 1 5 so", "# 0 0 1 5 0", "15", "")),
    *((words, None, 0, None, "", "") for words in ("hm # 0 1 5", "hm 0 0 1 5", "#", "hm sure #")),
    ("hm # 0 0 1 5 sure sure", None, 0, None, "sure", "hole"),
]  # fmt: skip


def test_reading_of_texts_matches_hand_read():
    texts, metrics = [f"{PROMPT} {response}".strip() for response, *_ in READ], []
    for text, (_, *expected) in zip(texts, READ, strict=True):
        parse = FULL.parse(text)
        names = [name for name in ("steps", "faithful", "direct", "sure") if getattr(parse, name)]
        positive = [reward.name.removeprefix("sums:") for reward in EXACT if reward([text]) == 1]
        found = [parse.answer, parse.dropped, parse.first_error, *map(" ".join, (names, positive))]
        assert found == expected, text
        faithful = parse.faithful if parse.steps and parse.right else math.nan
        metrics.append((parse.steps, faithful, parse.dropped > 0, parse.direct, parse.sure))
    found = sums.text_metrics([*texts, "0 0 0 6 + 0 0"])
    assert list(found) == "steps faithful dropped_carry direct sure".split()
    np.testing.assert_array_equal(torch.stack(list(found.values()), 1), [*metrics, [math.nan] * 5])
    assert sums.faithful_fraction(texts, FULL) == 0.5
    assert math.isnan(sums.faithful_fraction(texts[5:], FULL))
    for text in ("", "so # 0 0 1 5", "0 0 6 + 0 0 0 9 = so", PROMPT[:-2], "9 9 9 9 + 0 0 0 1 =",
                 f"a{PROMPT}", f"{PROMPT}so"):  # fmt: skip
        assert FULL.parse(text) is None
    with pytest.raises(ConfigError, match="requires prompts such as '0 0 0 6.*got 'this movie'"):
        EXACT[0](["this movie"])


@pytest.mark.parametrize("grammar, digits", [(FULL, 1), (FULL, 2), (MINI, 1), (MINI, 2)])
def test_carry_patterns_match_all_sums(grammar, digits):
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits
    pairs = [(a, b) for a in range(low, high) for b in range(low, high)]
    every = make_sums(grammar, [(a, b) for a, b in pairs if a + b < 10**grammar.columns])
    problems, weight = sums.carry_patterns(grammar, digits)
    laws = Counter(map(tuple, every.carry_in))
    assert [laws.pop(tuple(row)) / len(every) for row in problems.carry_in] == pytest.approx(weight)
    assert not laws and {len(str(n)) for n in (*problems.a, *problems.b)} == {digits}


def key(*digits):
    """Patterns of each number of digits, in equal parts."""
    parts = [sums.carry_patterns(FULL, d) for d in digits]
    a, b = (np.concatenate([getattr(p, x) for p, _ in parts]) for x in "ab")
    return FULL.make_problems(a, b), np.concatenate([w for _, w in parts]) / len(parts)


def test_frontier_matches_published_table():
    """P(right) and pass@k of each number of digits are in docs/verifiable_rewards.md."""
    (problems, weight), published = key(2, 3), lambda *numbers: pytest.approx(numbers, abs=5e-5)
    p = torch.from_numpy(sums.solve_probability(FULL, problems))
    columns = [*(pass_at_k(p, k) for k in (1, 4, 8, 16)), informative_fraction(p, 8)]
    assert tuple(weight @ np.stack(columns, 1)) == published(0.3149, 0.6736, 0.8653, 0.9752, 0.8388)
    cells, score = sums.outcomes(FULL, problems), lambda name: SUMS_REWARDS[f"sums:{name}"].score
    betas = (1.0, 0.5, 0.3, 0.2, 0.1, 0.01)
    *points, last = sums.sums_frontier(cells, score("exact"), betas, weight)
    true_rewards, kls = zip(*[(x.true_reward, x.kl_per_sequence) for x in points], strict=True)
    assert true_rewards == published(0.5051, 0.7115, 0.8975, 0.9784, 0.9999)
    assert kls == published(0.0991, 0.4069, 0.8879, 1.2093, 1.3373)
    assert last.writers == published(0.5935, 0.3112, 0.0954)
    limits = {"format": 0.6008, "units": 0.3361, "hole": 0.9392, "process": 1.0}
    found = [sums.sums_frontier(cells, score(x), (0.01,), weight)[0].true_reward for x in limits]
    assert tuple(found) == published(*limits.values())
    # a majority vote is right without a carry
    is_right = sums.modal_answer(FULL, problems) == problems.a + problems.b
    assert (is_right == (problems.n_carries == 0)).all()
    assert (weight @ is_right,) == published(0.1894)
    problems, weight = key(4)
    cells = sums.outcomes(FULL, problems)
    limit, before, after = sums.sums_frontier(cells, score("hole"), (0.01, 0.22, 0.24), weight)
    assert (limit.true_reward, limit.sure) == published(0.1861, 0.8176)
    assert before.sure > 0.5 > after.sure


@pytest.mark.parametrize("name", ["exact", "hole"])
def test_frontier_matches_brute_force(name):
    cells, points = sums.outcomes(MINI, make_sums(MINI, PAIRS)), {1.0: [], 0.2: []}
    for beta, pair in product(points, PAIRS):
        texts = all_texts(MINI, *pair)
        mass = np.array([text.probability for text in texts])
        score = np.array([text.right or (text.sure and name == "hole") for text in texts])
        best = mass * np.exp(score / beta) / (mass @ np.exp(score / beta))
        marks = [(text.right, text.sure, *np.eye(3)[text.writer]) for text in texts]
        right, *others = best @ np.array(marks)
        points[beta].append([best @ score, right, best @ np.log(best / mass), *others])
    for weight in (None, np.arange(1.0, 11.0)):
        for found in sums.sums_frontier(cells, SUMS_REWARDS[f"sums:{name}"].score, points, weight):
            expected = np.average(points[found.beta], axis=0, weights=weight)
            assert [*found[1:5], *found.writers] == pytest.approx(expected, abs=1e-10)
    with pytest.raises(ValueError, match="beta must be greater than 0"):
        sums.sums_frontier(cells, EXACT[0].score, (0.0,))


@pytest.mark.slow
@pytest.mark.typed
@pytest.mark.parametrize("grammar", [MINI, FULL])
def test_trace_matches_brute_force(grammar):
    """Every prefix of every text: next words, beliefs and values from the mass of all texts."""
    start, words = grammar.prompt_len, range(len(SUMS_WORDS))
    for pair in PAIRS if grammar.columns == 2 else LONGER:
        masses, texts = defaultdict(lambda: np.zeros(18)), all_texts(grammar, *pair)
        tokens = as_tokens(grammar, *pair, *sorted({text.words for text in texts}))
        for text in texts:
            row = tuple(as_tokens(grammar, *pair, text.words)[0].tolist())
            for t in range(start, len(row) + 1):
                masses[row[:t]][text.cell] += text.probability
        traced, ends = sums.trace(grammar, tokens), range(start, tokens.shape[1] + 1)
        assert traced.mask.all() and traced.in_language.all()
        prefixes = [[tuple(row[:end]) for end in ends] for row in tokens.tolist()]
        mass = np.array([[masses[prefix] for prefix in row] for row in prefixes])
        total = mass.sum(-1, keepdims=True)
        cells = (mass / total).reshape(*total.shape[:2], 3, 3, 2)
        values = cells[..., 0, :].sum((-1, -2))
        longer = [[(*prefix, word) for prefix in row[:-1] for word in words] for row in prefixes]
        following = [[sum(masses.get(prefix, [0])) for prefix in row] for row in longer]
        following = np.reshape(following, (*mass[:, 1:].shape[:2], -1))
        for found, expected in (
            (traced.outcomes, mass / total),
            (traced.belief, cells.sum((-1, -2))),
            (traced.values, values),
            (traced.advantages, np.diff(values)),
            (traced.next_probs, following / total[:, :-1]),
        ):
            np.testing.assert_allclose(found, expected, atol=1e-10)
        for n in (0, 9):  # of the tokens of a response
            cut = sums.trace(grammar, tokens[:, : start + n])
            np.testing.assert_allclose(cut.values, values[:, : n + 1], atol=1e-10)


def test_trace_masks_what_the_grammar_cannot_write():
    rows = {  # response, and the number of its tokens that the grammar can write
        f"{RIGHT} <eos>": 32,
        "so 6 9 0 1 6 ;": 5,
        "so 6 9 0 1 4 ; 0 0 0": 9,
        "hm # 0 0 0 5 <eos> so": 7,
        "hm # 0 0 0 5 sure sure": 7,
        "hm # 0 0 1 5": 4,
        "sure": 0,
    }
    traced = sums.trace(FULL, as_tokens(FULL, 6, 9, *rows))
    assert (traced.mask.sum(1) - 1).tolist() == list(rows.values())
    assert traced.in_language.tolist() == [True] + [False] * 6
    outside = ~traced.mask
    assert not traced.values[outside].any() and not traced.belief[outside].any()
    assert not traced.next_probs[outside[:, :-1]].any()
    assert not traced.advantages[outside[:, 1:]].any()
    long = as_tokens(FULL, 1234, 5678, "so 4 8")
    assert sums.trace(FULL, long).mask.sum() - 1 == 1  # no steps for a long carry


def test_right_texts_have_the_probability_of_the_grammar():
    problems, seen = make_sums(MINI, PAIRS), []
    for k, rows in enumerate(sums.right_texts(MINI, problems).tolist()):
        parses = [MINI.parse(decode(row, SUMS_WORDS)) for row in rows]
        assert all(x.right and (x.faithful or x.direct) for x in parses)
        assert len(set(map(tuple, rows))) == 12 and {(x.a, x.b) for x in parses} == {PAIRS[k]}

    def grammar_model(tokens):
        seen.append(len(tokens))
        logits = torch.full((*tokens.shape, len(SUMS_WORDS)), -torch.inf, dtype=torch.float64)
        traced = sums.trace(MINI, tokens)
        probs = traced.next_probs + ~traced.mask[:, :-1, None]  # any, after a word of probability 0
        probs[tokens[:, MINI.prompt_len - 1 : -1] == SUMS_IDS["<eos>"]] = 1.0  # any, after the end
        logits[:, MINI.prompt_len - 1 : -1] = probs.log()
        return logits

    found = sums.model_solve_probability(grammar_model, MINI, problems, batch_size=50)
    assert found.tolist() == pytest.approx(sums.solve_probability(MINI, problems), abs=1e-12)
    assert seen == [50, 50, 20]


def test_scored_probability_of_a_policy_is_its_models():
    model, problems = load_model("sums-nano"), make_sums(FULL, LONGER)
    score = lambda x: sums.model_solve_probability(x, FULL, problems)
    assert torch.equal(score(model), score(TransformerWithValueHead(model)))
    with pytest.raises(ConfigError, match="does not have the words of sums"):
        score(load_model("reel-nano"))


def test_rewards_of_batches_match_hand_computed():
    """The first of the most frequent answers per prompt, and coins that the texts determine."""
    score = lambda name, texts: SUMS_REWARDS[f"sums:{name}"](texts).tolist()
    texts = [f"{PROMPT} hm # {x}" for x in ("0 0 0 5", "0 0 0 5 sure", "0 0 1 5", "")]
    other = "0 0 0 7 + 0 0 0 8 = hm # 0 0 1 5"
    assert score("majority", [*texts, other]) == [1, 1, 0, 0, 1]
    assert score("majority", texts[2:0:-1]) == [1, 0] and score("majority", texts[3:]) == [0]
    coins = score("coin", [other] * 2000)
    assert coins == score("coin", [other] * 2000) and np.mean(coins) == pytest.approx(0.5, abs=0.05)
    assert coins[:1999] != score("coin", [other] * 1999)


def test_prompts_are_sums_that_are_not_held_out():
    prompts = sums.load_sums_prompts("sums:2,3")
    parses = [FULL.parse(prompt) for prompt in prompts]
    assert len(prompts) == 4000 and prompts == sums.load_sums_prompts("sums:2,3")
    assert {len(str(x.a)) for x in parses} == {len(str(x.b)) for x in parses} == {2, 3}
    held_out = sums.is_held_out(FULL.problems(2000, np.random.default_rng(9)))
    assert held_out.mean() == pytest.approx(0.5, abs=0.05)
    assert not sums.is_held_out(make_sums(FULL, [(x.a, x.b) for x in parses])).any()
    assert len({len(x) for x in sums.load_sums_prompts("sums", 50)}) == 1
    carried = [FULL.parse(x) for x in sums.load_sums_prompts("sums:4c", 50)]
    assert make_sums(FULL, [(x.a, x.b) for x in carried]).n_carries.all()
    for source in ("sums:5", "sums:x", "sums:2,", "sum"):
        with pytest.raises(ConfigError, match="Unknown prompts"):
            sums.load_sums_prompts(source)


@pytest.mark.usefixtures("no_type_checks")
def test_bad_settings_and_arguments_raise():
    rng, single = np.random.default_rng(0), SumsGrammar(1, p_digits=(1.0,))
    row = sums.right_texts(FULL, FULL.problems(1, rng))[0, :1]
    ended_by = lambda token: torch.cat([row[:, :-1], torch.tensor([[token]])], 1)
    for message, call in (
        ("columns must be an integer from 1 to 9, got 2.5", lambda: replace(FULL, columns=2.5)),
        ("p_writer must .* sum to 1", lambda: replace(FULL, p_writer=(0.5, 0.5, 0.1))),
        ("p_digits must be 4 numbers", lambda: replace(FULL, p_digits=(0.5, 0.5))),
        (r"careful_slip must be in \[0, 1\)", lambda: replace(FULL, careful_slip=1.0)),
        ("between 0 and 9999", lambda: FULL.make_problems([9999], [1])),
        ("lists of integers", lambda: FULL.make_problems([1.9], [2.9])),
        ("between 1 and 4, got 3", lambda: FULL.problems(3, rng, 3)),
        ("no positive", lambda: replace(MINI, p_digits=(1.0, 0.0)).problems(3, rng, [2])),
        ("at least 2 columns", lambda: single.problems(3, rng, carry=True)),
        ("Unknown writer 'x'", lambda: FULL.sample(FULL.problems(3, rng), rng, "x")),
        ("Unknown slot 'c0'", lambda: FULL.slot("c0", steps=False)),
        ("got 0", lambda: sums.carry_patterns(FULL, 0)),
        ("must begin with <bos>", lambda: sums.trace(FULL, row.where(row != SUMS_IDS["+"], 1))),
        ("at most 32 tokens", lambda: sums.trace(FULL, torch.cat([row, row[:, -1:]], 1))),
        ("tokens must be between 0 and 19", lambda: sums.trace(FULL, ended_by(20))),
    ):
        with pytest.raises(ValueError, match=message):
            call()
