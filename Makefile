# make train [ARGS="--pattern local:local_attn_ctx=64 --out runs/local"]   train the example language model
# make check [ONLY=hopper]                                                 lint, types and the fast tests; ONLY adds a backend or a room
# make test                                                                lint, types, tests and doctests
# make test-all                                                            the same, with all cases of the longest tables
# make test-jax                                                            of the tests those that a second version of JAX needs
# make test-triton                                                         the GPU kernels, compiled by earlier versions of Triton
# make docs                                                                the site, in docs/_build/html
# make test-docs                                                           the site, looked at in a browser
# make venv                                                                only the environment that both use
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
ONLY ?=

# libtpu, which the tests compile with, complains at every start on a machine without a TPU unless JAX leaves it alone.
ifeq ($(wildcard /dev/accel* /dev/vfio/[0-9]* /dev/nvidia* /dev/kfd),)
export JAX_PLATFORMS ?= cpu
endif

bin := $(VENV)/bin
stamp := $(VENV)/.installed

.PHONY: train lint check test test-all test-jax test-triton docs test-docs venv clean

train: $(stamp)
	$(bin)/python -m examples.train_lm.train $(ARGS)

# worksteal: each process takes one part of the list, so that few compile what another has, and then of what is left.
pytest := $(bin)/python -m pytest -n $(JOBS) --dist worksteal

# The tests of `make check`: of the op, those that interpret no kernel.
op := tests/ops/test_attention.py
fast := tests/masks tests/misuses tests/ops/planning $(op) tests/test_main.py tests/test_public.py tests/test_records.py
fast += tests/test_glossary.py tests/test_rooms.py tests/test_warnings.py tests/ops/kernels/test_routes.py
fast += $(foreach kernel,pallas_tpu triton,--deselect '$(op)::test_values_and_gradients[$(kernel)')

# What a second version of JAX and Flax cannot change: masks and plans, which are numpy's, builds of the package,
# records, files and settings of families, what Triton alone compiles or interprets; the op's own tests have some of these
# kernels. The examples train once; their model and their checkpoints are tested again.
once := tests/images tests/make_it_sparse tests/masks tests/ops/planning tests/your_model
once += tests/test_glossary.py tests/test_package.py tests/test_prose.py tests/test_records.py
once += tests/test_rooms.py tests/modules/loading/test_files.py tests/modules/loading/test_memory.py
once += tests/modules/loading/test_saving.py tests/modules/loading/test_sweep.py
once += $(filter-out %/test_model.py %/test_checkpoint.py,$(wildcard tests/train_lm/test_*.py))
once += $(wildcard tests/ops/kernels/test_gluon_*.py) tests/ops/kernels/test_triton_interpreter.py
once += tests/ops/kernels/test_hopper_gpu.py tests/ops/kernels/test_query_gather.py tests/ops/kernels/test_triton_gpu.py
left_out := tests/ops/kernels/test_hopper_gpu_aot.py::test_compiles_without_spills_or_hazards
left_out += tests/ops/kernels/test_triton_gpu_aot.py::test_compiles_and_fits
# Minutes on eight devices.
left_out += 'tests/ops/test_context_parallel.py::test_on_eight_devices[CASES]'
left_out += tests/modules/loading/test_huggingface.py::test_spread_over_eight_devices

lint: $(stamp)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/pyright --pythonpath $(bin)/python

check: lint
	$(pytest) $(fast)
	$(if $(ONLY),$(pytest) -k '$(ONLY)')

# The XML file has the seconds of each test: `python -m benchmarks.suite build/tests.xml` sums them up.
test: lint
	$(pytest) --junit-xml build/tests.xml

test-all:
	ALL_CASES=1 $(MAKE) test

# Each eleventh test: eleven divides no usual number of backends, dtypes or lengths, so a sample has all of them.
test-jax: lint
	$(pytest) --every 11 --junit-xml build/tests-jax.xml tests sparse_layers $(addprefix --ignore ,$(once)) $(addprefix --deselect ,$(left_out))

# `make test` has the newest. The oldest compiles a third of the cases, those between a fifth.
tritons := 3.6.0 3.7.0 3.8.0
compiled := $(wildcard tests/ops/kernels/test_*_gpu_aot.py)

test-triton: $(addprefix build/triton-,$(tritons))
	$(foreach version,$(tritons),PYTHONPATH=build/triton-$(version) $(pytest) --every $(if $(filter 3.6%,$(version)),3,5) $(compiled) &&) true

build/triton-%: $(stamp)
	$(bin)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ triton==$*
	touch $@

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
	rm -rf build docs/_build docs/generated $(VENV) .venv-3.* .pytest_cache .ruff_cache .hypothesis
