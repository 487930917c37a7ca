# All targets use a virtual environment, which is created on first use.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
READY := $(VENV)/.ready
CUDA := daemon/kvferry/daemon/engine/cuda
# The first pip that reads dependency groups. The one that comes with Python may be older.
GROUPS_PIP := --quiet --disable-pip-version-check 'pip>=25.1'

.PHONY: help demo demo-cluster demo-siblings test lowest trials static check coverage mutants format faults frames fuzz soak load bench gpu kernels clean \
	sglang sglang-tests vllm vllm-tests vllm-newest release lock

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# The demos need no tools of developers and no torch.
demo: $(VENV)/.ready-daemon  ## store a small model's KV cache by another process, and load it again
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m kvferry.testing.demo

demo-cluster: $(VENV)/.ready-mooncake  ## share a cache between two daemons and one Mooncake Store, on this machine
	$(BIN)/python -m kvferry.testing.demo_cluster

demo-siblings: $(VENV)/.ready-daemon  ## share a cache between two daemons of this machine, without a store
	$(BIN)/python -m kvferry.testing.demo_siblings

test: $(READY)  ## all tests that need no GPU, inject no faults and boot no container
	$(BIN)/python -m pytest -q -n 4 --dist worksteal -m "not gpu and not systemd" --ignore tests/faults

# The lowest versions have wheels for the lowest Python only.
lowest: .lowest/.ready  ## run the commands with the lowest versions of Python and of the dependencies
	.lowest/bin/python tests/lowest_versions.py

.lowest/.ready: pyproject.toml tests/lowest_versions.py
	python3.11 -m venv .lowest
	.lowest/bin/python tests/lowest_versions.py --constraints > .lowest/constraints.txt
	.lowest/bin/python -m pip install --quiet --disable-pip-version-check -c .lowest/constraints.txt -e '.[daemon,cli]'
	touch $@

trials: $(READY)  ## short forms of the tests with faults, hostile frames, soak and load; the systemd unit
	$(BIN)/python -m pytest -q -m "not gpu" tests/faults
	$(BIN)/python -m pytest -q -m "not gpu and systemd"

static: $(READY)  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check:  ## static, test, trials
	$(MAKE) static
	$(MAKE) test
	$(MAKE) trials

coverage: $(READY)  ## branch coverage of the product by the tests
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n 4 --dist worksteal -m "not gpu and not systemd" --ignore tests/faults
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort=cover

MUTANTS ?=
mutants: $(READY)  ## break the product in 100 ways, and report what no test notices; MUTANTS="tiers -j 1": some, one by one
	$(BIN)/python -m mutants $(MUTANTS)
	$(BIN)/python -m pytest -q --long -n 2 tests/property/test_sibling_cores_mutants.py

gpu: $(READY)  ## all tests, on a machine with a GPU
	$(BIN)/python -m pytest -q

faults: $(READY)  ## kills of daemons and engines, rude clients, attackers, small limits, tiers: 40 minutes
	$(BIN)/python -m pytest -v -rP -m "not gpu" --long tests/faults/test_kills.py tests/faults/test_limits.py tests/faults/test_rude_clients.py tests/faults/test_attackers.py tests/faults/test_subscribers.py tests/faults/test_disk_tier.py tests/faults/test_disk_tier_kills.py tests/faults/test_power_cuts.py tests/faults/test_kills_with_a_tier.py tests/faults/test_mooncake_cluster.py tests/faults/test_sibling_kills.py

frames: $(READY)  ## send a million hostile frames to a daemon
	$(BIN)/python -m pytest -v -rP -m "not gpu" --long tests/faults/test_fuzz.py

TARGET ?=
SECONDS ?= 1800
fuzz: $(VENV)/.ready-fuzz  ## fuzz all targets with atheris, 4 hours; TARGET=codec SECONDS=600: one of them, shorter
	$(BIN)/python -m fuzz $(TARGET) --seconds $(SECONDS)

$(VENV)/.ready-fuzz: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group fuzz
	touch $@

# Supported versions of vLLM that the connector is tested with; each has an environment of its own.
VLLM ?= 0.26.0 0.29.0 0.31.0 0.33.0
UPSTREAM := tests/vllm_upstream

vllm: $(VLLM:%=.vllm/%/.ready)  ## make environments with vLLM, without a GPU, in .vllm; VLLM=0.33.0 for one

vllm-tests: $(VLLM:%=vllm-tests-%)  ## test the connector with each vLLM; run vLLM's own tests through it

# vLLM's own tests run also if the connector's fail.
vllm-tests-%: .vllm/%/.ready
	.vllm/$*/bin/python -m pytest -q -n 2 tests/client/vllm; own=$$?; \
	.vllm/$*/bin/python -m pytest -q -c $(UPSTREAM)/pytest.ini --rootdir .vllm/$*/upstream \
		.vllm/$*/upstream/tests/v1/kv_connector/unit/offloading_connector && exit $$own

# Names the packages of other versions than this vLLM wants: its errors may be theirs.
vllm-newest: .vllm/packages/.ready  ## test the connector with the newest vLLM that pip finds
	$(BIN)/python $(UPSTREAM)/install.py newest .vllm/newest .vllm/packages
	touch .vllm/newest/.ready
	.vllm/newest/bin/python -m pip check | grep '^vllm .* but you have' || true
	$(MAKE) vllm-tests-newest

.vllm/packages/.ready: $(UPSTREAM)/packages.txt $(READY)
	rm -rf .vllm/packages
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .vllm/packages -r $<
	touch $@

.vllm/%/.ready: $(UPSTREAM)/install.py .vllm/packages/.ready
	$(BIN)/python $< $* .vllm/$* .vllm/packages
	touch $@

# The version of SGLang that the linker is tested with, in an environment of its own.
SGLANG := 0.5.23

sglang: .sglang/$(SGLANG)/.ready  ## make an environment with SGLang, without a GPU, in .sglang

sglang-tests: .sglang/$(SGLANG)/.ready  ## test the linker with SGLang's tree, pools and wrapper
	.sglang/$(SGLANG)/bin/python -m pytest -q -n 2 tests/client/sglang

.sglang/packages/.ready: tests/sglang_cpu/packages.txt $(READY)
	rm -rf .sglang/packages
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .sglang/packages -r $<
	touch $@

.sglang/%/.ready: tests/sglang_cpu/install.py .sglang/packages/.ready
	$(BIN)/python $< $* .sglang/$* .sglang/packages
	touch $@

MINUTES ?= 60
POOL ?= 64MiB
TIER ?= 0
soak: $(READY)  ## run at full speed with faults, for MINUTES=60; POOL=256MiB TIER=1GiB: with a disk tier
	$(BIN)/python -m support.soak --minutes $(MINUTES) --faults --pool $(POOL) --tier $(TIER) --json soak.json

load: $(READY)  ## run 64 clients with 10,000 small jobs per second
	$(BIN)/python -m support.load --json load.json

bench: $(READY)  ## measure bandwidth and latency on this machine's device
	$(BIN)/kvferry bench

kernels:  ## compile kernels.cu to kernels.ptx; needs nvcc
	nvcc -ptx -arch=compute_75 -O3 -o $(CUDA)/kernels.ptx $(CUDA)/kernels.cu
	sed -i -e 's/^\.version .*/.version 8.1/' -e '/^\/\//d' $(CUDA)/kernels.ptx

release: .release/.ready  ## build the checked-out commit twice; sdist, wheel, SBOM and checksums in dist
	.release/bin/python tests/make_release.py

# The locks have all that is in the daemon's image, and what builds it there.
LOCKS := deploy/containers
COMPILE := CUSTOM_COMPILE_COMMAND="make lock" .release/bin/pip-compile --quiet --upgrade --generate-hashes --strip-extras \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options -c constraints.txt

lock: .release/.ready  ## update the image's locks: versions as in constraints.txt, with hashes
	$(COMPILE) --extra daemon --extra cli -o $(LOCKS)/requirements.txt pyproject.toml
	$(COMPILE) --only-build-deps --build-deps-for wheel --allow-unsafe -o $(LOCKS)/requirements-build.txt pyproject.toml

.release/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .release
	.release/bin/python -m pip install $(GROUPS_PIP)
	.release/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group release
	touch $@

format: $(READY)  ## format the sources, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .sglang .vllm .fuzz .lowest .release .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# The daemon and the command line, with or without Mooncake's client.
$(VENV)/.ready-%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*,cli]'
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(GROUPS_PIP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[encryption,mooncake,testing]' --group dev
	touch $(READY) $(VENV)/.ready-daemon $(VENV)/.ready-mooncake
