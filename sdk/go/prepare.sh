#!/bin/sh
# Installs what the library and its tests need on Debian, unless it is there, and builds the service of the cases as the program
# ONCEGATE_GO_SERVICE, if that is set.
set -eu
cd "$(dirname "$0")"

missing=""
command -v go >/dev/null || missing="$missing golang-go"
command -v gcc >/dev/null || missing="$missing gcc libc6-dev"
command -v redis-server >/dev/null || missing="$missing redis-server"
command -v curl >/dev/null || missing="$missing curl"
command -v pgrep >/dev/null || missing="$missing procps"
[ -d /usr/share/gocode/src/github.com/lib/pq ] || missing="$missing golang-github-lib-pq-dev"
[ -d /usr/share/gocode/src/github.com/mna/redisc ] || missing="$missing golang-github-mna-redisc-dev"
command -v pgbouncer >/dev/null || missing="$missing pgbouncer"
[ -x /usr/lib/postgresql/15/bin/initdb ] || missing="$missing postgresql-15"
if [ -n "$missing" ]; then
	apt-get update -qq
	# shellcheck disable=SC2086
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
fi

# Debian's package of redisc has no go.mod, without which it cannot replace a module.
if [ ! -e cases/redisc/go.mod ]; then
	mkdir -p cases/redisc
	cp /usr/share/gocode/src/github.com/mna/redisc/*.go cases/redisc/
	rm -f cases/redisc/*_test.go
	printf 'module github.com/mna/redisc\n\ngo 1.19\n' >cases/redisc/go.mod
fi

if [ -n "${ONCEGATE_GO_SERVICE:-}" ]; then
	# No module is fetched: everything is here.
	export GOFLAGS=-mod=mod GOPROXY=off GONOSUMDB='*' GONOSUMCHECK=1 GOTOOLCHAIN=local
	(cd cases && go build -o "$ONCEGATE_GO_SERVICE" .)
	touch "$ONCEGATE_GO_SERVICE"
fi
