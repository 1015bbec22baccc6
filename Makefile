# The two commands of the README: `make bench` and `make test`. Both set up .venv first.
# `make report` renders a recorded run: RUN=results/nvidia-h200/timings.json OUT=results/nvidia-h200/report
# `make notebooks` makes each notebook from its script and runs it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= .benchmarks/last_run.json
OUT ?= .benchmarks/report
# Processes that share the tests. One where there is a GPU: some tests time it, and must have it alone.
WORKERS ?= $(if $(wildcard /dev/nvidia0),0,2)

.PHONY: bench report notebooks test check format clean

bench: $(VENV)/.installed
	mkdir -p .benchmarks
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only --benchmark-columns=median,iqr,rounds \
	  --benchmark-json=.benchmarks/last_run.json

report: $(VENV)/.installed
	$(BIN)/python -m lab.timing.report $(RUN) --out $(OUT)

notebooks: $(VENV)/.installed
	$(BIN)/python notebooks/execute.py

test: check
	$(BIN)/python -m pytest --benchmark-skip --numprocesses=$(WORKERS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,plots]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis
