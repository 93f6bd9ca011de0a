# Each target makes .venv itself and installs only what changed. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint fmt bench docs clean

export MAKECMDGOALS
BIN := .venv/bin

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

setup: ## Make .venv with everything (torch too)
	@bash .ci/environment dev
	@echo "==> ready: source .venv/bin/activate"

demo: ## Watch answers arrive in time on this machine; writes edgewise-demo.html
	@bash .ci/environment demo
	@echo "==> running the demo; the page will be edgewise-demo.html"
	@$(BIN)/edgewise demo --html edgewise-demo.html

test: ## Run the tests, without the slow ones and those that need an accelerator
	@bash .ci/environment dev
	@echo "==> running the tests"
	@$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not device"

test-all: ## Run all tests; those without their device skip with the reason
	@bash .ci/environment dev
	@echo "==> running all tests"
	@$(BIN)/python -m pytest -n auto --dist worksteal

lint: ## Check style, types and the direction of imports
	@bash .ci/environment dev
	@echo "==> checking style"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> checking types"
	@$(BIN)/mypy
	@echo "==> checking the direction of imports"
	@$(BIN)/lint-imports --no-logo

fmt: ## Format and repair what can be repaired
	@bash .ci/environment dev
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: ## Measure the router and the backends, briefly
	@bash .ci/environment dev
	@echo "==> measuring; leave the machine quiet"
	@$(BIN)/edgewise bench exits --quick

docs: ## Build the documentation into build/docs
	@bash .ci/environment dev
	@echo "==> building the documentation"
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "==> open build/docs/index.html"

clean: ## Remove .venv and everything that was generated
	rm -rf .venv build dist edgewise-demo.html .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
