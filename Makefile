# make train [ARGS="--pattern local:local_attn_ctx=64 --out runs/local"]   train the example language model
# make test                                                                lint, types, tests and doctests
# make docs                                                                the site, in docs/_build/html
# make test-docs                                                           the site, looked at in a browser
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

.PHONY: train test docs test-docs venv clean

train: $(stamp)
	$(bin)/python -m examples.train_lm.train $(ARGS)

# worksteal: each process takes one part of the list, so that few compile what another has, and then of what is left.
test: $(stamp)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/python -m pytest -n $(JOBS) --dist worksteal

# Nothing is fetched; a warning is an error.
docs: $(stamp) $(stamp)-docs
	$(bin)/sphinx-build --fail-on-warning --keep-going --quiet -b html docs docs/_build/html

test-docs: docs
	$(bin)/python -m pytest -q docs/test_site.py

venv: $(stamp)

$(stamp)-docs: $(stamp)
	$(bin)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

# The stamp is written last, so an interrupted install is begun again.
$(stamp): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("sparse_layers needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	$(bin)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf docs/_build docs/generated $(VENV) .venv-3.* .pytest_cache .ruff_cache .hypothesis
