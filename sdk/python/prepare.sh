#!/bin/sh
# Makes the virtual environment in the directory ONCEGATE_PYTHON_ENV, with the library and what its tests need, unless it is there.
set -eu
cd "$(dirname "$0")"
: "${ONCEGATE_PYTHON_ENV:?is not set: name a directory for the virtual environment}"
python="$ONCEGATE_PYTHON_ENV/bin/python3"
wanted=$(cat pyproject.toml requirements-tests.txt | sha256sum)
if [ "$(cat "$ONCEGATE_PYTHON_ENV/installed" 2>/dev/null || true)" != "$wanted" ]; then
    python3 -m venv "$ONCEGATE_PYTHON_ENV"
    "$python" -m pip install --quiet --disable-pip-version-check -r requirements-tests.txt
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
    echo "$wanted" > "$ONCEGATE_PYTHON_ENV/installed"
fi
