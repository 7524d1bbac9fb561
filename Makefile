# make train [ARGS="--pattern local:local_attn_ctx=64 --out runs/local"]   train the example language model
# make test                                                                lint, types, tests and doctests
# make venv                                                                only the environment that both use
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

# libtpu, which the tests compile with, complains at every start on a machine without a TPU unless JAX leaves it alone.
ifeq ($(wildcard /dev/accel* /dev/vfio/[0-9]* /dev/nvidia* /dev/kfd),)
export JAX_PLATFORMS ?= cpu
endif

bin := $(VENV)/bin
stamp := $(VENV)/.installed

.PHONY: train test venv clean

train: $(stamp)
	$(bin)/python -m examples.train_lm.train $(ARGS)

# worksteal: each process takes one part of the list, so that few compile what another has, and then of what is left.
test: $(stamp)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/python -m pytest -n $(JOBS) --dist worksteal

venv: $(stamp)

# The stamp is written last, so an interrupted install is begun again.
$(stamp): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("sparse_layers needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	$(bin)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .venv-3.* .pytest_cache .ruff_cache .hypothesis
