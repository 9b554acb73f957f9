# Every target installs what it needs, says so, and can be run again.
SHELL := /bin/bash
CARGO := cargo
# An ordinary user's PATH may lack the directories of nginx and tc.
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo "sudo -E env PATH=$$PATH:/usr/local/sbin:/usr/sbin:/sbin")
BIN := target/release
# Cargo builds as the user who asks; what it built runs as root.
# A clone belongs to who made it: what runs as root builds nothing in it.
export PYTHONDONTWRITEBYTECODE := 1
AS_ROOT := CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$(or $(SUDO),env)"

.PHONY: demo coverage older-kernels loom sanitize fuzz test soak nginx-tests odb-suites https-chains tlsfuzzer mutants check bench build clean packages rust
.DEFAULT_GOAL := build

build: packages rust   ## everything that runs: shunt, shuntd, shunt-lab, the nginx module
	$(CARGO) build --release --workspace --bins
	$(CARGO) build --release -p shunt-preload
	@$(MAKE) --no-print-directory -C nginx

demo: build            ## real nginx tiers, with and without Shunt, and what that saves
	$(SUDO) $(BIN)/shunt-lab demo

test: build            ## all tests; those that need root get it by sudo; builds the version before this one for some
	@$(MAKE) --no-print-directory -C nginx/t
	scripts/build-older
	@status=0; set -o pipefail; \
	$(BIN)/shunt-lab simulate --seconds 30 || status=1; \
	$(AS_ROOT) $(CARGO) test --release --workspace --no-fail-fast 2>&1 | tee target/test.log || status=1; \
	$(SUDO) $(MAKE) --no-print-directory -C nginx test || status=1; \
	scripts/failed-tests target/test.log; \
	exit $$status

soak: build            ## what takes long: simulated services for SIMULATE_SECONDS=600, every cell of the fault table, silence, mistakes, attacks, 100 lost backends, MINUTES=30 of everything
	$(BIN)/shunt-lab simulate --seconds $(or $(SIMULATE_SECONDS),600) --json target/simulate.json
	$(SUDO) $(BIN)/shunt-lab bench faults --json target/faults.json
	$(SUDO) $(BIN)/shunt-lab bench silence --json target/silence.json
	$(SUDO) $(BIN)/shunt-lab bench mistakes --json target/mistakes.json
	$(SUDO) $(BIN)/shunt-lab bench attack --minutes $(or $(ATTACK_MINUTES),10) --json target/attack.json
	$(SUDO) $(BIN)/shunt-lab bench failover --how both --json target/failover.json
	$(SUDO) $(BIN)/shunt-lab bench soak --minutes $(or $(MINUTES),30) --json target/soak.json

nginx-tests: build     ## nginx's own test suite, without Shunt and with tiers, agents and shortcuts; fetches the suite
	$(SUDO) nginx/t/nginx-tests.py

odb-suites: build      ## the suites of nginx, HAProxy and Apache, without Shunt and under `shunt run`; fetches them
	$(SUDO) crates/run/suites/run.py

https-chains: build    ## 2,000 requests over TLS to chains of eight kinds of programs; installs what that takes
	scripts/install-chains
	$(AS_ROOT) $(CARGO) test --release -p shunt-run --test programs https:: -- --ignored --test-threads 1

tlsfuzzer: build       ## tlsfuzzer's scripts for TLS 1.3, without Shunt and with it; fetches the suite
	scripts/fetch-tlsfuzzer
	$(AS_ROOT) $(CARGO) test --release -p shunt-lab --test tlsfuzzer -- --ignored

older-kernels: packages rust   ## all tests of the BPF programs on Linux 5.15 and 6.1, in an emulator: more than an hour
	scripts/older-kernels

mutants: rust          ## mends of old faults undone, and mistakes made up, in the agents' logic: is each noticed?
	scripts/mutants

loom: rust             ## tests that try every order of a few threads' steps
	scripts/loom

coverage: rust         ## which lines of the agent's logic 5,000 simulated histories reach
	scripts/coverage-of-logic

sanitize: rust         ## the layers of on-demand buffers under AddressSanitizer
	$(AS_ROOT) scripts/sanitize

fuzz: build            ## every fuzzer, SECONDS_EACH=20
	scripts/fuzz

bench: build           ## all benchmarks, one HTML report
	$(SUDO) $(BIN)/shunt-lab bench all --html target/bench.html

check: packages rust   ## formatting, lints, headers, structure, licences, and whether verifiers, also Linux 5.15's and 6.1's, take the BPF programs
	$(CARGO) fmt --all --check
	clang-format-14 --dry-run --Werror include/*.h openssl/*.[ch] crates/handoff/bpf/*.[ch] crates/handoff/bpf/decisions/*.h crates/decisions/*.[ch] crates/negotiation/bpf/*.[ch] nginx/*.[ch]
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	scripts/check-headers
	scripts/check-structure
	scripts/mutants --check
	scripts/cargo-deny
	$(AS_ROOT) $(CARGO) test --quiet --release -p shunt-handoff --test steering loader::
	scripts/older-kernels loader::both_sides both_ends_agree a_listener_that_says_no_more

clean:
	$(CARGO) clean
	$(MAKE) -C nginx clean

packages:
	@scripts/install-packages

rust:
	@scripts/check-rust
