#!/bin/sh
# rootfs.sh BINARY DIRECTORY: makes the file system of the image: the program, the libraries that it needs, the certificate
# authorities, and a directory for records. It has no shell and no other program.
set -eu
binary=$1
root=$2
user=65532

mkdir -p "$root/usr/bin" "$root/etc/ssl/certs" "$root/var/lib/oncegate" "$root/tmp"
install -m 0755 "$binary" "$root/usr/bin/oncegate"
# The libraries, and the loader, under the names by which the program asks for them.
ldd "$binary" | while read -r name arrow path _; do
    case "$name" in
        linux-vdso*) continue ;;
        /*) path=$name ;;
        *) [ "$arrow" = "=>" ] && [ -n "$path" ] || { echo "rootfs.sh: no library $name" >&2; exit 1; } ;;
    esac
    mkdir -p "$root$(dirname "$path")"
    cp -L "$path" "$root$path"
done
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
printf 'oncegate:x:%s:%s:oncegate:/var/lib/oncegate:/sbin/nologin\n' "$user" "$user" > "$root/etc/passwd"
printf 'oncegate:x:%s:\n' "$user" > "$root/etc/group"
printf 'hosts: files dns\n' > "$root/etc/nsswitch.conf"
chmod 1777 "$root/tmp"
chmod 0700 "$root/var/lib/oncegate"
chown "$user:$user" "$root/var/lib/oncegate"
