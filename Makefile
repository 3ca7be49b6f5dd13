# The commands of the README. `make test` installs what the tests need and runs them all.
.PHONY: run test check bench bench-compare tools peers

SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

run:
	cargo run --release

test: tools
	cargo test --locked

check:
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings

bench: tools
	cargo bench --locked

# Whole requests beside nginx, nginx+Lua+Redis and HAProxy; table on standard output.
bench-compare: tools peers
	cargo build --locked --release
	python3 benches/compare/compare.py --repeat 5

# What the tests start: a real Redis, and hey for load.
tools:
	@$(call ensure,redis-server hey,redis-server hey)

peers:
	@$(call ensure,nginx haproxy wrk,nginx libnginx-mod-http-lua haproxy wrk)

# $(1) programs that must be there, $(2) the packages that bring them.
define ensure
missing=; for program in $(1); do command -v $$program >/dev/null || missing="$$missing $$program"; done; \
if [ -n "$$missing" ]; then \
  if command -v apt-get >/dev/null; then \
    $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2); \
  else echo "please install:$$missing" >&2; exit 1; fi; \
fi
endef
