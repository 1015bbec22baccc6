# The two commands of the README: `make bench` and `make test`. Both set up .venv first.
# `make report` renders a recorded run: RUN=results/nvidia-h200/timings.json OUT=results/nvidia-h200/report
# `make html` makes one self-contained page of recorded results: RESULTS=results/nvidia-h200 HTML=report.html
# `make experiments` measures SGLang's five changes, or without a GPU shows the recorded ones: EXPERIMENTS=.benchmarks/experiments
# `make newest` runs the tests that Triton's version can change, in the interpreter, with that of constraints-newest.txt.
# `make mutation` changes one operator or constant at a time and finds out whether the tests see it: SEED=1 COUNT=200
# `make notebooks` makes each notebook from its script and runs it. `make docs` builds the site: SITE=docs/_build
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= .benchmarks/last_run.json
OUT ?= .benchmarks/report
RESULTS ?= results/nvidia-h200
HTML ?= .benchmarks/report.html
EXPERIMENTS ?= .benchmarks/experiments
SITE ?= docs/_build
SEED ?= 1
COUNT ?= 200
# Processes that share the tests. One for each GPU: some tests time it, and must have it alone.
WORKERS ?= $(if $(wildcard /dev/nvidia0),auto,2)
# How they share them: one by one, or by files where there is no GPU, so that what the tests of a file share is made once.
DIST ?= $(if $(wildcard /dev/nvidia0),load,loadfile)

NEWEST := $(abspath $(VENV)/newest)
NEWEST_TESTS := tests/test_interpreter.py tests/kernels/test_draft_decode_kv_indices.py tests/kernels/test_key_shares.py

.PHONY: bench report html experiments notebooks docs test newest mutation check format clean

bench: $(VENV)/.installed
	$(BIN)/lab bench

report: $(VENV)/.installed
	$(BIN)/lab report $(RUN) --out $(OUT)

html: $(VENV)/.installed
	$(BIN)/lab html $(RESULTS) --out $(HTML)

experiments: $(VENV)/.installed
	$(BIN)/lab experiments changes --out $(EXPERIMENTS)

notebooks: $(VENV)/.installed
	$(BIN)/python notebooks/execute.py

docs: $(VENV)/.installed
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs -d $(SITE)/doctrees . $(SITE)/html
	@echo $(SITE)/html/index.html

test: check
	$(BIN)/python -m pytest --benchmark-skip --numprocesses=$(WORKERS) --dist=$(DIST)

newest: $(NEWEST)/.installed
	PYTHONPATH=$(NEWEST) $(BIN)/python -c "import triton; print('Triton', triton.__version__)"
	TRITON_INTERPRET=1 PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=$(DIST) $(NEWEST_TESTS)

mutation: $(VENV)/.installed
	$(BIN)/python -m tests.mutation --seed $(SEED) --count $(COUNT)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --constraint constraints.txt --editable '.[all,dev,docs,html,plots]'
	touch $@

$(NEWEST)/.installed: $(VENV)/.installed constraints-newest.txt
	$(BIN)/pip install --no-deps --upgrade --target $(NEWEST) --constraint constraints-newest.txt triton
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis
