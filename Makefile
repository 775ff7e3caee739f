# Every target sets itself up: a virtual environment in .venv with the pinned versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo flower-demo test test-cpus wheel-test check studies bench format clean

demo: $(READY)
	$(BIN)/coterie demo

flower-demo: $(READY)
	$(BIN)/coterie flower demo

test: $(READY)
	$(BIN)/python -m pytest -m "not study" --numprocesses auto --dist loadfile --no-loadscope-reorder

# The numerical part, under three settings of the kernels that torch and MKL choose by the processor.
test-cpus: $(READY)
	$(BIN)/python tools/check_cpus.py

# The built wheel, installed in clean environments with the newest and the oldest dependencies that are allowed.
wheel-test:
	$(PYTHON) tools/check_wheel.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

studies: $(READY)
	$(BIN)/python -m pytest -m study -s

bench: $(READY)
	$(BIN)/python -m benchmarks

.PHONY: results docs

# ONLY="name name" runs these; otherwise what results/plan.toml has and results/ has not. Safe to stop: it goes on from there.
results: $(READY)
	$(BIN)/python -m tools.results $(ONLY)

docs: $(READY)
	$(BIN)/python -m tools.docs

format: $(READY)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf .venv

# torch first and by its exact version: left to a dependency, pip would bring several gigabytes of CUDA along.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,flower]"
	touch $(READY)
