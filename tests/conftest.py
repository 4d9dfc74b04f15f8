"""Fixtures of all tests: tiers, tiny model directories, processes, and no network.

Fixtures import transformers (5 seconds and more) themselves, so tests of the maths start without.
"""

import gc
import multiprocessing.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import jaxtyping
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tests.type_checker  # noqa: F401, which jaxtyping's import hook looks up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf_lab.models import TransformerWithValueHead
    from tests.warm import WarmPython

# A time limit per example would fail on a busy machine; timings are the benchmark's.
hypothesis.settings.register_profile("no time limit", deadline=None)
hypothesis.settings.load_profile("no time limit")

NIGHTLY = bool(os.environ.get("RLHF_LAB_NIGHTLY"))
QUICK = bool(os.environ.get("RLHF_LAB_QUICK"))
QUICK_LIMIT = 0.45  # CPU seconds per test: 0.3, and half as much again on a busy machine
TIERS = {"slow", "process", "kernel", "browser", "nightly"}
SKIPPED = pytest.mark.skip(reason="RLHF_LAB_NIGHTLY is unset")
MARKS = {  # fixtures that start a process or train, and the mark of the tests that use them
    **dict.fromkeys(("warm_python", "cold_python"), "process"),
    "chromium": "browser",
    **dict.fromkeys(
        ("finished", "fitted", "learned", "probed", "reel_model", "resumed", "runs", "trained"),
        "slow",
    ),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures, and skip nightly ones in other tiers."""
    for item in items:
        if not NIGHTLY and item.get_closest_marker("nightly"):
            item.add_marker(SKIPPED)
        for fixture in MARKS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(MARKS[fixture])
    gc.freeze()  # a pass over all imports takes 0.3 s, which would count as a test's time


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Check types in quick tests and in slow ones marked `typed`; checks double the time."""
    marks = {mark.name for mark in item.iter_markers()}
    is_slow = "slow" in marks and "typed" not in marks
    if is_slow or "no_type_checks" in getattr(item, "fixturenames", ()):
        with _no_type_checks():
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that trains or starts a process without a mark; `make quick` has none."""
    marks = {mark.name for mark in item.iter_markers()} & TIERS
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if marks <= {"slow", "nightly"}:
            patch.setattr(subprocess.Popen, "_execute_child", fail_on_process)
        if not marks:
            stack.enter_context(register_optimizer_step_pre_hook(fail_on_step))
        before = time.process_time()
        result = yield
        seconds = time.process_time() - before
        if QUICK and seconds > QUICK_LIMIT:
            pytest.fail(f"takes {seconds:.2f} s of CPU in `make quick`; mark it slow")
        return result


def fail_on_step(*arguments: Any) -> None:
    """Hook of all optimizers in tests without a mark."""
    pytest.fail("takes a step of an optimizer; mark it slow")


START = subprocess.Popen._execute_child
OF_LIBRARIES = ("lscpu", "fc-list", "pandoc")  # numpy, matplotlib and jupytext call them once


def fail_on_process(
    process: subprocess.Popen, program: object, *arguments: Any, **options: Any
) -> None:
    """Replacement of the start of a process in tests without a mark for it."""
    name = program if isinstance(program, str) else program[0]
    if name in OF_LIBRARIES:
        return START(process, program, *arguments, **options)
    pytest.fail("starts a process; mark it process, kernel or browser")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: tiny models lose more time waiting for threads than they gain."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def no_type_checks() -> None:
    """Switch jaxtyping off: for long runs, and for faulty records that must reach a check."""


@contextmanager
def _no_type_checks() -> Iterator[None]:
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Put all temporary files, also of processes and kernels, into a folder that is removed."""
    basetemp = tmp_path_factory.getbasetemp()
    multiprocessing.util.get_temp_dir()  # made before, since Python removes it only at exit
    with (
        tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
    if not request.session.testsfailed:  # not earlier: threads may still write to a tmp_path
        shutil.rmtree(basetemp, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Skip fsync, which only matters in a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_variables_of_wandb() -> Iterator[None]:
    """Unset variables that would switch wandb on."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def tiny_models() -> types.ModuleType:
    from tests import tiny_models

    return tiny_models


@pytest.fixture(scope="session")
def gpt2_tokenizer(tiny_models: types.ModuleType) -> "PreTrainedTokenizerFast":
    """One special token is BOS, EOS and padding at once, as in GPT-2."""
    return tiny_models.gpt2_tokenizer()


@pytest.fixture(scope="session")
def llama_tokenizer(tiny_models: types.ModuleType) -> "PreTrainedTokenizerFast":
    """Four distinct special tokens."""
    return tiny_models.llama_tokenizer()


@pytest.fixture(scope="session")
def gpt2_dir(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: types.ModuleType,
    gpt2_tokenizer: "PreTrainedTokenizerFast",
) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "tiny-one"
    return tiny_models.save(tiny_models.tiny_gpt2(), gpt2_tokenizer, directory)


@pytest.fixture(scope="session")
def llama_dir(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: types.ModuleType,
    llama_tokenizer: "PreTrainedTokenizerFast",
) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "tiny-two"
    return tiny_models.save(tiny_models.tiny_llama(), llama_tokenizer, directory)


@pytest.fixture(params=["gpt2", "llama"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    """Each of the two tiny models in turn."""
    return request.getfixturevalue(f"{request.param}_dir")


@pytest.fixture
def policy(model_dir: Path, tiny_models: types.ModuleType) -> "TransformerWithValueHead":
    """A fresh policy on each of the two tiny models in turn."""
    return tiny_models.policy_on(model_dir)


@pytest.fixture(scope="session")
def surroundings(
    tmp_path_factory: pytest.TempPathFactory, temporary_folder: None
) -> dict[str, str]:
    """The environment of a process: no credentials, network or real models, and one thread."""
    left_out = ("WANDB", "RLHF_LAB_REAL_MODELS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return kept | {
        "HOME": str(tmp_path_factory.mktemp("home")),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
        "TERM": "xterm-256color",
    }


@pytest.fixture(scope="session")
def warm_python(surroundings: dict[str, str]) -> "WarmPython":
    """Runs `python ARGUMENTS` in processes forked from one that has imported the package."""
    from tests.warm import WarmPython

    if not hasattr(os, "fork"):
        pytest.skip("needs fork, which this system does not have")
    return WarmPython(surroundings)


@pytest.fixture(scope="session")
def cold_python(surroundings: dict[str, str]) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `python ARGUMENTS` as the shell does, with more variables."""

    def run(
        arguments: list[str], variables: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=surroundings | dict(variables or {}),
            timeout=900,
            **options,
        )

    return run


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on every attempt to resolve a name or to connect."""

    def fail(*args: object, **kwargs: object) -> None:
        pytest.fail(f"the network was used: {args}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, fail)
    for name in ("getaddrinfo", "create_connection", "gethostbyname"):
        monkeypatch.setattr(socket, name, fail)


@pytest.fixture(scope="session")
def real_models() -> Path:
    """The directory with `minilm-sentiment/` and `smollm2/`."""
    place = os.environ.get("RLHF_LAB_REAL_MODELS")
    if not place:
        pytest.skip("RLHF_LAB_REAL_MODELS is unset; point it at the real models to run this test")
    return Path(place)
