#!/bin/sh
# Installs what the tests need, from the lock file, and runs everything.
set -eu
cd "$(dirname "$0")"
npm ci --no-audit --no-fund --silent
python3 ../generate.py --check
node build.mjs
npx --no-install eslint .
node --test --test-timeout=180000 test/*.test.js
