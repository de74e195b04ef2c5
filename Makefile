# make demo   a simulated server steered by a real controller: a live view, then a picture
# make check  a minute: lint, types, and the tests that need neither SGLang nor a process of their own
# make test   the whole test suite, against the real classes of SGLang 0.5.23 and the source of each version supported
# Each makes its own virtual environment once and reuses it. PYTHON=… names the interpreter, 3.11 or 3.12.
PYTHON ?=
WORKERS ?= $(shell echo $$(($$(nproc) < 7 ? $$(nproc) + 1 : 8)))
DEMO := .venv/demo
CHECK := .venv/check
TEST := .venv/test
WHEELS := .venv/sglang

.PHONY: demo check test fuzz lint docs bench clean
.NOTPARALLEL: # two installations at once would both write specpilot.egg-info

demo: $(DEMO)/ready
	$(DEMO)/bin/specpilot demo

check: lint
	FUZZ_EXAMPLES=30 $(CHECK)/bin/python -m pytest -q --quick -n $(WORKERS) --dist worksteal

test: $(TEST)/ready $(TEST)/browser $(WHEELS)/ready
	$(TEST)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal

# New inputs each time, about ten minutes; what it finds becomes an @example.
fuzz: $(CHECK)/ready
	FUZZ_EXAMPLES=5000 $(CHECK)/bin/python -m pytest -q --timeout 0 tests/test_fuzz.py

lint: $(CHECK)/ready
	$(CHECK)/bin/ruff check .
	$(CHECK)/bin/ruff format --check .
	$(CHECK)/bin/mypy

docs: $(CHECK)/ready
	$(CHECK)/bin/mkdocs build --strict --quiet

bench: $(TEST)/ready
	$(TEST)/bin/specpilot bench hook --json benchmarks/hook.json

# Small environments: neither torch nor SGLang.
$(DEMO)/ready: pyproject.toml Makefile
	@PYTHON="$(PYTHON)" .ci/environment $(DEMO) --editable '.[demo]'

$(CHECK)/ready: pyproject.toml Makefile
	@PYTHON="$(PYTHON)" .ci/environment $(CHECK) --editable '.[test,lint,docs]'

# About three minutes and 11 GB: SGLang brings torch, which must be chosen with it.
$(TEST)/ready: pyproject.toml Makefile
	@PYTHON="$(PYTHON)" .ci/environment $(TEST) torch==2.14.1 torchvision==0.29.1 sglang==0.5.23 --editable '.[test]'

# For the tests of the page, where the machine has no browser: tried once, and done without if it cannot be had.
$(TEST)/browser: | $(TEST)/ready
	@$(TEST)/bin/python -m tests.support.browser --install
	@touch $@

# 150 MB: the wheels of the supported SGLang versions, read by tests/contract and never installed.
$(WHEELS)/ready: sglang_hooks/contract.py | $(TEST)/ready
	@$(TEST)/bin/python -m tests.contract.wheels $(WHEELS)
	@touch $@

clean:
	rm -rf .venv build site demo *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
