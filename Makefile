# Every target makes the environment it needs; a second run finds it ready.
PYTHON ?= python3
PYTEST_FLAGS ?=
# Tests of one file share engines and daemons. Files with few tests are the slow ones, so they must
# not come last. Those of daemons wait more than they compute.
TEST_PROCESSES ?= 2
DAEMON_TEST_PROCESSES ?= 4
BY_FILE := --dist loadfile --no-loadscope-reorder
TOGETHER := -n $(TEST_PROCESSES) $(BY_FILE)
# What every change has to pass; `make test-all` leaves nothing out. No test takes minutes, so one
# that hangs ends early.
SELECTED ?= -m "not slow" --hypothesis-profile=landing --timeout=300

SETUP := $(PYTHON) tools/setup_env.py
UNIT := .venv-unit
LINT := .venv-lint
DOCS := .venv-docs
MUTATE := .venv-mutate
FULL := .venv
CXX_FILES := $(wildcard $(foreach e,c cc cpp cu cuh h hpp,csrc/*.$(e) csrc/*/*.$(e)))

# Or each of the many processes that tests start would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo chat test test-all environment unit daemon matrix soak lint check-native asan tsan \
  coverage mutants mutate gpu-test gpu-sanitize docs docs-serve format wheel wheel-test wheels clean distclean

##@ Try it
demo: ## ask a small real model about a long text, cold and from the CPU tier
	@$(SETUP) --env $(FULL) --profile full --without-servers
	@$(FULL)/bin/python examples/demo.py

chat: ## serve it with a daemon, restart the server, and see the answer come from the daemon
	@$(SETUP) --env $(FULL) --profile full --without-servers
	@$(FULL)/bin/python examples/chat.py

##@ Check it
test: ## run the tests that every change has to pass: `unit`, `daemon`, then those with vLLM
	@$(MAKE) --no-print-directory environment & \
	  $(MAKE) --no-print-directory unit daemon; status=$$?; wait; exit $$status
	@$(SETUP) --env $(FULL) --profile full
	$(FULL)/bin/python -m pytest tests/packaging tests/engine tests/conformance tests/gpu $(TOGETHER) $(SELECTED) $(PYTEST_FLAGS)

test-all: ## run all tests that need no GPU, before a release
	@REQUIRE_WHEEL=1 $(MAKE) --no-print-directory test SELECTED=

environment: # installs what vLLM needs, beside other targets
	@mkdir -p build
	@echo "what vLLM needs is installed meanwhile, see build/environment.log"
	@$(SETUP) --env $(FULL) --profile full --dependencies-only > build/environment.log 2>&1
	@# Compiles the modules that vLLM imports, once: or all test processes would do it at their start.
	@grep -q "up to date" build/environment.log || \
	  $(FULL)/bin/python -c "from vllm import LLM" >> build/environment.log 2>&1

unit: ## run the tests that need neither torch nor vLLM, where neither is installed
	@$(SETUP) --env $(UNIT) --profile unit
	$(UNIT)/bin/python -m pytest tests/unit $(TOGETHER) $(SELECTED) $(PYTEST_FLAGS)

daemon: ## run the tests of stores, daemon and client, also without torch and vLLM
	@$(SETUP) --env $(UNIT) --profile unit
	$(UNIT)/bin/python -m pytest tests/remote tests/daemon tests/stores -n $(DAEMON_TEST_PROCESSES) $(BY_FILE) $(SELECTED) $(PYTEST_FLAGS)

matrix: ## check each vLLM release in an environment of its own (RELEASES=0.32.0: only that)
	@$(PYTHON) -m tools.matrix $(RELEASES)

lint: ## ruff, mypy, clang-format, schemas of deploy/ and a faster `check-native`; changes nothing
	@$(SETUP) --env $(LINT) --profile lint
	$(LINT)/bin/ruff check .
	$(LINT)/bin/ruff format --check .
	$(LINT)/bin/mypy
	$(if $(CXX_FILES),$(LINT)/bin/clang-format --dry-run --Werror $(CXX_FILES))
	$(LINT)/bin/kubernetes-validate --strict --quiet deploy/kubernetes/*.yaml
	$(LINT)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/docker/compose.yml
	$(LINT)/bin/hadolint deploy/docker/Dockerfile
	$(LINT)/bin/python -m tools.check_native --fast

check-native: ## read csrc for bugs with clang-tidy and cppcheck
	@$(SETUP) --env $(LINT) --profile lint
	$(LINT)/bin/python -m tools.check_native

asan: ## run the tests of native code with ASan and UBSan
	@$(SETUP) --env $(UNIT) --profile unit
	$(UNIT)/bin/python -m tools.sanitize asan -- $(PYTEST_FLAGS)

tsan: ## run the tests of native code with TSan
	@$(SETUP) --env $(UNIT) --profile unit
	$(UNIT)/bin/python -m tools.sanitize tsan -- $(PYTEST_FLAGS)

coverage: ## say which lines and branches the tests reach, those of a GPU and of wheels aside
	@$(SETUP) --env $(FULL) --profile full
	$(FULL)/bin/python -m tools.measure_coverage

mutants: ## break one guard after the other on purpose, and see that tests fail
	@$(SETUP) --env $(FULL) --profile full
	$(FULL)/bin/python -m tools.mutants

mutate: ## break one MODULE in every way that mutmut knows, and see what its unit TESTS miss
	@$(SETUP) --env $(MUTATE) --profile mutate
	@$(MUTATE)/bin/python -m tools.mutate $(MODULE) $(TESTS)

gpu-test: ## run the tests that need an NVIDIA GPU
	@$(SETUP) --env $(FULL) --profile full
	$(FULL)/bin/python -m tools.gpu_tests $(PYTEST_FLAGS)

gpu-sanitize: ## run the tests of the CUDA copies under compute-sanitizer
	@$(SETUP) --env $(FULL) --profile full
	$(FULL)/bin/python -m tools.gpu_sanitize

SOAK_SECONDS ?= 600
soak: ## random requests and faults for SOAK_SECONDS (600), with SOAK_SEED or a random one
	@$(SETUP) --env $(FULL) --profile full
	$(FULL)/bin/python -m tests.soak --seconds $(SOAK_SECONDS) $(if $(SOAK_SEED),--seed $(SOAK_SEED)) \
	  $(if $(SOAK_EPISODE),--episode $(SOAK_EPISODE)) $(if $(SOAK_ONLY),--only $(SOAK_ONLY))

##@ Work on it
docs: ## build the site of these pages into build/site; a warning is an error
	@$(SETUP) --env $(DOCS) --profile docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

docs-serve: ## show the site on http://127.0.0.1:8010 and renew it while you write
	@$(SETUP) --env $(DOCS) --profile docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve --dev-addr 127.0.0.1:8010

format: ## let ruff and clang-format rewrite the sources
	@$(SETUP) --env $(LINT) --profile lint
	$(LINT)/bin/ruff check --fix .
	$(LINT)/bin/ruff format .
	$(if $(CXX_FILES),$(LINT)/bin/clang-format -i $(CXX_FILES))

wheel: ## build source archive and wheel into dist/, with the CUDA module (TIERED_KV_CUDA=0: without)
	@$(PYTHON) tools/build_wheel.py

wheel-test: ## build archive and wheel, and install each in an environment of its own
	@$(SETUP) --env $(UNIT) --profile unit
	REQUIRE_WHEEL=1 $(UNIT)/bin/python -m pytest tests/packaging/test_wheel.py $(PYTEST_FLAGS)

wheels: ## build a wheel for each Python, for older systems too, with Docker and cibuildwheel
	@$(PYTHON) tools/build_wheel.py --all

clean: ## remove what was built, keep the environments
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	rm -f vllm_tiered_kv/native/*.so
	find vllm_tiered_kv tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf $(UNIT) $(LINT) $(DOCS) $(MUTATE) $(FULL) .venv-matrix-*

help: ## show this list
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
