# make demo   sets up .venv and continues four long prompts with a real model
# make test   sets up .venv and runs the whole suite
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint clean

demo: .venv/.demo
	$(BIN)/longdraft demo

test: .venv/.test
	$(BIN)/python -m pytest -q -n auto

lint: .venv/.test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# Stamps: nothing is downloaded again until the requirements change.
NATIVE := CMakeLists.txt $(wildcard csrc/*)

.venv/.demo: pyproject.toml constraints.txt tools/setup_venv.py $(NATIVE)
	$(PYTHON) tools/setup_venv.py .
	touch $@

.venv/.test: pyproject.toml constraints.txt tools/setup_venv.py $(NATIVE)
	$(PYTHON) tools/setup_venv.py ".[test]"
	touch $@ .venv/.demo

clean:
	rm -rf .venv
