#!/bin/sh
# Lint, types, tests and the built artefact, in the virtual environment in the directory ONCEGATE_PYTHON_ENV (made if it is
# missing). Needs python3 with venv, PostgreSQL and redis-server; the tests start servers of their own. Arguments go to pytest.
set -eu
cd "$(dirname "$0")"
: "${ONCEGATE_PYTHON_ENV:?is not set: name a directory for the virtual environment}"
python="$ONCEGATE_PYTHON_ENV/bin/python3"
./prepare.sh
python3 ../generate.py --check
"$python" -m ruff check .
"$python" -m ruff format --check src cases
"$python" -m mypy
exec "$python" -m pytest -q "$@"
