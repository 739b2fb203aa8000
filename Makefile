# Everything runs in environments of its own under .venv and .venv-peer; python3, make and a C compiler are enough.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo web dist site kernels test test-all interpreter oldest avx2 fuzz asan test-cuda sanitize-cuda lint bench docs golden cases clean

demo: .venv/demo
	$(PY) examples/demo.py

# Everything that guards daily work, two files at a time; those of operators come first, as they compile the kernels.
ON_THE_CPU := $(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: .venv/ready
	$(ON_THE_CPU) --part daily

# The rest: slow tests and all other cases; the Triton kernels in Triton's interpreter, which needs no GPU; sessions
# once more, in the oldest onnxruntime that will do. The reports end with what was left out.
test-all: .venv/ready .oldest/ready build/npm/ready
	$(ON_THE_CPU) --part rest
	$(MAKE) interpreter oldest avx2 fuzz asan

# The tests whose cases go through tests/checks.py to the device under test, and those of calls on a GPU.
ON_A_GPU := tests/ops tests/cuda tests/test_golden.py

interpreter: .venv/ready
	TRITON_INTERPRET=1 ONNXGRAD_TEST_DEVICE=interpreter $(PY) -m pytest --numprocesses 2 $(ON_A_GPU)

# Half types as on a processor with AVX2 alone, whose kernels are compiled with smaller vectors.
avx2: .venv/ready
	$(PY) -m bench.avx2 pytest --numprocesses 2 --dist loadfile tests/ops --part halves

# Types, attributes, optional inputs that another onnxruntime may treat in another way: each once, not in every mixture.
oldest: .venv/ready .oldest/ready
	PYTHONPATH=.oldest $(PY) -m pytest tests/runtime --part daily

# Random calls of every operator in memory between pages that nobody may touch, a minute of them, the same ones each time.
fuzz: .venv/ready
	$(PY) -m tests.fuzz --seconds 60

# The C part under AddressSanitizer, in a copy of the package. Python is not built with it, so it is loaded first, with the
# library of C++ whose exceptions it looks at. What Python leaves behind is no leak; one test measures the process' memory,
# which AddressSanitizer keeps after it is freed.
asan: .venv/ready
	mkdir -p build/asan
	cp -r src build/asan
	rm -f build/asan/src/onnxgrad/runtime/_bridge*.so
	$(CC) -shared -fPIC -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all \
		-o build/asan/src/onnxgrad/runtime/_bridge.so src/onnxgrad/runtime/bridge.c
	PYTHONPATH=build/asan/src ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
		$(PY) -m pytest tests/runtime --part daily --capture sys -k "not kept_for_ever"

# On a GPU, with the Python that is there and no network: onnx, onnx_ir, onnxruntime, numba, torch and triton are enough,
# and pytest, which `make build/pytest` puts into a folder that can travel along. Warnings fail no test: the versions
# are those of the machine. ONLY="slice or test_sizes" is pytest's -k; 5 is its word for "no tests".
RUN_ON_A_GPU = PYTHONPATH=src:build/pytest ONNXGRAD_TEST_DEVICE=cuda $(PYTHON) -m pytest -rs -W default
CHOSEN = $(if $(ONLY),-k "$(ONLY)" || [ $$? -eq 5 ])
SEVERAL = $(if $(shell PYTHONPATH=build/pytest $(PYTHON) -c "import xdist; print(1)"),--numprocesses auto --maxprocesses 16)

# Sessions, if this onnxruntime has them for GPUs, run apart: they look at the memory of the whole GPU. The others' sides on
# the CPU have a thread each: with as many as there are cores, processes wait for each other.
test-cuda: src/onnxgrad/runtime/_bridge.so
	OMP_NUM_THREADS=1 $(RUN_ON_A_GPU) $(SEVERAL) $(ON_A_GPU) tests/torch tests/models/test_cuda.py $(CHOSEN)
	$(RUN_ON_A_GPU) tests/runtime tests/passes/test_expand_training.py tests/train/test_trainer_cuda.py \
		tests/ort_training/api/test_module_cuda.py $(CHOSEN)

# Kernels on a GPU under NVIDIA's compute-sanitizer, TOOL=racecheck for races; ONLY as above. Every tensor has memory of
# its own, so that reads and writes beside it are found, too.
sanitize-cuda: src/onnxgrad/runtime/_bridge.so
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 ONNXGRAD_TEST_DEVICE=cuda PYTHONPATH=src:build/pytest compute-sanitizer \
		--tool $(or $(TOOL),memcheck) --error-exitcode 1 $(PYTHON) -m pytest -W default --part daily tests/ops $(CHOSEN)

build/pytest: tests/cuda/requirements.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade --target $@ --no-deps --only-binary :all: --platform any -r $<
	touch $@

# The package's C part, which an installation builds too, where nothing is installed.
src/onnxgrad/runtime/_bridge.so: src/onnxgrad/runtime/bridge.c
	$(CC) -shared -fPIC -O2 -o $@ $<

lint: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

# Speed against onnxruntime-training, PyTorch and NumPy, into bench/*.csv, docs/speed.md and the README.
bench: .venv/ready .venv-peer/ready
	$(PY) -m bench
	$(PY) -m bench.training

# docs/api.md, operators.md and rules.md, and the generated tables of other pages.
docs: .venv/ready
	$(PY) docs/generate.py

# The results of onnxruntime-training 1.19.2 that the tests compare with.
golden: .venv-peer/ready .venv/ready
	.venv-peer/bin/python tests/data/make_golden.py
	.venv-peer/bin/python tests/data/make_golden_lstm.py
	.venv-peer/bin/python tests/data/make_golden_layer_normalization.py
	.venv-peer/bin/python tests/data/make_golden_batch_normalization.py
	.venv-peer/bin/python tests/data/make_golden_loss.py
	.venv-peer/bin/python tests/data/make_golden_activation.py
	.venv-peer/bin/python tests/data/make_golden_conv.py
	.venv-peer/bin/python tests/data/make_old_operators.py
	.venv-peer/bin/python tests/data/make_old_graphs.py
	.venv-peer/bin/python tests/data/make_ort_training_operators.py $(PY)
	.venv-peer/bin/python tests/data/make_artifacts.py
	.venv-peer/bin/python tests/data/make_checkpoints.py

# Models with data for other runtimes to run, in the layout of onnx's backend tests.
cases: .venv/ready
	$(PY) -m tests.backend_cases build/cases

# The page that trains a network in the browser, in build/web.
web: .venv/ready build/npm/ready
	$(PY) examples/web/make.py

# The pages as a site with a search, in build/site; a link that leads nowhere is an error.
site: .site/ready
	.site/bin/python docs/site/stage.py build/pages
	.site/bin/python -m sphinx -W --keep-going -q -c docs/site build/pages build/site

.site/ready: docs/site/requirements.txt
	$(PYTHON) -m venv .site
	.site/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Compiled kernels for every level of processors, which wheels ship; nothing here needs them.
kernels: .venv/ready
	$(PY) -m tests.ship_kernels

# Packages for an index, in dist/: a wheel that any Python 3 installs without a compiler, and the sources; checked.
dist: kernels .release/ready
	rm -rf dist build/lib* build/bdist*
	.release/bin/python -m build --sdist --outdir dist
	.release/bin/python -m build --wheel --outdir dist
	.release/bin/python -m wheel tags --remove --platform-tag manylinux_2_28_x86_64 dist/*.whl
	.release/bin/python release/check.py dist

.release/ready: release/requirements.txt
	$(PYTHON) -m venv .release
	.release/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# What the demo needs, in the versions of the tests: without PyTorch and the tools it is there in half the time.
.venv/demo: pyproject.toml tests/requirements.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c tests/requirements.txt -e . babel matplotlib onnxruntime
	touch $@

.venv/ready: .venv/demo tests/no-dependencies.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r tests/no-dependencies.txt
	touch $@

.oldest/ready: tests/oldest.txt .venv/ready
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .oldest -r tests/oldest.txt
	touch $@

# The onnxruntimes of JavaScript, for files of export_step(); where npm is missing, their tests are skipped.
build/npm/ready: tests/npm/package.json
	mkdir -p build/npm
	cp tests/npm/package.json build/npm
	if command -v npm > build/npm/found; then cd build/npm && npm install --ignore-scripts --no-audit --no-fund --loglevel=error; fi
	touch $@

# onnxruntime-training owns the module onnxruntime and stops at Python 3.11, hence an environment apart.
.venv-peer/ready: bench/peers/requirements.txt
	$$(command -v python3.11 || echo $(PYTHON)) -m venv .venv-peer
	.venv-peer/bin/python -m pip install --quiet --disable-pip-version-check -r bench/peers/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-peer .oldest .release .site build dist src/*.egg-info src/onnxgrad/_kernels
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
