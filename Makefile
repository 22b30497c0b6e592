# Everything a newcomer needs: `make quickstart`, `make test`. `make help` lists the rest.
#
# PYTHON=python3.12   the interpreter to build the environment with. Each has an environment of its own
#                     (.venv-python3.12), so switching rebuilds nothing. Without it: .venv, made by python3, or by
#                     the first of python3.13, python3.12, python3.11 that will do where python3 is too old.
# TORCH=1 or 0        whether `make test` installs PyTorch. Only the tests that compare saejax with PyTorch need it,
#                     and they skip themselves without it; everything else runs the same. Left alone, Python 3.11
#                     gets it and newer ones do not: one version is enough to compare with, and on Linux the usual
#                     torch wheel brings several gigabytes of CUDA libraries. For the small CPU build put PyTorch's
#                     CPU index in PIP_EXTRA_INDEX_URL.
# WORKERS=2           how many processes share the tests (3: one more than two cores, for tests that wait for others); 0
#                     runs them in one. Each takes up to 6 GB.
# ARGS="-k coders"    more arguments for pytest, or for launch.pipeline in `make quickstart`.

PYTHON ?= python3
TORCH ?= auto
WORKERS ?= 3
ARGS ?=

ifeq ($(PYTHON),python3)
VENV := .venv
INTERPRETERS := python3 python3.13 python3.12 python3.11
else
VENV := .venv-$(notdir $(PYTHON))
INTERPRETERS := $(PYTHON)
endif
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
LINT := $(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check . && $(BIN)/python -m mypy
# TIMED command TOOK: says at the end how long it took, and ends as the command did.
TIMED := began=$$(date +%s);
TOOK = ; code=$$?; echo "make $@ took $$(($$(date +%s) - began)) s"; exit $$code
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# One stamp for each thing that can be installed; it is as old as the last installation. A larger installation
# contains the smaller ones and touches their stamps too. The code itself is editable: changing it installs nothing.
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
TEST_STAMP := $(VENV)/.installed-test-torch-$(TORCH)
DOCS_STAMP := $(VENV)/.installed-docs
# An environment's python is a link to the interpreter. Where that is gone, what was installed counts for nothing:
# the environment is made anew.
$(shell [ -x $(BIN)/python ] || rm -f $(VENV)/.installed*)

.DEFAULT_GOAL := help
.PHONY: help install quickstart serve check test ci soak faults reliability slurm bench truth real docs lint format clean which-python
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | \
	  awk -F'|' '{ printf "%-19s %s\n", $$1, $$2 }'
	@echo "PYTHON=python3.12 chooses the interpreter, TORCH=0|1 whether the tests get PyTorch, ARGS=... goes along."

install: $(RUN_STAMP)  ## make the environment and install saejax into it

quickstart: $(RUN_STAMP)  ## the whole way in one command: text, activations, training, evaluation, report
	$(BIN)/python -m launch.pipeline --config=configs/quickstart.py $(ARGS)

serve: $(RUN_STAMP)  ## the live page of runs/ and stores/: prints its address; Ctrl-C ends it
	$(BIN)/python -m launch.serve $(ARGS)

check: $(TEST_STAMP)  ## lint, and the tests but for the slow files: two minutes
	@$(TIMED) $(LINT) && $(PYTEST) --quick $(ARGS)$(TOOK)

test: $(TEST_STAMP)  ## run the tests: ten minutes on two cores; ARGS=--record-durations notes which file takes how long
	@$(TIMED) $(PYTEST) $(ARGS)$(TOOK)

ci: $(TEST_STAMP)  ## the tests that .ci/run adds: further kills and meshes, benchmarks, Makefile, wheel
	$(PYTEST) -m "ci and not soak" --ignore=tests/house/test_docs.py $(ARGS)

soak: $(TEST_STAMP)  ## run the long tests, then all others once more, compiled as users compile them
	$(BIN)/python -m pytest -m soak $(ARGS)
	XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=3" $(PYTEST) -m "not soak" $(ARGS)

faults: $(TEST_STAMP)  ## try every fault a capture survives and write benchmarks/faults.md (minutes)
	$(BIN)/python -m benchmarks.faults $(ARGS)

reliability: $(TEST_STAMP)  ## two tables: the same numbers on every mesh and mode; faults that a training survives
	$(BIN)/python -m benchmarks.equality --output=benchmarks/equality.md
	$(BIN)/python -m benchmarks.reliability --output=benchmarks/reliability.md $(ARGS)

slurm: $(RUN_STAMP)  ## the jobs on a real Slurm of two nodes here, to benchmarks/slurm.md; ARGS=--short: half of it
	$(BIN)/python -m benchmarks.slurm $(ARGS)

bench: $(RUN_STAMP)  ## saejax, the peers and the floor side by side, to benchmarks/RESULTS.md; ARGS=--quick: minutes
	@[ -x build/peers-venv/bin/python ] || sh benchmarks/peers/make_env.sh || \
	  { rm -rf build/peers-venv; echo "The peers cannot be installed here: saejax is measured without them." >&2; }
	$(BIN)/python -m benchmarks.bench $(ARGS)

truth: $(RUN_STAMP)  ## saejax and the peers on planted features: MCC, F1, FVE, to benchmarks/quality/truth*.md
	@[ -x build/peers-venv/bin/python ] || sh benchmarks/peers/make_env.sh
	$(BIN)/python -m benchmarks.quality.run --sets=truth,truth_large $(ARGS)

real: $(TEST_STAMP)  ## SmolLM2-135M from its package to dictionaries, hours on two cores; ARGS=--short: minutes
	$(BIN)/python -m benchmarks.real $(ARGS)

docs: $(DOCS_STAMP) $(TEST_STAMP)  ## build the site into docs/_build/html; runs the notebooks and the pages' Python
	$(BIN)/python -m sphinx -b html -c docs -d docs/_build/doctrees -W --keep-going . docs/_build/html $(ARGS)
	$(PYTEST) -m ci tests/house/test_docs.py

lint: $(DEV_STAMP)  ## ruff check, ruff format --check, mypy
	$(LINT)

format: $(DEV_STAMP)  ## let ruff format the code and mend what it can
	$(BIN)/python -m ruff check --fix-only .
	$(BIN)/python -m ruff format .

clean:  ## remove environments, caches and builds; runs/ and stores/ stay
	rm -rf .venv .venv-* build dist docs/_build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

which-python: $(DEV_STAMP)
	@echo $(BIN)/python

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[serve]'
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev,serve]'
	@touch $(RUN_STAMP) $@

$(DOCS_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[docs,serve]'
	@touch $(RUN_STAMP) $@

$(TEST_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@case "$(TORCH)" in auto|0|1) ;; *) echo "TORCH is '$(TORCH)'; it must be 0 or 1." >&2; exit 2;; esac
	@torch="$(TORCH)"; extras=dev,s3,serve,probes; \
	if [ "$$torch" = auto ]; then \
	  torch=$$($(BIN)/python -c 'import sys; print(int(sys.version_info[:2] == (3, 11)))'); \
	fi; \
	if [ "$$torch" = 1 ]; then extras=dev,s3,serve,probes,torch; fi; \
	echo $(PIP_INSTALL) -e ".[$$extras]"; \
	$(PIP_INSTALL) -e ".[$$extras]"
	@touch $(RUN_STAMP) $(DEV_STAMP) $@

$(BIN)/python:
	@why="not found"; \
	for python in $(INTERPRETERS); do \
	  "$$python" -c '' 2>/dev/null || continue; \
	  if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    why="older than 3.11"; continue; \
	  fi; \
	  if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    why="without its venv module (Debian, Ubuntu: apt-get install python3-venv)"; continue; \
	  fi; \
	  echo "$$("$$python" --version) makes $(VENV)"; \
	  exec "$$python" -m venv --clear $(VENV); \
	done; \
	echo "saejax needs Python 3.11 or newer: $(INTERPRETERS): $$why; name one: make PYTHON=/path/to/python3.12" >&2; \
	exit 1
