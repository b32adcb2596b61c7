# Two commands on a fresh machine:
#   make report   set up, execute the notebooks on the virtual device, build reports/ci/index.html
#   make test     set up, then lint, type check and tests
#
# FORCE=1         execute also the notebooks whose inputs did not change
# PROFILE=gpu     execute on this machine's accelerator
# PYTHON=...      interpreter to make .venv with (3.11 or 3.12)
# TORCH_INDEX=... package index to take torch from, e.g. PyTorch's index of CPU builds
# PIP_ARGS=...    further arguments of pip install

.PHONY: report test setup lint types clean
.DELETE_ON_ERROR:

PROFILE ?= ci
PYTEST_ARGS ?=
VERSION_TEST := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
# asked for in turn: a name on the path may be a stand-in that does not run
PYTHON ?= $(shell for name in python3.11 python3.12 python3 python; do \
	if $$name -c '$(VERSION_TEST)' >/dev/null 2>&1; then echo $$name; break; fi; done)

BIN := .venv/bin
STAMP := .venv/.installed

report: $(STAMP)
	@$(BIN)/python -m atom run --profile $(PROFILE) $(if $(FORCE),--force)

test: lint types
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

setup: $(STAMP)

# environment.yml's pip list is the one list of versions; pip never picks one by itself
$(STAMP): environment.yml pyproject.toml
	@chosen='$(PYTHON)'; \
	if [ -z "$$chosen" ]; then echo "error: Python 3.11 or 3.12 is needed (PYTHON=...)" >&2; exit 2; fi; \
	[ -x $(BIN)/python ] || "$$chosen" -m venv .venv
	@awk '/^ *- pip:/ { inside = 1; next } inside && /^ *- / { sub(/^ *- */, ""); print }' \
		environment.yml > .venv/pins.txt
	@echo "installing $$(wc -l < .venv/pins.txt) pinned packages into .venv"
	$(if $(TORCH_INDEX),@$(BIN)/python -m pip install --quiet --no-deps --index-url $(TORCH_INDEX) \
		$$(grep '^torch==' .venv/pins.txt))
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r .venv/pins.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -e .
	@touch $@

clean:
	rm -rf .venv reports/ci
