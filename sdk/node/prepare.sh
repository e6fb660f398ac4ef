#!/bin/sh
# Installs the packages from the lock file, unless they are there, and builds the library, unless its build is newer than its sources:
# other programs may use it.
set -eu
cd "$(dirname "$0")"
if [ ! -f node_modules/.package-lock.json ] || [ package-lock.json -nt node_modules/.package-lock.json ]; then
	npm ci --no-audit --no-fund --silent
fi
if [ ! -f dist/.built ] || [ -n "$(find src build.mjs tsconfig.json package.json -newer dist/.built)" ]; then
	node build.mjs
fi
