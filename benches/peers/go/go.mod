module peers

go 1.19

require oncegate.dev/oncegate v0.0.0

replace oncegate.dev/oncegate => ../../../sdk/go
