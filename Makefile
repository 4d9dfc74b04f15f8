# Each target sets up the virtual environment .venv: `make train` installs what training needs,
# the others what tests, lessons and benchmarks need as well.
PYTHON ?= python3
BIN := .venv/bin
# pip leaves the bytecode to the first import of a module, since most are never imported; it has to be kept then.
export PYTHONDONTWRITEBYTECODE :=
# One thread a process: small models are not faster with two.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
INSTALLED := .venv/installed
DEVELOPED := .venv/developed
PEERS := .cache/peers

# What depends most on the versions of other packages and of Python.
ELSEWHERE := tests/test_requirements.py tests/course/test_wheel.py tests/models tests/views
ELSEWHERE += tests/test_sampling.py tests/training/test_trainer.py

# What shows in a minute that the package works with a version of TransformerLens.
SMOKE := tests/test_smoke.py tests/test_requirements.py tests/functional tests/models/test_equality.py
SMOKE += -m "not process and not nightly" -k "not test_equality or GPT2LM or LlamaFor or Gemma3For"

.PHONY: train test lock lowest pinned newest smoke quick nightly faults site test-browser lint course lessons reel reel-check bench bench-peers clean

train: $(INSTALLED)
	$(BIN)/python -m rlhf_lab train

test: $(DEVELOPED) lint
	# in the order of their names: the longest files would otherwise be the last, and run alone
	$(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder

# The tests of at most 0.3 CPU seconds each: none trains or starts a process, a kernel or a browser.
quick: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	RLHF_LAB_QUICK=1 $(PYTEST) --numprocesses 2 --dist loadfile --quiet -m "not (slow or process or kernel or browser or nightly)"

# Every test, with other versions of packages and of Python, and with a browser.
nightly: $(DEVELOPED) lint
	$(PIP) --constraint requirements.lock --editable ".[browser,docs]"
	RLHF_LAB_NIGHTLY=1 $(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder -rs
	$(MAKE) faults
	if command -v python3.12; then $(MAKE) lowest newest PYTHON=python3.12; fi
	if command -v python3.13; then $(MAKE) pinned PYTHON=python3.13; fi

# Each line of tests/faults.txt changes the source, and a test must fail; FAULTS="functional/kl" chooses lines.
faults: $(DEVELOPED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults $(FAULTS)

smoke: $(DEVELOPED)
	$(PYTEST) --quiet $(SMOKE)

# README, docs/, lessons and API as pages in build/site/html; what Sphinx warns of and dead links are errors.
site: $(DEVELOPED)
	$(PIP) --constraint requirements.lock --editable ".[docs]"
	$(BIN)/python -m tools.site

# A lesson and a report in headless Chromium, which has to be on PATH; the tests are skipped without it.
test-browser: $(DEVELOPED)
	$(PIP) --constraint requirements.lock --editable ".[browser]"
	$(PYTEST) -rs tests/browser

# All extras, as new as the ranges of requirements.txt allow, with the pinned torch; the file is complete.
lock:
	$(PYTHON) -m venv .cache/lock
	.cache/lock/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	.cache/lock/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,course,browser,docs,eightbit]"
	grep '^#' requirements.lock > .cache/lock/written
	.cache/lock/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' >> .cache/lock/written
	mv .cache/lock/written requirements.lock

# The list of `smoke` in an environment for PYTHON with the oldest packages that requirements.txt allows, or with the newest
# TransformerLens 4. On Linux, uv takes a torch with CUDA. Remove .cache/lowest or .cache/newest before another PYTHON.
lowest newest: %: .cache/%/installed
	$(subst $(BIN),.cache/$@/bin,$(PYTEST)) --quiet $(SMOKE)

# A longer list with the pinned packages, for another Python than that of .venv.
pinned: .cache/pinned/installed
	$(subst $(BIN),.cache/$@/bin,$(PYTEST)) --numprocesses 2 --dist loadfile --quiet -m "not slow" $(ELSEWHERE)

.cache/lowest/installed: VERSIONS := --resolution lowest-direct
.cache/pinned/installed: VERSIONS := --constraint requirements.lock
.cache/newest/installed: VERSIONS := "$$(grep '^torch==' requirements.lock)" "transformer_lens>=4"
.cache/lowest/installed .cache/pinned/installed .cache/newest/installed: $(DEVELOPED) requirements.txt requirements.lock pyproject.toml
	$(BIN)/uv venv --quiet --clear --seed --python $(PYTHON) $(@D)
	$(BIN)/uv pip install --quiet --python $(@D) $(VERSIONS) --editable ".[dev]"
	touch $@

lint: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.prose

course: $(DEVELOPED)
	$(BIN)/python -m tools.course build
	$(PYTEST) --quiet tests/course/test_lessons.py
	RLHF_LAB_NIGHTLY=1 $(PYTEST) --quiet tests/course/test_exercises.py

# Every lesson whole, each cell twice over and from top to bottom in a fresh kernel; half an hour.
lessons: $(DEVELOPED)
	RLHF_LAB_NIGHTLY=1 $(PYTEST) tests/course/test_lessons.py tests/course/test_lesson_again.py

# The bundled models, made again from the grammar into runs/organism; and those that are shipped, measured.
reel: $(DEVELOPED)
	$(BIN)/python -m tools.reel train

reel-check: $(DEVELOPED)
	$(BIN)/python -m tools.reel check

# One phase of the tiny shape; others with, for example, make bench BENCH="--shape small --probes".
bench: $(DEVELOPED)
	$(BIN)/python -m benchmarks $(BENCH)

bench-peers: $(PEERS)/trl-0.11.4/installed $(PEERS)/trl-1.12/installed

$(PEERS)/%/installed: benchmarks/requirements/%.txt requirements.lock
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# torch is installed first, so an available CPU build is used and no other package decides its version.
$(INSTALLED): requirements.txt requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) "$$(grep '^torch==' requirements.lock)"
	$(PIP) --constraint requirements.lock --editable .
	touch $@

$(DEVELOPED): $(INSTALLED)
	$(PIP) --constraint requirements.lock --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
