# Everything happens in .venv, which `make install` fills; the other targets make it when it is not there.
PYTHON ?= python3
# That of MaxText, which needs a later one.
MAXTEXT_PYTHON ?= python3.12
# A worker takes tests in their order, from another when it has none left: what a module's tests share is made once.
# One more than there are cores: tests wait for disks and servers.
PYTEST_FLAGS ?= -n $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))') --dist worksteal

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Compiled modules are kept, even where the environment forbids it: tests start Python some thousand times.
export PYTHONDONTWRITEBYTECODE :=
AZURITE := build/azurite/node_modules/.bin/azurite-blob
AXE := build/axe/node_modules/axe-core/axe.min.js

.PHONY: grammar help install demo test thorough coverage test-pythons test-azure test-page test-deepspeed test-dcp test-trainers test-formats test-kills test-maps test-maxtext test-megatron test-vllm test-grammar without without-turn mutants fuzz lint format man bench docs dist clean

help:
	@echo "make install   create the development environment in $(VENV)"
	@echo "make demo      create a ZeRO-3 checkpoint of 100 M parameters, and convert it"
	@echo "make test      run the tests"
	@echo "make thorough  run the tests with ten times as many random cases, different each time"
	@echo "make coverage  run the tests, and report the lines that they reach"
	@echo "make test-pythons   run every command on Python 3.10 to 3.14, with the lowest and the newest libraries"
	@echo "make test-azure   test Azure storage with Azurite: needs node and npm"
	@echo "make test-page   test the page of inspect --html in Chromium, and with axe: needs node and npm"
	@echo "make test-deepspeed   train and save with DeepSpeed, and compare the results of converters"
	@echo "make test-dcp   resume torch training from converted checkpoints, with FSDP2 and DDP"
	@echo "make test-trainers   read states that transformers, PEFT, TRL, accelerate, Lightning and Composer save"
	@echo "make test-formats   save new checkpoints with Orbax and others, and compare what they and ckptconv read"
	@echo "make test-kills   kill savers while they save: their loaders must accept the steps that ckptconv steps reports as good"
	@echo "make test-maps   compare the maps with torchtitan, Megatron-core, transformers and others"
	@echo "make test-maxtext   convert MaxText steps with the maps, and compare the logits of transformers: needs Python 3.12"
	@echo "make test-megatron   load converted steps in Megatron-core, with tensor, pipeline and expert parallelism"
	@echo "make test-vllm   load grafted layers for multi-token prediction in vLLM, without a GPU"
	@echo "make test-grammar   compare the productions of scan with all libraries that they list, with traps instead of objects"
	@echo "make without   check and test copies without one feature each; FEATURE=rows selects one"
	@echo "make without-turn   test the trunk and two features in one such copy, a different one after each commit"
	@echo "make mutants   plant faults in a copy, and list those that the tests miss"
	@echo "make fuzz      read hostile and broken files for a minute, with ckptconv and other readers"
	@echo "make lint      run ruff and mypy, and check the order of imports"
	@echo "make format    format and fix the code with ruff"
	@echo "make grammar   write the productions of scan from the installed libraries"
	@echo "make man       write the manual pages, and the reference of commands and JSON in docs"
	@echo "make bench     measure the time of ckptconv, cp and other converters"
	@echo "make docs      build the documentation site in build/site"
	@echo "make dist      build, check, install and try the release archives in dist"
	@echo "make clean     remove build results; keep the environment"

install: $(INSTALLED)

# torch alone and first: nothing that follows may bring another one.
$(INSTALLED): pyproject.toml requirements-dev.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
# Half of the time to start, where the environment forbids Python to do this by itself.
	$(BIN)/python -m compileall -q ckptconv
	@touch $@

demo: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo.sh build/demo

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

coverage: $(INSTALLED)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PYTEST_FLAGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

thorough: $(INSTALLED)
	CKPTCONV_TEST_EFFORT=10 $(BIN)/python -m pytest $(PYTEST_FLAGS)

test-pythons: $(INSTALLED)
	$(BIN)/python scripts/test_pythons.py $(PYTHONS_FLAGS)

test-azure: $(INSTALLED) $(AZURITE)
	$(BIN)/python -m pytest tests/features/az

$(AZURITE):
	npm install --no-audit --no-fund --prefix build/azurite azurite

test-page: $(INSTALLED) $(AXE)
	$(BIN)/python -m pytest tests/features/inspect

$(AXE):
	npm install --no-audit --no-fund --prefix build/axe axe-core

test-deepspeed: $(INSTALLED)
	$(BIN)/python scripts/test_deepspeed.py $(DEEPSPEED_FLAGS)
	$(BIN)/python scripts/test_chain.py

test-dcp: $(INSTALLED)
	$(BIN)/python scripts/test_dcp.py

test-trainers: build/trainers-tools build/trainers-more
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/trainers-more $</bin/python scripts/test_trainers.py $(TRAINERS_FLAGS)

test-formats: build/formats-tools
	$</bin/python scripts/test_formats.py $(FORMATS_FLAGS)

test-kills: build/trainers-tools build/kills-more build/formats-tools
	PYTHONPATH=$(CURDIR)/build/kills-more $</bin/python scripts/test_kills.py dcp trainer deepspeed torch_checkpointing $(KILLS_FLAGS)
	build/formats-tools/bin/python scripts/test_kills.py orbax $(KILLS_FLAGS)

build/kills-more: build/trainers-tools
	rm -rf $@
	$</bin/python -m pip install --quiet --no-deps --target $@ torch_checkpointing==0.1.1
	@touch $@

test-maps: build/maps-tools build/maps-old build/maps-more build/maps-titan build/maps-maxtext
	$</bin/python scripts/record_maps.py --old build/maps-old --more build/maps-more --titan build/maps-titan --maxtext build/maps-maxtext $(MAPS_FLAGS)
	$</bin/python scripts/module_orders.py --old build/maps-old

test-maxtext: build/maps-tools build/maxtext-tools
	MAXTEXT=build/maxtext-tools/bin/python $</bin/python scripts/record_maps.py --logits maxtext

build/maxtext-tools: PYTHON = $(MAXTEXT_PYTHON)

test-megatron: build/megatron-tools build/megatron-new build/megatron-bridge build/megatron-bridge-new
	$</bin/python scripts/test_megatron.py $(MEGATRON_FLAGS)
	$</bin/python scripts/test_megatron_states.py
	PYTHONPATH=build/megatron-new $</bin/python scripts/test_megatron.py $(MEGATRON_FLAGS)
	PYTHONPATH=build/megatron-new $</bin/python scripts/test_megatron_states.py
	PYTHONPATH=build/megatron-new $</bin/python scripts/test_megatron_fsdp.py
	PYTHONPATH=build/megatron-new:build/megatron-bridge-new $</bin/python scripts/test_megatron_bridge.py
	PYTHONPATH=build/megatron-bridge $</bin/python scripts/test_megatron_adapters.py
	PYTHONPATH=build/megatron-new:build/megatron-bridge-new $</bin/python scripts/test_megatron_adapters.py

# The newest release, which asks for a newer Python than it needs.
build/megatron-new: build/megatron-tools
	rm -rf $@
	$</bin/python -m pip install --quiet --no-deps --ignore-requires-python --target $@ megatron-core==0.19.2
	@touch $@

# Megatron-Bridge asks for libraries that need a GPU; its adapters do without. The first release is for the older one of
# Megatron-core.
build/megatron-bridge: build/megatron-tools
	rm -rf $@
	$</bin/python -m pip install --quiet --no-deps --target $@ megatron-bridge==0.3.1
	@touch $@

build/megatron-bridge-new: build/megatron-tools
	rm -rf $@
	$</bin/python -m pip install --quiet --no-deps --ignore-requires-python --target $@ megatron-bridge==0.6.2
	@touch $@

test-vllm: build/vllm-tools build/vllm-alone
	PYTHONPATH=$(CURDIR)/build/vllm-alone $</bin/python scripts/test_vllm.py $(VLLM_FLAGS)

# vLLM, and what it imports for grammars, ask for libraries that need a GPU; its loader does without.
build/vllm-alone: build/vllm-tools
	rm -rf $@
	$</bin/python -m pip install --quiet --no-deps --target $@ vllm==0.33.0 xgrammar==0.2.8
	@touch $@

# Composer asks for older releases than it needs.
build/trainers-more: build/trainers-tools
	rm -rf $@
	$</bin/python -m pip install --quiet --no-deps --target $@ mosaicml==0.32.1 torch_optimizer==0.3.0 pytorch-ranger==0.1.1 \
		coolname==5.0.0 importlib-metadata==8.7.0 zipp==4.1.2 tabulate==0.9.0 py-cpuinfo==9.0.0 pillow
	@touch $@

test-grammar: $(INSTALLED) build/grammar-tools
	build/grammar-tools/bin/python scripts/scan/grammar.py --check
	$(BIN)/python -W ignore tests/features/scan/held_back.py
	$(BIN)/python scripts/scan/traps.py --python build/grammar-tools/bin/python $(GRAMMAR_FLAGS)

# The last release of transformers with Meta's script. What it needs and has in common with the newest is not doubled.
build/maps-old: build/maps-tools
	rm -rf $@
	$</bin/python -m pip install --quiet --no-deps --target $@ transformers==4.45.2 "huggingface_hub<1" "tokenizers<0.21"
	@touch $@

# What asks for other releases than it needs.
build/maps-more: build/maps-tools
	rm -rf $@
	$</bin/python -m pip install --quiet --no-deps --target $@ litgpt==0.5.13 lightning==2.6.6 pytorch-lightning==2.6.6 \
		lightning-utilities==0.15.3 torchmetrics==1.9.0 jsonargparse==4.53.0 torchtune==0.6.1 \
		megatron-bridge==0.3.1 mcore-bridge==1.6.5 nemo_toolkit==2.5.3
	@touch $@

# The last release of torchtitan with Llama 4.
build/maps-titan: build/maps-tools
	rm -rf $@
	$</bin/python -m pip install --quiet --no-deps --target $@ torchtitan==0.2.2
	@touch $@

# MaxText asks for a later Python than its tables need.
build/maps-maxtext: build/maps-tools
	rm -rf $@
	$</bin/python -m pip install --quiet --no-deps --ignore-requires-python --target $@ maxtext==0.2.5
	@touch $@

without: $(INSTALLED)
	for name in $(or $(FEATURE),$$($(BIN)/python scripts/house.py --without)); do \
		$(BIN)/python scripts/house.py --without $$name --check $(PYTEST_FLAGS) || exit 1; \
	done

without-turn: $(INSTALLED)
	$(BIN)/python scripts/house.py --without --turn $(PYTEST_FLAGS)

mutants: $(INSTALLED)
	$(BIN)/python scripts/mutants.py $(MUTANTS_FLAGS)

fuzz: $(INSTALLED)
	$(BIN)/python -W ignore tests/fuzz.py --seconds 60 $(FUZZ_FLAGS)

grammar: $(INSTALLED)
	$(BIN)/python scripts/scan/grammar.py $(GRAMMAR_FLAGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/house.py --check
	$(BIN)/python scripts/keywords.py --check

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

man: $(INSTALLED)
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/keywords.py

bench: $(INSTALLED)
	$(BIN)/python scripts/bench.py $(BENCH_FLAGS)

# Tools that the development environment does without.
build/%-tools: requirements-%.txt
	$(PYTHON) -m venv --clear $@
	$@/bin/python -m pip install --quiet --requirement $<
	@touch $@

docs: build/docs-tools
	$</bin/mkdocs build --strict --quiet

# As a stranger gets it: the wheel is built of the source archive, and that is unpacked, installed and tried.
dist: build/dist-tools
	rm -rf dist build/unpacked
	$</bin/python -m build
	$</bin/twine check --strict dist/*
	mkdir -p build/unpacked
	tar -xzf dist/*.tar.gz -C build/unpacked --strip-components 1
	$(PYTHON) -m venv build/unpacked/.venv
	build/unpacked/.venv/bin/python -m pip install --quiet dist/*.tar.gz
	build/unpacked/.venv/bin/python build/unpacked/scripts/smoke.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find ckptconv scripts tests -name __pycache__ -prune -exec rm -rf {} +
