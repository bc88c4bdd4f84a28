# One command per job. `make` alone lists them. Nothing is needed beforehand but Python >= 3.11 (with venv) and make;
# a C compiler is used only where a package has no wheel for this machine.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
ENV_STAMP := $(VENV)/.installed
BENCH_VENV := .venv-bench
BENCH_PIP := $(BENCH_VENV)/bin/python -m pip --disable-pip-version-check
BENCH_STAMP := $(BENCH_VENV)/.installed
CODE := src tests benchmarks scripts

.DEFAULT_GOAL := help
.PHONY: help env demo test check static format bench bench-env clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(ENV_STAMP) ## create or update .venv from the pinned requirements

$(ENV_STAMP): requirements/runtime.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Stowage needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch: hundreds of megabytes the first time, gigabytes where pip finds the CUDA build."
	@$(PIP) install --constraint requirements/runtime.txt "$$(grep '^torch==' requirements/runtime.txt)"
	@echo "Installing everything else."
	@$(PIP) install --quiet --requirement requirements/runtime.txt --requirement requirements/dev.txt
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(ENV_STAMP) ## show the main job: a prefix that comes back from disk after a restart
	$(PY) -m stowage.demo

test: $(ENV_STAMP) ## run the whole test suite
	$(PY) -m pytest -m "not vllm and not cuda"

check: static ## formatter, linter, types, layers and the fast tests
	$(PY) -m pytest -m "not slow and not vllm and not cuda"

static: $(ENV_STAMP) ## formatter, linter, types and layers, no other tests
	$(PY) -m ruff format --check $(wildcard $(CODE))
	$(PY) -m ruff check $(wildcard $(CODE))
	$(PY) -m mypy --strict src
	$(PY) -m pytest -q tests/unit/test_layers.py

format: $(ENV_STAMP) ## rewrite the code as the formatter wants it
	$(PY) -m ruff check --fix $(wildcard $(CODE))
	$(PY) -m ruff format $(wildcard $(CODE))

bench: $(ENV_STAMP) ## run the benchmarks; results go to benchmarks/results
	$(PY) -m benchmarks.control_plane
	$(PY) -m benchmarks.no_hit_overhead
	$(PY) -m benchmarks.prefix_reuse

bench-env: $(BENCH_STAMP) ## create .venv-bench with the peers that the benchmarks compare with

$(BENCH_STAMP): requirements/bench.txt
	@test -x $(BENCH_VENV)/bin/pip || $(PYTHON) -m venv $(BENCH_VENV)
	@echo "Installing the peers; the first time this downloads about a gigabyte."
	@$(BENCH_PIP) install --constraint requirements/runtime.txt "$$(grep '^torch==' requirements/bench.txt)"
	@$(BENCH_PIP) install --quiet --no-deps --requirement requirements/bench.txt
	@touch $@

clean: ## remove environments, caches and build products; cached KV data is left alone
	rm -rf $(VENV) $(BENCH_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
