#!/bin/sh
# Installs what the tests need, from the lock file, builds the page, and uses it in Chromium: with the library, and behind the sidecar
# $ONCEGATE (target/debug/oncegate by default).
set -eu
cd "$(dirname "$0")"
ONCEGATE="${ONCEGATE:-$PWD/../../target/debug/oncegate}"
export ONCEGATE
[ -x "$ONCEGATE" ] || { echo "$ONCEGATE is missing; run cargo build --package oncegate-cli" >&2; exit 1; }
node setup.mjs
node --test --test-timeout=300000 test/*.test.js
