module oncegate.dev/oncegate/cases

go 1.19

require (
	github.com/gomodule/redigo v1.8.3
	github.com/lib/pq v1.10.7
	github.com/mna/redisc v1.1.7
	oncegate.dev/oncegate v0.0.0
)

replace (
	// Debian's golang-github-gomodule-redigo-dev and golang-github-lib-pq-dev. prepare.sh copies golang-github-mna-redisc-dev.
	github.com/gomodule/redigo => /usr/share/gocode/src/github.com/gomodule/redigo
	github.com/lib/pq => /usr/share/gocode/src/github.com/lib/pq
	github.com/mna/redisc => ./redisc
	oncegate.dev/oncegate => ../
)
