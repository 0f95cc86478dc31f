# Every target makes .venv and installs what it needs; nothing else has to be there but Python 3.11+ and make.
#   PYTHON=python3.12    which interpreter .venv is made with
#   ENGINES='vllm sglang' which engines `make engines` installs
#   WORKERS=0            how many files of tests run at a time (0: one, in the process of pytest itself)
#   BENCH_ARGS=--rivals  what `make bench` passes on: here, other projects too
#   TORCH_INDEX=URL      where to take torch from (pick your vendor's CPU index to save the CUDA build's gigabytes)
PYTHON ?= python3
TORCH_INDEX ?=
ENGINES ?= vllm llamacpp sglang
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?= -q
WORKERS ?= 2
BENCH_ARGS ?=
# Hundreds of daemons start in the tests: with bytecode each takes half the time.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test slow long check format bench engines wheel clean
help:
	@echo 'make demo | test | slow | long | check | format | bench | engines | wheel | clean'

demo: $(VENV)/.demo
	$(BIN)/python -m kvtier.demo

test: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python -m pytest $(PYTEST_ARGS) -n $(WORKERS) --dist loadfile -m 'not slow and not gpu'

slow: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python -m pytest $(PYTEST_ARGS) -n $(WORKERS) --dist loadfile -m 'slow and not alone and not gpu'
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'slow and alone and not gpu'

# Kills, operations and seconds by the hundreds and thousands; hours.
long: $(VENV)/.dev
	KVTIER_KILLS=500 KVTIER_SOAK=1000000 KVTIER_SOAK_S=1800 $(BIN)/python -m pytest $(PYTEST_ARGS) -m slow \
	  tests/test_disk_crash.py tests/test_daemon_powercut.py tests/test_disk_soak.py tests/test_soak.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev $(VENV)/.demo $(VENV)/.bench
	$(BIN)/python bench/run.py $(BENCH_ARGS)

# Venvs of their own for the engines that `make slow` runs where they are: ENGINES=vllm for one of them.
engines:
	set -e; for engine in $(ENGINES); do .ci/install-$$engine .venv-$$engine; done

wheel: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) .venv-vllm .venv-llamacpp .venv-sglang dist build

$(VENV)/.made:
	.ci/make-venv '$(PYTHON)' $(VENV)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.made
	$(PIP) install --quiet -c constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.made
	$(PIP) install --quiet --editable '.[bench]'
	@touch $@

$(VENV)/.torch: constraints.txt | $(VENV)/.made
	.ci/install-torch $(BIN)/python '$(TORCH_INDEX)'
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	.ci/install-demo $(BIN)/python
	@touch $@
