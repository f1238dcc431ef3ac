# Everything runs in environments made here; only Python >= 3.11 with venv, git and make are presumed.
# An environment is made again when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ORACLE_VENV := .venv-oracle
S3_VENV := $(VENV)/moto

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DVC_NO_ANALYTICS := 1

.PHONY: help demo test torture lint oracle exact-boards clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

demo: $(VENV)/.made-demo ## set up, run the restart experiment with a small model, show its result
	@touch $(VENV)/.demo-started
	PATH="$(CURDIR)/$(BIN):$$PATH" dvc repro
	@echo
	@test artifacts/bench/report.md -nt $(VENV)/.demo-started || cat artifacts/bench/report.md  # else just printed
	@echo
	@echo "Try next:"
	@echo "  . $(BIN)/activate"
	@echo "  kestrel generate --chat 'Why is the sky blue?'"
	@echo "  kestrel serve                          # then open http://127.0.0.1:8080"
	@echo "  kestrel kv ls                          # what the store holds by then"
	@echo "  kestrel doctor                         # this machine's kernels, exactness, store and disk"

test: $(VENV)/.made-dev $(S3_VENV)/.made ## run the test suite
	$(BIN)/python -m pytest

torture: $(VENV)/.made-dev ## kill, spoil and overload it, 20 minutes or more: 1,000 kills, 200,000 spoilt files, 64 clients for 10 minutes
	KESTREL_TORTURE=long $(BIN)/python -m pytest tests/torture -s --durations=0

lint: $(VENV)/.made-dev ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict kestrel pipelines

oracle: $(ORACLE_VENV)/.made ## compare with the reference implementation (torch, transformers) in an environment of its own
	$(ORACLE_VENV)/bin/python -m pytest tests/oracle

exact-boards: $(VENV)/aarch64/.made ## try exactness on an AVX2 CPU and on a Cortex-A76, emulated by qemu-user (minutes)
	$(BIN)/python tests/boards/run.py $(VENV)/aarch64

clean: ## remove the environments, caches and results of this folder; artifacts stay
	rm -rf $(VENV) $(ORACLE_VENV) dist outputs .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# `dev` holds all of `demo`, so making it also settles the demo's stamp.
$(VENV)/.made-demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[plots]'
	@touch $@

$(VENV)/.made-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.made-demo

$(ORACLE_VENV)/.made: pyproject.toml
	$(PYTHON) -m venv $(ORACLE_VENV)
	$(ORACLE_VENV)/bin/python -m pip install --quiet --editable '.[oracle]'
	@touch $@

# An S3 server for the tests, apart because it asks for another version of what DVC's S3 client needs.
$(S3_VENV)/.made: | $(VENV)/bin/python
	$(BIN)/python -m venv $(S3_VENV)
	$(S3_VENV)/bin/python -m pip install --quiet 'moto[server]>=5,<6'
	@touch $@

$(VENV)/aarch64/.made: tests/boards/aarch64.sh tests/boards/cortex-a76.cpuinfo pyproject.toml | $(VENV)/.made-dev
	@for tool in qemu-x86_64 qemu-aarch64 apt-get dpkg-deb; do command -v $$tool >/dev/null || \
	  { echo "make exact-boards needs $$tool, on Debian: apt-get install qemu-user" >&2; exit 1; }; done
	bash tests/boards/aarch64.sh $(VENV)/aarch64 $(BIN)/python
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Kestrel needs Python 3.11 or newer; $$($(PYTHON) --version) is $(PYTHON). Try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
