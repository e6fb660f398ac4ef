#!/bin/sh
# Installs what the tests need, from the lock file, and runs everything. Needs Chromium.
set -eu
cd "$(dirname "$0")"
npm ci --no-audit --no-fund --silent
python3 ../generate.py --check
node build.mjs
npx --no-install eslint .
# The tests have a service with the library for Node.
if [ ! -d ../node/dist/esm ]; then (cd ../node && npm ci --no-audit --no-fund --silent && node build.mjs); fi
node --test --test-timeout=600000 test/*.test.js
