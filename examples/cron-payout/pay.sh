#!/bin/sh
# Pays what is due, as a cron job: may be killed at any moment, and started again at any moment.
#
#   BANK=http://127.0.0.1:8080 pay.sh DIR
#
# DIR/due.csv has a line for each payout: number,account,cents. The outcomes go into done.csv, refused.csv and unknown.csv in
# the same directory. A line that is in none of them is paid by this run, or by the next one. Exits with 0 if nothing is left
# for the next run, with 1 if something is left, and with 2 if it could not begin or continue.
set -u

dir=${1:?say which directory: BANK=http://127.0.0.1:8080 pay.sh DIR}
bank=${BANK:?say where the bank is: BANK=http://127.0.0.1:8080 pay.sh DIR}
oncegate=${ONCEGATE:-oncegate}
journal=$dir/journal
if [ ! -r "$dir/due.csv" ]; then
    echo "$dir/due.csv cannot be read" >&2
    exit 2
fi
mkdir -p "$dir/responses" || exit 2
mkdir -p -m 700 "$journal" || exit 2
later=0

note() { # list line
    # In one write: a run that is killed leaves a whole line, or none.
    printf '%s\n' "$2" >> "$dir/$1.csv"
}

is_noted() { # line
    for list in done refused unknown; do
        if [ -f "$dir/$list.csv" ] && grep -Fqx -e "$1" "$dir/$list.csv"; then return 0; fi
    done
    return 1
}

# Sends what a killed run has left. Each payout is sent again below, and gets the response that belongs to its key.
"$oncegate" call --resume --journal "$journal" --silent
case $? in 2 | 126 | 127) exit 2 ;; esac

# A last line without a newline is due, too.
while IFS= read -r line || [ -n "$line" ]; do
    if [ -z "$line" ] || is_noted "$line"; then continue; fi
    IFS=, read -r number account cents <<END
$line
END
    "$oncegate" call POST "$bank/payouts" \
        --intent "payout-$number" --journal "$journal" \
        --json "{\"payout\":\"$number\",\"account\":\"$account\",\"cents\":$cents}" \
        --output "$dir/responses/$number.json" --silent < /dev/null
    case $? in
        # 6: paid, but there is no response to write.
        0 | 6) note 'done' "$line" ;;
        1) note refused "$line" ;;
        2) echo "payout $number: wrong usage" >&2; exit 2 ;;
        5) note unknown "$line"; echo "payout $number: a person has to find out if it was paid" >&2 ;;
        7) later=1; echo "payout $number: turned away, check the credentials and the address; it stays due" >&2 ;;
        # Nothing happened, or it is not known yet: the next run asks again under the same key.
        *) later=1; echo "payout $number: left for the next run" >&2 ;;
    esac
done < "$dir/due.csv"

exit "$later"
