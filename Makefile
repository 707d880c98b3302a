# Two commands do everything on a fresh machine: `make book` and `make test`.
PY     ?= python3
PYTHON ?= .venv/bin/python
export PYTHONPATH := $(CURDIR)/src
export OMP_NUM_THREADS ?= 2
export PYTHONDONTWRITEBYTECODE =# compiled once, not by every process of a test
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal

# The virtual environment is made only when it is the Python that is used.
ifeq ($(PYTHON),.venv/bin/python)
VENV := .venv/.ready
endif

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \t\2/p' $(MAKEFILE_LIST) | expand -t 26

book: notebooks ## execute every chapter and build the site; a warning or a broken cell fails it
	$(PYTHON) tools/build_book.py
	@echo "The book: _build/html/index.html"

test: $(VENV) ## run the tests that need no GPU and no built book
	$(PYTEST)
	@echo "All tests passed. What takes long: make test-deep"

test-deep: $(VENV) ## run the rest that needs neither a GPU nor the built book: whole ladders, properties 300 times, the kit's sweeps (or TESTS="tests/test_models.py")
	$(PYTEST) -m "(deep or hypothesis) and not gpu and not browser" --hypothesis-profile deep $(TESTS)
	@echo "All deep tests passed."

test-orders: $(VENV) ## run what depends on the order of a product's sum as other processors' BLAS makes it (or CORES=Haswell)
	for core in $(or $(CORES),Haswell Prescott); do \
	  OPENBLAS_CORETYPE=$$core $(PYTEST) tests/test_kernels_flash.py tests/test_kernels_portable.py tests/test_orders.py || exit 1; \
	done

# every file that has tests for a GPU
GPU_TESTS = $(shell grep -lE "pytest.mark.gpu|^@anywhere|^@on_hopper" tests/test_*.py)
test-gpu: $(VENV) ## run the GPU tests with this host's driver (PYTHON=python3 uses its own torch)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(GPU_TESTS) -m gpu -n auto --maxprocesses 15 --dist worksteal \
	  --gpu-summary benchmarks/results/test-gpu.json
	@echo "The summary: benchmarks/results/test-gpu.json"

stress-gpu: $(VENV) ## train every mixer in 14 processes on one GPU: does one die, do equal trainings stay equal (SECONDS=60)
	$(PYTHON) tools/stress_gpu.py --record --seconds $(or $(SECONDS),60)

test-site: book ## look at the built book: its links, figures and notebooks, and a selection of its pages in a headless Chromium
	$(PYTHON) tools/install_chromium.py
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/test_book.py tests/browser -m "(site or browser) and not deep and not alone" -n 2 --dist worksteal

test-browser: book ## open every page in a headless Chromium, network refused; then print the book, and time its pages
	$(PYTHON) tools/install_chromium.py
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/browser -m "browser and not alone" -n 2 --dist worksteal
	$(PYTHON) -m pytest tests/browser -m "browser and alone"

pdf: book ## print the whole book: _build/gated-linear-attention.pdf
	$(PYTHON) tools/install_chromium.py
	$(PYTHON) tools/make_pdf.py

mutants: $(VENV) ## hold the check kit against every named mistake: all are caught, nine in ten named
	$(PYTEST) -m deep tests/test_check_named.py

nightly: $(VENV) ## run the parts that take long, or PART="deep kit", and record each; a part runs again when a file that it reads changed
	$(PYTHON) tools/nightly.py $(PART)

compile: $(VENV) ## compile every kernel for every class of GPU (or ARCH="75 90"), without one: registers, spills, shared memory, barriers
	OMP_NUM_THREADS=1 $(PYTHON) tools/compile_kernels.py --record $(if $(ARCH),--arch $(ARCH))

compile-changed: $(VENV) ## compile for sm_90 the launches whose plan or kernel changed since they were last compiled right
	OMP_NUM_THREADS=1 $(PYTHON) tools/compile_kernels.py --changed --arch 90

compile-versions: $(VENV) ## compile every kernel for sm_90 with the known Tritons but the pinned, or TRITON="3.6.0" (or all launches of some CASES)
	OMP_NUM_THREADS=1 $(PYTHON) tools/compile_kernels.py $(or $(CASES),--kinds) --triton $(TRITON) --arch 90

bench: ## check and time kernels and peers on a GPU host: make bench SUITE="flash linear" (no SUITE: lists them)
	$(PY) benchmarks/run.py $(SUITE)

notebooks: $(VENV) ## write notebooks/*.ipynb from book/*.md
	$(PYTHON) tools/make_notebooks.py

test-notebooks: book ## run the notebooks (or NOTEBOOKS="19_comparing_mixers") as a reader does: from the site, where the package is missing
	OMP_NUM_THREADS=1 $(PYTHON) tools/run_notebooks_clean.py $(NOTEBOOKS) --jobs 2

serve: book ## build, then show the book at http://localhost:8000
	$(PYTHON) -m http.server --directory _build/html

lint: $(VENV) ## check style and format of code and notebooks
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check src tests tools book benchmarks

lines: ## count the lines of every room (or COMMIT=3baf513)
	@$(PYTHON) tools/count_lines.py $(COMMIT)

clean: ## remove what was built (the virtual environment stays)
	rm -rf _build build dist src/*.egg-info

.venv/.ready: requirements.txt pyproject.toml
	@echo "Installing into .venv (once; a few minutes, about 6 GB on Linux)"
	$(PY) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: help book test test-site test-deep nightly test-orders test-gpu stress-gpu compile compile-changed compile-versions \
  test-browser test-notebooks pdf mutants bench notebooks serve lint lines clean
.DEFAULT_GOAL := help
