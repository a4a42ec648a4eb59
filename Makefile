# Everything a person runs. Needs only Python >= 3.11,<3.13 and make; the rest comes from the hashed lock files.
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv
export PYTHONWARNINGS ?= ignore::DeprecationWarning:google

.PHONY: help setup export-efficientnet demo honesty bench-simulator bench-planner reproduce-clover test test-system test-node test-quick check lint types imports protos lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.ready .venv-triton/.ready  ## create both environments from the hashed lock files

.venv/.ready: requirements/bootstrap.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"trefoil needs Python >=3.11,<3.13; {sys.executable} is {v[0]}.{v[1]}. Remedy: make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	$(UV) pip install --quiet --python $(BIN)/python --require-hashes -r requirements/dev.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

# Triton's python backend needs numpy < 2 and must not see ours: an environment of its own.
.venv-triton/.ready: .venv/.ready requirements/triton.txt requirements/triton-server.txt
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-triton
	$(UV) pip install --quiet --python .venv-triton/bin/python --require-hashes -r requirements/triton.txt
	$(UV) pip install --quiet --python .venv-triton/bin/python --require-hashes --no-deps -r requirements/triton-server.txt
	@touch $@

# Exporting real architectures needs torch and transformers (1.2 GB installed), which nothing else here does.
# By pip alone and not after .venv, so that a test can ask for it while .venv runs that test.
.venv-export/.ready: requirements/export.txt requirements/export-torch.in
	$(PYTHON) -m venv --clear .venv-export
	.venv-export/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/export.txt
	.venv-export/bin/pip install --quiet --disable-pip-version-check -r requirements/export-torch.in
	@touch $@

export-efficientnet: .venv-export/.ready  ## export EfficientNet B1, B3, B5, B7 with random weights (ARGS= for the hub's)
	.venv-export/bin/python model_repository/efficientnet/export.py $(if $(filter undefined,$(origin ARGS)),--random-weights,$(ARGS))

demo: setup  ## the main job: three runs on this machine, a table and out/demo/report.html (<= 8 minutes)
	$(BIN)/trefoil demo $(ARGS)

honesty: setup  ## three controls in which the demo must find no saving, accuracy or joules (about ten minutes)
	$(BIN)/python benchmarks/honesty.py $(ARGS)

bench-simulator: setup  ## the simulator: decisions, requests/s, memory, a year, parity with live (six minutes; ARGS=--short: two)
	$(BIN)/python -m benchmarks.simulator $(ARGS)

bench-planner: setup  ## `exact` from 1 to 100,000 GPUs: time, proven gap, objective, memory, mapping (two minutes)
	$(BIN)/python -m benchmarks.planner $(ARGS)

reproduce-clover: setup  ## CLOVER at equal load, five seeds, every figure (about half an hour; ARGS=--quick: two minutes)
	$(BIN)/trefoil reproduce clover $(ARGS)

# Two lanes at once, because most tests wait: whole systems in one, everything else in the other (nice, so that it does not
# disturb what the first measures).
test: setup  ## lint, types, import contracts and every test (<= 25 minutes; each part prints when it is done)
	+@$(MAKE) --no-print-directory -j2 --output-sync=line check test-system test-node test-quick

SYSTEM_TESTS := $(addprefix tests/integration/,test_demo.py test_demo_controls.py test_up_down.py test_exploring.py)
NODE_TESTS := $(filter-out $(SYSTEM_TESTS),$(wildcard tests/integration/test_*.py))

test-system: setup  ## whole systems: `trefoil up`, the demo, clients, faults, energy, exploring
	$(BIN)/pytest $(ARGS) tests/integration/system $(SYSTEM_TESTS)

test-node: setup  ## single services with real processes: Redis, Triton, the simulated node, the power agent, Docker
	nice -n 5 $(BIN)/pytest $(ARGS) $(NODE_TESTS)

test-quick: setup  ## house rules, units, properties, contracts, papers' numbers, simulations
	$(BIN)/pytest $(ARGS) tests/test_tidy.py tests/unit tests/property tests/contract tests/papers tests/simulation

check: lint types imports  ## what pre-commit runs

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy trefoil controller dispatcher power_agent carbon_feed

imports: setup
	$(BIN)/lint-imports

protos: setup  ## regenerate the committed stubs
	$(BIN)/python -m protos.generate

lock: setup  ## re-resolve the hashed lock files
	for name in bootstrap main dev triton train export; do $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate requirements/$$name.in -o requirements/$$name.txt; done
	$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-deps --no-header --no-annotate requirements/triton-server.in -o requirements/triton-server.txt

clean:  ## remove environments and outputs
	rm -rf .venv .venv-triton .venv-export out .trefoil
