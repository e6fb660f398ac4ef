module oncegate.dev/oncegate

go 1.19
