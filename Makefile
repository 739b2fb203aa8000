# Everything runs in environments of its own under .venv and .venv-peer; python3, make and a C compiler are enough.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo test lint bench docs golden clean

demo: .venv/ready
	$(PY) examples/demo.py

test: .venv/ready
	$(PY) -m pytest

lint: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Speed against onnxruntime-training, PyTorch and NumPy, into bench/results.csv and the table of the README.
bench: .venv/ready .venv-peer/ready
	$(PY) -m bench

# docs/operators.md and the generated tables of the README.
docs: .venv/ready
	$(PY) docs/generate.py

# The results of onnxruntime-training 1.19.2 that the tests compare with.
golden: .venv-peer/ready
	.venv-peer/bin/python tests/data/make_golden.py

.venv/ready: pyproject.toml tests/requirements.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt -e .
	touch $@

# onnxruntime-training owns the module onnxruntime and stops at Python 3.11, hence an environment apart.
.venv-peer/ready: bench/peers/requirements.txt
	$$(command -v python3.11 || echo $(PYTHON)) -m venv .venv-peer
	.venv-peer/bin/python -m pip install --quiet --disable-pip-version-check -r bench/peers/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-peer build src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
