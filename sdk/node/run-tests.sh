#!/bin/sh
# Installs what the tests need, from the lock file, and runs everything.
set -eu
cd "$(dirname "$0")"
./prepare.sh
python3 ../generate.py --check
npx --no-install eslint .
node --test --test-timeout=600000 test/*.test.js
