# make demo   a simulated server steered by a real controller: a live view, then a picture
# make test   the whole test suite, against the real classes of SGLang 0.5.23 and the source of each version supported
# Each makes its own virtual environment once and reuses it.
PYTHON ?= python3
DEMO := .venv/demo
TEST := .venv/test
WHEELS := .venv/sglang

.PHONY: demo test fuzz lint docs bench clean

demo: $(DEMO)/ready
	$(DEMO)/bin/specpilot demo

test: $(TEST)/ready $(WHEELS)/ready
	$(TEST)/bin/python -m pytest -q

# New inputs each time, about ten minutes; what it finds becomes an @example.
fuzz: $(TEST)/ready
	FUZZ_EXAMPLES=5000 $(TEST)/bin/python -m pytest -q --timeout 0 tests/test_fuzz.py

lint: $(TEST)/ready
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy

docs: $(TEST)/ready
	$(TEST)/bin/mkdocs build --strict --quiet

bench: $(TEST)/ready
	$(TEST)/bin/specpilot bench hook --json benchmarks/hook.json

# A small environment: neither torch nor SGLang.
$(DEMO)/ready: pyproject.toml
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/pip install --quiet --upgrade pip
	$(DEMO)/bin/pip install --quiet --editable '.[demo]'
	touch $@

# About three minutes and 11 GB: SGLang brings torch, which must be chosen with it.
$(TEST)/ready: pyproject.toml
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/pip install --quiet --upgrade pip
	$(TEST)/bin/pip install --quiet torch==2.14.1 torchvision==0.29.1 sglang==0.5.23 --editable '.[test,lint,docs]'
	touch $@

# 150 MB: the wheels of the supported SGLang versions, read by tests/contract and never installed.
$(WHEELS)/ready: sglang_hooks/contract.py | $(TEST)/ready
	$(TEST)/bin/python -m tests.contract.wheels $(WHEELS)
	touch $@

clean:
	rm -rf .venv build site demo *.egg-info
