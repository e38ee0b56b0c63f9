# Each target does all of its own set-up; no virtual environment needs to be active.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# A run of the tests starts hundreds of processes: each would compile all of the source anew.
unexport PYTHONDONTWRITEBYTECODE
# One more than two cores: ranks wait for each other a third of the time.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup train test test-full soak coverage lint bench docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "MoEclipse needs Python >= 3.11, but $(PYTHON) is " + sys.version.split()[0] + "; run: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "could not create $(VENV); on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

train: setup
	@$(BIN)/moeclipse train $(ARGS)

test: setup
	@$(PYTEST) $(ARGS)

test-full: setup
	@$(PYTEST) -m "full and not long" $(ARGS)

soak: setup
	@SOAK_S=$${SOAK_S:-3600} $(BIN)/python -m pytest -q --long tests/train/test_soak.py $(ARGS)

coverage: setup
	@$(BIN)/python tests/coverage_by_name.py $(ARGS)

# without a cache: it does not notice that a new module made another file's imports its neighbours
lint: setup
	@$(BIN)/ruff check --no-cache src tests bench examples docs/*.py
	@$(BIN)/ruff format --check src tests bench examples docs/*.py
	@$(BIN)/python tests/house.py
	@$(BIN)/mypy

# a site in build/site; `make docs ARGS=serve` shows it while it is written
docs: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build)

bench: setup
	@for file in bench/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file $(ARGS); code=$$?; \
		[ $$code -eq 0 ] || [ $$code -eq 2 ] || exit $$code; done

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
