# On a fresh machine:
#   make report   set up, execute the notebooks on the virtual device, build reports/ci/index.html
#   make test     set up, then lint, type check and tests
#   make lab      set up, then JupyterLab on the notebooks
#
# ENV=system      .venv over the packages of PYTHON, e.g. a GPU container's; its torch stays as it is
# PYTHON=...      interpreter to make .venv with (3.11 or 3.12)
# TORCH_INDEX=... package index to take torch from, e.g. PyTorch's index of CPU builds
# FORCE=1         execute also the notebooks whose inputs did not change
# PROFILE=gpu     execute on this machine's accelerator

.PHONY: report test lab setup lint types clean
.DELETE_ON_ERROR:

PROFILE ?= ci
TORCH_INDEX ?=
PYTEST_ARGS ?= -n 2 --dist worksteal
BIN := .venv/bin

# from the command line alone: containers set a variable ENV for their shells
MODE := $(if $(filter command,$(origin ENV)),$(ENV),$(or $(shell cat .venv/.mode 2>/dev/null),own))
RIGHT := import sys, importlib.util; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12))
HAS_TORCH := $(if $(filter system,$(MODE)), or importlib.util.find_spec("torch") is None)
CHECK := $(RIGHT)$(HAS_TORCH))
NAMES := $(if $(filter system,$(MODE)),python3 python) python3.11 python3.12 python3 python
# asked for in turn: a name on the path may be a stand-in that does not run
PYTHON ?= $(shell for name in $(NAMES); do \
	if $$name -c '$(CHECK)' >/dev/null 2>&1; then echo $$name; break; fi; done)

report: setup
	@$(BIN)/python -m atom run --profile $(PROFILE) $(if $(FORCE),--force)

test: lint types
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: setup
	$(BIN)/python -m mypy

# our kernel first, whatever kernels a user or a container has; containers run as root
lab: setup
	@JUPYTER_PATH=$(CURDIR)/.venv/share/jupyter JUPYTER_PREFER_ENV_PATH=1 \
		exec $(BIN)/python -m jupyterlab --ServerApp.root_dir=$(CURDIR) \
		--LabApp.default_url=/lab/tree/notebooks $(if $(filter 0,$(shell id -u)),--allow-root) \
		$(LAB_ARGS)

# environment.yml's pip list is the one list of versions; pip never picks one by itself
setup:
	@chosen='$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))'; \
	if [ -z "$$chosen" ]; then \
		echo "error: no Python 3.11 or 3.12$(if $(HAS_TORCH), with torch) found (PYTHON=...)" >&2; \
		exit 2; \
	fi; \
	$$chosen -P atom/environment.py --mode '$(MODE)' --torch-index '$(TORCH_INDEX)'

clean:
	rm -rf .venv reports/ci
