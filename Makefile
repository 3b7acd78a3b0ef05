# One runner for everything; bare `make` explains its targets. Works from a fresh clone on a bare Debian-like machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.busrl
# Python compiles a module when it is first imported; most of what is installed never is.
INSTALL := pip install -q --no-compile
PIP    := $(BIN)/$(INSTALL) -c constraints.txt
RUN_DIR ?= runs/demo
# Most tests wait for processes of their own, so that several run side by side: one more than there are cores. A make
# that a test starts is nobody's child: it knows nothing of this one's jobs.
WORKERS ?= $(shell expr $$(nproc) + 1)
PYTEST := env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL $(BIN)/pytest -n $(WORKERS) --dist worksteal
# Without the copies that the tests of C++ make, which would let everything be installed again.
SOURCES := $(shell find csrc -path csrc/build -prune -o -name '*.hpp' -print -o -name '*.cpp' -print -o -name '*.h' -print)
# Waiting threads must not spin: on two cores that costs a busy neighbour a factor of 3 to 4.
export OMP_WAIT_POLICY := PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: without this, where the variable is set, each compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-real test test-runs test-all lint format bench bench-core bench-faults soak cpp model storm sanitize aarch64 fuzz install clean vllm vllm-test agents-env openenv-env browser atropos-env tinker-env tinker-versions tinker-test trl-env ray-env slurm docs environments wheels release test-pythons

help: ## explain the targets
	@echo "busrl: asynchronous reinforcement learning over a message bus"; echo
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP)/train ## virtual environment, dependencies and the package, built in place

demo: $(STAMP)/train ## train a tiny model by reinforcement learning, from nothing, in a few minutes
	@rm -rf $(RUN_DIR)
	@$(BIN)/busrl quickstart --run-dir $(RUN_DIR)

demo-real: $(STAMP)/real ## train a Qwen2 of 10 M parameters on reasoning-gym, with a kill and a resume (docs/demo-real.md)
	@$(BIN)/python examples/real-run/run.py

test: $(STAMP)/test ## lint, types, C++ tests and the Python tests (five to fifteen minutes on two cores)
	@$(MAKE) --no-print-directory -j2 -Otarget lint cpp
	$(PYTEST) -m "not long and not slow and not soak and not vllm" --durations=40

test-runs: $(STAMP)/test ## whole runs and many processes, of which other tests have the parts: kills, a full disk, lost messages, examples
	$(PYTEST) -m "long and not slow and not soak and not vllm" --durations=40 $$(grep -rl --include='*.py' 'mark\.long' tests)

test-all: browser agents-env openenv-env atropos-env tinker-versions trl-env ray-env slurm test test-runs model storm sanitize aarch64 vllm-test ## the slower tests, mutants, models, a long storm, sanitizers, aarch64, fuzzing, vLLM
	$(MAKE) -C csrc fuzz
	$(PYTEST) -m "slow and not vllm" $$(grep -rl --include='*.py' 'mark\.slow' tests)
	$(BIN)/python tools/mutants.py
	HYPOTHESIS_PROFILE=explore $(PYTEST) -m "not long and not slow and not soak and not vllm" $$(grep -rl --include='*.py' "from hypothesis" tests)

soak: $(STAMP)/test ## many kills of every role; takes a long time
	$(BIN)/pytest -m soak --timeout 7200

lint: $(STAMP)/lint ## ruff, strict types, clang-format
	$(BIN)/ruff check .
	$(BIN)/mypy
	git ls-files 'csrc/*.[ch]pp' 'csrc/*.[ch]' 'examples/*.[ch]pp' | xargs -r $(BIN)/clang-format --dry-run --Werror

format: $(STAMP)/lint ## order Python's imports, mend what ruff can mend, format C++
	$(BIN)/ruff check --fix .
	git ls-files 'csrc/*.[ch]pp' 'csrc/*.[ch]' 'examples/*.[ch]pp' | xargs -r $(BIN)/clang-format -i

cpp: $(STAMP)/system ## the C++ tests, the smaller models, mutants that must fail, and some mutated segments
	BUSRL_STORM_S=$${BUSRL_STORM_S:-5} $(MAKE) -C csrc -j2 -Otarget test model-quick mutants
	$(MAKE) -C csrc fuzz FUZZ_INPUTS=20000

model: $(STAMP)/system ## every state of the protocol's models (docs/models.md)
	$(MAKE) -C csrc model

storm: $(STAMP)/system ## minutes of random SIGKILL and SIGSTOP, also on mutants that must fail
	$(MAKE) -C csrc storm

sanitize: $(STAMP)/system ## the C++ tests under address, undefined-behaviour and thread sanitizers
	$(MAKE) -C csrc asan tsan

aarch64: $(STAMP)/system ## the C++ tests compiled for aarch64, under qemu
	@sh tools/system.sh $(PYTHON) aarch64-linux-gnu-g++:g++-aarch64-linux-gnu qemu-aarch64:qemu-user
	$(MAKE) -C csrc aarch64

fuzz: $(STAMP)/test ## a million inputs each: mutated segments, mutated messages, garbage at the broker's doors
	$(MAKE) -C csrc fuzz
	$(BIN)/pytest -m slow tests/fuzz

bench: $(STAMP)/train ## side by side with a tuned loop, our own sync mode and TRL (takes a while)
	$(BIN)/python -m benchmarks compare --against loop sync trl

# The rivals have an environment of their own: Ray and TransferQueue bring much that busrl does not need.
RIVALS ?= $(VENV)/rivals
$(RIVALS)/.installed: benchmarks/ring/requirements.txt constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/$(INSTALL) -c constraints.txt torch==2.13.0
	-$(RIVALS)/bin/$(INSTALL) -r benchmarks/ring/requirements.txt
	@touch $@

bench-core: $(STAMP)/train $(RIVALS)/.installed ## ring and bus against raw memory, iceoryx2, queues, Ray, TransferQueue (15 minutes)
	-$(BIN)/python -m benchmarks ring --rivals-python $(RIVALS)/bin/python
	-$(BIN)/python -m benchmarks bus --python $(RIVALS)/bin/python
	$(BIN)/python -m benchmarks operations

bench-faults: $(STAMP)/train ## how long a death is felt, what lost messages and a monitor cost (half an hour; a quiet machine)
	$(BIN)/python -m benchmarks recovery
	$(BIN)/python -m benchmarks faults
	$(BIN)/python -m benchmarks monitor

# vLLM has an environment of its own: it pins torch and transformers. busrl is in it from this tree, built in place.
# torch for CPUs is on an index of its own, asked only where pip does not find that build where it looks anyway.
VLLM ?= $(VENV)/vllm
VLLM_TESTS ?= tests/vllm
VLLM_TORCH := $(shell grep '^torch==' tools/vllm/requirements.txt)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
$(VLLM)/.packages: tools/vllm/requirements.txt | $(STAMP)/system
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/$(INSTALL) --no-deps $(VLLM_TORCH) 2>/dev/null || \
		$(VLLM)/bin/$(INSTALL) --no-deps --extra-index-url $(TORCH_INDEX) $(VLLM_TORCH)
	$(VLLM)/bin/$(INSTALL) --no-deps -r tools/vllm/requirements.txt
	@touch $@

$(VLLM)/.installed: $(VLLM)/.packages pyproject.toml setup.py $(SOURCES)
	$(VLLM)/bin/$(INSTALL) --no-deps -e .
	@touch $@

vllm: $(VLLM)/.installed ## an environment with vLLM for CPUs and busrl: .venv/vllm/bin/busrl

vllm-test: $(VLLM)/.installed ## the tests that need vLLM, in an environment that has it (a few minutes)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm $(VLLM_TESTS) --timeout 900

# verifiers, textarena and gymnasium: what `[[process]] python` of an agent may name (docs/agents.md). Without torch.
AGENTS ?= $(VENV)/agents
$(AGENTS)/.installed: tools/agents/requirements.txt | $(STAMP)/system
	@test -x $(AGENTS)/bin/python || $(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/$(INSTALL) -r tools/agents/requirements.txt
	@touch $@

agents-env: $(AGENTS)/.installed ## an environment with verifiers and textarena for agents: .venv/agents/bin/python

# A server of OpenEnv to test the adapter with; openenv and verifiers pin other versions of the same packages.
OPENENV ?= $(VENV)/openenv
$(OPENENV)/.installed: | $(STAMP)/system
	@test -x $(OPENENV)/bin/python || $(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/$(INSTALL) openenv==0.10.0
	@touch $@

openenv-env: $(OPENENV)/.installed

browser: # Chromium, for the tests of the monitor's page, which are left out where it can not be installed
	-@sh tools/system.sh $(PYTHON) chromium:chromium

# atroposlib for an environment of its own, that posts to a run (docs/agents.md).
ATROPOS ?= $(VENV)/atropos
$(ATROPOS)/.installed: tools/atropos/requirements.txt constraints.txt | $(STAMP)/system
	@test -x $(ATROPOS)/bin/python || $(PYTHON) -m venv $(ATROPOS)
	$(ATROPOS)/bin/$(INSTALL) -c constraints.txt -r tools/atropos/requirements.txt
	$(ATROPOS)/bin/$(INSTALL) --no-deps atroposlib==0.4.0
	@touch $@

atropos-env: $(ATROPOS)/.installed ## an environment with atroposlib: .venv/atropos/bin/python

# The SDK of Tinker and its cookbook, which drive a service (docs/service.md). busrl is not in it.
TINKER ?= $(VENV)/tinker
$(TINKER)/.installed: tools/tinker/requirements.txt constraints.txt | $(STAMP)/system
	@test -x $(TINKER)/bin/python || $(PYTHON) -m venv $(TINKER)
	@$(TINKER)/bin/$(INSTALL) --no-deps $(VLLM_TORCH) 2>/dev/null || \
		$(TINKER)/bin/$(INSTALL) --no-deps --extra-index-url $(TORCH_INDEX) $(VLLM_TORCH)
	$(TINKER)/bin/$(INSTALL) -r tools/tinker/requirements.txt
	$(TINKER)/bin/$(INSTALL) --no-deps tinker-cookbook==0.6.1
	@touch $@

tinker-env: $(TINKER)/.installed ## an environment with Tinker's SDK and cookbook: .venv/tinker/bin/python

# Other versions that programs pin, each a folder that goes before the environment's own (PYTHONPATH).
TINKER_VERSIONS ?= 0.24.1 0.25.0 0.30.4 0.34.0
tinker-versions: $(TINKER)/.installed
	@for version in $(TINKER_VERSIONS); do folder=$(TINKER)/versions/$$version; test -d $$folder || { \
		$(TINKER)/bin/$(INSTALL) --no-deps --target $$folder.part tinker==$$version && mv $$folder.part $$folder; \
	} || exit 1; done

TINKER_TESTS ?= tests/service/test_sdk.py
tinker-test: $(TINKER)/.installed $(STAMP)/test ## Tinker's SDK and recipes, unmodified, against a service, kills included (minutes)
	$(BIN)/pytest -q --timeout 900 $(TINKER_TESTS)

# TRL's trainer, which takes its rollouts from a run (docs/service.md).
TRL ?= $(VENV)/trl
$(TRL)/.installed: tools/trl/requirements.txt benchmarks/rivals/requirements.txt | $(STAMP)/system
	@test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	@$(TRL)/bin/$(INSTALL) --no-deps $(VLLM_TORCH) 2>/dev/null || \
		$(TRL)/bin/$(INSTALL) --no-deps --extra-index-url $(TORCH_INDEX) $(VLLM_TORCH)
	$(TRL)/bin/$(INSTALL) -r tools/trl/requirements.txt
	@touch $@

trl-env: $(TRL)/.installed ## an environment with TRL, which trains on rollouts of a run: .venv/trl/bin/python

# A cluster of Ray, and one of Slurm, to start hosts by (docs/hosts.md).
RAY ?= $(VENV)/ray
$(RAY)/.installed: | $(STAMP)/system
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/$(INSTALL) ray==2.60.0
	@touch $@

ray-env: $(RAY)/.installed
slurm:
	-@sh tools/system.sh $(PYTHON) slurmctld:slurm-wlm munged:munge

# The site of docs/, in an environment of its own; `.venv/docs/bin/mike deploy` publishes a version.
DOCS ?= $(VENV)/docs
$(DOCS)/.installed: tools/docs/requirements.txt | $(STAMP)/system
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/$(INSTALL) -r tools/docs/requirements.txt
	@touch $@

docs: $(DOCS)/.installed ## the site, strictly: build/site
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --clean

# What CI needs beside .venv itself, but for busrl, which is built in this tree and so not while tests use it.
environments: $(VLLM)/.packages $(TINKER)/.installed $(DOCS)/.installed

# What is published, made and tried by tools/wheels.py.
WHEELS ?= $(VENV)/wheels
$(WHEELS)/.installed: tools/wheels.txt | $(STAMP)/system
	@test -x $(WHEELS)/bin/python || $(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/$(INSTALL) -r tools/wheels.txt
	@touch $@

wheels: $(WHEELS)/.installed ## sdist, and a wheel for each CPython from 3.10 on that is here, checked and tried: dist/
	$(WHEELS)/bin/python -m tools.wheels build

release: wheels docs ## all that a release publishes: sdist, wheels, and the site in dist/site
	@rm -rf dist/site && cp -r build/site dist/site && du -sh dist/*

test-pythons: $(WHEELS)/.installed ## the tests that need no torch, on each CPython that is here, with the wheels of dist/
	@ls dist/busrl-*.whl >/dev/null 2>&1 || $(MAKE) --no-print-directory wheels
	$(WHEELS)/bin/python -m tools.wheels test

clean: ## remove what was built; runs/ stays
	rm -rf $(VENV) build dist busrl.egg-info csrc/build busrl/*.so

# -- what the targets need ------------------------------------------------------------------------------------------

# A compiler, the Python headers and venv: from apt where something is missing and we may install it.
$(STAMP)/system:
	@sh tools/system.sh $(PYTHON)
	@mkdir -p $(STAMP) && touch $@

$(BIN)/python: | $(STAMP)/system
	$(PYTHON) -m venv $(VENV)

# torch is pinned: a plain `torch` would bring gigabytes of CUDA. busrl is compiled meanwhile, on another core. setuptools
# first: torch replaces the one that a new environment has, from under the compilation, which may find half of it.
$(STAMP)/train: constraints.txt pyproject.toml setup.py $(SOURCES) | $(BIN)/python
	@start=$$(date +%s); $(PIP) 'setuptools>=77.0.3'; \
	$(PIP) torch==2.13.0 & torch=$$!; \
	$(PIP) --no-deps -e .; built=$$?; \
	wait $$torch && test $$built = 0 && \
	$(PIP) 'busrl[train,agents]' && \
	mkdir -p $(STAMP) && touch $@ && \
	echo "installed in $$(( $$(date +%s) - start )) s"

# busrl is installed by then, so its name brings the extras: `-e .` would compile it again, which takes a minute.
# Of dashscope the vocabulary of Qwen is read, nothing is imported: so none of its own dependencies.
$(STAMP)/real: $(STAMP)/train
	$(PIP) 'busrl[train,data,rewards]'
	$(PIP) --no-deps dashscope
	@touch $@

# The headers are for the test of examples/cpp-reward, which is left out where they can not be installed.
$(STAMP)/test: $(STAMP)/train
	-@sh tools/system.sh $(PYTHON) /usr/include/zmq.h:libzmq3-dev /usr/include/nlohmann/json.hpp:nlohmann-json3-dev
	$(PIP) 'busrl[train,lora,adam8,data,rewards,sinks,test]'
	$(PIP) --no-deps dashscope
	@touch $@

$(STAMP)/lint: $(STAMP)/test
	$(PIP) 'busrl[lint]'
	@touch $@
