# make demo   set up and run the main job on this machine (no GPU needed)
# make test   set up and run every test
# make test-fast, make lint, make setup, make clean-runs

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := requirements/cpu.txt requirements/engines.txt requirements/dev.txt
STAMP := $(VENV)/.installed
# Tests that start servers, ranks or a cluster, or wait for a time to pass: one at a time. The others go two at a time.
ALONE := tests/servers tests/cluster tests/parallel tests/rollout tests/launch tests/monitor
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-fast lint setup clean-runs

demo: $(STAMP)
	$(BIN)/python examples/quickstart_cpu/demo.py

test: $(STAMP)
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest $(ALONE)

test-fast: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

lint: $(STAMP)
	$(BIN)/ruff check .

setup: $(STAMP)

# Written last, so that an interrupted set-up is taken up again and a finished one installs nothing.
$(STAMP): $(REQUIREMENTS) setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed; {sys.executable} is {v.major}.{v.minor}. Try: make PYTHON=python3.11")'
	@echo "== setting up $(VENV) with $$($(PYTHON) --version); a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/cpu.txt -r requirements/dev.txt
	@# Megatron-Core's cp311 wheel works, though its metadata asks for 3.12; newer Pythons need no exception.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
	  $$($(PYTHON) -c 'import sys; print("--ignore-requires-python" if sys.version_info < (3, 12) else "")') \
	  -r requirements/engines.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

clean-runs:
	rm -rf runs
