PYTHON = .venv/bin/python

setup:    ## create a virtual environment with everything the tests need
	python3 -m venv .venv && .venv/bin/pip install -q -e ".[test]"

test:     ## run the quick tests, as in README.md
	$(PYTHON) -m pytest

test-all: ## run every test, including full grids, attacks, soak tests, and compilation of all kernels
	$(PYTHON) -m pytest -m "slow or not slow"

cluster:  ## run the tests of replicas on Ray, for several minutes; needs `pip install -e ".[cluster]"`
	$(PYTHON) -m pytest -n 0 -m cluster tests/cluster

clients:  ## install third-party clients for tests/server/clients: Python packages in .venv-clients, npm packages
	python3 -m venv .venv-clients && .venv-clients/bin/pip install -q uv
	.venv-clients/bin/uv pip install -q -p .venv-clients/bin/python -r tests/server/clients/requirements.txt
	npm install --silent --prefix tests/server/clients

triton:   ## install the oldest supported Triton beside the installed one, into .triton, for tests of compilation
	rm -rf .triton/3.6 && $(PYTHON) -m pip install -q --no-deps --target .triton/3.6 "triton==3.6.*"

check:    ## check format, lint, types and import layers
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	.venv/bin/basedpyright
	.venv/bin/lint-imports --no-cache

bench:    ## compare a generated 1B model with transformers; appends to bench/results/
	$(PYTHON) -m bench.decode --save

docs:     ## regenerate docs/cli.md, docs/schemas, man, commands.json, and parts of docs/{chat,hardware,kernels,models,plan}.md
	$(PYTHON) tools/cli_docs.py
	$(PYTHON) tools/chat_docs.py
	$(PYTHON) tools/hardware_docs.py
	$(PYTHON) tools/kernel_docs.py
	$(PYTHON) tools/kernel_docs.py --amd
	$(PYTHON) tools/software_gpu.py
	$(PYTHON) tools/cpu_kernel_docs.py
	$(PYTHON) tools/disaggregation_docs.py
	$(PYTHON) -m tests.plan.example
	$(PYTHON) -m pytest -q -n 0 -m "slow or not slow" tests/models --models-table

screens:  ## regenerate the pictures of the terminal UI in docs/images, from a session in tmux
	$(PYTHON) -m pytest -q -n 0 -m slow tests/tui/test_session_in_tmux.py --screens

binary:   ## build dist/localllm, one file for Linux x86-64 that needs no Python (docs/binary.md)
	$(PYTHON) -m pip install -q -e ".[binary]"
	PATH="$(CURDIR)/.venv/bin:$$PATH" nice $(PYTHON) tools/binary/build.py
	$(PYTHON) tools/binary/check.py dist/localllm

catalog:  ## compare models.toml with the Hub
	$(PYTHON) tools/catalog.py

.PHONY: setup test test-all cluster clients triton check bench docs screens binary catalog
