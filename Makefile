# Everything runs in a virtual environment of its own, made on first use from names alone.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
READY := $(VENV)/.ready
CUDA := daemon/kvferry/daemon/engine/cuda

.PHONY: help demo test trials check coverage format faults fuzz soak load bench gpu kernels clean \
	vllm vllm-tests

help:  ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY)  ## a model's KV cache leaves for another process and comes back
	$(BIN)/python -m kvferry.testing.demo

test: $(READY)  ## the tests, without those that need a GPU, break things or boot a system
	$(BIN)/python -m pytest -q -n 4 --dist worksteal -m "not gpu and not systemd" --ignore tests/faults

trials: $(READY)  ## faults, hostile frames, soak and load in their short form; the unit under a systemd
	$(BIN)/python -m pytest -q -m "not gpu" tests/faults
	$(BIN)/python -m pytest -q -m "not gpu and systemd"

check: $(READY)  ## everything that must hold besides: format, lint, types, imports, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test
	$(MAKE) trials

coverage: $(READY)  ## the tests, and which branches of the product they took
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n 4 --dist worksteal -m "not gpu and not systemd" --ignore tests/faults
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort=cover

gpu: $(READY)  ## the tests on a machine with a GPU
	$(BIN)/python -m pytest -q

faults: $(READY)  ## kills of daemons and engines, rude clients, attackers, small limits: in full, 15 minutes
	$(BIN)/python -m pytest -v -rP -m "not gpu" --long tests/faults/test_kills.py tests/faults/test_limits.py tests/faults/test_rude_clients.py tests/faults/test_attackers.py tests/faults/test_subscribers.py

fuzz: $(READY)  ## a million hostile frames
	$(BIN)/python -m pytest -v -rP -m "not gpu" --long tests/faults/test_fuzz.py

# Supported versions of vLLM that the connector is tested with; each has an environment of its own.
VLLM ?= 0.26.0 0.29.0 0.31.0 0.33.0
UPSTREAM := tests/vllm_upstream

vllm: $(VLLM:%=.vllm/%/.ready)  ## environments with vLLM, without a GPU, in .vllm; VLLM=0.33.0 for one

vllm-tests: $(VLLM:%=vllm-tests-%)  ## the connector with each vLLM, and vLLM's own through it

vllm-tests-%: .vllm/%/.ready
	.vllm/$*/bin/python -m pytest -q -n 2 tests/client/vllm
	.vllm/$*/bin/python -m pytest -q -c $(UPSTREAM)/pytest.ini --rootdir .vllm/$*/upstream \
		.vllm/$*/upstream/tests/v1/kv_connector/unit/offloading_connector

.vllm/packages/.ready: $(UPSTREAM)/packages.txt $(READY)
	rm -rf .vllm/packages
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .vllm/packages -r $<
	touch $@

.vllm/%/.ready: $(UPSTREAM)/install.py .vllm/packages/.ready
	$(BIN)/python $< $* .vllm/$* .vllm/packages
	touch $@

MINUTES ?= 60
soak: $(READY)  ## full speed with faults, for MINUTES=60
	$(BIN)/python -m support.soak --minutes $(MINUTES) --faults --json soak.json

load: $(READY)  ## 64 clients, 10,000 small jobs a second
	$(BIN)/python -m support.load --json load.json

bench: $(READY)  ## GB/s and microseconds on this machine's device
	$(BIN)/kvferry bench

kernels:  ## kernels.ptx, after a change of kernels.cu; needs nvcc
	nvcc -ptx -arch=compute_75 -O3 -o $(CUDA)/kernels.ptx $(CUDA)/kernels.cu
	sed -i -e 's/^\.version .*/.version 8.1/' -e '/^\/\//d' $(CUDA)/kernels.ptx

format: $(READY)  ## rewrite the sources the way check wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what make made
	rm -rf $(VENV) .vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)
