#!/bin/sh
# Runs everything that proves this library: format, vet, vectors, real servers, and an empty module that imports it.
set -eu
cd "$(dirname "$0")"

./prepare.sh

# No module is fetched: everything is here.
export GOFLAGS=-mod=mod GOPROXY=off GONOSUMDB='*' GONOSUMCHECK=1 GOTOOLCHAIN=local

python3 ../generate.py --check
unformatted=$(gofmt -l ./*.go cases/*.go cases/resp)
[ -z "$unformatted" ] || { echo "not formatted: $unformatted" >&2; exit 1; }
go vet ./...
(cd cases && go vet ./...)
go test -race -count=1 -timeout 5m ./...
(cd cases && go test -race -count=1 -timeout 5m ./...)

# The start of the README, literally, in an empty module.
empty=$(mktemp -d)
trap 'rm -rf "$empty"; [ -z "${server:-}" ] || kill "$server" 2>/dev/null || true' EXIT
library=$PWD
awk '/^```go$/ && !found { inside = 1; found = 1; next } /^```$/ { inside = 0 } inside' README.md >"$empty/main.go"
START_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
sed -i "s/127.0.0.1:8080/127.0.0.1:$START_PORT/" "$empty/main.go"
cd "$empty"
go mod init example.test/start 2>/dev/null
go mod edit -require oncegate.dev/oncegate@v0.0.0 -replace "oncegate.dev/oncegate=$library"
go vet .
go build -o start .
./start &
server=$!
url="http://127.0.0.1:$START_PORT/charges"
tries=0
until curl -s -o /dev/null "$url"; do
	tries=$((tries + 1))
	[ "$tries" -lt 200 ] || { echo "the start of the README does not answer" >&2; exit 1; }
	sleep 0.05
done
first=$(curl -s -X POST -H 'Idempotency-Key: order-1' "$url")
retry=$(curl -s -i -X POST -H 'Idempotency-Key: order-1' "$url")
case "$retry" in
*"Idempotent-Replayed: true"*"$first") ;;
*)
	echo "the start of the README replays nothing: $first / $retry" >&2
	exit 1
	;;
esac
echo "all tests of sdk/go passed"
