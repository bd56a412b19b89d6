# Everything runs in .venv, which these targets make; only Python 3.10 or newer is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup setup-measure predict test check bench validate-here accuracy scaling devices switches learning settings fits fuzz mutants coverage framework-checks clean

setup: $(VENV)/.predict

setup-measure: $(VENV)/.measure

$(VENV)/.predict: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	$(COMPILE)
	touch $@

$(VENV)/.measure: pyproject.toml $(VENV)/.predict
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[measure]"
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.predict
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

$(VENV)/.mutants: pyproject.toml $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[mutants]"
	touch $@

predict: $(VENV)/.predict
	$(BIN)/python simulation_train_formulaic.py --run_all_solu --world_size 128

# pip compiles what it installs, but no editable package; where PYTHONDONTWRITEBYTECODE is set, as in many images, nothing else does
COMPILE = $(BIN)/python -m compileall -q profiler predictor solver *.py

# What the documents state and tell a user to type, and the scripts that write them, is tested by `make check`.
DOCUMENTS = tests/benchmarks tests/solver/test_examples.py
PARALLEL = -n 2 --dist worksteal --assert=plain
TESTS = $(PARALLEL) --durations=5 $(addprefix --ignore=,$(DOCUMENTS))

# Plain assertions, because rewriting those of all tests takes each worker ten seconds; tests that fail run again with the values
# that their assertions compare.
test: $(VENV)/.dev
	$(COMPILE) tests benchmarks
	$(BIN)/python -m pytest $(TESTS) || ($(BIN)/python -m pytest --last-failed; exit 1)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PARALLEL) $(DOCUMENTS)

bench: $(VENV)/.predict
	$(BIN)/python benchmarks/search.py

accuracy: $(VENV)/.predict
	$(BIN)/python benchmarks/accuracy.py

scaling: $(VENV)/.predict
	$(BIN)/python benchmarks/weak_scaling.py

devices: $(VENV)/.predict
	$(BIN)/python benchmarks/devices.py

switches: $(VENV)/.predict
	$(BIN)/python benchmarks/switches.py
	$(BIN)/python benchmarks/published_layouts.py

learning: $(VENV)/.predict
	$(BIN)/python benchmarks/learning.py

validate-here: $(VENV)/.dev
	$(BIN)/python benchmarks/validate_here.py

settings: $(VENV)/.predict
	$(BIN)/python benchmarks/settings.py

fits: $(VENV)/.predict
	$(BIN)/python -m predictor.accuracy --profile all

fuzz: $(VENV)/.predict
	$(BIN)/python benchmarks/fuzz.py --inputs 2000

mutants: $(VENV)/.mutants
	$(BIN)/python benchmarks/mutants.py --mutants 250

# The frameworks' own packages, in an environment of their own that sees this one's torch.
FRAMEWORKS := .frameworks

framework-checks: $(VENV)/.dev
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$($(FRAMEWORKS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/foretrain.pth"
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check --no-deps megatron-core==0.16.1 torchtitan==0.2.2 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.1 shtab==1.13.0 tokenizers==0.22.1 huggingface-hub==0.36.0
	PYTHONPATH=. $(FRAMEWORKS)/bin/python -W ignore benchmarks/framework_checks.py

coverage: $(VENV)/.dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 2
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

clean:
	rm -rf $(VENV) prof_data/.cache
