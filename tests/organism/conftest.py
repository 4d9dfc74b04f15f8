"""Shares the solved grammar among the tests of the organism."""

import pytest

from rlhf_lab.organism import Grammar, GraphPolicy, build_graph, grammar_policy


@pytest.fixture(scope="session")
def reel() -> GraphPolicy:
    return grammar_policy(build_graph(Grammar()))


@pytest.fixture(scope="session")
def mini() -> GraphPolicy:
    return grammar_policy(build_graph(Grammar(n_clauses=1)))
