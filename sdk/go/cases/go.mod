module oncegate.dev/oncegate/cases

go 1.19

require (
	github.com/lib/pq v1.10.7
	oncegate.dev/oncegate v0.0.0
)

replace (
	// Debian's golang-github-lib-pq-dev.
	github.com/lib/pq => /usr/share/gocode/src/github.com/lib/pq
	oncegate.dev/oncegate => ../
)
