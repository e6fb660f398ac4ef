(
@KEY@
files=$(mktemp -d) || exit
trap 'rm -r "$files"' EXIT
after=0
for pause in 0 1 2 4 8 16; do
  [ "${after:-0}" -gt "$pause" ] && pause=$after
  [ "$pause" -gt 3600 ] && pause=3600
  after=0
  sleep "$pause"
  @CALL@
  case $status in
    2??|303) cat "$files/body"; exit 0 ;;
    000) continue ;; # no response, or not the whole of it
  esac
  again=no
  @DECISION@
  if [ $again = no ]; then
    echo "Stopped with status $status:" >&2; cat "$files/body" >&2; exit 1
  fi
  after=$(sed -n 's/^[Rr]etry-[Aa]fter: *\([0-9]\{1,9\}\).*/\1/p' "$files/head" | tail -n 1)
done
echo "The outcome is not known. Run this again later@LATER@." >&2
exit 1
)
